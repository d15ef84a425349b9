"""How many files this process may have open: all it was allowed, and its children as many as before."""

from __future__ import annotations

import errno
import os
import resource

_PLENTY = 1 << 18
"""No process opens this many files, so a limit this high needs no counting."""

_given: int | None = None


def use_all() -> int:
    """Raise the limit in force to the highest allowed. Returns it.

    The usual limit of 1,024 is one for programs that use ``select``; a server of many sessions needs more.
    """
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _given is None:
        _given = soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft  # the kernel's own maximum is lower than what was allowed
    return hard


def as_given(pid: int) -> None:
    """Let a child have the limit this process was started with: what it runs may go through all of them."""
    if _given is None:
        return
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_given, hard))


def require_room(count: int) -> None:
    """Raise ``OSError`` as opening does when there are none left, unless there are ``count`` at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _PLENTY and len(os.listdir("/proc/self/fd")) + count > soft:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
