"""Sandboxes over HTTP: create, get, resume, list, change, fork, delete."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess


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
    assert len({route["url"] for route in box.created["routes"]}) == 2
    assert [route["subdomain"].split("-")[-2] for route in box.created["routes"]] == ["3000", "8080"]
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
        ({"tags": {str(n): "" for n in range(65)}}, "tags"),
        ({"image": "a", "runtime": "node24"}, "runtime"),
        ({"region": "x1", "failoverRegions": ["x1"]}, "failoverRegions[0]"),
    ):
        answer = attempt(**body)
        assert refused(answer) == (400, "bad_request"), body
        assert answer.json()["error"]["details"]["field"] == field


def test_of_requests_with_one_key_one_creates(api: httpx.Client, server: ServerProcess) -> None:
    def ask(key: str, **body: Any) -> httpx.Response:
        headers = {"idempotency-key": key}
        return api.post(
            "/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, **body}, headers=headers
        )

    with ThreadPoolExecutor(4) as pool:
        answers = [answer.json() for answer in pool.map(ask, ["one"] * 4)]
    assert len({answer["session"]["id"] for answer in answers}) == 1
    name = answers[0]["sandbox"]["name"]
    assert {answer["sandbox"]["name"] for answer in answers} == {name}
    assert ask("one", name=name).status_code == 200
    taken = ask("two", name=name)
    assert taken.status_code == 400 and taken.json()["error"]["kind"] == "name_taken"
    # Another project's key is another key.
    with server.client(server.make_token(project="other")) as other:
        made = other.post("/v3/sandboxes", json={"projectId": "other"}, headers={"idempotency-key": "one"})
        assert made.json()["sandbox"]["name"] != name
        other.delete(f"/v2/sandboxes/{made.json()['sandbox']['name']}")
    api.delete(f"/v2/sandboxes/{name}", params=scoped())
    again = ask("one").json()
    assert again["session"]["id"] != answers[0]["session"]["id"]
    api.delete(f"/v2/sandboxes/{again['sandbox']['name']}", params=scoped())


def test_a_sandbox_is_deleted_by_its_session_and_not_by_its_name_alone(box: Box) -> None:
    path = f"/v2/sandboxes/{box.name}"
    refused = box.api.delete(path, params=scoped(session="sbx_0000000000000000000000"))
    assert refused.status_code == 404
    assert box.api.get(path, params=scoped()).status_code == 200
    assert box.api.delete(path, params=scoped(session=box.session)).status_code == 200


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
    both = api.get("/v2/sandboxes", params=scoped(tags=["kind:lst-b", "kind:lst-b", "no:such"])).json()
    assert both["sandboxes"] == []
    refused = api.get("/v2/sandboxes", params=scoped(tags=["kind:lst-b", "kind:lst-a"]))
    assert refused.status_code == 400 and refused.json()["error"]["details"]["field"] == "tags"
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


def test_a_fork_may_have_another_image_than_the_runtime_of_its_source(api: httpx.Client) -> None:
    name = f"rt-{secrets.token_hex(4)}"
    made = api.post("/v2/sandboxes", params=scoped(), json={"projectId": PROJECT, "name": name}).json()
    assert made["sandbox"]["runtime"] == "node24"
    box = Box(api, name, made)
    box.run("sh", "-c", "echo of the source > /vercel/sandbox/f")
    api.post(f"{box.path}/stop")
    answer = api.post(f"/v2/sandboxes/{name}/fork", params=scoped(), json={"image": "vercel/sandbox/node:24"})
    assert answer.status_code == 200, answer.text
    fork = Box(api, answer.json()["sandbox"]["name"], answer.json())
    assert "runtime" not in fork.created["sandbox"]
    read = api.post(f"{fork.path}/fs/read", json={"path": "/vercel/sandbox/f"})
    assert read.status_code == 404, "another image starts without the source's files"
    for each in (fork.name, name):
        api.delete(f"/v2/sandboxes/{each}", params=scoped())


def test_the_default_region_among_the_failover_regions_is_left_out(api: httpx.Client) -> None:
    """Refused only to those who named it: others need not know which one they get."""
    box = create(api, failoverRegions=["iad1", "sfo1"])
    assert (box.created["sandbox"]["region"], box.created["sandbox"]["failoverRegions"]) == ("iad1", ["sfo1"])
    path = f"/v2/sandboxes/{box.name}"
    again = api.patch(path, params=scoped(), json={"failoverRegions": ["iad1", "sfo1"]})
    named = {"projectId": PROJECT, "region": "iad1", "failoverRegions": ["iad1", "sfo1"]}
    fork = api.post(f"{path}/fork", params=scoped(), json={"failoverRegions": ["iad1"]})
    for answer in (again, fork, api.post("/v3/sandboxes", params=scoped(), json=named)):
        assert refused(answer) == (400, "bad_request")
        assert answer.json()["error"]["details"]["field"] == "failoverRegions[0]"
    api.delete(path, params=scoped())
