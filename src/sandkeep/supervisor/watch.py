"""Limits nobody enforces for us: looked at from outside, now and then, while something runs.

Memory where there is no control group to hold it, and disk where the file system has no quota. Watching is
not enforcing: a session can overshoot between two looks. It is reported as ``watched`` for that reason. The
reserve of the store's file system is watched always, because a full disk takes every session down with it.
"""

from __future__ import annotations

import os
from typing import Final

RELAXED: Final = 2.0
ALERT: Final = 0.25
"""Seconds between looks: usually, and while free space is shrinking fast."""
_FAST: Final = 128 << 20
_RESERVE_PART: Final = 50
_RESERVE_MOST: Final = 1 << 30
_NOT_WORTH: Final = 16 << 20
"""A session smaller than this is not the one that filled the disk."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class DiskWatch:
    """Free space of the store and, when it moved, the size of this session's own files."""

    def __init__(self, directory: str, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._free: int | None = None
        self.interval = RELAXED

    def look(self) -> str | None:
        """Why the session must be stopped, or ``None``."""
        room = os.statvfs(self._directory)
        free = room.f_bavail * room.f_frsize
        used_since = (self._free - free) if self._free is not None else _FAST
        self._free = free
        self.interval = ALERT if used_since >= _FAST else RELAXED
        reserve = min(room.f_blocks * room.f_frsize // _RESERVE_PART, _RESERVE_MOST)
        short = free < reserve
        if not short and (self._limit is None or used_since <= 0):
            return None
        size = tree_size(self._directory)
        if self._limit is not None and size > self._limit:
            return f"disk full: {size} bytes written, {self._limit} allowed"
        if short and size > _NOT_WORTH:
            return f"disk full: {free} bytes left on the host, {reserve} are kept free"
        return None


def tree_size(directory: str) -> int:
    """Bytes allocated below a directory. A look, not a measurement: links are counted as often as seen."""
    total = 0
    pending = [directory]
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except OSError:
            continue
        with entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                except OSError:
                    continue
    return total


def memory_in_use(root_fd: int) -> tuple[int, int]:
    """Private memory of all processes of a session, and the pid (inside) of the one with most.

    Read through the session's own /proc, which shows just its processes and which it cannot replace.
    """
    total = most = victim = 0
    proc = os.open("proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        for name in os.listdir(proc):
            if not name.isdigit() or name == "1":
                continue
            try:
                fd = os.open(f"{name}/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            except OSError:
                continue
            try:
                fields = os.read(fd, 128).split()
            except OSError:
                continue
            finally:
                os.close(fd)
            private = (int(fields[1]) - int(fields[2])) * _PAGE
            total += private
            if private > most:
                most, victim = private, int(name)
    finally:
        os.close(proc)
    return total, victim
