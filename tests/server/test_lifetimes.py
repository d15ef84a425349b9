"""Sandboxes that the server destroys by itself: when their session ends, or when their lifetime ends.

What runs leave that were killed goes without the client that made it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.supervisors import kill_supervisor
from tests.polling import until
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess, running_server


@pytest.fixture(scope="module")
def server(able: None) -> Iterator[ServerProcess]:
    """One that a test may stop."""
    with running_server() as server:
        yield server


def gone(box: Box) -> bool:
    return box.api.get(f"/v2/sandboxes/{box.name}", params=scoped()).status_code == 404


def left(server: ServerProcess, box: Box) -> list[str]:
    """Return what is on disk of a session and its layers."""
    below = (server.data / "sessions", server.data / "layers")
    return [path.name for place in below for path in place.iterdir() if box.session[4:] in path.name]


def destroyed(api: httpx.Client, box: Box) -> dict[str, Any]:
    events = api.get("/v1/events", params=scoped(kind="sandbox.destroyed")).json()["events"]
    [event] = [event for event in events if event["sandboxName"] == box.name]
    return dict(event)


def test_a_sandbox_goes_with_its_session_however_that_ends(server: ServerProcess, api: httpx.Client) -> None:
    stopped, lost = create(api, destroyOnStop=True), create(api, destroyOnStop=True)
    limited = create(api, destroyOnStop=True, timeout=3000)
    idle = create(api, destroyOnStop=True, idleTimeout=5000)
    unlucky = create(api, destroyOnStop=True)
    assert stopped.created["sandbox"]["destroyOnStop"] is True
    kill_supervisor(lost.session)
    answer = api.post(f"{stopped.path}/stop", json={})
    assert answer.status_code == 200, answer.text
    assert answer.json()["session"]["status"] == "stopped" and "snapshot" not in answer.json()
    assert answer.json()["sandbox"]["name"] == stopped.name
    for box in (stopped, lost, limited, idle):
        until(lambda box=box: gone(box))  # type: ignore[misc]
        until(lambda box=box: not left(server, box))  # type: ignore[misc]
        assert destroyed(api, box)["data"]["reason"] == "its session ended"
        create(api, name=box.name, destroyOnStop=True)  # the name is free
        assert api.post(f"{box.path}/stop", json={}).status_code == 404
    server.stop(signal.SIGKILL)
    kill_supervisor(unlucky.session)
    server.start()
    until(lambda: gone(unlucky))
    until(lambda: not left(server, unlucky))
    snapshots = api.get("/v2/sandboxes/snapshots", params=scoped(status="created")).json()["snapshots"]
    assert snapshots == []


def test_what_would_keep_something_is_refused_beside_it(api: httpx.Client) -> None:
    for more in (
        {"persistent": True},
        {"snapshotExpiration": 0},
        {"keepLastSnapshots": {"count": 2}},
    ):
        body = {"projectId": PROJECT, "destroyOnStop": True, **more}
        answer = api.post("/v3/sandboxes", params=scoped(), json=body)
        assert answer.status_code == 400 and answer.json()["error"]["details"]["field"] == "destroyOnStop"
    box = create(api, destroyOnStop=True)
    refused = api.post(f"{box.path}/snapshot", json={})
    assert refused.status_code == 409 and "destroyed" in refused.json()["error"]["message"]
    taken = api.post(f"{box.own}/checkpoint", json={})
    assert taken.status_code == 200, taken.text
    change = api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"destroyOnStop": False})
    assert change.status_code == 200 and "destroyOnStop" not in change.json()["sandbox"]
    assert api.post(f"{box.path}/snapshot", json={}).status_code in (200, 201)
    assert not gone(box)


def test_a_fork_keeps_the_snapshot_that_it_started_from(api: httpx.Client) -> None:
    box = create(api, destroyOnStop=True)
    assert box.run("sh", "-c", "echo kept > note").status_code == 200
    body = {"live": True, "destroyOnStop": False}
    answer = api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json=body)
    assert answer.status_code == 200, answer.text
    fork = Box(api, answer.json()["sandbox"]["name"], answer.json())
    assert "destroyOnStop" not in fork.created["sandbox"]
    api.post(f"{box.path}/stop", json={})
    until(lambda: gone(box))
    assert "kept" in fork.run("cat", "note").text
    assert api.post(f"{fork.path}/stop", json={}).status_code == 200
    again = api.get(f"/v2/sandboxes/{fork.name}", params=scoped(resume="true")).json()
    assert "kept" in Box(api, fork.name, again).run("cat", "note").text


def test_a_lifetime_ends_without_its_client_running_or_stopped(
    server: ServerProcess, api: httpx.Client
) -> None:
    """Also over the unix socket, and although no server runs at the moment."""
    before = time.time() * 1000
    running, stopped = create(api, deleteAfter=2000), create(api, deleteAfter=2000)
    shown = running.created["sandbox"]
    assert shown["deleteAfter"] == 2000
    assert before + 1000 < shown["deleteAt"] < time.time() * 1000 + 2001
    api.post(f"{stopped.path}/stop", json={})
    with server.local() as local:
        missed = create(local, deleteAfter=1000)
        server.stop()
    time.sleep(1)  # its lifetime ends while no server runs
    server.start()
    for box in (running, stopped):
        until(lambda box=box: gone(box))  # type: ignore[misc]
        until(lambda box=box: not left(server, box))  # type: ignore[misc]
        assert destroyed(api, box)["data"]["reason"] == "its lifetime ended"
    with server.local() as local:
        until(lambda: gone(Box(local, missed.name, missed.created)))


def test_a_lifetime_is_changed_taken_away_and_inherited(api: httpx.Client) -> None:
    box = create(api, deleteAfter=3600_000)

    def change(value: int) -> httpx.Response:
        return api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"deleteAfter": value})

    longer = change(7200_000).json()["sandbox"]
    assert longer["deleteAt"] >= box.created["sandbox"]["deleteAt"] + 3600_000
    fork = api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json={}).json()["sandbox"]
    assert fork["deleteAfter"] == 7200_000 and fork["deleteAt"] >= longer["deleteAt"]
    never = change(0).json()["sandbox"]
    assert "deleteAfter" not in never and "deleteAt" not in never
    refused = change(999)
    assert refused.status_code == 400 and refused.json()["error"]["details"]["field"] == "deleteAfter"
