"""The session's state table, alone and against the real store under arbitrary interleavings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sandkeep.engine import lifecycle
from sandkeep.engine.lifecycle import (
    ACTIVE,
    MOVES,
    TERMINAL,
    VERDICTS,
    Cause,
    Operation,
    State,
    Verdict,
    draw,
    next_state,
    require,
    sources,
)
from sandkeep.errors import SessionSnapshotting, SessionStopped, SessionStopping, WrongState
from sandkeep.store import PageRequest
from sandkeep.store.rows import Session
from tests.unit.store_rows import open_store, sandbox, session

NEEDS_RUNNING = (
    Operation.RUN,
    Operation.SIGNAL,
    Operation.STDIN,
    Operation.TERMINAL,
    Operation.FILES,
    Operation.EXTEND,
    Operation.SET_POLICY,
    Operation.SNAPSHOT,
    Operation.CHECKPOINT,
)


def test_every_operation_has_an_answer_in_every_state() -> None:
    for operation in Operation:
        assert set(VERDICTS[operation]) == set(State)
        for state in State:
            assert isinstance(VERDICTS[operation][state], Verdict)


def test_every_state_is_reached_and_every_active_one_can_end() -> None:
    reached = {State.PENDING}
    for _ in State:
        reached |= {target for (state, _), target in MOVES.items() if state in reached}
    assert reached == set(State)
    for state in ACTIVE:
        assert next_state(state, Cause.LOST) is State.ABORTED


def test_terminal_states_are_never_left() -> None:
    for state in TERMINAL:
        for cause in Cause:
            with pytest.raises(WrongState):
                next_state(state, cause)
    assert not any(state in TERMINAL for state, _ in MOVES)


def test_a_move_the_table_does_not_name_is_refused_with_the_state() -> None:
    with pytest.raises(WrongState) as caught:
        next_state(State.PENDING, Cause.SNAPSHOT)
    assert caught.value.status == "pending"
    assert sources(Cause.SNAPSHOT) == {State.RUNNING, State.STOPPING}


@pytest.mark.parametrize("operation", NEEDS_RUNNING)
def test_what_needs_a_running_session_waits_for_the_boot_and_is_refused_afterwards(
    operation: Operation,
) -> None:
    assert require(operation, State.PENDING, session_id="s") is Verdict.WAIT
    assert require(operation, State.RUNNING, session_id="s") is Verdict.PROCEED
    with pytest.raises(SessionStopping) as stopping:
        require(operation, State.STOPPING, session_id="s")
    assert (stopping.value.session, stopping.value.status) == ("s", "stopping")
    with pytest.raises(SessionSnapshotting):
        require(operation, State.SNAPSHOTTING, session_id="s")
    for state in TERMINAL:
        with pytest.raises(SessionStopped):
            require(operation, state, session_id="s")


@pytest.mark.parametrize("operation", [Operation.STOP, Operation.DESTROY])
def test_stop_and_destroy_end_what_is_active_and_have_nothing_to_end_afterwards(operation: Operation) -> None:
    for state in State:
        assert VERDICTS[operation][state] is (Verdict.DONE if state in TERMINAL else Verdict.PROCEED)


def test_resume_waits_for_an_end_in_progress_and_does_nothing_when_running() -> None:
    assert {VERDICTS[Operation.RESUME][state] for state in TERMINAL} == {Verdict.PROCEED}
    assert VERDICTS[Operation.RESUME][State.RUNNING] is Verdict.DONE
    for state in (State.PENDING, State.STOPPING, State.SNAPSHOTTING):
        assert VERDICTS[Operation.RESUME][state] is Verdict.WAIT


def test_updating_is_possible_in_every_state() -> None:
    assert set(VERDICTS[Operation.UPDATE].values()) == {Verdict.PROCEED}


@pytest.mark.parametrize("operation", [Operation.FORK, Operation.ROLL_BACK])
def test_the_current_snapshot_is_read_and_replaced_after_an_end_under_way(
    operation: Operation,
) -> None:
    for state in State:
        ending = state in (State.STOPPING, State.SNAPSHOTTING)
        assert VERDICTS[operation][state] is (Verdict.WAIT if ending else Verdict.PROCEED)


def test_nobody_waits_in_a_state_that_lasts() -> None:
    for operation in Operation:
        for state in {State.RUNNING, *TERMINAL}:
            assert VERDICTS[operation][state] is not Verdict.WAIT


@given(st.lists(st.sampled_from(Cause)))
def test_any_sequence_of_causes_ends_where_it_first_became_terminal(causes: list[Cause]) -> None:
    state = State.PENDING
    ended: State | None = None
    for cause in causes:
        try:
            state = next_state(state, cause)
        except WrongState:
            continue
        assert ended is None
        ended = state if state in TERMINAL else None
    assert ended is None or state is ended


def test_the_drawing_shows_exactly_the_table() -> None:
    arrows = [line.strip() for line in draw().splitlines() if "-->" in line and "[*]" not in line]
    assert arrows == [f"{state} --> {target}: {cause}" for (state, cause), target in MOVES.items()]
    assert draw().count("--> [*]") == len(TERMINAL)
    assert set(lifecycle.__all__) <= set(vars(lifecycle))


def _after(state: State) -> set[State]:
    return {target for (source, _), target in MOVES.items() if source is state}


class Callers(RuleBasedStateMachine):
    """Callers who decide on what they read and act later, with anything in between, on the real store.

    No lock protects them: what is shown is that the tables and the store's own checks are enough to keep the
    promises, so that a lock is a matter of speed and of politeness.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()
        self.store = self.resources.enter_context(open_store())
        self.box = sandbox("p", "a")
        self.now = 1
        self.made = 0
        self.decided: list[tuple[Operation, str, State]] = []
        self.seen: dict[str, State] = {}

    @initialize()
    def create(self) -> None:
        self.store.sandboxes.add(self.box)
        self.begin_session()

    def begin_session(self) -> None:
        self.made += 1
        self.store.sessions.start(session(self.box, f"s{self.made}"))

    def current(self) -> Session:
        name = self.store.sandboxes.get("p", "a").current_session
        assert name is not None
        return self.store.sessions.get("p", name)

    def move(self, name: str, seen: State, cause: Cause) -> None:
        self.now += 1
        self.store.sessions.move("p", name, next_state(seen, cause), expected={seen}, now_ms=self.now)

    # Only those that change something: the others would fill the sequences with nothing.
    @rule(
        operation=st.sampled_from([Operation.STOP, Operation.RESUME, Operation.SNAPSHOT, Operation.DESTROY])
    )
    def decide(self, operation: Operation) -> None:
        now = self.current()
        try:
            if require(operation, now.status, session_id=now.id) is Verdict.PROCEED:
                self.decided.append((operation, now.id, now.status))
        except WrongState:
            assert now.status not in (State.PENDING, State.RUNNING)

    @precondition(lambda self: self.decided)
    @rule(data=st.data())
    def act(self, data: Any) -> None:
        chosen = data.draw(st.integers(0, len(self.decided) - 1))
        operation, name, seen = self.decided.pop(chosen)
        try:
            if operation is Operation.RESUME:
                self.begin_session()
            elif operation is Operation.STOP or (operation is Operation.DESTROY and seen in ACTIVE):
                # One that is on its way to its end already is brought there.
                begins = seen in (State.PENDING, State.RUNNING)
                self.move(name, seen, Cause.STOP if begins else Cause.ENDED)
            elif operation is Operation.SNAPSHOT:
                self.move(name, seen, Cause.SNAPSHOT)
            elif operation is Operation.DESTROY:
                self.store.sandboxes.delete("p", "a")
                self.box = sandbox("p", "a", id=f"box_after_{self.made}")
                self.create()
        except WrongState:
            assert (self.current().id, self.current().status) != (name, seen), (
                "refused though nothing changed"
            )

    @precondition(lambda self: self.current().status in ACTIVE)
    @rule(data=st.data())
    def happen(self, data: Any) -> None:
        now = self.current()
        possible = [cause for state, cause in MOVES if state is now.status]
        self.move(now.id, now.status, data.draw(st.sampled_from(possible)))

    @invariant()
    def at_most_one_session_is_active_and_all_move_by_the_table(self) -> None:
        rows = self.store.sessions.page("p", PageRequest(limit=100)).items
        assert len([row for row in rows if row.status in ACTIVE]) <= 1
        for row in rows:
            before = self.seen.get(row.id, row.status)
            assert row.status is before or row.status in _after(before)
            self.seen[row.id] = row.status

    @invariant()
    def the_sandbox_shows_its_sessions_status(self) -> None:
        box = self.store.sandboxes.find("p", "a")
        if box is not None and box.current_session is not None:
            assert box.status is self.current().status

    def teardown(self) -> None:
        self.resources.close()


TestCallers = Callers.TestCase
TestCallers.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "design" / "engine.md"
    assert f"```mermaid\n{draw()}```" in page.read_text()
