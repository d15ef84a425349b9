"""Sandboxes over HTTP: create, get, resume, list, change, fork, delete."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import Box, create, scoped
from tests.server.harness import PROJECT


def no_nulls(value: Any, path: str = "") -> None:
    """Optional fields are left out, never null; two fields alone are null when there is nothing to say."""
    if isinstance(value, dict):
        for name, inner in value.items():
            assert inner is not None or name in ("exitCode", "next"), f"{path}.{name} is null"
            no_nulls(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            no_nulls(inner, f"{path}[{index}]")


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_create_answers_with_a_running_session_and_every_required_field(box: Box) -> None:
    created = box.created
    no_nulls(created)
    assert created["resumed"] is False and created["routes"] == []
    sandbox, session = created["sandbox"], created["session"]
    assert sandbox["status"] == session["status"] == "running"
    assert sandbox["currentSessionId"] == session["id"]
    assert sandbox["projectId"] == session["projectId"] == PROJECT
    assert isinstance(session["runtime"], str) and session["cwd"] == "/vercel/sandbox"
    assert sandbox["memory"] == 2048 * sandbox["vcpus"]
    assert session["sourceSandboxName"] == box.name
    assert "interactivePort" not in session


def test_configuration_is_echoed_and_environment_is_not(api: httpx.Client) -> None:
    box = create(
        api,
        ports=[3000, 8080],
        timeout=120_000,
        resources={"vcpus": 4},
        env={"SECRET": "hidden"},
        tags={"a": "b:c"},
        keepLastSnapshots={"count": 3},
        networkPolicy={"allow": {"x.com": [{"transform": [{"headers": {"authorization": "hidden"}}]}]}},
        __interactive=True,
    )
    text = json.dumps(box.created)
    sandbox, session = box.created["sandbox"], box.created["session"]
    assert "hidden" not in text and "env" not in sandbox
    assert (sandbox["vcpus"], sandbox["memory"], sandbox["timeout"]) == (4, 8192, 120_000)
    assert sandbox["keepLastSnapshots"] == {"count": 3, "deleteEvicted": True}
    assert sandbox["networkPolicy"]["mode"] == "custom"
    assert [route["port"] for route in box.created["routes"]] == [3000, 8080]
    assert all(route["subdomain"] in route["url"] for route in box.created["routes"])
    assert session["interactivePort"]
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())


def test_a_taken_name_and_bad_fields_are_bad_requests_that_name_the_field(box: Box) -> None:
    def attempt(**body: Any) -> httpx.Response:
        return box.api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, **body})

    assert refused(attempt(name=box.name)) == (400, "bad_request")
    for body, field in (
        ({"ports": ["x"]}, "ports[0]"),
        ({"ports": list(range(3000, 3020))}, "ports"),
        ({"name": "drives"}, "name"),
        ({"resources": {"vcpus": 3}}, "resources.vcpus"),
        ({"tags": {str(n): "" for n in range(6)}}, "tags"),
        ({"image": "a", "runtime": "node24"}, "runtime"),
        ({"region": "x1", "failoverRegions": ["x1"]}, "failoverRegions[0]"),
    ):
        answer = attempt(**body)
        assert refused(answer) == (400, "bad_request"), body
        assert answer.json()["error"]["details"]["field"] == field


def test_the_older_route_means_a_runtime(api: httpx.Client) -> None:
    answer = api.post("/v2/sandboxes", params=scoped(), json={"projectId": PROJECT})
    created = answer.json()
    assert created["session"]["runtime"] == created["sandbox"]["runtime"] == "node24"
    api.delete(f"/v2/sandboxes/{created['sandbox']['name']}", params=scoped())


def test_get_starts_nothing_and_resume_starts_one_session_for_all_who_ask(box: Box) -> None:
    box.api.post(f"{box.path}/stop")
    path = f"/v2/sandboxes/{box.name}"
    assert box.api.get(path, params=scoped()).json()["session"]["status"] == "stopped"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: box.api.get(path, params=scoped(resume="true")).json(), range(8)))
    assert len({answer["session"]["id"] for answer in answers}) == 1
    assert sorted(answer["resumed"] for answer in answers) == [False] * 7 + [True]
    assert all(answer["sandbox"]["currentSessionId"] == answer["session"]["id"] for answer in answers)


def test_lists_page_sort_and_filter(api: httpx.Client) -> None:
    names = [f"lst-{letter}" for letter in "abc"]
    for name in names:
        create(api, name=name, tags={"kind": name})
    found: list[str] = []
    cursor = None
    while True:
        page = api.get(
            "/v2/sandboxes", params=scoped(limit=1, **({"cursor": cursor} if cursor else {}))
        ).json()
        no_nulls(page)
        assert page["pagination"]["count"] == len(page["sandboxes"])
        found += [sandbox["name"] for sandbox in page["sandboxes"]]
        cursor = page["pagination"]["next"]
        if cursor is None:
            break
    assert [name for name in found if name in names] == names[::-1]
    by_name = api.get(
        "/v2/sandboxes", params=scoped(sortBy="name", sortOrder="asc", namePrefix="lst-")
    ).json()
    assert [sandbox["name"] for sandbox in by_name["sandboxes"]] == names
    tagged = api.get("/v2/sandboxes", params=scoped(tags="kind:lst-b")).json()
    assert [sandbox["name"] for sandbox in tagged["sandboxes"]] == ["lst-b"]
    for name in names:
        api.delete(f"/v2/sandboxes/{name}", params=scoped())


def test_a_change_shows_at_once_and_leaves_the_session_alone(box: Box) -> None:
    def patch(**body: Any) -> dict[str, Any]:
        answer = box.api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json=body)
        assert answer.status_code == 200, answer.text
        no_nulls(answer.json())
        return dict(answer.json())

    assert "routes" not in patch(tags={"x": "1"})
    changed = patch(ports=[4000], timeout=600_000, keepLastSnapshots={"count": 2})
    assert [route["port"] for route in changed["routes"]] == [4000]
    assert changed["sandbox"]["timeout"] == 600_000 and changed["sandbox"]["tags"] == {"x": "1"}
    assert patch(ports=[])["routes"] == []
    cleared = patch(keepLastSnapshots=None, mounts={}, networkId=None)["sandbox"]
    assert "keepLastSnapshots" not in cleared and cleared["mounts"] == {}
    session = box.api.get(box.path).json()["session"]
    assert session["timeout"] == box.created["session"]["timeout"]
    unknown = box.api.patch(
        f"/v2/sandboxes/{box.name}", params=scoped(), json={"currentSnapshotId": "snap_nothing"}
    )
    assert refused(unknown) == (404, "not_found")


def test_a_fork_has_the_files_and_the_environment(box: Box) -> None:
    box.api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"env": {"WHO": "source"}})
    box.run("sh", "-c", "echo kept > f")
    box.api.post(f"{box.path}/stop")
    answer = box.api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json={"tags": {"n": "1"}})
    fork = Box(box.api, answer.json()["sandbox"]["name"], answer.json())
    assert "kept source" in fork.run("sh", "-c", "echo $(cat f) $WHO").text
    assert fork.created["sandbox"]["tags"] == {"n": "1"}
    missing = box.api.post("/v2/sandboxes/nothing/fork", params=scoped())
    assert refused(missing) == (404, "not_found")
    box.api.delete(f"/v2/sandboxes/{fork.name}", params=scoped())


def test_a_deleted_sandbox_is_gone_with_its_session(api: httpx.Client) -> None:
    box = create(api)
    path = f"/v2/sandboxes/{box.name}"
    assert api.delete(path, params=scoped()).json()["sandbox"]["name"] == box.name
    assert refused(api.get(path, params=scoped())) == (404, "not_found")
    assert refused(api.delete(path, params=scoped())) == (404, "not_found")
    assert refused(box.run("true")) in ((410, "sandbox_stopped"), (404, "not_found"))


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_everything_is_served_below_api_too(box: Box, prefix: str) -> None:
    assert box.api.get(f"{prefix}/v2/sandboxes/{box.name}", params=scoped()).status_code == 200
