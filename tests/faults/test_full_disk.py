"""A server whose disk is full: it runs, starts, stops sessions and deletes, and says what it cannot do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sandkeep.engine.reserve import Reserve
from tests.faults.smalldisks import (
    BTRFS,
    EXT4,
    EXT4_INODES,
    EXT4_ORDINARY,
    XFS,
    Filler,
    Kind,
    ServerOnDisk,
    small_disk,
)
from tests.faults.watching import eventually
from tests.server.conftest import Box, create, run_body, scoped
from tests.server.server_process import PROJECT

_KINDS = [
    pytest.param(EXT4, id="ext4"),
    pytest.param(EXT4_ORDINARY, id="ext4-ordinary", marks=pytest.mark.slow),
    pytest.param(EXT4_INODES, id="ext4-inodes", marks=pytest.mark.slow),
    pytest.param(BTRFS, id="btrfs", marks=pytest.mark.slow),
    pytest.param(XFS, id="xfs", marks=pytest.mark.slow),
]
_CONNECTIONS: dict[str, Callable[[ServerOnDisk], httpx.Client]] = {
    "unix": lambda server: server.local(params=scoped()),
    "tcp": ServerOnDisk.client,
}


class Full:
    """A server on a small disk."""

    def __init__(self, server: ServerOnDisk, filler: Filler, kind: Kind) -> None:
        self.server = server
        self.filler = filler
        self.inodes = kind.inodes
        self.reserve = Reserve(str(server.data))

    def fill(self) -> None:
        """Once the server has its reserve."""
        eventually(lambda: self.reserve.complete)
        self.filler.fill()


@pytest.fixture(scope="module", params=_KINDS)
def full(request: pytest.FixtureRequest, test_area: Path) -> Iterator[Full]:
    kind: Kind = request.param
    with small_disk(kind, test_area) as place:
        user = request.getfixturevalue("ordinary_user") if kind.ordinary else None
        server = ServerOnDisk(place / "data", test_area / f"{kind.name}.log", user)
        filler = Filler(place, inodes=kind.inodes)
        try:
            server.start()
            yield Full(server, filler, kind)
        finally:
            filler.free()
            server.end()


def _destroy(api: httpx.Client, name: str) -> None:
    answer = api.delete(f"/v2/sandboxes/{name}", params=scoped())
    assert answer.status_code == 200, answer.text


def _names(api: httpx.Client) -> set[str]:
    answer = api.get("/v2/sandboxes", params=scoped())
    assert answer.status_code == 200, answer.text
    return {sandbox["name"] for sandbox in answer.json()["sandboxes"]}


def _refused_for_want_of_room(answer: httpx.Response) -> bool:
    """False when it was done after all: there may be room for something small."""
    if answer.status_code == 200:
        return False
    assert answer.json()["error"]["kind"] == "no_space", answer.text
    return True


@pytest.mark.parametrize("connection", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_full_disk(full: Full, connection: str) -> None:
    """Everything that ends or deletes works, also by a server that starts on a full disk."""
    server = full.server
    connect = _CONNECTIONS[connection]
    with connect(server) as api:
        kept, doomed, running = (
            create(api, name=f"{name}-{connection}") for name in ("kept", "doomed", "running")
        )
        for box in (kept, doomed, running):
            assert box.run("sh", "-c", "echo mine > file").status_code == 200
        stopped = api.post(f"{doomed.path}/stop").json()
        snapshot = stopped["snapshot"]["id"] if "snapshot" in stopped else None
        drive = f"/v2/sandboxes/drives/d-{connection}"
        assert api.post(drive, params=scoped(), json={"projectId": PROJECT}).status_code == 201

        full.fill()
        assert _names(api) >= {kept.name, doomed.name, running.name}
        tries = [
            api.post(
                "/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "name": f"n{n}-{connection}"}
            )
            for n in range(3)
        ]
        for number, answer in enumerate(tries):
            if not _refused_for_want_of_room(answer):
                _destroy(api, f"n{number}-{connection}")
        _refused_for_want_of_room(api.post(f"{running.path}/cmd", json=run_body("true")))
        full.filler.fill()  # xfs gives back what was deleted a while later
        upload = api.put(f"{running.own}/fs/content", params={"path": "big"}, content=b"x" * (2 << 20))
        assert _refused_for_want_of_room(upload) or full.inodes
        _refused_for_want_of_room(api.post(f"{running.own}/checkpoint"))
        assert server.alive, server.log()

    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    full.filler.fill()
    server.start()
    with connect(server) as api:
        assert _names(api) >= {kept.name, doomed.name, running.name}
        answer = api.post(f"{kept.path}/stop")
        assert answer.status_code == 200, answer.text
        _destroy(api, running.name)
        if snapshot:
            answer = api.delete(f"/v2/sandboxes/snapshots/{snapshot}", params=scoped())
            assert answer.status_code == 200, answer.text
        _destroy(api, doomed.name)
        answer = api.delete(drive, params=scoped())
        assert answer.status_code == 200, answer.text
        assert _names(api) & {kept.name, doomed.name, running.name} == {kept.name}
        assert server.alive, server.log()

    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        # The reserve is spent now, and somebody else takes what it left and what was deleted.
        full.filler.fill()
        assert server.stop(number) == status, server.log()
        server.start()
        with connect(server) as api:
            assert kept.name in _names(api)
            assert server.alive, server.log()

    with connect(server) as api:
        full.filler.free()
        resumed = api.get(f"/v2/sandboxes/{kept.name}", params=scoped(resume="true"))
        assert resumed.status_code == 200, resumed.text
        again = Box(api, kept.name, resumed.json())
        assert '"mine\\n"' in again.run("cat", "file").text
        eventually(lambda: full.reserve.complete)
        _destroy(api, kept.name)
