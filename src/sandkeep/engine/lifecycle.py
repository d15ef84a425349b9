"""The states of a session, and the gate: what each operation may do in each state. Tables, and no I/O.

A session never leaves a terminal state, and a sandbox has at most one session in an active one. `MOVES` says
what happens to a session, `VERDICTS` what happens to a caller. Every status change the engine makes is
`next_state` of the one before.

Every operation whose outcome depends on the state asks the gate, `require`, before it does anything:

- Operations that change a session, or what the sandbox's next session starts from (extend, set policy,
  snapshot, stop, resume, destroy, fork, roll back, update), ask while they hold the sandbox's lock, through
  `Sessions.ask_locked`. Some ask before they take the lock too, so that a refusal need not wait for it.
- Operations that run in a session (processes, files, the copy of a checkpoint) can last as long as the
  session, so they cannot hold the lock. They ask once when they begin, through `Sessions.require`. The
  supervisor is the second barrier: it refuses requests for any session and generation but its own, and all
  requests from the moment the session ends.

Reading (state, process records, logs, usage) is possible in every state and has no row.
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
    "MOVES",
    "TERMINAL",
    "VERDICTS",
    "Cause",
    "Operation",
    "State",
    "Verdict",
    "draw",
    "next_state",
    "require",
    "sources",
]


class Cause(StrEnum):
    """What moves a session from one state to another."""

    BOOTED = "booted"
    """Its init has responded, and its source is in place."""
    BOOT_FAILED = "boot failed"
    """It never ran: the image, the snapshot or the host refused it."""
    STOP = "stop"
    """A caller stopped it, its deadline passed, it was idle too long, or its sandbox is being destroyed."""
    SNAPSHOT = "snapshot"
    """The engine keeps its files: a caller asked for a snapshot, or its sandbox is persistent."""
    ENDED = "ended"
    """Every process has ended, and the files to keep are kept."""
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
    """Return the state that ``cause`` moves a session in ``state`` to.

    Raises:
        WrongState: `MOVES` has no such move.
    """
    try:
        return MOVES[state, cause]
    except KeyError:
        raise WrongState(f"a {state} session cannot be moved by: {cause}", status=state) from None


def sources(cause: Cause) -> frozenset[State]:
    """Return the states that ``cause`` can move a session from."""
    return frozenset(state for state, known in MOVES if known is cause)


class Operation(StrEnum):
    """The operations whose outcome depends on the session's state."""

    RUN = "run"
    SIGNAL = "signal"
    STDIN = "stdin"
    TERMINAL = "terminal"
    FILES = "files"
    CHECKPOINT = "checkpoint"
    EXTEND = "extend"
    SET_POLICY = "set policy"
    SNAPSHOT = "snapshot"
    STOP = "stop"
    DESTROY = "destroy"
    RESUME = "resume"
    FORK = "fork"
    ROLL_BACK = "roll back"
    UPDATE = "update"


class Verdict(StrEnum):
    """The gate's decision about an operation in a state."""

    PROCEED = "proceed"
    WAIT = "wait"
    """Take the sandbox's lock and ask again. If the session is still in this state then, a crash or a failure
    left it there: the caller first brings it to its end."""
    DONE = "done"
    """The session is already in the state asked for."""
    STOPPING = "refuse: stopping"
    SNAPSHOTTING = "refuse: snapshotting"
    STOPPED = "refuse: stopped"


def _row(
    *,
    pending: Verdict,
    running: Verdict = Verdict.PROCEED,
    stopping: Verdict,
    snapshotting: Verdict,
    ended: Verdict,
) -> dict[State, Verdict]:
    return {
        State.PENDING: pending,
        State.RUNNING: running,
        State.STOPPING: stopping,
        State.SNAPSHOTTING: snapshotting,
        **dict.fromkeys(TERMINAL, ended),
    }


_NEEDS_RUNNING = _row(
    pending=Verdict.WAIT,
    stopping=Verdict.STOPPING,
    snapshotting=Verdict.SNAPSHOTTING,
    ended=Verdict.STOPPED,
)
# These continue where an interrupted end stopped, so no active state makes them wait.
_ENDS_SESSION = _row(
    pending=Verdict.PROCEED,
    stopping=Verdict.PROCEED,
    snapshotting=Verdict.PROCEED,
    ended=Verdict.DONE,
)
# The snapshot of a session that ends becomes the current one, which these operations read or replace.
_CURRENT_SNAPSHOT = _row(
    pending=Verdict.PROCEED, stopping=Verdict.WAIT, snapshotting=Verdict.WAIT, ended=Verdict.PROCEED
)

VERDICTS: Mapping[Operation, Mapping[State, Verdict]] = MappingProxyType(
    {
        Operation.RUN: _NEEDS_RUNNING,
        Operation.SIGNAL: _NEEDS_RUNNING,
        Operation.STDIN: _NEEDS_RUNNING,
        Operation.TERMINAL: _NEEDS_RUNNING,
        Operation.FILES: _NEEDS_RUNNING,
        Operation.CHECKPOINT: _NEEDS_RUNNING,
        Operation.EXTEND: _NEEDS_RUNNING,
        Operation.SET_POLICY: _NEEDS_RUNNING,
        Operation.SNAPSHOT: _NEEDS_RUNNING,
        Operation.STOP: _ENDS_SESSION,
        Operation.DESTROY: _ENDS_SESSION,
        Operation.RESUME: _row(
            pending=Verdict.WAIT,
            running=Verdict.DONE,
            stopping=Verdict.WAIT,
            snapshotting=Verdict.WAIT,
            ended=Verdict.PROCEED,
        ),
        Operation.FORK: _CURRENT_SNAPSHOT,
        Operation.ROLL_BACK: _CURRENT_SNAPSHOT,
        Operation.UPDATE: dict.fromkeys(State, Verdict.PROCEED),
    }
)

_REFUSALS: Mapping[Verdict, type[WrongState]] = {
    Verdict.STOPPING: SessionStopping,
    Verdict.SNAPSHOTTING: SessionSnapshotting,
    Verdict.STOPPED: SessionStopped,
}


def require(operation: Operation, state: State, *, session_id: str) -> Verdict:
    """Return ``PROCEED``, ``WAIT`` or ``DONE``.

    Raises:
        WrongState: the operation is refused in this state; the subclass tells the caller why.
    """
    verdict = VERDICTS[operation][state]
    refusal = _REFUSALS.get(verdict)
    if refusal is not None:
        raise refusal(f"session {session_id} is {state}", session=session_id, status=state)
    return verdict


def draw() -> str:
    """Return `MOVES` as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.PENDING}"]
    lines += [f"    {state} --> {target}: {cause}" for (state, cause), target in MOVES.items()]
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join(lines) + "\n"
