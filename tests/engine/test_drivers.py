"""The engine on two drivers: the native one, and a fake written against the interface alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sandkeep.engine.adoption import Adoption
from sandkeep.engine.engine import Host
from sandkeep.errors import NotFound, SessionStopped
from sandkeep.host.driver import SessionRef
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.native.messages import NativeState
from sandkeep.host.storage import Storage
from sandkeep.process_options import ProcessOptions
from sandkeep.store.rows import ProcessStatus, SessionStatus
from tests.engine.engine_lab import EngineLab
from tests.engine.fakedriver import FakeDriver


@pytest.fixture(scope="module", params=["native", "fake"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    data_dir = str(tmp_path_factory.mktemp(request.param))
    if request.param == "native":
        with EngineLab(data_dir) as lab:
            yield lab
        return
    spawner = NativeDriver(data_dir)  # runs the worker, and no session
    with EngineLab(data_dir, host=Host(FakeDriver(data_dir), Storage(spawner))) as lab:
        yield lab
    asyncio.run(spawner.close())


def crash(lab: EngineLab, session_id: str) -> None:
    driver = lab.engine.driver
    ref = lab.engine.sessions._context.ref(lab.engine.sessions.get(lab.project, session_id))
    if isinstance(driver, FakeDriver):
        driver.crash(ref)
        return
    state = lab.do(driver.state(ref))
    assert isinstance(state, NativeState)
    os.kill(state.supervisor_pid, signal.SIGKILL)


def options(command: str, *args: str) -> ProcessOptions:
    return ProcessOptions(command=command, args=args)


def test_a_process_runs_and_its_output_and_exit_are_recorded(lab: EngineLab) -> None:
    session_id = lab.create("runs").session.id
    assert lab.sh(session_id, "echo out; echo err >&2") == "out\nerr\n"
    process = lab.do(
        lab.engine.processes.start(lab.project, session_id, options("sh", "-c", "echo x; exit 3"))
    )
    ended = lab.do(lab.engine.processes.wait(lab.project, session_id, process.id))
    assert (ended.status, ended.exit_code) == (ProcessStatus.EXITED, 3)
    assert lab.text(session_id, process.id) == b"x\n"
    assert process.id in [row.id for row in lab.engine.processes.list(lab.project, session_id)]


def test_a_signal_ends_a_process(lab: EngineLab) -> None:
    session_id = lab.create("signalled").session.id
    process = lab.do(lab.engine.processes.start(lab.project, session_id, options("sleep", "600")))
    lab.do(lab.engine.processes.signal(lab.project, session_id, process.id, signal.SIGTERM))
    ended = lab.do(lab.engine.processes.wait(lab.project, session_id, process.id))
    assert (ended.status, ended.exit_code) == (ProcessStatus.KILLED, 128 + signal.SIGTERM)


def test_a_start_with_the_same_key_is_the_same_process(lab: EngineLab) -> None:
    session_id = lab.create("keyed").session.id
    start = lab.engine.processes.start
    first, second = (
        lab.do(start(lab.project, session_id, options("echo", "once"), key="k")) for _ in range(2)
    )
    assert first.id == second.id


def test_a_stop_keeps_the_files_and_a_resume_shows_them(lab: EngineLab) -> None:
    first = lab.create("kept")
    lab.sh(first.session.id, "echo one > f")
    ended, snapshot = lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    assert ended.status is SessionStatus.STOPPED and snapshot is not None
    with pytest.raises(SessionStopped):
        lab.sh(first.session.id, "true")
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "kept"))
    assert lab.sh(again.session.id, "cat f; echo two >> f") == "one\n"
    lab.do(lab.engine.sessions.stop(lab.project, again.session.id))
    last = lab.do(lab.engine.sandboxes.resume(lab.project, "kept"))
    assert lab.sh(last.session.id, "cat f") == "one\ntwo\n"


def test_output_can_be_read_after_the_session_has_ended(lab: EngineLab) -> None:
    session_id = lab.create("read-later").session.id
    process = lab.do(lab.engine.processes.start(lab.project, session_id, options("echo", "later")))
    lab.do(lab.engine.processes.wait(lab.project, session_id, process.id))
    lab.do(lab.engine.sessions.stop(lab.project, session_id))
    assert lab.text(session_id, process.id) == b"later\n"


def test_a_destroyed_sandbox_is_gone_with_its_files(lab: EngineLab) -> None:
    session_id = lab.create("destroyed").session.id
    lab.sh(session_id, "echo x > f")
    lab.do(lab.engine.sandboxes.destroy(lab.project, "destroyed"))
    with pytest.raises(NotFound):
        lab.engine.sandboxes.get(lab.project, "destroyed")
    assert not Path(lab.data_dir, "sessions", session_id, "fs").exists()


def test_a_session_ends_at_its_deadline_and_keeps_its_files(lab: EngineLab) -> None:
    started = lab.create("timed", timeout=timedelta(seconds=3))
    lab.sh(started.session.id, "echo kept > f")
    ended = lab.ended(started.session.id)
    assert (ended.status, ended.stop_reason) == (SessionStatus.STOPPED, "deadline reached")
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "timed"))
    assert lab.sh(again.session.id, "cat f") == "kept\n"


def test_a_session_is_extended(lab: EngineLab) -> None:
    started = lab.create("extended", timeout=timedelta(minutes=5))
    longer = lab.do(lab.engine.sessions.extend(lab.project, started.session.id, by_ms=60_000))
    assert longer.deadline_ms is not None and started.session.deadline_ms is not None
    assert 55_000 < longer.deadline_ms - started.session.deadline_ms < 65_000


def test_a_session_that_its_host_lost_is_aborted_and_its_files_are_kept(lab: EngineLab) -> None:
    started = lab.create("crashes")
    lab.sh(started.session.id, "echo kept > f; sync")
    crash(lab, started.session.id)
    assert lab.ended(started.session.id).status is SessionStatus.ABORTED
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "crashes"))
    assert lab.sh(again.session.id, "cat f") == "kept\n"


def forget_rows(lab: EngineLab, sandbox: str) -> str:
    """Make the store forget a sandbox that runs; return the id of its session."""
    session_id = lab.create(sandbox).session.id
    lab.sh(session_id, "echo x > f")
    database = lab.engine.store._db
    database.run("DELETE FROM sessions WHERE id = $1", session_id)
    database.run("DELETE FROM sandboxes WHERE name = $1", sandbox)
    return session_id


def test_a_session_that_the_store_does_not_know_can_be_adopted(lab: EngineLab) -> None:
    session_id = forget_rows(lab, "adopted")
    context = lab.engine._context
    ref = SessionRef(lab.engine.driver.host, session_id)
    origin = lab.do(lab.engine.driver.origin(ref))
    assert origin is not None and origin.image.startswith("host")
    adopted = lab.do(Adoption(context, lab.engine.sandboxes).run())
    [name] = [item.name for item in adopted if item.found == session_id]
    project = lab.engine.project(team="local", name="default").id
    session = lab.engine.sandboxes.get(project, name).session
    assert (session.id, session.status) == (session_id, SessionStatus.RUNNING)
    assert (session.deadline_ms, session.cwd) == (origin.deadline_ms, origin.cwd)
    ended, snapshot = lab.do(lab.engine.sessions.stop(project, session_id))
    assert ended.status is SessionStatus.STOPPED and snapshot is not None
    assert lab.do(lab.engine.driver.origin(ref)) is None, "its files are a layer now"
    has_directory = lab.engine.storage.has_directory
    assert lab.do(has_directory(snapshot.layer, session.cwd))
    assert not lab.do(has_directory(snapshot.layer, "/nowhere"))
    lab.do(lab.engine.sandboxes.destroy(project, name, delete_orphan_snapshots=True))


def test_a_session_that_the_store_does_not_know_is_set_aside_and_goes_on(lab: EngineLab) -> None:
    session_id = forget_rows(lab, "set-aside")
    ref = SessionRef(lab.engine.driver.host, session_id)
    lab.log.clear()
    for _ in range(2):
        lab.do(lab.engine.garbage.remove_sessions())
    assert [facts["session_id"] for text, facts in lab.log if text == "session.set-aside"] == [session_id]
    assert lab.do(lab.engine.storage.set_session_aside(session_id)) is not None
    assert lab.do(lab.engine.driver.state(ref)).running
    lab.do(lab.engine.driver.stop(ref, reason="the test is over"))
    lab.do(lab.engine._context.remove_session(session_id))
