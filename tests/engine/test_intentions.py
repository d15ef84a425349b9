"""What an operation is about to do is written down first, and finished by whoever comes after a failure.

`test_steps.py` kills processes at every step; here each promise is looked at by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sandkeep.engine.context import ACTOR
from sandkeep.errors import NotFound, TransportError
from sandkeep.spec import SnapshotSource
from sandkeep.store.rows import SessionStatus, SnapshotMethod, SnapshotStatus
from tests.engine.engine_lab import EngineLab

DAY_MS = 24 * 3600 * 1000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("intentions"))) as lab:
        yield lab


@pytest.fixture(autouse=True)
def a_project_of_its_own(lab: EngineLab, request: pytest.FixtureRequest) -> Iterator[None]:
    lab.project = lab.engine.project(team="team_test", name=request.node.name).id
    yield
    lab.remove_all()


class Interrupted:
    """The worker does one operation, and whoever asked never hears of it."""

    def __init__(self, lab: EngineLab, monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
        self._lab, self._patch = lab, monkeypatch
        self._operations = operations
        self.calls: Counter[str] = Counter()
        self._real = lab.engine.storage._send
        monkeypatch.setattr(lab.engine.storage, "_send", self._send)

    async def _send(self, operation: str, **options: Any) -> Any:
        self.calls[operation] += 1
        answer = await self._real(operation, **options)
        if operation in self._operations:
            raise TransportError("the server died")
        return answer

    def over(self) -> None:
        self._operations = ()


def kinds(lab: EngineLab, sandbox: str) -> list[str]:
    return [event.kind for event in lab.engine.store.events.page(lab.project, sandbox=sandbox).items]


@pytest.mark.parametrize("who", ["create", "destroy", "upkeep", "restart"])
def test_a_destroy_that_was_cut_short_is_finished_by(
    who: str, lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the files were thrown away, with nothing written down since."""
    first = lab.create("box")
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    started = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    snapshot = started.sandbox.current_snapshot
    assert snapshot is not None
    interrupted = Interrupted(lab, monkeypatch, "discard_session")

    async def destroy() -> None:
        token = ACTOR.set("token:tok_1")
        try:
            await lab.engine.sandboxes.destroy(lab.project, "box", delete_orphan_snapshots=True)
        finally:
            ACTOR.reset(token)

    with pytest.raises(TransportError):
        lab.do(destroy())
    interrupted.over()

    for look in (lab.engine.sandboxes.get, lab.engine.store.sandboxes.get):
        with pytest.raises(NotFound, match="no sandbox named box"):
            look(lab.project, "box")
    with pytest.raises(NotFound, match="no sandbox named box"):
        lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert not lab.engine.store.sandboxes.page(lab.project).items

    if who == "create":
        assert lab.create("box").sandbox.id != started.sandbox.id
    elif who == "destroy":
        assert lab.do(lab.engine.sandboxes.destroy(lab.project, "box")).id == started.sandbox.id
    elif who == "upkeep":
        lab.do(lab.engine.upkeep.turn())
    else:
        lab.reopen()
    store = lab.engine.store
    assert store.sandboxes.find_by_id(lab.project, started.sandbox.id) is None
    assert store.sessions.get(lab.project, started.session.id).status is SessionStatus.STOPPED
    assert store.snapshots.get(lab.project, snapshot).status is SnapshotStatus.DELETED
    assert len(store.snapshots.page(lab.project).items) == 1, "what it had written was not to be kept"
    assert kinds(lab, started.sandbox.id).count("sandbox.destroyed") == 1
    events = store.events.page(lab.project, sandbox=started.sandbox.id, kind="sandbox.destroyed").items
    assert [event.actor for event in events] == ["token:tok_1"]


@pytest.mark.parametrize("flipped", [False, True])
def test_an_end_without_a_snapshot_stays_one(
    flipped: bool, lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether files are kept is decided when a session begins to end, whatever is configured later."""
    started = lab.create("box", persistent=False)
    interrupted = Interrupted(lab, monkeypatch, "discard_session")
    with pytest.raises(TransportError):
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    interrupted.over()
    if flipped:
        lab.engine.store.sandboxes.update(lab.project, "box", now_ms=1, persistent=True)
    ended, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert (ended.status, snapshot) == (SessionStatus.STOPPED, None)
    assert lab.do(lab.engine.sandboxes.resume(lab.project, "box")).resumed


def test_a_snapshot_that_was_cut_short_is_the_one_that_was_asked_for(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lab.create("box", persistent=False)
    interrupted = Interrupted(lab, monkeypatch, "publish_layer")
    with pytest.raises(TransportError):
        lab.do(
            lab.engine.sessions.snapshot(
                lab.project, started.session.id, lifetime_ms=3 * DAY_MS, comment="asked for"
            )
        )
    interrupted.over()
    lab.reopen()
    (snapshot,) = lab.engine.store.snapshots.page(lab.project).items
    assert (snapshot.method, snapshot.expiry_asked) == (SnapshotMethod.MANUAL, True)
    assert snapshot.comment == "asked for"
    assert snapshot.expires_ms == snapshot.created_ms + 3 * DAY_MS
    assert kinds(lab, started.sandbox.id).count("snapshot.created") == 1


def test_a_session_whose_files_are_gone_ends_without_a_snapshot(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers left it that did not write down how a session is to end."""
    started = lab.create("box")
    interrupted = Interrupted(lab, monkeypatch, "discard_session")
    with pytest.raises(TransportError):
        lab.do(lab.engine.sandboxes.destroy(lab.project, "box"))
    interrupted.over()
    lab.engine.store._db.run("UPDATE sandboxes SET destroying = NULL")
    lab.engine.store._db.run("UPDATE sessions SET ending = NULL")
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert again.session.id != started.session.id
    assert lab.engine.sessions.get(lab.project, started.session.id).status is SessionStatus.STOPPED


def test_a_layer_that_has_no_row_yet_outlives_a_start_that_cannot_write_it(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer was published, then neither this server nor the next could go on: the one after that can."""
    started = lab.create("box")
    lab.sh(started.session.id, "echo kept > f")

    async def fail(*args: Any, **more: Any) -> None:
        raise TransportError("not now")

    Interrupted(lab, monkeypatch, "publish_layer")  # and it stays so: this server tries again by itself
    with pytest.raises(TransportError):
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    with monkeypatch.context() as patch:
        patch.setattr("sandkeep.engine.sessions.Sessions._reconcile_one", fail)
        lab.reopen()
    assert lab.engine.sessions.get(lab.project, started.session.id).status is SessionStatus.SNAPSHOTTING
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    assert lab.sh(again.session.id, "cat f") == "kept\n"


def test_snapshots_that_a_fork_used_go_with_the_last_fork(lab: EngineLab) -> None:
    source = lab.create("source")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, source.session.id))
    assert snapshot is not None
    for name in ("one", "two"):
        lab.do(lab.engine.sandboxes.fork(lab.project, "source", {"name": name}))

    def status() -> SnapshotStatus:
        return lab.engine.snapshots.get(lab.project, snapshot.id).status

    lab.do(lab.engine.sandboxes.destroy(lab.project, "source", delete_orphan_snapshots=True))
    assert status() is SnapshotStatus.CREATED
    # Also once the fork has files of its own: it can go back to what it was made from.
    one = lab.engine.sandboxes.get(lab.project, "one")
    lab.do(lab.engine.sessions.stop(lab.project, one.session.id))
    lab.do(lab.engine.sandboxes.destroy(lab.project, "two", delete_orphan_snapshots=True))
    assert status() is SnapshotStatus.CREATED
    lab.do(lab.engine.sandboxes.destroy(lab.project, "one"))
    assert status() is SnapshotStatus.DELETED
    (kept,) = [row for row in lab.engine.store.snapshots.page(lab.project).items if row.id != snapshot.id]
    assert kept.status is SnapshotStatus.CREATED, "the snapshots of that fork were not to be deleted"
    lab.create("third", source=SnapshotSource(kept.id))


def test_snapshots_that_stay_without_their_sandbox_are_not_deleted_with_a_fork(lab: EngineLab) -> None:
    source = lab.create("source")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, source.session.id))
    assert snapshot is not None
    lab.do(lab.engine.sandboxes.fork(lab.project, "source", {"name": "fork"}))
    lab.do(lab.engine.sandboxes.destroy(lab.project, "source"))
    lab.do(lab.engine.sandboxes.destroy(lab.project, "fork", delete_orphan_snapshots=True))
    assert lab.engine.snapshots.get(lab.project, snapshot.id).status is SnapshotStatus.CREATED


def test_many_snapshots_are_deleted_with_a_few_looks_for_layers(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lab.create("box")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert snapshot is not None
    for number in range(300):
        lab.engine.store.snapshots.add(replace(snapshot, id=f"{snapshot.id}n{number}"))
    calls = Interrupted(lab, monkeypatch).calls
    lab.do(lab.engine.sandboxes.destroy(lab.project, "box", delete_orphan_snapshots=True))
    lab.do(lab.engine.close())
    assert calls["collect_layers"] <= 2
    assert calls["release_layers"] == 1 and not calls["release_layer"]
    monkeypatch.undo()
    lab.engine = lab.do(lab._open())
    lab.do(lab.engine.network.ready())  # one that nobody has spoken to yet stays for half a minute
    rows = lab.engine.store.snapshots.page(lab.project).items
    assert {row.status for row in rows} == {SnapshotStatus.DELETED}
    left = lab.do(lab.engine.storage.list_layers())
    assert snapshot.layer not in [layer.id for layer in left]
