"""A sandbox that is stopped and resumed for years: what its sessions stand on stays short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.host import worker
from sandkeep.spec import Mount, SandboxSpec, SnapshotSource
from sandkeep.states import MountMode
from tests.engine.engine_lab import EngineLab
from tests.polling import until
from tests.running_user import ONE_ID

DEEP = 30
"""Where chains begin to be folded."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path / "data")) as lab:
        yield lab


def depth(lab: EngineLab, layer: str) -> int:
    layers = {each.id: each for each in lab.do(lab.engine.storage.list_layers())}
    found = 0
    at: str | None = layer
    while at is not None:
        found, at = found + 1, layers[at].parent
    return found


def until_folded(lab: EngineLab, layer: str) -> None:
    """Whoever folds may have begun already, and be at it still."""

    def folded() -> bool:
        lab.do(asyncio.sleep(0.05))
        return depth(lab, layer) <= DEEP

    until(folded)


def write_and_stop(lab: EngineLab, name: str, number: int) -> Any:
    started = lab.do(lab.engine.sandboxes.resume(lab.project, name))
    lab.sh(
        started.session.id, f"echo {number} > file{number % 7}; echo {number} >> all; rm -f gone{number - 1}"
    )
    lab.sh(started.session.id, f"touch gone{number}")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert snapshot is not None
    return snapshot


def test_the_layers_below_a_sandbox_are_folded_and_nothing_is_lost(lab: EngineLab) -> None:
    first = lab.create("box")
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    snapshots = [write_and_stop(lab, "box", number) for number in range(2 * DEEP)]
    lab.do(lab.engine.upkeep.turn())
    until_folded(lab, snapshots[-1].layer)
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert lab.sh(again.session.id, "cat all").split() == [str(number) for number in range(2 * DEEP)]
    assert lab.sh(again.session.id, "ls -d gone* file*").split() == [
        *(f"file{number}" for number in range(7)),
        f"gone{2 * DEEP - 1}",
    ]
    # Older snapshots are what they were.
    spec = SandboxSpec(name="earlier", source=SnapshotSource(snapshots[10].id))
    earlier = lab.do(lab.engine.sandboxes.create(lab.project, spec))
    assert lab.sh(earlier.session.id, "cat all; ls -d gone*").split() == [*map(str, range(11)), "gone10"]
    lab.do(lab.engine.storage.collect_layers())
    assert lab.sh(again.session.id, "tail -n 1 all") == f"{2 * DEEP - 1}\n"


def test_how_many_layers_are_too_many_is_a_setting(tmp_path: Path) -> None:
    with EngineLab(str(tmp_path / "data"), Settings(fold_depth=3)) as lab:
        lab.do(lab.engine.drives.get_or_create(lab.project, "own", region="iad1"))
        lab.create("box", mounts={"/own": Mount("own", MountMode.READ_WRITE)})
        for number in range(5):
            started = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
            lab.sh(started.session.id, f"touch {number} /own/{number}")
            _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        drive = lab.engine.drives.get(lab.project, "own").layer
        assert snapshot is not None and drive is not None
        tips = (snapshot.layer, drive)
        lab.do(lab.engine.upkeep.turn())

        def folded() -> bool:
            lab.do(asyncio.sleep(0.05))
            return max(depth(lab, layer) for layer in tips) <= 3

        until(folded)
        again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
        assert lab.sh(again.session.id, "ls; ls /own").split() == [str(number) for number in range(5)] * 2


def test_a_chain_that_grew_too_quickly_is_folded_before_the_next_session(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More stops in a moment than the kernel can mount layers; nobody had the time to fold."""

    async def later(tip_id: str, *, image: str | None, max_depth: int) -> int:
        return 0

    monkeypatch.setattr(lab.engine.storage, "fold_layers", later)
    first = lab.create("box")
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    for number in range(worker._DEEPEST + 2):
        snapshot = write_and_stop(lab, "box", number)
    assert depth(lab, snapshot.layer) <= worker._DEEPEST
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert lab.sh(again.session.id, "wc -l < all").strip() == str(worker._DEEPEST + 2)


def test_the_layers_of_a_drive_are_folded_too(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "store", region="local"))
    first = lab.create("box", mounts={"/data": Mount("store")}, persistent=False)
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    for number in range(DEEP + 5):
        started = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
        lab.sh(started.session.id, f"echo {number} >> /data/all; echo > /data/file{number}")
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    drive = lab.engine.drives.get(lab.project, "store")
    assert drive.layer is not None
    until_folded(lab, drive.layer)
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert lab.sh(again.session.id, "wc -l < /data/all; ls /data | wc -l").split() == [
        str(DEEP + 5),
        str(DEEP + 6),
    ]


def test_what_is_set_on_the_root_of_a_filesystem_lasts(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "owned", region="local"))
    owner = "0:0" if ONE_ID else "7:8"
    first = lab.create("rooted", mounts={"/data": Mount("owned")})
    lab.sh(first.session.id, f"chmod 1777 /; chown {owner} /data; chmod 750 /data", root=True)
    for _ in range(2):
        session = lab.engine.sandboxes.get(lab.project, "rooted").session
        lab.do(lab.engine.sessions.stop(lab.project, session.id))
        again = lab.do(lab.engine.sandboxes.resume(lab.project, "rooted"))
        assert lab.sh(again.session.id, "stat -c '%a %u:%g' / /data") == f"1777 0:0\n750 {owner}\n"
