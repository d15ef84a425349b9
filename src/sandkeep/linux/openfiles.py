"""Raise this process's limit of open files to the maximum; children keep the original limit."""

from __future__ import annotations

import errno
import os
import resource

_PLENTY = 1 << 18
"""No process opens this many files, so a limit this high needs no counting."""

_given: int | None = None


def use_all() -> int:
    """Raise the soft limit to the highest allowed, and return it.

    The usual limit of 1,024 is for programs that use ``select``; a server of many sessions needs more.
    """
    global _given
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _given is None:
        _given = soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft  # the kernel's own maximum is lower than the hard limit
    return hard


def as_given(pid: int) -> None:
    """Give a child the limit this process was started with: its programs may iterate over all descriptors."""
    if _given is None:
        return
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_given, hard))


def require_room(count: int) -> None:
    """Raise the ``OSError`` of a failed open unless ``count`` more files can be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _PLENTY and len(os.listdir("/proc/self/fd")) + count > soft:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
