"""Probe for a lock on a file or directory that another process may hold with ``flock``."""

from __future__ import annotations

import fcntl
import os


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock on this file or directory; false if it is missing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Unlock before closing: a child forked meanwhile shares the descriptor, and with it the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
