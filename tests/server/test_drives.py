"""Drives over HTTP."""

from __future__ import annotations

import secrets

import httpx

from tests.server.conftest import create, scoped
from tests.server.harness import PROJECT
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
