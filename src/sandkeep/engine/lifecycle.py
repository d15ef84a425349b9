"""Which states a session goes through, and what each operation may do in each. Tables, and no I/O.

Two rules hold: a session never leaves a terminal state, and a sandbox has at most one session in an active
one. `MOVES` says what happens to a session, `ANSWERS` what happens to a caller. Every status change the
engine makes is `next_state` of the one before; every operation asks `require` first, holding the sandbox's
lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from sandkeep.errors import SessionSnapshotting, SessionStopped, SessionStopping, WrongState
from sandkeep.store.rows import ACTIVE, TERMINAL
from sandkeep.store.rows import SessionStatus as State

__all__ = [
    "ACTIVE",
    "ANSWERS",
    "MOVES",
    "TERMINAL",
    "Answer",
    "Cause",
    "Operation",
    "State",
    "answer",
    "draw",
    "next_state",
    "require",
    "sources",
]


class Cause(StrEnum):
    """What moves a session from one state to another."""

    BOOTED = "booted"
    """Its init answers."""
    BOOT_FAILED = "boot failed"
    """It never ran: the image, the snapshot or the host refused."""
    STOP = "stop"
    """Somebody asked, the deadline passed, it idled too long, or the sandbox is being destroyed."""
    SNAPSHOT = "snapshot"
    """Its filesystem is being kept: asked for by hand, or on the way from stopping when persistent."""
    ENDED = "ended"
    """Every process is gone and what had to be kept is kept, or recorded as failed."""
    LOST = "lost"
    """Its supervisor or host died."""


MOVES: Mapping[tuple[State, Cause], State] = MappingProxyType(
    {
        (State.PENDING, Cause.BOOTED): State.RUNNING,
        (State.PENDING, Cause.BOOT_FAILED): State.FAILED,
        (State.PENDING, Cause.STOP): State.STOPPING,
        (State.RUNNING, Cause.STOP): State.STOPPING,
        (State.RUNNING, Cause.SNAPSHOT): State.SNAPSHOTTING,
        (State.STOPPING, Cause.SNAPSHOT): State.SNAPSHOTTING,
        (State.STOPPING, Cause.ENDED): State.STOPPED,
        (State.SNAPSHOTTING, Cause.ENDED): State.STOPPED,
        (State.PENDING, Cause.LOST): State.ABORTED,
        (State.RUNNING, Cause.LOST): State.ABORTED,
        (State.STOPPING, Cause.LOST): State.ABORTED,
        (State.SNAPSHOTTING, Cause.LOST): State.ABORTED,
    }
)


def next_state(state: State, cause: Cause) -> State:
    """Where ``cause`` takes a session in ``state``. Raises `WrongState` when the table does not say."""
    try:
        return MOVES[state, cause]
    except KeyError:
        raise WrongState(f"a {state} session cannot be moved by: {cause}", status=state) from None


def sources(cause: Cause) -> frozenset[State]:
    """The states ``cause`` can move a session from."""
    return frozenset(state for state, known in MOVES if known is cause)


class Operation(StrEnum):
    """What callers ask for, as far as the session's state matters to the answer."""

    RUN = "run"
    SIGNAL = "signal"
    STDIN = "stdin"
    TERMINAL = "terminal"
    FILES = "files"
    EXTEND = "extend"
    SET_POLICY = "set policy"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    RESUME = "resume"
    DESTROY = "destroy"
    FORK = "fork"
    ROLL_BACK = "roll back"
    UPDATE = "update"
    READ = "read"
    """State, process records, and logs: all of it outlives the session."""


class Answer(StrEnum):
    """What the engine does with an operation."""

    PROCEED = "proceed"
    WAIT = "wait"
    """Until the session is in another state, then ask again."""
    DONE = "done"
    """Nothing to do: answer with how things are."""
    STOPPING = "refuse: stopping"
    SNAPSHOTTING = "refuse: snapshotting"
    STOPPED = "refuse: stopped"


def _row(
    *,
    pending: Answer,
    running: Answer = Answer.PROCEED,
    stopping: Answer,
    snapshotting: Answer,
    ended: Answer,
) -> dict[State, Answer]:
    return {
        State.PENDING: pending,
        State.RUNNING: running,
        State.STOPPING: stopping,
        State.SNAPSHOTTING: snapshotting,
        **dict.fromkeys(TERMINAL, ended),
    }


_NEEDS_RUNNING = _row(
    pending=Answer.WAIT,
    stopping=Answer.STOPPING,
    snapshotting=Answer.SNAPSHOTTING,
    ended=Answer.STOPPED,
)
# A snapshot on its way becomes the current one, so whoever reads or replaces that has to see it first.
_CURRENT_SNAPSHOT = _row(
    pending=Answer.PROCEED, stopping=Answer.WAIT, snapshotting=Answer.WAIT, ended=Answer.PROCEED
)
_ALWAYS = dict.fromkeys(State, Answer.PROCEED)

ANSWERS: Mapping[Operation, Mapping[State, Answer]] = MappingProxyType(
    {
        Operation.RUN: _NEEDS_RUNNING,
        Operation.SIGNAL: _NEEDS_RUNNING,
        Operation.STDIN: _NEEDS_RUNNING,
        Operation.TERMINAL: _NEEDS_RUNNING,
        Operation.FILES: _NEEDS_RUNNING,
        Operation.EXTEND: _NEEDS_RUNNING,
        Operation.SET_POLICY: _NEEDS_RUNNING,
        Operation.SNAPSHOT: _NEEDS_RUNNING,
        Operation.CHECKPOINT: _NEEDS_RUNNING,
        Operation.STOP: _row(
            pending=Answer.WAIT, stopping=Answer.WAIT, snapshotting=Answer.WAIT, ended=Answer.DONE
        ),
        Operation.RESUME: _row(
            pending=Answer.WAIT,
            running=Answer.DONE,
            stopping=Answer.WAIT,
            snapshotting=Answer.WAIT,
            ended=Answer.PROCEED,
        ),
        # A boot that hangs must not make a sandbox undeletable, so this one does not wait for it.
        Operation.DESTROY: _row(
            pending=Answer.PROCEED, stopping=Answer.WAIT, snapshotting=Answer.WAIT, ended=Answer.PROCEED
        ),
        Operation.FORK: _CURRENT_SNAPSHOT,
        Operation.ROLL_BACK: _CURRENT_SNAPSHOT,
        Operation.UPDATE: _ALWAYS,
        Operation.READ: _ALWAYS,
    }
)

_REFUSALS: Mapping[Answer, type[WrongState]] = {
    Answer.STOPPING: SessionStopping,
    Answer.SNAPSHOTTING: SessionSnapshotting,
    Answer.STOPPED: SessionStopped,
}


def answer(operation: Operation, state: State) -> Answer:
    return ANSWERS[operation][state]


def require(operation: Operation, state: State, *, session: str) -> Answer:
    """``PROCEED``, ``WAIT`` or ``DONE``; a refusal is raised as the error the caller is to see."""
    found = answer(operation, state)
    refusal = _REFUSALS.get(found)
    if refusal is not None:
        raise refusal(f"session {session} is {state}", session=session, status=state)
    return found


def draw() -> str:
    """`MOVES` as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.PENDING}"]
    lines += [f"    {state} --> {target}: {cause}" for (state, cause), target in MOVES.items()]
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join(lines) + "\n"
