"""Limits that the kernel does not enforce: polled from outside while something runs.

These are memory without a control group, and disk without a quota of the file system. A session can exceed
such a limit between two polls, so the limit is reported as ``watched``. The reserve of the store's file
system is always polled, because a full disk ends every session.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

RELAXED: Final = 2.0
ALERT: Final = 0.25
"""Seconds between polls: usually, and while free space is shrinking fast."""
_FAST: Final = 128 << 20
_RESERVE_PART: Final = 50
_RESERVE_MOST: Final = 1 << 30
_NOT_WORTH: Final = 16 << 20
"""A session smaller than this is not the one that filled the disk."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class DiskWatch:
    """Polls the free space of the store and, when that changed, the size of this session's own files."""

    def __init__(
        self, directory: str, limit: int | None, drives: Mapping[str, tuple[str, int | None]]
    ) -> None:
        """``drives`` maps the name of a drive's directory to its mount point and its limit in bytes.

        What is written to drives does not count for ``limit``.
        """
        self._directory = directory
        self._limit = limit
        self._drives = drives
        self._free: int | None = None
        self._written = 0
        self.interval = RELAXED

    def check(self) -> str | None:
        """Return why the session must be stopped, or ``None``."""
        try:
            room = os.statvfs(self._directory)
            names = os.listdir(self._directory)
        except OSError:
            # The directory was deleted or its disk fails: no reason to end the session.
            self.interval = RELAXED
            return None
        free = room.f_bavail * room.f_frsize
        used_since = (self._free - free) if self._free is not None else _FAST
        self._free = free
        self.interval = ALERT if used_since >= _FAST else RELAXED
        reserve = min(room.f_blocks * room.f_frsize // _RESERVE_PART, _RESERVE_MOST)
        short = free < reserve
        limited = self._limit is not None or any(most is not None for _, most in self._drives.values())
        # Free space can grow although this session writes, because other sessions delete.
        if not short and (not limited or used_since == 0):
            return None
        sizes = {name: tree_size(f"{self._directory}/{name}") for name in names}
        for name, (target, allowed) in self._drives.items():
            if allowed is not None and sizes.get(name, 0) > allowed:
                return f"drive full: {sizes[name]} bytes written to {target}, {allowed} allowed"
        if self._limit is not None:
            written = sum(size for name, size in sizes.items() if name not in self._drives)
            if written > self._limit:
                return f"disk full: {written} bytes written, {self._limit} allowed"
            if written + 2 * (written - self._written) > self._limit:
                self.interval = ALERT
            self._written = written
        if short and sum(sizes.values()) > _NOT_WORTH:
            return f"disk full: {free} bytes left on the host, {reserve} are kept free"
        return None


def tree_size(directory: str) -> int:
    """Return the bytes allocated below a directory. An estimate: a file counts once for each of its names."""
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
    """Return the private memory of all processes of a session, and the pid (inside) of the largest.

    Reads the session's own /proc, which shows only its processes and which it cannot replace.
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
