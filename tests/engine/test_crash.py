"""``kill -9`` of the engine's process in the middle of each operation, then another one takes over.

The victim is a process of its own that repeats one operation; it is killed at a different moment each time.
Whoever opens the data directory next must find every acknowledged file, no second session, and nothing that
cannot be resumed or destroyed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.engine import Engine
from sandkeep.errors import SandkeepError, SnapshotGone, TransportError
from sandkeep.host.driver import SessionRef
from sandkeep.host.layers.values import Layer
from sandkeep.host.native.messages import NativeState
from sandkeep.process_options import ProcessOptions
from sandkeep.spec import SandboxSpec
from sandkeep.store.rows import ACTIVE, ProcessStatus, SessionStatus
from tests.conftest import remove_tree
from tests.engine.engine_lab import EngineLab, run_script
from tests.polling import ENOUGH

OPERATIONS = ("create", "stop", "snapshot", "checkpoint", "resume", "fork", "destroy", "run")
KILLS = 3


async def victim(data_dir: str, operation: str) -> None:
    """Repeat an operation on ``box`` for ever, writing a line to standard output before and after each."""
    engine = await Engine.open(data_dir)
    project = engine.project(team="team_test", name="prj_test").id
    count = 0
    while True:
        count += 1
        try:
            started = await engine.sandboxes.resume(project, "box")
        except SandkeepError:
            started = await engine.sandboxes.create(project, SandboxSpec(name="box"))
        await run_script(engine, project, started.session.id, f"echo {os.getpid()}-{count} >> acknowledged")
        print(f"wrote {os.getpid()}-{count}", flush=True)
        print("begin", flush=True)
        session = started.session.id
        if operation == "create":
            await engine.sandboxes.create(project, SandboxSpec(name=f"new-{os.getpid()}-{count}"))
        elif operation == "stop":
            await engine.sessions.stop(project, session)
        elif operation == "snapshot":
            await engine.sessions.snapshot(project, session)
        elif operation == "checkpoint":
            await engine.sessions.checkpoint(project, session)
        elif operation == "resume":
            await engine.sessions.stop(project, session)
            await engine.sandboxes.resume(project, "box")
        elif operation == "fork":
            await engine.sessions.stop(project, session)
            await engine.sandboxes.fork(project, "box", {"name": f"fork-{os.getpid()}-{count}", "mounts": {}})
        elif operation == "destroy":
            other = f"doomed-{os.getpid()}-{count}"
            await engine.sandboxes.create(project, SandboxSpec(name=other))
            await engine.sandboxes.destroy(project, other, delete_orphan_snapshots=True)
        else:
            await run_script(engine, project, session, "head -c 100000 /dev/zero")


def kill_in_the_middle(data_dir: str, operation: str, delay: float) -> list[str]:
    """Run a victim and kill it; returns the lines whose writing had been acknowledged."""
    code = (
        "import asyncio, sys; from tests.engine.test_crash import victim; asyncio.run(victim(*sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, data_dir, operation],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert process.stdout is not None
    acknowledged = []
    for line in process.stdout:
        if line.startswith("wrote"):
            acknowledged.append(line.split()[1])
        elif line.startswith("begin"):
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            break
    rest = process.stdout.read()
    acknowledged += [line.split()[1] for line in rest.splitlines() if line.startswith("wrote")]
    process.stdout.close()
    process.wait()
    return acknowledged


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "data")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_in_the_middle_of(operation: str, data_dir: str) -> None:
    chance = random.Random(operation)
    acknowledged: list[str] = []
    for _ in range(KILLS):
        acknowledged += kill_in_the_middle(data_dir, operation, chance.random() * 0.06)
        with EngineLabKeeping(data_dir) as lab:
            check(lab, acknowledged)
    with EngineLab(data_dir) as lab:
        check(lab, acknowledged)
    left = os.listdir(f"{data_dir}/sessions")
    assert not left, left


class EngineLabKeeping(EngineLab):
    """Looks and goes away again, leaving everything as it is."""

    def close(self) -> None:
        self.do(self.engine.close())
        self._runner.close()


def check(lab: EngineLab, acknowledged: list[str]) -> None:
    page = lab.engine.store.sandboxes.page(lab.project)
    for sandbox in page.items:
        sessions = lab.engine.store.sessions.page(lab.project, sandbox=sandbox.id)
        assert sum(session.status in ACTIVE for session in sessions.items) <= 1
    started = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
    lines = lab.sh(started.session.id, "cat acknowledged").split()
    missing = [line for line in acknowledged if line not in lines]
    assert not missing, (missing, lines)


def test_output_of_a_running_process_survives_the_engine(data_dir: str) -> None:
    with EngineLabKeeping(data_dir) as lab:
        started = lab.create("talks")
        script = "for i in $(seq 1 300); do echo line $i; sleep 0.005; done"
        process = lab.do(
            lab.engine.processes.start(
                lab.project, started.session.id, ProcessOptions(command="bash", args=["-c", script])
            )
        )
    with EngineLab(data_dir) as lab:
        assert lab.engine.sandboxes.get(lab.project, "talks").session.id == started.session.id
        ended = lab.do(
            asyncio.wait_for(lab.engine.processes.wait(lab.project, started.session.id, process.id), ENOUGH)
        )
        assert (ended.status, ended.exit_code) == (ProcessStatus.EXITED, 0)
        text = lab.text(started.session.id, process.id).decode()
        assert text == "".join(f"line {i}\n" for i in range(1, 301))


def test_a_supervisor_that_died_ends_its_session_as_aborted_and_keeps_its_files(data_dir: str) -> None:
    with EngineLab(data_dir) as lab:
        started = lab.create("orphan")
        lab.sh(started.session.id, "echo kept > f; sync")
        state = lab.do(lab.engine.driver.state(lab.engine.sessions._context.ref(started.session)))
        assert isinstance(state, NativeState)
        os.kill(state.supervisor_pid, signal.SIGKILL)
        assert lab.ended(started.session.id).status == "aborted"
        try:
            again = lab.do(lab.engine.sandboxes.resume(lab.project, "orphan"))
        except SnapshotGone:
            pytest.fail("the aborted session's files were not kept")
        assert lab.sh(again.session.id, "cat f") == "kept\n"


@pytest.mark.parametrize("persistent", [True, False])
def test_an_end_that_failed_half_way_is_finished_by_whoever_comes_next(
    persistent: bool, data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot was being taken when its layer could not be published: nothing is lost and nothing stuck."""
    with EngineLab(data_dir) as lab:
        started = lab.create("box", persistent=persistent)
        lab.sh(started.session.id, "echo kept > f")

        async def refuse(session_id: str, **layer: Any) -> Layer:
            raise TransportError("the worker died")

        monkeypatch.setattr(lab.engine.storage, "publish_layer", refuse)
        with pytest.raises(TransportError):
            lab.do(lab.engine.sessions.snapshot(lab.project, started.session.id))
        assert lab.engine.sandboxes.get(lab.project, "box").session.status == "snapshotting"
        with pytest.raises(TransportError):
            lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
        lab.do(lab.engine.sessions.reconcile_unfinished())
        assert ("reconcile failed", "the worker died") in [(note, f.get("error")) for note, f in lab.log]

        monkeypatch.undo()
        again = lab.do(lab.engine.sandboxes.resume(lab.project, "box"))
        assert lab.sh(again.session.id, "cat f") == "kept\n"
        assert lab.engine.sessions.get(lab.project, started.session.id).status == "stopped"


def test_upkeep_finishes_an_end_nobody_comes_back_for(data_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineLab(data_dir) as lab:
        started = lab.create("box")

        async def refuse(session_id: str, **layer: Any) -> Layer:
            raise TransportError("the worker died")

        monkeypatch.setattr(lab.engine.storage, "publish_layer", refuse)
        with pytest.raises(TransportError):
            lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        while not any(note == "task failed" for note, _ in lab.log):  # who watched the session tried as well
            lab.do(asyncio.sleep(0.01))
        monkeypatch.undo()
        lab.do(lab.engine.upkeep.turn())
        ended = lab.engine.sandboxes.get(lab.project, "box")
        assert (ended.session.status, ended.sandbox.current_snapshot is not None) == ("stopped", True)


def test_a_session_whose_directory_was_removed_can_be_stopped_resumed_and_destroyed(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(ref: SessionRef) -> None:
        await asyncio.Event().wait()

    with EngineLab(data_dir) as lab:
        monkeypatch.setattr(lab.engine.driver, "wait_stopped", never)
        for operation in ("stop", "resume", "destroy"):
            started = lab.create("removed")
            session = started.session.id
            lab.do(lab.engine.driver.stop(SessionRef("local", session), reason="for the test"))
            remove_tree(f"{data_dir}/sessions/{session}")
            if operation == "stop":
                ended, snapshot = lab.do(lab.engine.sessions.stop(lab.project, session))
                assert ended.status is SessionStatus.ABORTED and snapshot is None
            elif operation == "resume":
                again = lab.do(lab.engine.sandboxes.resume(lab.project, "removed"))
                assert again.session.id != session
            lab.do(lab.engine.sandboxes.destroy(lab.project, "removed"))


def test_a_session_whose_watching_failed_is_watched_again(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineLab(data_dir) as lab:
        real, calls = lab.engine.driver.wait_stopped, []

        async def wait_stopped(ref: SessionRef) -> Any:
            calls.append(ref)
            if len(calls) == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return await real(ref)

        monkeypatch.setattr(lab.engine.driver, "wait_stopped", wait_stopped)
        started = lab.create("unwatched", timeout=timedelta(seconds=2))
        ended = lab.ended(started.session.id)
        assert (ended.status, ended.stop_reason) == (SessionStatus.STOPPED, "deadline reached")
