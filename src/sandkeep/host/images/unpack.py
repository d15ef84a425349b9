"""Unpack an untrusted archive into one overlay directory.

Names are confined: absolute names are taken as relative to the directory, names with ``..`` are refused, and
every parent is opened with ``openat2(RESOLVE_IN_ROOT)``, so a symbolic link in the archive cannot lead
outside. Device nodes are left out. ``.wh.`` names of image layers become overlay whiteouts and opaque
directories.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from sandkeep.errors import ImageError
from sandkeep.host.images.allowance import Spending
from sandkeep.host.images.streams import ByteSource, archive_errors
from sandkeep.host.images.tree import MAX_ID, Mode, flavour_of
from sandkeep.linux import syscalls as sc
from sandkeep.shared.removal import remove_tree
from sandkeep.shared.tarreader import TarEntry, TarReader

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_UNMAPPED = 65534
_OPEN_PARENTS = 64
_NO_ATTRIBUTE = (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.ENODATA, errno.ERANGE)


@dataclass(frozen=True, slots=True)
class Unpacked:
    size: int
    entries: int
    skipped: int
    """Number of device nodes left out: no sandbox may have any."""


def unpack(
    source: ByteSource, directory: str, *, mode: Mode, whiteouts: bool, spending: Spending | None = None
) -> Unpacked:
    """Unpack a plain tar stream. ``whiteouts``: interpret ``.wh.`` names as an image layer's markers.

    ``spending`` counts every entry that is made. The reader of the stream counts the bytes.
    """
    with _Unpacker(directory, mode, whiteouts, spending) as unpacker, archive_errors():
        for member in TarReader(source.read, gunzip=False):
            try:
                unpacker.add(member)
            except OSError as error:
                name = os.fsdecode(member.name)
                raise ImageError(f"cannot unpack {name}: {error.strerror}", entry=name) from error
        unpacker.finish()
        return Unpacked(unpacker.size, unpacker.entries, unpacker.skipped)


class _Unpacker:
    def __init__(self, directory: str, mode: Mode, whiteouts: bool, spending: Spending | None) -> None:
        self._mode = mode
        self._spending = spending
        self._whiteouts = whiteouts
        self._opaque = f"{flavour_of(mode)}.overlay.opaque"
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parents: dict[bytes, int] = {}
        self._directories: list[tuple[bytes, int]] = []
        self.size = self.entries = self.skipped = 0

    def __enter__(self) -> _Unpacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget_parents()
        os.close(self._root)

    def add(self, member: TarEntry) -> None:
        self.entries += 1
        self._spend()
        name = _clean(member.name)
        if not name:
            if member.kind == "directory":
                self._metadata(self._root, b".", member)
            return
        above, _, base = name.rpartition(b"/")
        parent = self._parent(above)
        if self._whiteouts and base.startswith(_WHITEOUT):
            self._hide(parent, base)
        elif member.kind == "directory":
            self._directory(parent, base, member)
            self._directories.append((name, member.mtime_ns))
        elif member.kind == "file":
            self._clear(parent, base)
            self._file(parent, base, member)
        elif member.kind == "symlink":
            self._clear(parent, base)
            os.symlink(member.link, base, dir_fd=parent)
            self._own(parent, base, member)
        elif member.kind == "hardlink":
            self._hardlink(parent, base, member)
        elif member.kind == "fifo":
            self._clear(parent, base)
            os.mkfifo(base, 0o600, dir_fd=parent)
            self._metadata(parent, base, member)
        else:
            self.skipped += 1

    def finish(self) -> None:
        """Set directory times last, because every entry made in a directory changes its time."""
        for name, mtime_ns in reversed(self._directories):
            try:
                fd = sc.openat2(self._root, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # replaced later in the same archive
            os.utime(fd, ns=(mtime_ns, mtime_ns))
            os.close(fd)

    # --- entries ---------------------------------------------------------------------------------------

    def _file(self, parent: int, base: bytes, member: TarEntry) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(base, flags, 0o600, dir_fd=parent)
        try:
            member.copy_to(fd)
            uid, gid = self._ids(member)
            if uid or gid:
                os.fchown(fd, uid, gid)
            os.fchmod(fd, member.mode)
            # After chown, which drops file capabilities.
            for name, value in member.xattrs.items():
                _set_attribute(fd, name, value)
            os.utime(fd, ns=(member.mtime_ns, member.mtime_ns))
        finally:
            os.close(fd)
        self.size += member.size

    def _directory(self, parent: int, base: bytes, member: TarEntry) -> None:
        existing = _kind(parent, base)
        if existing != stat.S_IFDIR:
            hidden = existing == stat.S_IFCHR
            self._clear(parent, base)
            self._forget_parents_but(parent)  # a link of that name may have been followed before
            os.mkdir(base, 0o700, dir_fd=parent)
            if hidden:  # removed and made again in one layer: nothing of the old one shows through
                self._make_opaque(parent, base)
        self._metadata(parent, base, member)

    def _hardlink(self, parent: int, base: bytes, member: TarEntry) -> None:
        target = _clean(member.link)
        above, _, name = target.rpartition(b"/")
        try:
            source = sc.openat2(self._root, above or b".", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise ImageError(f"hard link to a missing {os.fsdecode(target)}") from error
        try:
            if _same(source, name, parent, base):
                return
            self._clear(parent, base)
            os.link(name, base, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as error:
            raise ImageError(f"hard link to a missing {os.fsdecode(target)}") from error
        finally:
            os.close(source)

    def _hide(self, parent: int, base: bytes) -> None:
        if base == _OPAQUE:
            self._make_opaque(parent, b".")
            return
        name = base[len(_WHITEOUT) :]
        if base.startswith(b".wh..wh.") or name in (b"", b".", b".."):
            return  # bookkeeping of an older union filesystem
        existing = _kind(parent, name)
        if existing is None:
            os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)
        elif existing == stat.S_IFDIR:
            self._make_opaque(parent, name)

    # --- helpers ---------------------------------------------------------------------------------------

    def _parent(self, above: bytes) -> int:
        """Return a descriptor of the directory ``above``, made if it is missing."""
        fd = self._parents.get(above)
        if fd is None:
            if len(self._parents) >= _OPEN_PARENTS:
                self._forget_parents()
            try:
                fd = self._open(above)
            except FileNotFoundError:
                fd = self._make_parents(above)
            self._parents[above] = fd
        return fd

    def _make_parents(self, above: bytes) -> int:
        """Make the directories in a loop: there may be more of them than the recursion limit."""
        parts = above.split(b"/")
        fd = self._open(b"")
        try:
            for count in range(1, len(parts) + 1):
                here = b"/".join(parts[:count])
                try:
                    inner = self._open(here)
                except FileNotFoundError:
                    self._spend()
                    os.mkdir(parts[count - 1], dir_fd=fd)
                    inner = self._open(here)
                    os.fchmod(inner, 0o755)  # independent of the umask
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _spend(self) -> None:
        if self._spending is not None:
            self._spending.add_entries()

    def _open(self, path: bytes) -> int:
        return sc.openat2(self._root, path or b".", os.O_RDONLY | os.O_DIRECTORY)

    def _forget_parents(self) -> None:
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()

    def _clear(self, parent: int, base: bytes) -> None:
        """Remove an existing entry: a later one in an archive replaces an earlier one."""
        try:
            os.unlink(base, dir_fd=parent)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            # Descriptors of directories below it must not be used for later entries.
            remove_tree(parent, base)
            self._forget_parents_but(parent)

    def _forget_parents_but(self, kept: int) -> None:
        for above, fd in list(self._parents.items()):
            if fd != kept:
                os.close(fd)
                del self._parents[above]

    def _ids(self, member: TarEntry) -> tuple[int, int]:
        if self._mode == "single":
            return 0, 0
        return (
            member.uid if 0 <= member.uid <= MAX_ID else _UNMAPPED,
            member.gid if 0 <= member.gid <= MAX_ID else _UNMAPPED,
        )

    def _own(self, parent: int, base: bytes, member: TarEntry) -> None:
        uid, gid = self._ids(member)
        if uid or gid:
            os.chown(base, uid, gid, dir_fd=parent, follow_symlinks=False)

    def _metadata(self, parent: int, base: bytes, member: TarEntry) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(base, flags, dir_fd=parent)
        try:
            uid, gid = self._ids(member)
            if self._mode != "single":
                os.fchown(fd, uid, gid)
            os.fchmod(fd, member.mode)
            for name, value in member.xattrs.items():
                _set_attribute(fd, name, value)
        finally:
            os.close(fd)

    def _make_opaque(self, parent: int, base: bytes) -> None:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.setxattr(fd, self._opaque, b"y")
        finally:
            os.close(fd)


def _clean(name: bytes) -> bytes:
    """Return the name relative to the root, without ``.`` parts."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise ImageError(f"refused: {os.fsdecode(name)!r} would leave the image", entry=os.fsdecode(name))
    return b"/".join(parts)


def _kind(parent: int, base: bytes) -> int | None:
    try:
        return stat.S_IFMT(os.stat(base, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _same(parent: int, base: bytes, other_parent: int, other: bytes) -> bool:
    try:
        one = os.stat(base, dir_fd=parent, follow_symlinks=False)
        two = os.stat(other, dir_fd=other_parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def _set_attribute(fd: int, name: bytes, value: bytes) -> None:
    """Set an attribute an image may have: capabilities and plain user attributes, never overlayfs's own."""
    if name != b"security.capability" and (
        not name.startswith(b"user.") or name.startswith((b"user.overlay.", b"user.fuseoverlayfs."))
    ):
        return
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTE:
            raise
