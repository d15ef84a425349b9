"""Copy a session's upper while the session runs, with one short freeze at the end.

``copy_upper`` walks the tree several times. The first passes run beside the session and copy entries that are
new or changed since the pass before; the last pass runs while the session is frozen. After it, the copy is
the upper as it was at one instant. The session notices only the frozen pass.

The session is hostile and may rename, replace or grow anything under the walk, so directories are opened
beneath the upper without following links and files by name with ``O_NOFOLLOW``; entries that vanish are
skipped and seen again by a later pass. An entry counts as unchanged when its inode, size and change time are
the same. Three things would defeat that and are handled:

* a change within the clock's granularity of the copy: an entry that young is never trusted;
* stores through a shared mapping, which move the change time only when a clean page is first written: a file
  that is open for writing is flushed before it is copied, which makes its pages clean;
* tmpfs, which never moves the change time for such stores: there, those files are copied again when frozen.

Where source and destination are in a directory that is a btrfs subvolume of its own, the frozen part is one
snapshot of that, and the copy is made from the snapshot afterwards.

The keys of entries are kept between the passes in a file beside the copy (``treeindex``), not in memory.

While a copy runs, the destination directory is flocked, so that recovery leaves it alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Final, NamedTuple

from sandkeep.errors import WrongState, path_error
from sandkeep.linux import btrfs
from sandkeep.linux.syscalls import fstatfs_type, syncfs
from sandkeep.shared.copying import (
    EntryCopier,
    apply_attributes,
    check_depth,
    link_entry,
    open_beneath,
    read_xattrs,
    replaced,
)
from sandkeep.supervisor.treeindex import (
    Directory,
    Key,
    Memory,
    pack_attributes,
    pack_entry,
    pack_key,
    same_inode,
    unpack_attributes,
    unpack_key,
)

_TMPFS_MAGIC: Final = 0x01021994
_YOUNG_NS: Final = 20_000_000
"""Coarsest change-time granularity (one tick at 100 Hz), doubled."""
_RUNNING_PASSES: Final = 4
_SETTLED_BYTES: Final = 16 << 20
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EXDEV)

_SNAPSHOT: Final = b"snapshot"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_NO_SIZE: Final = -1


class CheckpointResult(NamedTuple):
    """Result of a checkpoint. ``pause_ms`` is the time from asking for the freeze to the end of the thaw."""

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
) -> CheckpointResult:
    """Copy the directory ``source`` to ``dest``, which must not exist or be empty. Both are absolute paths.

    Entries of ``source`` itself that ``leave_out`` names are not copied.

    ``thaw`` is called after every ``freeze``, also after a failure. Raises ``WrongState`` once
    ``cancelled()`` returns true, ``LimitReached`` when directories are nested too deep, and a ``PathError``
    when the copy cannot be made; the caller then removes ``dest``.
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
                with closing(_Copier(source_fd, dest_fd, cancelled, leave_out)) as copier:
                    return _copy_in_passes(copier, freeze, thaw)
            finally:
                os.close(source_fd)
        finally:
            os.close(dest_fd)
    except OSError as error:
        raise path_error(error, "checkpoint", error.filename or source) from error


def _copy_in_passes(
    copier: _Copier, freeze: Callable[[], None], thaw: Callable[[], None]
) -> CheckpointResult:
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
    return CheckpointResult(copier.files, copier.bytes, passes + 1, pause * 1000)


def _can_snapshot(directory: str, beside: str) -> bool:
    """Return whether ``directory`` is a subvolume whose snapshots this process may delete, too.

    Deleting takes more rights than making one.
    """
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
) -> CheckpointResult:
    """Freeze for one snapshot of the subvolume that holds both, thaw, then copy from the snapshot."""
    subvolume_fd = os.open(subvolume, _DIRECTORY)
    beside_fd = os.open(os.path.dirname(dest), _DIRECTORY)
    try:
        # Most of a snapshot's time is flushing; flushing before the freeze makes the freeze shorter.
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
                with closing(_Copier(source_fd, dest_fd, cancelled, leave_out)) as copier:
                    copier.run(frozen=True)
                    copier.finish()
            finally:
                os.close(source_fd)
        finally:
            btrfs.destroy_subvolume(beside_fd, _SNAPSHOT)
        return CheckpointResult(copier.files, copier.bytes, 1, pause * 1000)
    finally:
        os.close(subvolume_fd)
        os.close(beside_fd)


class _Copier:
    """The state kept between passes: which entries were copied, and the key of each."""

    __slots__ = (
        "_cancelled",
        "_copier",
        "_dest",
        "_frozen",
        "_known",
        "_leave_out",
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
        self._known = Memory(dest_fd)
        self._whiteout: tuple[bytes, bytes] | None = None
        self._tmpfs = fstatfs_type(source_fd) == _TMPFS_MAGIC
        self._copier = EntryCopier()
        self._frozen = False
        self._pass_bytes = 0
        self.files = 0
        self.bytes = 0

    def close(self) -> None:
        self._known.close()

    # --- one pass --------------------------------------------------------------------------------------

    def run(self, *, frozen: bool) -> int:
        """Bring the copy up to date and return the number of bytes copied."""
        self._frozen = frozen
        self._pass_bytes = 0
        self._known.forget_links()
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
        """Give directories their attributes, children before parents.

        Last, because every entry made in a directory moves its times.
        """
        for path, known in self._known.children_first():
            status, xattrs = unpack_attributes(known.attributes)
            fd = open_beneath(self._dest, path)
            try:
                apply_attributes(fd, status, xattrs, stale=set())
            finally:
                os.close(fd)

    def _directory(self, fd: int, path: bytes, pending: list[bytes]) -> None:
        status = os.fstat(fd)
        key: tuple[int, int, int] | None = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        known = self._known.get(path)
        same = known is not None and known.key == key
        if known is None or not same:
            attributes = pack_attributes(status, read_xattrs(fd))
            if self._young(status):
                key = None
        else:
            attributes = known.attributes
        # Unchanged entries are taken out of ``known``, so the rest of it is gone or changed.
        before = known.keys() if known is not None else {}
        prefix = path + b"/" if path else b""
        changed: list[bytes] = []
        reusable: set[bytes] = set()
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
                known_key = before.get(name)
                if known_key is not None and known_key == _key(status):
                    del before[name]
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(prefix + name)
                    continue
                changed.append(name)
                if known_key is not None and self._reusable(known_key, status):
                    reusable.add(name)
        if known is not None and not before and not changed:
            if not same:
                self._known.put(path, Directory(key, attributes, known.entries))
            return
        now = bytearray()
        for name, known_key in known.keys().items() if known is not None else ():
            if name not in before:
                now += pack_entry(name, known_key)
        pending += self._replace(fd, path, before, changed, reusable, now)
        self._known.put(path, Directory(key, attributes, bytes(now)))

    def _replace(
        self,
        fd: int,
        path: bytes,
        before: dict[bytes, Key],
        changed: list[bytes],
        reusable: set[bytes],
        now: bytearray,
    ) -> list[bytes]:
        """Remove entries that are gone, copy changed ones, and add the key of each to ``now``.

        Returns the directories that were made, which are empty.
        """
        made: list[bytes] = []
        prefix = path + b"/" if path else b""
        dest_fd = open_beneath(self._dest, path)
        try:
            # Remove everything about to be replaced, except files whose content can be overwritten in place.
            for name, key in before.items():
                if name not in reusable:
                    self._remove(dest_fd, prefix, name, directory=_is_directory(key))
            for name in changed:
                try:
                    # A second stat: keeping the results for all new entries would take much memory.
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if name in reusable and not self._reusable(before[name], status):
                        raise replaced(name)
                    key = self._entry(fd, dest_fd, path, name, status, reuse=name in reusable)
                except OSError as error:
                    if error.errno not in _GONE or self._frozen:
                        raise
                    self._remove(dest_fd, prefix, name, directory=False)
                else:
                    now += pack_entry(name, key)
                    if _is_directory(key):
                        made.append(prefix + name)
        finally:
            os.close(dest_fd)
        return made

    @staticmethod
    def _reusable(before: Key, status: os.stat_result) -> bool:
        """Return whether it is the same regular file with one name: its copy can be overwritten in place."""
        return stat.S_ISREG(status.st_mode) and same_inode(before, _key(status)) and status.st_nlink == 1

    def _remove(self, dest_fd: int, prefix: bytes, name: bytes, *, directory: bool) -> None:
        if not directory:
            try:
                os.unlink(name, dir_fd=dest_fd)
            except FileNotFoundError:
                pass
            return
        # Remove the subtree, children first: each directory holds only what earlier passes put there.
        order, pending = [], [prefix + name]
        while pending:
            path = pending.pop()
            order.append(path)
            known = self._known.get(path)
            if known is not None:
                pending.extend(path + b"/" + n for n, key in known.keys().items() if _is_directory(key))
        for path in reversed(order):
            known = self._known.forget(path)
            parent, _, last = path.rpartition(b"/")
            if known is not None:
                fd = open_beneath(self._dest, path)
                try:
                    for child, key in known.keys().items():
                        if not _is_directory(key):
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
    ) -> Key:
        """Make ``name`` in the copy and return its key."""
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=dest_fd)
            return _key(status)
        key = self._trusted(status)
        if status.st_nlink > 1 and not stat.S_ISCHR(mode):
            first = self._known.link(status.st_ino)
            if first is not None and link_entry(self._dest, first[:2], dest_fd, name):
                # The link has the content that was copied under the first name, so it has that one's key.
                return first[2]
        if stat.S_ISREG(mode):
            key = self._file(fd, dest_fd, name, reuse=reuse)
        elif stat.S_ISCHR(mode) and status.st_rdev == 0:
            # A whiteout is only a name; the kernel makes them hard links of one inode, and so does the copy.
            if self._whiteout is None or not link_entry(self._dest, self._whiteout, dest_fd, name):
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=dest_fd)
                self._whiteout = (path, name)
            return key
        else:
            self._copier.other(fd, dest_fd, name, status)
        if status.st_nlink > 1:
            self._known.put_link(status.st_ino, path, name, key)
        self.files += 1
        return key

    def _young(self, status: os.stat_result) -> bool:
        """Return whether it changed so recently that the next change may not move its change time."""
        return not self._frozen and status.st_ctime_ns > time.time_ns() - _YOUNG_NS

    def _trusted(self, status: os.stat_result) -> Key:
        """Return the key of an entry about to be copied; for a young entry, one that never matches again."""
        return _unequalled(_key(status)) if self._young(status) else _key(status)

    def _file(self, fd: int, dest_fd: int, name: bytes, *, reuse: bool) -> Key:
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


def _key(status: os.stat_result) -> Key:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        # The key of a directory is its inode alone: its entries are compared one by one.
        return pack_key(kind, status.st_ino, 0, 0)
    # The kind is part of the key because inode numbers are soon used again.
    return pack_key(kind, status.st_ino, status.st_size, status.st_ctime_ns)


def _is_directory(key: Key) -> bool:
    return unpack_key(key)[0] == stat.S_IFDIR


def _unequalled(key: Key) -> Key:
    kind, inode, _, changed_ns = unpack_key(key)
    return pack_key(kind, inode, _NO_SIZE, changed_ns)


def _has_writer(fd: int) -> bool:
    """Return whether a process has this file open for writing, which includes shared writable mappings.

    The kernel grants a read lease only on a file without writers. Without the right to take a lease, no
    writer is assumed. A process that opens the file during the lease waits for the supervisor, and the kernel
    signals the supervisor, by default with SIGIO, which would kill it.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
