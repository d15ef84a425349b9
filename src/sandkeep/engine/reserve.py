"""The reserve: disk space in the data directory that is kept for the case that the disk is full.

Ending a session, deleting a sandbox and starting a server need a little space themselves: a row of the store,
a small file, a directory entry. On a full disk no caller could free space then. So the server keeps a
directory of files that only hold bytes, inodes and metadata. When an ending, a deletion or a start finds the
disk full, the server deletes a part of them, and refills the reserve right afterwards, as far as possible.

One mechanism for every filesystem: deleting files frees blocks, inodes and the metadata of copy-on-write
filesystems. Nothing else may use it: a create on a full disk is refused. There are several parts because
another program may take the space in the moment in which a part is freed.
"""

from __future__ import annotations

import os
from typing import Final

from sandkeep.linux.syscalls import syncfs

DIRECTORY: Final = "reserve"
PARTS: Final = 8
BYTES: Final = 16 << 20
"""Size of all parts together."""
_SHARE: Final = 64
"""On a small disk, at most one in this many bytes."""
SMALL_FILES: Final = 16
"""Number of small files of each part."""
_SMALL: Final = 1900
"""Bytes of a small file: takes an inode everywhere, and metadata on btrfs, which keeps them in the inode."""
_STEP: Final = 256 << 10
_SCARCE_BYTES: Final = 1 << 20
_SCARCE_INODES: Final = 32
"""With less free than this an ending or a deletion may fail half-way."""


class Reserve:
    """The reserve of a server, which has the data directory to itself."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        self._directory = os.path.join(data_dir, DIRECTORY)

    @property
    def complete(self) -> bool:
        wanted = self._bytes_of_a_part()
        return all(
            self._size(_bytes(part)) >= wanted and self._size(_small(part, SMALL_FILES - 1)) >= 0
            for part in range(PARTS)
        )

    def scarce(self) -> bool:
        """Return whether the disk has too little free space to rely on."""
        disk = os.statvfs(self._data_dir)
        few_inodes = disk.f_files > 0 and disk.f_favail < _SCARCE_INODES
        return few_inodes or disk.f_bavail * disk.f_frsize < _SCARCE_BYTES

    def spend(self) -> bool:
        """Free one part, or more if other programs take it at once; return False when none was left."""
        given = False
        while not given or self.scarce():
            if not self._free_a_part():
                break
            given = True
        return given

    def fill(self) -> bool:
        """Refill what is missing, as far as there is space; return whether the reserve is complete."""
        if self.complete:
            return True
        wanted = self._bytes_of_a_part()
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            for part in range(PARTS):
                self._extend(_bytes(part), wanted)
                for number in range(SMALL_FILES):
                    self._make_small(_small(part, number))
        except OSError:
            return False  # keep what was written; a later call adds the rest
        return True

    def _bytes_of_a_part(self) -> int:
        disk = os.statvfs(self._data_dir)
        return min(BYTES, disk.f_blocks * disk.f_frsize // _SHARE) // PARTS

    def _free_a_part(self) -> bool:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return False
        for part in range(PARTS):
            if sum(self._remove(name) for name in names if name.startswith(_prefix(part))):
                self._commit_deletions()
                return True
        return False

    def _remove(self, name: str) -> bool:
        path = os.path.join(self._directory, name)
        try:
            os.truncate(
                path, 0
            )  # xfs frees the blocks of a deleted file only later, those of a truncated one now
            os.unlink(path)
        except OSError:
            return False  # one that cannot be deleted does not keep the others from being deleted
        return True

    def _size(self, name: str) -> int:
        try:
            return os.stat(os.path.join(self._directory, name)).st_size
        except FileNotFoundError:
            return -1

    def _make_small(self, name: str) -> None:
        if self._size(name) >= 0:
            return
        fd = self._open(name)
        try:
            os.write(fd, os.urandom(_SMALL))  # random, so that no filesystem compresses it
        finally:
            os.close(fd)

    def _extend(self, name: str, wanted: int) -> None:
        fd = self._open(name)
        try:
            while (size := os.fstat(fd).st_size) < wanted:
                os.posix_fallocate(fd, size, min(_STEP, wanted - size))
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        path = os.path.join(self._directory, name)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _commit_deletions(self) -> None:
        """Sync, because copy-on-write filesystems free deleted blocks only with their next commit."""
        fd = os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syncfs(fd)
        except OSError:
            pass
        finally:
            os.close(fd)


def _prefix(part: int) -> str:
    return f"{part}-"


def _bytes(part: int) -> str:
    return f"{_prefix(part)}bytes"


def _small(part: int, number: int) -> str:
    return f"{_prefix(part)}small-{number:02d}"
