"""Walk and remove trees that a sandbox has made: any depth, any mode, any kind of entry.

Everything works on directory descriptors and bytes. No other process changes these trees, except one that
removes the same tree.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from sandkeep.linux import btrfs
from sandkeep.shared.copying import open_beneath

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEP = 64


def open_directory(name: str | bytes, dir_fd: int | None = None) -> int:
    """Open a directory without following a link; take read permission when its mode refuses."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=dir_fd)
        return os.open(name, _DIRECTORY, dir_fd=dir_fd)


def remove_tree(path: str) -> None:
    """Remove ``path`` and everything below; a missing tree is not an error.

    Directories deeper than a few dozen levels are first moved up to the top, so that neither path length nor
    the number of open descriptors limits which trees can be removed.
    """
    try:
        top = open_directory(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    try:
        hoisted = [0]
        while _empty(top, top, 0, hoisted) or not _removed(path):
            pass
    finally:
        os.close(top)


def _removed(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False  # another process that removes this tree has moved an entry to the top
    return True


def _empty(fd: int, top: int, depth: int, hoisted: list[int]) -> bool:
    """Remove all entries of ``fd``; return whether one was moved to the top and is still to be removed."""
    again = False
    with os.scandir(fd) as entries:
        names = [(os.fsencode(e.name), e.is_dir(follow_symlinks=False)) for e in entries]
    if names:
        _make_writable(fd)
    for name, directory in names:
        try:
            if not directory:
                os.unlink(name, dir_fd=fd)
                continue
            if depth == _DEEP:
                _hoist(fd, name, top, hoisted)
                again = True
                continue
            child = open_directory(name, fd)
            try:
                if btrfs.is_subvolume(child) and _destroy(fd, name):
                    continue
                again |= _empty(child, top, depth + 1, hoisted)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or depth:
                raise
            again = True  # as above: this entry is one of those moved to the top
    return again


def _hoist(fd: int, name: bytes, top: int, hoisted: list[int]) -> None:
    while True:
        hoisted[0] += 1
        try:
            os.rename(name, b".deep-%d" % hoisted[0], src_dir_fd=fd, dst_dir_fd=top)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise


def _make_writable(fd: int) -> None:
    """Make a directory writable. Modes bind uid 0 only where ids are unmapped; there only the owner may."""
    mode = os.fstat(fd).st_mode
    if mode & 0o300 != 0o300:
        try:
            os.fchmod(fd, stat.S_IMODE(mode) | 0o700)
        except PermissionError:
            pass


def _destroy(fd: int, name: bytes) -> bool:
    try:
        btrfs.destroy_subvolume(fd, name)
    except OSError as error:
        # Without the privilege an emptied subvolume can still be removed like a directory.
        if error.errno in (errno.EPERM, errno.EACCES):
            return False
        raise
    return True


def disk_usage(path: str) -> int:
    """Return the bytes on disk below ``path``, itself included; a file with many names counts once."""
    root = open_directory(path)
    try:
        total = os.fstat(root).st_blocks * 512
        seen: set[int] = set()
        pending = [b""]
        while pending:
            directory = pending.pop()
            prefix = directory + b"/" if directory else b""
            for name, status in _entries(root, directory):
                if stat.S_ISDIR(status.st_mode):
                    pending.append(prefix + name)
                elif status.st_nlink > 1:
                    if status.st_ino in seen:
                        continue
                    seen.add(status.st_ino)
                total += status.st_blocks * 512
        return total
    finally:
        os.close(root)


def _entries(root: int, directory: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    fd = open_beneath(root, directory)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                yield os.fsencode(entry.name), entry.stat(follow_symlinks=False)
    finally:
        os.close(fd)
