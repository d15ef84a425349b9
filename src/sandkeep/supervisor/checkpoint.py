"""Copy a session's upper while the session runs, with one short freeze at the end.

``copy_upper`` walks the tree several times. The first passes run beside the session and copy what is new or
changed since the pass before; the last one runs frozen and is the one that counts: when it is over, the copy
is the upper as it was at one instant. Only the frozen pass is felt by the session.

The session is hostile and may rename, replace or grow anything under the walk, so directories are opened
beneath the upper without following links and files by name with ``O_NOFOLLOW``; what vanishes is skipped and
seen again by a later pass. An entry counts as unchanged when inode, size and change time are; three things
would fool that and are dealt with:

* a change within the clock's granularity of the copy: an entry that young is never trusted;
* stores through a shared mapping, which move the change time only when a clean page is first written: a file
  somebody has open for writing is flushed before it is copied, which makes its pages clean;
* tmpfs, which never moves the change time for such stores: there, those files are copied again when frozen.

While a copy is under way the destination directory is flocked, so that recovery leaves it alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from sandkeep.errors import WrongState, path_error
from sandkeep.linux import btrfs
from sandkeep.linux.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, fstatfs_type, openat2, syncfs

_TMPFS_MAGIC: Final = 0x01021994
_FICLONE: Final = 0x40049409
_CLONE_FROM: Final = 1 << 20
_SMALL: Final = 1 << 16
_CHUNK: Final = 1 << 26
_YOUNG_NS: Final = 20_000_000
"""Coarsest change-time granularity (one tick at 100 Hz), doubled."""
_RUNNING_PASSES: Final = 4
_SETTLED_BYTES: Final = 16 << 20
_PATH_STEP: Final = 3000
"""Longest relative path handed to the kernel at once; a sandbox may nest deeper than PATH_MAX."""
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EXDEV)
_NEVER: Final = (-1, -1, -1)

WORK: Final = b".work"
"""The work directories of an upper that is a subvolume live inside it; they are no part of a layer."""

_Key = tuple[int, int, int]


class Report(NamedTuple):
    """What a checkpoint did. ``pause_ms`` is the time from asking for the freeze to the end of the thaw."""

    copied_files: int
    copied_bytes: int
    passes: int
    pause_ms: float


def copy_upper(
    source: str,
    dest: str,
    *,
    freeze: Callable[[], None],
    thaw: Callable[[], None],
    cancelled: Callable[[], bool],
) -> Report:
    """Copy the directory ``source`` to ``dest``, which must not exist or be empty.

    ``thaw`` is called whenever ``freeze`` was, however this ends. Raises ``WrongState`` once ``cancelled()``
    says so and a ``PathError`` when the copy cannot be made; what is at ``dest`` then is to be thrown away.
    """
    try:
        source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if btrfs.is_subvolume(source_fd) and _can_snapshot(dest):
                return _snapshot(source_fd, dest, freeze=freeze, thaw=thaw)
            os.makedirs(dest, mode=0o700, exist_ok=True)
            dest_fd = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(dest_fd, fcntl.LOCK_EX)
                return _copy_in_passes(_Copier(source_fd, dest_fd, cancelled), freeze=freeze, thaw=thaw)
            finally:
                os.close(dest_fd)
        finally:
            os.close(source_fd)
    except OSError as error:
        raise path_error(error, "checkpoint", error.filename or source) from error


def _copy_in_passes(copier: _Copier, *, freeze: Callable[[], None], thaw: Callable[[], None]) -> Report:
    passes, before = 0, -1
    while True:
        copied = copier.run(frozen=False)
        passes += 1
        settled = copied <= _SETTLED_BYTES or (before >= 0 and copied > before // 2)
        if passes >= 2 and (settled or passes == _RUNNING_PASSES):
            break
        before = copied
    started = time.monotonic()
    try:
        freeze()
        copier.run(frozen=True)
    finally:
        thaw()
    pause = time.monotonic() - started
    copier.finish()
    return Report(copier.files, copier.bytes, passes + 1, pause * 1000)


def _can_snapshot(dest: str) -> bool:
    """A snapshot needs a name that is free, on btrfs too."""
    parent_fd = os.open(os.path.dirname(dest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not os.path.lexists(dest) and btrfs.is_btrfs(parent_fd)
    finally:
        os.close(parent_fd)


def _snapshot(source_fd: int, dest: str, *, freeze: Callable[[], None], thaw: Callable[[], None]) -> Report:
    parent, name = os.path.split(os.fsencode(dest))
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Most of a snapshot's time is flushing; what is flushed before the freeze does not prolong it.
        syncfs(source_fd)
        started = time.monotonic()
        try:
            freeze()
            btrfs.snapshot(source_fd, parent_fd, name)
        finally:
            thaw()
        return Report(0, 0, 1, (time.monotonic() - started) * 1000)
    finally:
        os.close(parent_fd)


class _Directory:
    """What the passes so far know of one directory of the upper."""

    __slots__ = ("entries", "key")

    def __init__(self) -> None:
        self.entries: dict[bytes, _Key] = {}
        self.key: _Key = _NEVER


class _Copier:
    """The state that outlives a pass: what was copied, under which key."""

    __slots__ = (
        "_attributes",
        "_can_clone",
        "_cancelled",
        "_dest",
        "_frozen",
        "_gid",
        "_known",
        "_linked",
        "_noatime",
        "_pass_bytes",
        "_source",
        "_tmpfs",
        "_uid",
        "_whiteout",
        "bytes",
        "files",
    )

    def __init__(self, source_fd: int, dest_fd: int, cancelled: Callable[[], bool]) -> None:
        self._source = source_fd
        self._dest = dest_fd
        self._cancelled = cancelled
        self._known: dict[bytes, _Directory] = {}
        # Directory attributes are applied last, because every entry made in a directory moves its times.
        self._attributes: dict[bytes, tuple[os.stat_result, dict[str, bytes]]] = {}
        self._linked: dict[int, tuple[bytes, bytes, _Key]] = {}
        self._whiteout: tuple[bytes, bytes] | None = None
        self._tmpfs = fstatfs_type(source_fd) == _TMPFS_MAGIC
        self._can_clone = True
        self._noatime = os.O_NOATIME
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._frozen = False
        self._pass_bytes = 0
        self.files = 0
        self.bytes = 0

    # --- one pass --------------------------------------------------------------------------------------

    def run(self, *, frozen: bool) -> int:
        """Bring the copy up to date; returns the bytes copied."""
        self._frozen = frozen
        self._pass_bytes = 0
        self._linked.clear()
        pending = [b""]
        while pending:
            if self._cancelled():
                raise WrongState("the checkpoint was cancelled")
            path = pending.pop()
            try:
                fd = open_beneath(self._source, path)
            except OSError as error:
                if error.errno in _GONE and path and not frozen:
                    continue
                raise
            try:
                self._directory(fd, path, pending)
            finally:
                os.close(fd)
        return self._pass_bytes

    def finish(self) -> None:
        """Give directories their attributes, children before parents."""
        for path in sorted(self._attributes, key=len, reverse=True):
            status, xattrs = self._attributes[path]
            fd = open_beneath(self._dest, path)
            try:
                apply_attributes(fd, status, xattrs, stale=set())
            finally:
                os.close(fd)

    def _directory(self, fd: int, path: bytes, pending: list[bytes]) -> None:
        status = os.fstat(fd)
        key = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = _Directory()
        if known.key != key:
            known.key = key
            self._attributes[path] = (status, read_xattrs(fd))
        before = known.entries
        now: dict[bytes, _Key] = {}
        prefix = path + b"/" if path else b""
        changed: list[tuple[bytes, os.stat_result]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                # scandir of a descriptor yields str; names are bytes, and surrogateescape keeps them whole.
                name = os.fsencode(entry.name)
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                mode = status.st_mode
                if stat.S_ISDIR(mode):
                    if not path and name == WORK:
                        continue
                    # A directory is known by its inode alone: its contents are compared one by one.
                    key = (status.st_ino, -2, -2)
                    pending.append(prefix + name)
                else:
                    key = (status.st_ino, status.st_size, status.st_ctime_ns)
                if before.get(name) == key:
                    now[name] = key
                    continue
                changed.append((name, status))
        known.entries = now
        gone = before.keys() - now.keys()
        if not gone and not changed:
            return
        dest_fd = open_beneath(self._dest, path)
        try:
            # Everything about to be replaced goes first, except what a file's new contents can overwrite.
            fresh = dict(changed)
            reusable = set()
            for name in gone:
                status_now = fresh.get(name)
                if status_now is not None and self._reusable(before[name], status_now):
                    reusable.add(name)
                else:
                    self._remove(dest_fd, prefix, name, directory=before[name][1] == -2)
            for name, status in changed:
                try:
                    now[name] = self._entry(fd, dest_fd, path, name, status, reuse=name in reusable)
                except OSError as error:
                    if error.errno not in _GONE or self._frozen:
                        raise
                    self._remove(dest_fd, prefix, name, directory=False)
        finally:
            os.close(dest_fd)
        if path in self._attributes:
            return
        # Entries were replaced in a directory that did not change itself (a file was rewritten in place).
        self._attributes[path] = (os.fstat(fd), read_xattrs(fd))

    @staticmethod
    def _reusable(before: _Key, status: os.stat_result) -> bool:
        """The same single-named regular file, only rewritten: its copy can be overwritten in place."""
        return before[0] == status.st_ino and stat.S_ISREG(status.st_mode) and status.st_nlink == 1

    def _remove(self, dest_fd: int, prefix: bytes, name: bytes, *, directory: bool) -> None:
        if not directory:
            try:
                os.unlink(name, dir_fd=dest_fd)
            except FileNotFoundError:
                pass
            return
        # Forget the subtree, children first, emptying each directory from what the passes put there.
        order, pending = [], [prefix + name]
        while pending:
            path = pending.pop()
            order.append(path)
            known = self._known.get(path)
            if known is not None:
                pending.extend(path + b"/" + n for n, key in known.entries.items() if key[1] == -2)
        for path in reversed(order):
            known = self._known.pop(path, None)
            self._attributes.pop(path, None)
            parent, _, last = path.rpartition(b"/")
            if known is not None:
                fd = open_beneath(self._dest, path)
                try:
                    for child, key in known.entries.items():
                        if key[1] != -2:
                            os.unlink(child, dir_fd=fd)
                finally:
                    os.close(fd)
            fd = open_beneath(self._dest, parent)
            try:
                os.rmdir(last, dir_fd=fd)
            finally:
                os.close(fd)

    # --- one entry -------------------------------------------------------------------------------------

    def _entry(
        self, fd: int, dest_fd: int, path: bytes, name: bytes, status: os.stat_result, *, reuse: bool
    ) -> _Key:
        """Make ``name`` in the copy; returns the key under which it is now known."""
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=dest_fd)
            return (status.st_ino, -2, -2)
        key = self._trusted(status)
        if status.st_nlink > 1 and not stat.S_ISCHR(mode):
            first = self._linked.get(status.st_ino)
            if first is not None and self._link(first[:2], dest_fd, name):
                # What was linked is the state the first name was copied in, so that is what is known.
                return first[2]
        if stat.S_ISREG(mode):
            key = self._file(fd, dest_fd, name, reuse=reuse)
        elif stat.S_ISLNK(mode):
            os.symlink(_link_target(fd, name), name, dir_fd=dest_fd)
            self._plain_attributes(fd, dest_fd, name, status)
        elif stat.S_ISCHR(mode) and status.st_rdev == 0:
            # Whiteouts carry nothing but their name; the kernel links them together, and so do we.
            if self._whiteout is None or not self._link(self._whiteout, dest_fd, name):
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=dest_fd)
                self._whiteout = (path, name)
            return key
        else:
            os.mknod(name, stat.S_IFMT(mode) | 0o600, status.st_rdev, dir_fd=dest_fd)
            self._plain_attributes(fd, dest_fd, name, status)
        if status.st_nlink > 1:
            self._linked[status.st_ino] = (path, name, key)
        self.files += 1
        return key

    def _trusted(self, status: os.stat_result) -> _Key:
        """The key of an entry about to be copied; one no later state can equal if it changed just now."""
        if not self._frozen and status.st_ctime_ns > time.time_ns() - _YOUNG_NS:
            return (status.st_ino, -1, status.st_ctime_ns)
        return (status.st_ino, status.st_size, status.st_ctime_ns)

    def _link(self, first: tuple[bytes, bytes], dest_fd: int, name: bytes) -> bool:
        """Link to a copy made before; ``False`` when that is gone or has as many links as it can have."""
        directory, existing = first
        try:
            first_fd = open_beneath(self._dest, directory)
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

    def _file(self, fd: int, dest_fd: int, name: bytes, *, reuse: bool) -> _Key:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            source = os.open(name, flags | self._noatime, dir_fd=fd)
        except PermissionError:
            self._noatime = 0
            source = os.open(name, flags, dir_fd=fd)
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode):
                raise _replaced(name)
            key = self._trusted(status)
            if not self._frozen and status.st_size and _has_writer(source):
                if self._tmpfs:
                    key = _NEVER
                else:
                    os.fdatasync(source)
            create = os.O_WRONLY | os.O_CLOEXEC | (0 if reuse else os.O_CREAT | os.O_EXCL)
            copy = os.open(name, create, 0o600, dir_fd=dest_fd)
            try:
                self._contents(source, copy, status, reuse=reuse)
                apply_attributes(
                    copy, status, read_xattrs(source), stale=set(os.listxattr(copy)) if reuse else set()
                )
            finally:
                os.close(copy)
        finally:
            os.close(source)
        return key

    def _contents(self, source: int, copy: int, status: os.stat_result, *, reuse: bool) -> None:
        size = status.st_size
        if size <= _SMALL and not reuse:
            data = os.read(source, size) if size else b""
            if data and os.write(copy, data) != len(data):
                _copy_range(source, copy, 0, size)  # a full disk: this names it
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
        self.bytes += size
        self._pass_bytes += size

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

    def _plain_attributes(self, fd: int, dest_fd: int, name: bytes, status: os.stat_result) -> None:
        """Attributes of what cannot be opened: links, pipes, sockets, devices."""
        if (status.st_uid, status.st_gid) != (self._uid, self._gid):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=dest_fd, follow_symlinks=False)
        here, there = (b"/proc/self/fd/%d/%s" % (where, name) for where in (fd, dest_fd))
        for attribute in os.listxattr(here, follow_symlinks=False):
            value = os.getxattr(here, attribute, follow_symlinks=False)
            os.setxattr(there, attribute, value, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=dest_fd)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=dest_fd, follow_symlinks=False)


def open_beneath(root: int, path: bytes) -> int:
    """The directory ``path`` beneath ``root``, following no link, however deep it is."""
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


def _replaced(name: bytes) -> OSError:
    return OSError(errno.ESTALE, "replaced while being copied", os.fsdecode(name))


def _link_target(fd: int, name: bytes) -> bytes:
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise _replaced(name) from None
        raise


def _has_writer(fd: int) -> bool:
    """Whether somebody has this file open for writing, which includes every shared writable mapping.

    A read lease is only given on a file without writers. Without the right to take one, nobody is assumed.
    An opener meanwhile waits for us and we are signalled, by default with SIGIO, which would be our end.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


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


def read_xattrs(fd: int) -> dict[str, bytes]:
    return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}


def apply_attributes(fd: int, status: os.stat_result, xattrs: dict[str, bytes], *, stale: set[str]) -> None:
    """Owner first, it clears set-id bits and capabilities; times last, everything else moves them."""
    os.fchown(fd, status.st_uid, status.st_gid)
    for name in stale - xattrs.keys():
        os.removexattr(fd, name)
    for name, value in xattrs.items():
        os.setxattr(fd, name, value)
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
