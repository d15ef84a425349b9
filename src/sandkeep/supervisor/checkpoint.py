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

Where source and destination are in a directory that is a btrfs subvolume of its own, the frozen part is one
snapshot of that, and the copy is made from the snapshot afterwards.

While a copy is under way the destination directory is flocked, so that recovery leaves it alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from sandkeep.errors import WrongState, path_error
from sandkeep.linux import btrfs
from sandkeep.linux.syscalls import fstatfs_type, syncfs
from sandkeep.supervisor.copying import (
    EntryCopier,
    apply_attributes,
    check_depth,
    link_entry,
    open_beneath,
    read_xattrs,
)

_TMPFS_MAGIC: Final = 0x01021994
_YOUNG_NS: Final = 20_000_000
"""Coarsest change-time granularity (one tick at 100 Hz), doubled."""
_RUNNING_PASSES: Final = 4
_SETTLED_BYTES: Final = 16 << 20
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EXDEV)

_SNAPSHOT: Final = b"snapshot"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_Key = tuple[int, int, int, int]
"""Kind, inode, size and change time. The kind is part of it because inode numbers are soon used again."""
_NO_SIZE: Final = -1


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
    leave_out: Collection[str] = (),
) -> Report:
    """Copy the directory ``source`` to ``dest``, which must not exist or be empty. Both are absolute paths.

    Entries of ``source`` itself that ``leave_out`` names are not copied.

    ``thaw`` is called whenever ``freeze`` was, however this ends. Raises ``WrongState`` once ``cancelled()``
    says so, ``LimitReached`` when directories are nested absurdly deep, and a ``PathError`` when the copy
    cannot be made; what is at ``dest`` then is to be thrown away.
    """
    try:
        os.makedirs(dest, mode=0o700, exist_ok=True)
        dest_fd = os.open(dest, _DIRECTORY)
        try:
            fcntl.flock(dest_fd, fcntl.LOCK_EX)
            common = os.path.commonpath([source, dest])
            if _can_snapshot(common, os.path.dirname(dest)):
                return _copy_from_snapshot(common, source, dest, dest_fd, freeze, thaw, cancelled, leave_out)
            source_fd = os.open(source, _DIRECTORY)
            try:
                return _copy_in_passes(_Copier(source_fd, dest_fd, cancelled, leave_out), freeze, thaw)
            finally:
                os.close(source_fd)
        finally:
            os.close(dest_fd)
    except OSError as error:
        raise path_error(error, "checkpoint", error.filename or source) from error


def _copy_in_passes(copier: _Copier, freeze: Callable[[], None], thaw: Callable[[], None]) -> Report:
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


def _can_snapshot(directory: str, beside: str) -> bool:
    """Whether ``directory`` is a subvolume and we may also drop snapshots of it, which takes more rights."""
    fd = os.open(directory, _DIRECTORY)
    beside_fd = os.open(beside, _DIRECTORY)
    try:
        if not btrfs.is_subvolume(fd):
            return False
        btrfs.create_subvolume(beside_fd, _SNAPSHOT)
        try:
            btrfs.destroy_subvolume(beside_fd, _SNAPSHOT)
        except PermissionError:
            os.rmdir(_SNAPSHOT, dir_fd=beside_fd)
            return False
        return True
    except PermissionError:
        return False
    finally:
        os.close(fd)
        os.close(beside_fd)


def _copy_from_snapshot(
    subvolume: str,
    source: str,
    dest: str,
    dest_fd: int,
    freeze: Callable[[], None],
    thaw: Callable[[], None],
    cancelled: Callable[[], bool],
    leave_out: Collection[str],
) -> Report:
    """Freeze for one snapshot of the subvolume both are in, then copy at leisure out of it."""
    subvolume_fd = os.open(subvolume, _DIRECTORY)
    beside_fd = os.open(os.path.dirname(dest), _DIRECTORY)
    try:
        # Most of a snapshot's time is flushing; what is flushed before the freeze does not prolong it.
        syncfs(subvolume_fd)
        started = time.monotonic()
        try:
            freeze()
            btrfs.snapshot(subvolume_fd, beside_fd, _SNAPSHOT)
        finally:
            thaw()
        pause = time.monotonic() - started
        try:
            inside = os.fsencode(os.path.relpath(source, subvolume))
            source_fd = open_beneath(beside_fd, _SNAPSHOT + b"/" + inside)
            try:
                copier = _Copier(source_fd, dest_fd, cancelled, leave_out)
                copier.run(frozen=True)
                copier.finish()
            finally:
                os.close(source_fd)
        finally:
            btrfs.destroy_subvolume(beside_fd, _SNAPSHOT)
        return Report(copier.files, copier.bytes, 1, pause * 1000)
    finally:
        os.close(subvolume_fd)
        os.close(beside_fd)


class _Directory:
    """What the passes so far know of one directory of the upper."""

    __slots__ = ("entries", "key")

    def __init__(self) -> None:
        self.entries: dict[bytes, _Key] = {}
        self.key: tuple[int, int, int] | None = None


class _Copier:
    """The state that outlives a pass: what was copied, under which key."""

    __slots__ = (
        "_attributes",
        "_cancelled",
        "_copier",
        "_dest",
        "_frozen",
        "_known",
        "_leave_out",
        "_linked",
        "_pass_bytes",
        "_source",
        "_tmpfs",
        "_whiteout",
        "bytes",
        "files",
    )

    def __init__(
        self, source_fd: int, dest_fd: int, cancelled: Callable[[], bool], leave_out: Collection[str]
    ) -> None:
        self._source = source_fd
        self._dest = dest_fd
        self._cancelled = cancelled
        self._leave_out = frozenset(map(os.fsencode, leave_out))
        self._known: dict[bytes, _Directory] = {}
        # Directory attributes are applied last, because every entry made in a directory moves its times.
        self._attributes: dict[bytes, tuple[os.stat_result, dict[str, bytes]]] = {}
        self._linked: dict[int, tuple[bytes, bytes, _Key]] = {}
        self._whiteout: tuple[bytes, bytes] | None = None
        self._tmpfs = fstatfs_type(source_fd) == _TMPFS_MAGIC
        self._copier = EntryCopier()
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
            check_depth(path)
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
        attributes = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = _Directory()
        if known.key != attributes:
            known.key = None if self._young(status) else attributes
            self._attributes[path] = (status, read_xattrs(fd))
        before = known.entries
        now: dict[bytes, _Key] = {}
        prefix = path + b"/" if path else b""
        changed: list[tuple[bytes, os.stat_result]] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                # scandir of a descriptor yields str; names are bytes, and surrogateescape keeps them whole.
                name = os.fsencode(entry.name)
                if not path and name in self._leave_out:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    pending.append(prefix + name)
                key = _key(status)
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
                    self._remove(dest_fd, prefix, name, directory=before[name][0] == stat.S_IFDIR)
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
        return before[0] == stat.S_IFREG and before[:2] == _key(status)[:2] and status.st_nlink == 1

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
                pending.extend(path + b"/" + n for n, key in known.entries.items() if key[0] == stat.S_IFDIR)
        for path in reversed(order):
            known = self._known.pop(path, None)
            self._attributes.pop(path, None)
            parent, _, last = path.rpartition(b"/")
            if known is not None:
                fd = open_beneath(self._dest, path)
                try:
                    for child, key in known.entries.items():
                        if key[0] != stat.S_IFDIR:
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
            return _key(status)
        key = self._trusted(status)
        if status.st_nlink > 1 and not stat.S_ISCHR(mode):
            first = self._linked.get(status.st_ino)
            if first is not None and link_entry(self._dest, first[:2], dest_fd, name):
                # What was linked is the state the first name was copied in, so that is what is known.
                return first[2]
        if stat.S_ISREG(mode):
            key = self._file(fd, dest_fd, name, reuse=reuse)
        elif stat.S_ISCHR(mode) and status.st_rdev == 0:
            # Whiteouts carry nothing but their name; the kernel links them together, and so do we.
            if self._whiteout is None or not link_entry(self._dest, self._whiteout, dest_fd, name):
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=dest_fd)
                self._whiteout = (path, name)
            return key
        else:
            self._copier.other(fd, dest_fd, name, status)
        if status.st_nlink > 1:
            self._linked[status.st_ino] = (path, name, key)
        self.files += 1
        return key

    def _young(self, status: os.stat_result) -> bool:
        """Whether it changed so recently that the next change may not move its change time."""
        return not self._frozen and status.st_ctime_ns > time.time_ns() - _YOUNG_NS

    def _trusted(self, status: os.stat_result) -> _Key:
        """The key of an entry about to be copied; one no later state can equal if it is young."""
        return _unequalled(_key(status)) if self._young(status) else _key(status)

    def _file(self, fd: int, dest_fd: int, name: bytes, *, reuse: bool) -> _Key:
        source, status = self._copier.open_file(fd, name)
        try:
            key = self._trusted(status)
            if not self._frozen and status.st_size and _has_writer(source):
                if self._tmpfs:
                    key = _unequalled(key)
                else:
                    os.fdatasync(source)
            self._copier.file(source, status, dest_fd, name, reuse=reuse)
        finally:
            os.close(source)
        self.bytes += status.st_size
        self._pass_bytes += status.st_size
        return key


def _key(status: os.stat_result) -> _Key:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        # A directory is known by its inode alone: its contents are compared one by one.
        return (kind, status.st_ino, 0, 0)
    return (kind, status.st_ino, status.st_size, status.st_ctime_ns)


def _unequalled(key: _Key) -> _Key:
    return (key[0], key[1], _NO_SIZE, key[3])


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
