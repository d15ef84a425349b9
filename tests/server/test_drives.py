"""Drives over HTTP."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from tests.polling import until
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT
from tests.server.test_sandboxes import no_nulls, refused


def test_a_drive_is_created_once_mounted_once_forked_and_deleted(api: httpx.Client) -> None:
    name = f"d-{secrets.token_hex(3)}"
    path = f"/v2/sandboxes/drives/{name}"
    body = {"projectId": PROJECT, "maxSizeBytes": 1 << 30}
    first, again = (api.post(path, params=scoped(), json=body) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    drive = first.json()["drive"]
    no_nulls(drive)
    assert drive == again.json()["drive"] and drive["projectId"] == PROJECT
    assert refused(api.post(f"{path}/fork", params=scoped(), json={"name": "f"})) == (
        409,
        "drive_not_initialized",
    )
    box = create(api, mounts={"/data": {"drive": name, "mode": "read-write"}})
    attached = api.get(path, params=scoped()).json()["drive"]
    assert (attached["currentSessionId"], attached["currentSandboxName"]) == (box.session, box.name)
    body = {"projectId": PROJECT, "mounts": {"/data": {"drive": name}}}
    assert refused(api.post("/v3/sandboxes", params=scoped(), json=body)) == (409, "drive_attached")
    assert refused(api.delete(path, params=scoped())) == (409, "drive_attached")
    box.run("sh", "-c", "echo hello > /data/f", sudo=True)
    api.post(f"{box.path}/stop")
    fork = api.post(f"{path}/fork", params=scoped(), json={"name": f"{name}-f"})
    assert fork.json()["drive"]["parentDriveId"] == drive["id"]
    taken = api.post(f"{path}/fork", params=scoped(), json={"name": f"{name}-f"})
    assert refused(taken) == (409, "conflict")
    listed = api.get("/v2/sandboxes/drives", params=scoped(namePrefix=name, sortBy="name", sortOrder="asc"))
    assert [row["name"] for row in listed.json()["drives"]] == [name, f"{name}-f"]
    for one in (name, f"{name}-f"):
        assert api.delete(f"/v2/sandboxes/drives/{one}", params=scoped()).status_code == 200
    assert refused(api.get(path, params=scoped())) == (404, "not_found")
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())


def _drive(api: httpx.Client, **body: Any) -> str:
    name = f"d-{secrets.token_hex(3)}"
    answer = api.post(f"/v2/sandboxes/drives/{name}", params=scoped(), json={"projectId": PROJECT, **body})
    assert answer.status_code == 201, answer.text
    return name


def _mounted(drive: str, mode: str = "read-write") -> dict[str, Any]:
    return {"/data": {"drive": drive, "mode": mode}}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["process", "api"])
def test_a_drive_holds_no_more_than_its_size(api: httpx.Client, how: str) -> None:
    """Like the disk of a session, it is watched: who writes more is stopped, and nothing is lost."""
    drive = _drive(api, maxSizeBytes=16 << 20)
    box = create(api, mounts=_mounted(drive))
    if how == "process":
        box.run("chmod", "777", "/data", sudo=True)
        box.run("sh", "-c", "head -c 8M /dev/urandom > /data/a; sleep 0.1")
        box.start("sh", "-c", "head -c 48M /dev/urandom > /data/b; sleep 600")
    else:
        params = scoped(path="/data/b", sudo="true")
        api.put(f"{box.own}/fs/content", params=params, content=secrets.token_bytes(48 << 20))

    def ended() -> bool:
        session = api.get(f"/v2/sandboxes/sessions/{box.session}", params=scoped()).json()["session"]
        return bool(session["status"] == "stopped")

    until(ended)
    events = api.get("/v1/events", params=scoped(session=box.session, kind="session.ended")).json()["events"]
    assert "drive full" in events[0]["data"]["reason"] and "/data" in events[0]["data"]["reason"]

    resumed = Box(api, box.name, api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json())
    assert str(48 << 20) in resumed.run("stat", "-c", "%s", "/data/b").text, "what was written is kept"
    resumed.run("rm", "/data/b", sudo=True)
    api.post(f"{resumed.path}/stop", params=scoped())
    resumed = Box(api, box.name, api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json())
    assert '"exitCode":0' in resumed.run("sh", "-c", "head -c 4M /dev/urandom > /data/c; sleep 3").text
    stopped = api.post(f"{resumed.path}/stop", params=scoped()).json()["session"]
    assert stopped["status"] == "stopped"
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())
    assert api.delete(f"/v2/sandboxes/drives/{drive}", params=scoped()).status_code == 200


def test_snapshots_and_forks_of_a_drive_show_what_ended_sessions_left(api: httpx.Client) -> None:
    drive = _drive(api)
    box = create(api, mounts=_mounted(drive))
    box.run("sh", "-c", "echo first > /data/f", sudo=True)
    api.post(f"{box.path}/stop", params=scoped())
    writer = Box(api, box.name, api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json())
    writer.run("sh", "-c", "echo second > /data/f; sync", sudo=True)

    reader = create(api, mounts=_mounted(drive, "snapshot"))
    assert '"first\\n"' in reader.run("cat", "/data/f").text
    fork = api.post(f"/v2/sandboxes/drives/{drive}/fork", params=scoped(), json={"name": f"{drive}-f"})
    assert fork.status_code == 200
    forked = create(api, mounts=_mounted(f"{drive}-f"))
    assert '"first\\n"' in forked.run("cat", "/data/f").text
    for each in (box, reader, forked):
        api.delete(f"/v2/sandboxes/{each.name}", params=scoped())
    for name in (drive, f"{drive}-f"):
        assert api.delete(f"/v2/sandboxes/drives/{name}", params=scoped()).status_code == 200


def test_a_drive_that_a_sandbox_shows_as_a_snapshot_is_not_deleted(api: httpx.Client) -> None:
    drive = _drive(api)
    box = create(api, mounts=_mounted(drive, "snapshot"))
    path = f"/v2/sandboxes/drives/{drive}"
    for _ in ("running", "stopped"):
        answer = api.delete(path, params=scoped())
        assert refused(answer) == (409, "drive_attached")
        assert answer.json()["error"]["details"]["sandbox"] == box.name
        api.post(f"{box.path}/stop", params=scoped())
    assert api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).status_code == 200
    changed = api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"mounts": {}})
    assert changed.status_code == 200
    assert api.delete(path, params=scoped()).status_code == 200
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())
