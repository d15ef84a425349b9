"""Check whether this host can hold the limits that a caller asked for. Values, and no I/O.

Limits are *exact* when the caller named them with this project's SDK or command line: they are enforced or
watched, or the operation is refused. Official clients of the vendor send processors and memory with every
request and must start in containers without usable control groups, so their limits are best effort, like
the defaults: the session's ``limits`` say which of them hold.
"""

from __future__ import annotations

from typing import Final

from sandkeep.engine.context import Context
from sandkeep.errors import LimitUnenforceable
from sandkeep.spec import Resources
from sandkeep.store.rows import Session

EXPLICIT: Final = frozenset({"cpu"})
"""Limits that the driver must enforce or refuse when they are exact. Where it cannot enforce memory, the
session's supervisor watches it, which keeps the promise."""

_HINT: Final = (
    "leave the limit out, or make it best effort (Resources(exact=False) in the SDK, --best-effort on the"
    " command line): the session then starts with the limits that the host can hold, and 'sandkeep doctor'"
    " says what the host lacks"
)


def check(context: Context, resources: Resources) -> None:
    """Refuse exact limits that a session on this host would not be held to.

    Raises:
        LimitUnenforceable: ``part`` names the limit, ``why`` is the reason.
    """
    if not resources.exact:
        return
    if not context.settings.enforce_memory:
        raise _refusal("memory", f"{resources.memory_mb} MB", "the operator has switched enforce_memory off")
    why = context.driver.capabilities().limits.get("cpu")
    if why:
        raise _refusal("cpu", f"{resources.vcpus} vcpus", why)


def check_running(session: Session, resources: Resources) -> None:
    """Refuse exact limits that a session started without: a best-effort start, or one of an earlier version.

    Raises:
        LimitUnenforceable: ``part`` names the limit, ``why`` is the reason.
    """
    reported = session.barriers.get("limits", {})
    asked = {"memory": f"{resources.memory_mb} MB", "cpu": f"{resources.vcpus} vcpus"}
    for part, value in asked.items():
        limit = reported.get(part, {})
        if resources.exact and limit.get("state") not in ("enforced", "watched"):
            raise _refusal(part, value, limit.get("why") or f"session {session.id} was started without it")


def _refusal(part: str, value: str, why: str) -> LimitUnenforceable:
    return LimitUnenforceable(
        f"a limit of {value} cannot be enforced here: {why}", part=part, why=why, hint=_HINT
    )
