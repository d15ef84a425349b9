"""Events: pages, and a stream that misses nothing."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any
from unittest.mock import ANY

from tests.server.conftest import Box, scoped
from tests.server.server_process import ServerProcess
from tests.server.test_sandboxes import refused


def events(box: Box, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = box.api.get("/v1/events", params=scoped(**query)).json()["events"]
    return found


def test_events_of_a_sandbox_are_listed_newest_first(box: Box) -> None:
    box.api.post(f"{box.path}/stop")
    found = events(box, name=box.name)
    kinds = [event["kind"] for event in found]
    assert kinds[0] == "session.ended" and kinds[-2:] == ["session.started", "sandbox.created"]
    assert all(event["sandboxName"] == box.name for event in found)
    assert all(
        event["sessionId"] == box.session for event in found if not event["kind"].startswith("sandbox")
    )


def test_every_change_is_recorded_with_who_made_it(server: ServerProcess, box: Box) -> None:
    """And what is only looked at is not. Values of secrets, environments and files are in no event."""
    api, session = box.api, f"/v1/sessions/{box.session}"
    api.put(f"{session}/fs/content", params={"path": "a"}, content=b"hidden words")
    api.post(f"{session}/fs/rename", json={"path": "a", "target": "b"})
    api.post(f"{session}/fs/stat", json={"path": "b"})
    api.get(f"{session}/fs/content", params={"path": "b"})
    command = {"command": "sleep", "args": ["60"], "env": {"KEY": "hidden words"}}
    process = api.post(f"{box.path}/cmd", json=command).json()["command"]["id"]
    api.post(f"{box.path}/cmd/{process}/kill", json={"signal": 9})
    api.post(f"{box.path}/extend-timeout", json={"duration": 1000})
    api.post(f"{box.path}/network-policy", json={"mode": "deny-all"})
    api.patch(
        f"/v2/sandboxes/{box.name}", params=scoped(), json={"tags": {"k": "v"}, "env": {"A": "hidden words"}}
    )
    api.put(f"/v1/secrets/{box.name}", params=scoped(), json={"value": "hidden words"})
    api.delete(f"/v1/secrets/{box.name}", params=scoped())
    snapshot = api.post(f"{session}/checkpoint", json={}).json()["snapshot"]["id"]
    api.delete(f"/v2/sandboxes/snapshots/{snapshot}", params=scoped())
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())
    newest = api.get("/v1/events", params=scoped(limit="50")).text
    assert "hidden words" not in newest
    mine = [
        event
        for event in reversed(json.loads(newest)["events"])
        if event.get("sandboxName") == box.name or event["data"].get("name") == box.name
    ]
    assert [(event["kind"], event["data"]) for event in mine if event["kind"] != "session.started"] == [
        ("sandbox.created", {"image": ANY, "runtime": None, "source": None}),
        ("files.changed", {"operation": "write", "path": "a", "bytes": 12}),
        ("files.changed", {"operation": "rename", "path": "a"}),
        ("process.started", {"process": process, "command": "sleep 60", "user": ANY}),
        ("process.signalled", {"process": process, "signal": 9}),
        ("session.extended", {"by_ms": 1000}),
        ("session.policy-changed", {}),
        ("sandbox.updated", {"fields": ["env", "tags"]}),
        ("secret.set", {"name": box.name}),
        ("secret.removed", {"name": box.name}),
        ("snapshot.created", {"snapshot": snapshot, "method": ANY}),
        ("snapshot.deleted", {"snapshot": snapshot}),
        ("session.ended", {"reason": ANY, "status": ANY}),
        ("sandbox.destroyed", {}),
    ]
    claims = json.loads(base64.urlsafe_b64decode(server.token.split(".")[1] + "=="))
    assert {event["actor"] for event in mine} == {f"token:{claims['jti']}"}


def test_what_comes_by_itself_has_no_actor(box: Box) -> None:
    api = box.api
    api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"timeout": 1000})
    api.post(f"{box.path}/stop")
    api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true"))
    with api.stream(
        "GET", "/v1/events", params=scoped(name=box.name, follow="true", kind="session.ended")
    ) as answer:
        event = json.loads(next(line for line in answer.iter_lines() if line))["event"]
    assert "actor" not in event


def test_following_goes_on_where_the_cursor_is(box: Box) -> None:
    params = scoped(name=box.name, follow="true")
    seen = []
    with box.api.stream("GET", "/v1/events", params=params) as answer:
        stopping = threading.Thread(target=lambda: box.api.post(f"{box.path}/stop"))
        stopping.start()
        for line in answer.iter_lines():
            seen.append(json.loads(line))
            if seen[-1]["event"]["kind"] == "session.ended":
                break
        stopping.join()
    after = scoped(name=box.name, follow="true", cursor=seen[0]["cursor"])
    with box.api.stream("GET", "/v1/events", params=after) as answer:
        again = []
        for line in answer.iter_lines():
            again.append(json.loads(line))
            if len(again) == len(seen) - 1:
                break
    assert again == seen[1:]
    assert refused(box.api.get("/v1/events", params=scoped(follow="true", cursor="x"))) == (
        400,
        "bad_request",
    )


def test_following_a_sandbox_ends_when_it_is_destroyed(box: Box) -> None:
    params = scoped(name=box.name, follow="true", sortOrder="asc")
    with box.api.stream("GET", "/v1/events", params=params) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["event"]["kind"] == "sandbox.created"
        box.api.delete(f"/v2/sandboxes/{box.name}", params=scoped())
        rest = [json.loads(line) for line in lines if line]
    assert rest[-1]["event"]["kind"] == "sandbox.destroyed"
