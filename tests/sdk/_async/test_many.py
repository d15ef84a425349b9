"""Several sandboxes by one request: all of them, or none."""

from __future__ import annotations

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NameTaken, NotFound, SessionStopped, WrongState

pytestmark = pytest.mark.anyio


async def _names(prefix: str) -> list[str]:
    listed = sandkeep.query_sandboxes(sandkeep.SandboxQueryByName(prefix=prefix))
    return [info.name for info in await listed.all()]


async def test_many_are_created_and_leave_together(name: str) -> None:
    async with sandkeep.create_many(3, name, tags={"run": name}, env={"A": "1"}) as boxes:
        assert [box.name for box in boxes] == [f"{name}-1", f"{name}-2", f"{name}-3"]
        assert len({box.current_session.id for box in boxes}) == len(boxes) == 3
        assert all(
            box.status is sandkeep.SessionStatus.RUNNING and box.tags == {"run": name} for box in boxes
        )
        for box in boxes[1:]:
            assert (await box.run_process("printenv", ["A"], capture_output=True)).stdout == b"1\n"
        await boxes[0].destroy()
    assert await _names(name) == []
    async with sandkeep.create_many(2, tags={"run": name}, auto_resume=False) as boxes:
        assert boxes[0].name != boxes[1].name
        await boxes[1].stop()
        with pytest.raises(SessionStopped):
            await boxes[1].run_process("true")


async def test_if_one_of_many_cannot_be_created_there_is_none(name: str) -> None:
    async with sandkeep.create_sandbox(f"{name}-4") as taken:
        await taken.fs.write_text("note", "kept")
        with pytest.raises(NameTaken, match=f"{name}-4"):
            await sandkeep.create_many(5, name)
        assert await _names(name) == [f"{name}-4"]
        assert await taken.fs.read_text("note") == "kept"
        with pytest.raises(NameTaken):
            await taken.fork(name, count=4)
        assert await _names(name) == [f"{name}-4"]
    for wrong in (0, 101, True):
        with pytest.raises(InvalidRequest, match="count"):
            sandkeep.create_many(wrong)
    with pytest.raises(NotFound):
        await sandkeep.fork_sandbox(name, count=2)


async def test_forks_of_a_running_sandbox_start_from_one_checkpoint(name: str) -> None:
    async with sandkeep.create_sandbox(name, tags={"from": name}) as box:
        await box.fs.write_text("note", "now")
        async with box.fork(f"{name}-f", live=True, count=3) as forks:
            [checkpoint] = await box.snapshots().all()
            assert [fork.name for fork in forks] == [f"{name}-f-{number}" for number in (1, 2, 3)]
            for fork in forks:
                assert fork.current_snapshot_id == checkpoint.id and fork.tags == {"from": name}
                assert await fork.fs.read_text("note") == "now" and fork.left_out is None
            await forks[0].fs.write_text("note", "changed")
            assert await forks[1].fs.read_text("note") == "now"
        async with box.fork(count=2) as forks:
            assert {fork.left_out for fork in forks} == {box.current_session.id}
            assert not await forks[1].fs.exists("note")


async def test_forks_of_a_stopped_sandbox_start_from_its_snapshot(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("note", "kept")
        await box.stop()
        async with sandkeep.fork_sandbox(name, count=2, tags={"a": "b"}) as forks:
            for fork in forks:
                assert await fork.fs.read_text("note") == "kept" and fork.tags == {"a": "b"}
        assert (await box.refresh()).status is sandkeep.SessionStatus.STOPPED


async def test_only_a_stopped_sandbox_is_destroyed_if_asked_so(name: str) -> None:
    box = await sandkeep.create_sandbox(name)
    with pytest.raises(WrongState, match="running"):
        await box.destroy(only_stopped=True)
    await box.run_process("true", check=True)
    stopped = await box.stop()
    await box.destroy(delete_snapshots=False, only_stopped=True)
    assert stopped.snapshot is not None
    orphaned = sandkeep.query_snapshots(sandkeep.SnapshotQuery(orphaned=True))
    assert stopped.snapshot.id in [snapshot.id async for snapshot in orphaned]
    source = sandkeep.SnapshotSource(stopped.snapshot.id)
    async with sandkeep.create_sandbox(name, source=source):
        assert stopped.snapshot.id not in [snapshot.id async for snapshot in orphaned]
    await sandkeep.delete_snapshot(stopped.snapshot.id)
    assert stopped.snapshot.id not in [snapshot.id async for snapshot in orphaned]
