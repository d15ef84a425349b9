"""The gate against the real engine: every operation in every state asks it, and does what it says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from sandkeep.engine import lifecycle
from sandkeep.engine.lifecycle import TERMINAL, VERDICTS, Operation, State, Verdict
from sandkeep.engine.sandboxes import Started
from sandkeep.engine.settings import Settings
from sandkeep.errors import SandkeepError, SessionSnapshotting, SessionStopped, SessionStopping
from sandkeep.host.driver import Acting
from sandkeep.policy import NetworkPolicy
from sandkeep.process_options import ProcessOptions
from tests.engine.engine_lab import EngineLab

REFUSALS: dict[Verdict, type[SandkeepError]] = {
    Verdict.STOPPING: SessionStopping,
    Verdict.SNAPSHOTTING: SessionSnapshotting,
    Verdict.STOPPED: SessionStopped,
}
AFTER = {State.PENDING: State.ABORTED, State.STOPPING: State.STOPPED, State.SNAPSHOTTING: State.STOPPED}
"""Where a session that a crash left in a state is brought."""
IN_THE_SESSION = {
    Operation.RUN,
    Operation.SIGNAL,
    Operation.STDIN,
    Operation.TERMINAL,
    Operation.FILES,
    Operation.CHECKPOINT,
}
"""They cannot hold the lock for as long as they last."""


class Asked(NamedTuple):
    operation: Operation
    state: State
    locked: bool


class Box(NamedTuple):
    name: str
    session: str
    process: str
    terminal: str
    snapshot: str


class Gate:
    """A sandbox in any state, any operation on it, and what the gate was asked."""

    def __init__(self, lab: EngineLab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab = lab
        self.engine = lab.engine
        self.asked: list[Asked] = []
        self._names = (f"gate-{number}" for number in itertools.count(1))
        self._box: Box | None = None
        for task in lab.engine._context._tasks:
            if task.get_name() == "upkeep":
                task.cancel()  # it would end the sessions that are left between two states
        require = lifecycle.require

        def asking(operation: Operation, state: State, *, session_id: str) -> Verdict:
            name = lab.engine.sessions.get(lab.project, session_id).sandbox_name
            held = lab.engine._context.locked(lab.project, name)
            self.asked.append(Asked(operation, state, held))
            return require(operation, state, session_id=session_id)

        monkeypatch.setattr("sandkeep.engine.sessions.require", asking)

    def box(self, state: State) -> Box:
        """A sandbox whose second session is in a state; one between two states as a crash would leave it."""
        lab, engine, name = self.lab, self.engine, next(self._names)
        first = lab.create(name)
        lab.do(engine.sessions.stop(lab.project, first.session.id))
        started: Started = lab.do(engine.sandboxes.resume(lab.project, name))
        session = started.session.id
        process = lab.do(
            engine.processes.start(lab.project, session, ProcessOptions(command="cat", stdin=True))
        ).id
        terminal = lab.do(
            engine.processes.start(lab.project, session, ProcessOptions(command="cat", pty=(24, 80)))
        ).id
        snapshot = started.sandbox.current_snapshot
        assert snapshot is not None
        if state in TERMINAL:
            lab.do(engine.sessions.stop(lab.project, session))
        database = engine.store._db
        # The end of a process may be on record later than that of its session.
        database.run("UPDATE processes SET status = 'running' WHERE session = $1", session)
        if engine.sessions.get(lab.project, session).status is not state:
            database.run("UPDATE sessions SET status = $1 WHERE id = $2", str(state), session)
            database.run("UPDATE sandboxes SET status = $1 WHERE name = $2", str(state), name)
        self.asked.clear()
        return Box(name, session, process, terminal, snapshot)

    def shared(self, state: State) -> Box:
        """The same, for operations that leave the state as it is."""
        if self._box is None:
            self._box = self.box(state)
        self.asked.clear()
        return self._box

    def do(self, operation: Operation, box: Box) -> Any:
        return self.lab.do(asyncio.wait_for(_OPERATIONS[operation](self, box), 60))


_OPERATIONS: dict[Operation, Callable[[Gate, Box], Awaitable[Any]]] = {
    Operation.RUN: lambda at, box: at.engine.processes.start(
        at.lab.project, box.session, ProcessOptions(command="true")
    ),
    Operation.SIGNAL: lambda at, box: at.engine.processes.signal(
        at.lab.project, box.session, box.process, 28
    ),
    Operation.STDIN: lambda at, box: at.engine.processes.write_stdin(
        at.lab.project, box.session, box.process, b"x"
    ),
    Operation.TERMINAL: lambda at, box: at.engine.processes.resize(
        at.lab.project, box.session, box.terminal, rows=30, columns=90
    ),
    Operation.FILES: lambda at, box: at.engine.files.stat(at.lab.project, box.session, "/", Acting()),
    Operation.CHECKPOINT: lambda at, box: at.engine.sessions.checkpoint(at.lab.project, box.session),
    Operation.EXTEND: lambda at, box: at.engine.sessions.extend(at.lab.project, box.session, by_ms=1000),
    Operation.SET_POLICY: lambda at, box: at.engine.sandboxes.set_policy(
        at.lab.project, box.session, NetworkPolicy.deny_all()
    ),
    Operation.SNAPSHOT: lambda at, box: at.engine.sessions.snapshot(at.lab.project, box.session),
    Operation.STOP: lambda at, box: at.engine.sessions.stop(at.lab.project, box.session),
    Operation.DESTROY: lambda at, box: at.engine.sandboxes.destroy(at.lab.project, box.name),
    Operation.RESUME: lambda at, box: at.engine.sandboxes.resume(at.lab.project, box.name),
    Operation.FORK: lambda at, box: at.engine.sandboxes.fork(
        at.lab.project, box.name, {"name": f"{box.name}-fork"}
    ),
    Operation.ROLL_BACK: lambda at, box: at.engine.sandboxes.update(
        at.lab.project, box.name, {}, current_snapshot=box.snapshot
    ),
    Operation.UPDATE: lambda at, box: at.engine.sandboxes.update(at.lab.project, box.name, {"tags": {}}),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("gate")), Settings(pool=1)) as lab:
        yield lab


@pytest.fixture
def gate(lab: EngineLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    yield Gate(lab, monkeypatch)
    lab.remove_all()


@pytest.mark.parametrize("state", State)
def test_every_operation_asks_the_gate_and_does_what_it_says(gate: Gate, state: State) -> None:
    for operation in Operation:
        verdict = VERDICTS[operation][state]
        refused = verdict in REFUSALS
        leaves = refused or operation in IN_THE_SESSION | {Operation.EXTEND, Operation.UPDATE}
        box = gate.shared(state) if leaves and verdict is not Verdict.WAIT else gate.box(state)
        # The session may be gone from this state by the time of the second look.
        final = VERDICTS[operation][AFTER[state]] if verdict is Verdict.WAIT else verdict
        if final in REFUSALS:
            with pytest.raises(REFUSALS[final]):
                gate.do(operation, box)
        else:
            gate.do(operation, box)
        asked = [each for each in gate.asked if each.operation is operation]
        assert asked and asked[0].state is state, (operation, state)
        if verdict is Verdict.WAIT:
            assert asked[-1].state is AFTER[state] and asked[-1].locked, (operation, state)
        if not refused and operation not in IN_THE_SESSION:
            assert asked[-1].locked, (operation, state)


def test_a_fork_of_a_sandbox_whose_end_was_interrupted_has_the_files_of_that_session(gate: Gate) -> None:
    lab, engine = gate.lab, gate.engine
    started = lab.create("interrupted")
    lab.sh(started.session.id, "echo kept > file")
    engine.store._db.run("UPDATE sessions SET status = 'stopping' WHERE id = $1", started.session.id)
    forked = lab.do(engine.sandboxes.fork(lab.project, "interrupted", {"name": "heir"}))
    assert lab.sh(forked.session.id, "cat file") == "kept\n"
