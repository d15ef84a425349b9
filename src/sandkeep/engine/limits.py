"""Check whether this host can hold the limits that a caller asked for. Values, and no I/O.

Limits are *exact* when the caller named them with this project's SDK or command line: they are enforced or
watched, or the operation is refused. Official clients of the vendor send processors and memory with every
request and must start in containers without usable control groups, so their limits are best effort, like
the defaults: the session's ``limits`` say which of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from sandkeep.checks import refuse
from sandkeep.engine.context import Context
from sandkeep.engine.settings import Settings
from sandkeep.errors import LimitUnenforceable
from sandkeep.spec import Resources
from sandkeep.store.rows import Session

EXPLICIT: Final = frozenset({"cpu", "pids"})
"""What the driver has to enforce or refuse of exact limits. Where it cannot enforce memory or disk, the
session's supervisor watches them, which keeps the promise."""


class _Asked(NamedTuple):
    """A limit that a caller named."""

    part: str
    """Its name in what sessions report."""
    field: str
    """Its name in `Resources`."""
    text: str


_HINT: Final = (
    "leave the limit out, or make it best effort (Resources(exact=False) in the SDK, --best-effort on the"
    " command line): the session then starts with the limits that the host can hold, and 'sandkeep doctor'"
    " says what the host lacks"
)


def explicit(resources: Resources) -> frozenset[str]:
    """Return the limits that the driver has to enforce, or to refuse the start."""
    return frozenset(each.part for each in _asked(resources)) & EXPLICIT


def pids(resources: Resources, settings: Settings) -> int:
    """Return how many processes a session may have: no more than the operator allows now."""
    return settings.pids if resources.pids is None else min(resources.pids, settings.pids)


def disk_bytes(resources: Resources, settings: Settings) -> int | None:
    """Return what a session may write: no more than the operator allows now."""
    if resources.disk_mb is None or settings.disk_bytes is None:
        return settings.disk_bytes if resources.disk_mb is None else resources.disk_mb << 20
    return min(resources.disk_mb << 20, settings.disk_bytes)


def check_allowed(settings: Settings, resources: Resources) -> None:
    """Refuse a limit that is higher than the operator's own.

    Raises:
        InvalidRequest: ``field`` names it.
    """
    if resources.pids is not None and resources.pids > settings.pids:
        refuse("resources.pids", f"must be at most {settings.pids}, which the operator of the server has set")
    most = settings.disk_bytes
    if resources.disk_mb is not None and most is not None and resources.disk_mb << 20 > most:
        refuse("resources.disk_mb", f"must be at most {most >> 20}, which the operator of the server has set")


def check(context: Context, resources: Resources) -> None:
    """Refuse exact limits that a session on this host would not be held to.

    Raises:
        LimitUnenforceable: ``part`` names the limit, ``why`` is the reason.
    """
    if not resources.exact:
        return
    known = context.driver.capabilities()
    for each in _asked(resources):
        why = ""
        if each.part == "memory" and not context.settings.enforce_memory:
            why = "the operator has switched enforce_memory off"
        elif each.part == "cpu" or (each.part == "pids" and known.mode != "single"):
            # With one id inside, the kernel's limit per user is the session's.
            why = known.limits.get(each.part, "")
        if why:
            raise _refusal(each, why)


def check_running(session: Session, resources: Resources) -> None:
    """Refuse exact limits that a session started without: a best-effort start, or one of an earlier version.

    Raises:
        LimitUnenforceable: ``part`` names the limit, ``why`` is the reason.
    """
    if not resources.exact:
        return
    reported = session.barriers.get("limits", {})
    for each in _asked(resources):
        limit = reported.get(each.part, {})
        if limit.get("state") not in ("enforced", "watched"):
            raise _refusal(each, limit.get("why") or f"session {session.id} was started without it")


def _asked(resources: Resources) -> Iterator[_Asked]:
    for field, value in resources.asked.items():
        part, unit = _PARTS[field]
        yield _Asked(part, field, f"{value} {unit}")


_PARTS: Final = {
    "cpus": ("cpu", "cpus"),
    "memory_mb": ("memory", "MB"),
    "disk_mb": ("disk", "MB of disk space"),
    "pids": ("pids", "processes"),
}


def _refusal(asked: _Asked, why: str) -> LimitUnenforceable:
    message = f"a limit of {asked.text} cannot be enforced here: {why}"
    return LimitUnenforceable(message, part=asked.part, field=f"resources.{asked.field}", why=why, hint=_HINT)
