"""Locks of the store: flock on a file opened anew each time, so threads exclude each other like processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sandkeep.shared.locks import is_locked

__all__ = ["FileLock", "is_locked"]


class FileLock:
    """A lock held for one ``with`` block; not reentrant. The kernel releases it when the process ends."""

    def __init__(self, path: str) -> None:
        self._path = path

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, kind)
            yield
        finally:
            # Unlock before closing: a child forked meanwhile shares the descriptor, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
