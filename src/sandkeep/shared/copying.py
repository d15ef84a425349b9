"""Copy single entries of a tree with all their attributes, and open directories of untrusted trees.

Works on directory descriptors and names as bytes; the caller walks the tree. A source may change during the
copy: an entry that was replaced since the caller saw it fails with ``ESTALE``, other failures have the errno
of the call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Final, NamedTuple

from sandkeep.errors import LimitReached
from sandkeep.linux.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, openat2

_FICLONE: Final = 0x40049409
_CLONE_FROM: Final = 1 << 20
"""Below about this size copying is faster than sharing extents."""
_SMALL: Final = 1 << 16
_CHUNK: Final = 1 << 26
_PATH_STEP: Final = 3000
"""Longest relative path handed to the kernel at once; a sandbox may nest deeper than PATH_MAX."""
_PATH_LIMIT: Final = 1 << 14


class Attributes(NamedTuple):
    """The fields of a stat result that ``apply_attributes`` needs, by the same names."""

    st_uid: int
    st_gid: int
    st_mode: int
    st_atime_ns: int
    st_mtime_ns: int


def check_depth(path: bytes) -> None:
    """Refuse a tree nested so deep that storing its paths would take unbounded memory."""
    if len(path) > _PATH_LIMIT:
        raise LimitReached(
            f"a directory is nested deeper than {_PATH_LIMIT} bytes of path",
            limit="path_bytes",
            value=_PATH_LIMIT,
        )


class EntryCopier:
    """Copies entries into one filesystem, and remembers which calls it and this process's rights allow."""

    __slots__ = ("_can_clone", "_gid", "_noatime", "_uid")

    def __init__(self) -> None:
        self._can_clone = True
        self._noatime = os.O_NOATIME
        self._uid, self._gid = os.geteuid(), os.getegid()

    def open_file(self, fd: int, name: bytes) -> tuple[int, os.stat_result]:
        """Open a regular file for reading, without blocking or following a link."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            source = os.open(name, flags | self._noatime, dir_fd=fd)
        except PermissionError:
            self._noatime = 0
            source = os.open(name, flags, dir_fd=fd)
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            os.close(source)
            raise replaced(name)
        return source, status

    def file(
        self, source: int, status: os.stat_result, dest_fd: int, name: bytes, *, reuse: bool = False
    ) -> None:
        """Copy an opened file; with ``reuse``, overwrite the earlier copy of that name."""
        create = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if reuse else os.O_CREAT | os.O_EXCL)
        copy = os.open(name, create, 0o600, dir_fd=dest_fd)
        try:
            self._contents(source, copy, status, reuse=reuse)
            stale = set(os.listxattr(copy)) if reuse else set()
            apply_attributes(copy, status, read_xattrs(source), stale=stale)
        finally:
            os.close(copy)

    def other(self, fd: int, dest_fd: int, name: bytes, status: os.stat_result) -> None:
        """Copy an entry that is neither file nor directory: a link, pipe, socket or device."""
        mode = status.st_mode
        if stat.S_ISLNK(mode):
            os.symlink(_link_target(fd, name), name, dir_fd=dest_fd)
        else:
            os.mknod(name, stat.S_IFMT(mode) | 0o600, status.st_rdev, dir_fd=dest_fd)
        if (status.st_uid, status.st_gid) != (self._uid, self._gid):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=dest_fd, follow_symlinks=False)
        here, there = (b"/proc/self/fd/%d/%s" % (where, name) for where in (fd, dest_fd))
        for attribute in os.listxattr(here, follow_symlinks=False):
            value = os.getxattr(here, attribute, follow_symlinks=False)
            os.setxattr(there, attribute, value, follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(name, stat.S_IMODE(mode), dir_fd=dest_fd)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=dest_fd, follow_symlinks=False)

    def _contents(self, source: int, copy: int, status: os.stat_result, *, reuse: bool) -> None:
        size = status.st_size
        if size <= _SMALL and not reuse:
            data = os.read(source, size) if size else b""
            if data and os.write(copy, data) != len(data):
                _copy_range(source, copy, 0, size)  # on a full disk this call raises the right error
        elif size > _CLONE_FROM and self._clone(source, copy):
            os.ftruncate(copy, size)
        elif status.st_blocks * 512 < size:
            os.ftruncate(copy, 0)
            _copy_extents(source, copy, size)
            os.ftruncate(copy, size)
        else:
            _copy_range(source, copy, 0, size)
            if reuse:
                os.ftruncate(copy, size)

    def _clone(self, source: int, copy: int) -> bool:
        if not self._can_clone:
            return False
        try:
            fcntl.ioctl(copy, _FICLONE, source)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
                raise
            self._can_clone = False
            return False
        return True


def link_entry(root: int, first: tuple[bytes, bytes], dest_fd: int, name: bytes) -> bool:
    """Link ``name`` to an entry copied before, given as directory beneath ``root`` and name.

    Return ``False`` when that entry is gone or already has the maximum number of links.
    """
    directory, existing = first
    try:
        first_fd = open_beneath(root, directory)
    except FileNotFoundError:
        return False
    try:
        os.link(existing, name, src_dir_fd=first_fd, dst_dir_fd=dest_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EMLINK):
            return False
        raise
    finally:
        os.close(first_fd)
    return True


def open_beneath(root: int, path: bytes) -> int:
    """Open the directory ``path`` beneath ``root``, at any depth, following no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
    fd, owned = root, False
    try:
        while len(path) > _PATH_STEP:
            cut = path.rindex(b"/", 0, _PATH_STEP)
            step = openat2(fd, path[:cut], flags, resolve=resolve)
            if owned:
                os.close(fd)
            fd, owned, path = step, True, path[cut + 1 :]
        return openat2(fd, path or b".", flags, resolve=resolve)
    finally:
        if owned:
            os.close(fd)


def read_xattrs(fd: int) -> dict[str, bytes]:
    return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}


def own_attributes(path: str) -> dict[str, bytes]:
    """Return the extended attributes that a session may have set, without those of overlayfs."""
    return {
        name: os.getxattr(path, name)
        for name in os.listxattr(path)
        if name.startswith(("user.", "system.posix_acl_")) and not name.startswith("user.overlay.")
    }


def apply_attributes(
    fd: int, status: os.stat_result | Attributes, xattrs: dict[str, bytes], *, stale: set[str]
) -> None:
    """Set the attributes: owner first, since it clears set-id bits and capabilities; times last."""
    os.fchown(fd, status.st_uid, status.st_gid)
    for name in stale - xattrs.keys():
        os.removexattr(fd, name)
    for name, value in xattrs.items():
        os.setxattr(fd, name, value)
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(name: bytes) -> OSError:
    return OSError(errno.ESTALE, "replaced while being copied", os.fsdecode(name))


def _link_target(fd: int, name: bytes) -> bytes:
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise replaced(name) from None
        raise


def _copy_extents(source: int, copy: int, size: int) -> None:
    offset = 0
    while offset < size:
        try:
            start = os.lseek(source, offset, os.SEEK_DATA)
            offset = os.lseek(source, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        _copy_range(source, copy, start, min(offset, size))


def _copy_range(source: int, copy: int, start: int, end: int) -> None:
    while start < end:
        try:
            done = os.copy_file_range(source, copy, min(end - start, _CHUNK), start, start)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.lseek(copy, start, os.SEEK_SET)
            done = os.sendfile(copy, source, start, min(end - start, _CHUNK))
        if not done:
            return
        start += done
