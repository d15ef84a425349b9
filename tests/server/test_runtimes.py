"""A runtime is that version or is refused; official clients' names of runtimes stand for what there is."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from sandkeep import sync
from sandkeep.errors import InvalidRequest
from sandkeep.host.images.hostimage import programs
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess

VERSION = {"python": "python3 --version", "node": "node --version"}


@pytest.fixture(scope="module")
def present() -> dict[str, str]:
    """Runtimes this machine has, by the name of the language."""
    found = {name.rstrip("0123456789."): name for name in programs.runtimes()}
    if not found:
        pytest.skip("this machine has neither python3 nor node")
    return found


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[sync.Client]:
    """The SDK, by each way to the server."""
    if request.param == "unix":
        found = sync.Client(f"unix://{server.socket}")
    else:
        found = sync.Client(server.url, token=server.token)
    with found:
        yield found


def test_a_runtime_is_the_version_that_was_asked_for(client: sync.Client, present: dict[str, str]) -> None:
    for language, runtime in present.items():
        with client.create_sandbox(runtime=runtime) as box:
            done = box.run_process("sh", ["-c", VERSION[language]], capture_output=True, check=True)
            said = done.stdout_text.lower().replace(" ", "").replace("v", "")
            assert said.startswith((runtime, runtime.removeprefix("node")))
            assert box.runtime == runtime


@pytest.mark.parametrize("wanted", ["python3.99", "node99", "python3.1", "python", "node24x"])
def test_another_version_is_refused_with_those_that_exist(
    client: sync.Client, present: dict[str, str], wanted: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.create_sandbox(runtime=wanted).__enter__()
    assert refused.value.field == "runtime"
    assert wanted in refused.value.message
    assert all(runtime in refused.value.message for runtime in present.values())
    assert refused.value.hint


def test_a_vendors_runtime_stands_for_the_machines_programs_and_that_is_shown(
    api: httpx.Client, present: dict[str, str]
) -> None:
    for runtime in ("node22", "node24", "node26", "python3.13", "python3.14"):
        body = {"projectId": PROJECT, "runtime": runtime}
        answer = api.post("/v2/sandboxes", params=scoped(), json=body)
        assert answer.status_code == 200, answer.text
        created = answer.json()
        name = created["sandbox"]["name"]
        assert created["sandbox"]["runtime"] == runtime
        assert created["sandbox"]["image"].startswith("host@")
        events = api.get("/v1/events", params=scoped(kind="sandbox.created", sandbox=name)).json()["events"]
        told = [event["data"] for event in events if event.get("sandboxName") == name]
        assert [(data["runtime"], data["image"]) for data in told] == [(runtime, "host")]
        api.delete(f"/v2/sandboxes/{name}", params=scoped())


def test_no_runtime_means_none_is_claimed(api: httpx.Client) -> None:
    box: Box = create(api)
    assert "runtime" not in box.created["sandbox"]
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())


def test_a_snapshot_of_a_runtime_is_restored_with_it(api: httpx.Client) -> None:
    made = api.post("/v2/sandboxes", params=scoped(), json={"projectId": PROJECT, "runtime": "node24"}).json()
    session = made["session"]["id"]
    snapshot = api.post(f"/v2/sandboxes/sessions/{session}/snapshot").json()["snapshot"]["id"]
    # Also when the sandbox that made it is gone.
    api.delete(f"/v2/sandboxes/{made['sandbox']['name']}", params=scoped())
    for route in ("/v3/sandboxes", "/v2/sandboxes"):
        body = {"projectId": PROJECT, "source": {"type": "snapshot", "snapshotId": snapshot}}
        answer = api.post(route, params=scoped(), json=body)
        assert answer.status_code == 200, answer.text
        restored = answer.json()
        assert restored["sandbox"]["runtime"] == restored["session"]["runtime"] == "node24"
        api.delete(f"/v2/sandboxes/{restored['sandbox']['name']}", params=scoped())
    refused = api.post("/v3/sandboxes", params=scoped(), json={**body, "runtime": "node99"})
    assert refused.status_code == 400 and "node24" in refused.text
