"""Remove a directory tree while a hostile process may be rearranging it.

The walk never uses a path of more than one name: each directory is opened relative to its parent's
descriptor, not through a symbolic link and not onto another mount. The number of open descriptors and of
names in memory is bounded, however deep or wide the tree is.
"""

from __future__ import annotations

import errno
import os

from sandkeep.linux import syscalls

_OPEN_LEVELS = 64
_BATCH = 1024
_ATTEMPTS = 8
"""Number of attempts to empty a directory that another process keeps filling."""


class _Level:
    """One directory on the way down. ``fd`` is -1 while it is closed to save descriptors."""

    __slots__ = ("attempts", "fd", "key", "name", "pending")

    def __init__(self, fd: int, name: bytes) -> None:
        info = os.fstat(fd)
        self.fd = fd
        self.name = name
        self.key = (info.st_dev, info.st_ino)
        self.pending: list[bytes] = []
        self.attempts = 0


def remove_tree(parent: int, name: bytes) -> None:
    """Remove directory ``name`` of ``parent`` and all below it.

    ``filename`` of the raised error is the directory where it stopped.
    """
    levels: list[_Level] = []
    try:
        levels.append(_Level(_open(parent, name), name))
        while levels:
            level = levels[-1]
            if not level.pending:
                _scan(level)
            if level.pending:
                _descend(levels, level.pending.pop())
                continue
            above = _reopened(levels)
            try:
                os.rmdir(level.name, dir_fd=parent if above is None else above.fd)
            except OSError as error:
                level.attempts += 1
                if error.errno != errno.ENOTEMPTY or level.attempts == _ATTEMPTS:
                    raise
                continue
            os.close(level.fd)
            levels.pop()
    except OSError as error:
        error.filename = b"/".join(level.name for level in levels) or name
        raise
    finally:
        for level in levels:
            if level.fd >= 0:
                os.close(level.fd)


def _open(parent: int, name: bytes) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return syscalls.openat2(
            parent, name, flags, resolve=syscalls.RESOLVE_NO_XDEV | syscalls.RESOLVE_NO_SYMLINKS
        )
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EBUSY, "a file system is mounted there", name) from None
        raise


def _scan(level: _Level) -> None:
    """Unlink every entry that is not a directory, and remember some of the directories."""
    os.lseek(level.fd, 0, os.SEEK_SET)
    with os.scandir(level.fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if not entry.is_dir(follow_symlinks=False):
                try:
                    os.unlink(name, dir_fd=level.fd)
                    continue
                except FileNotFoundError:
                    continue
                except IsADirectoryError:
                    pass
            level.pending.append(name)
            if len(level.pending) == _BATCH:
                return


def _descend(levels: list[_Level], name: bytes) -> None:
    level = levels[-1]
    try:
        fd = _open(level.fd, name)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=level.fd)
        return
    levels.append(_Level(fd, name))
    if len(levels) > _OPEN_LEVELS:
        closing = levels[-1 - _OPEN_LEVELS]
        os.close(closing.fd)
        closing.fd = -1


def _reopened(levels: list[_Level]) -> _Level | None:
    """Return the level above the last, open; it must still be the directory that was entered."""
    if len(levels) < 2:
        return None
    above = levels[-2]
    if above.fd < 0:
        fd = os.open(b"..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=levels[-1].fd)
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != above.key:
            os.close(fd)
            raise OSError(errno.ESTALE, "moved while being removed", above.name)
        above.fd = fd
    return above
