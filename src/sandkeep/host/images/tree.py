"""Write one overlay directory: files, owners, whiteouts, and the attributes overlayfs reads.

Every path is relative to the tree's root and is trusted: it comes from this package, not from an archive.
``unpack`` handles names from archives. Owners are numbers inside the sandbox; where only one id exists
(``single``) they are ignored, since every file then belongs to that id anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Literal

from sandkeep.host.rootfs import Flavour

Mode = Literal["root", "subuid", "single"]
"""The user that writes the tree: real root, uid 0 over a range of 65,536 ids, or uid 0 over one id."""

MAX_ID = 65535


def flavour_of(mode: Mode) -> Flavour:
    return "trusted" if mode == "root" else "user"


class ImageTree:
    """One overlay lower under construction."""

    def __init__(self, root: str, *, mode: Mode) -> None:
        self.root = root
        self.mode = mode
        self.flavour: Flavour = flavour_of(mode)
        self.size = 0
        os.makedirs(root, exist_ok=True)
        os.chmod(root, 0o755)  # independent of the umask

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def own(self, name: str, uid: int, gid: int) -> None:
        if self.mode != "single":
            os.chown(self.path(name), uid, gid, follow_symlinks=False)

    def directory(self, name: str, mode: int = 0o755, *, uid: int = 0, gid: int = 0) -> None:
        """Make a directory and its parents; an existing one gets the given mode and owner."""
        path = self.path(name)
        try:
            os.mkdir(path)
        except FileNotFoundError:
            self.directory(os.path.dirname(name))
            os.mkdir(path)
        except FileExistsError:
            pass
        if uid or gid:
            self.own(name, uid, gid)
        os.chmod(path, mode)

    def parents(self, name: str) -> None:
        """Create the directories above ``name``; leave existing ones unchanged."""
        above = os.path.dirname(name)
        if above and not os.path.isdir(self.path(above)):
            self.directory(above)

    def file(self, name: str, content: str | bytes, mode: int = 0o644, *, uid: int = 0, gid: int = 0) -> None:
        self.parents(name)
        data = content.encode() if isinstance(content, str) else content
        path = self.path(name)
        # An existing entry may be read-only or a symlink (/etc/mtab is one): replace it, never write through
        # it.
        if os.path.lexists(path):
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as out:
            out.write(data)
        self._finish(name, mode, uid, gid, len(data))

    def symlink(self, name: str, target: str) -> None:
        self.parents(name)
        path = self.path(name)
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)

    def copy(self, source: str, name: str, mode: int | None = None, *, uid: int = 0, gid: int = 0) -> None:
        """Copy one regular file's bytes; the mode is the source's unless given."""
        self.parents(name)
        path = self.path(name)
        if os.path.lexists(path):
            os.unlink(path)
        with open(source, "rb") as src:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", buffering=0) as out:
                info = os.fstat(src.fileno())
                copied = _copy_bytes(src.fileno(), out.fileno(), info.st_size)
        self._finish(name, stat.S_IMODE(info.st_mode) if mode is None else mode, uid, gid, copied)
        os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def copy_tree(self, source: str, name: str, *, skip: Iterable[str] = ()) -> None:
        """Copy the regular files, directories and symlinks that everyone may read; skip all others."""
        self.directory(name)
        left_out = frozenset(skip)
        for entry in _entries(source):
            if entry.name in left_out:
                continue
            target = f"{name}/{entry.name}"
            if entry.is_symlink():
                self.symlink(target, os.readlink(entry.path))
            elif entry.is_dir():
                self.copy_tree(entry.path, target)
            elif entry.is_file() and entry.stat().st_mode & stat.S_IROTH:
                try:
                    self.copy(entry.path, target)
                except PermissionError:
                    continue

    def whiteout(self, name: str) -> None:
        """Hide ``name`` of the layers below with a whiteout."""
        self.parents(name)
        if not self.exists(name):
            os.mknod(self.path(name), stat.S_IFCHR | 0o600, os.makedev(0, 0))

    def opaque(self, name: str) -> None:
        """Hide everything the layers below have in this directory."""
        os.setxattr(self.path(name), f"{self.flavour}.overlay.opaque", b"y")

    def redirect(self, name: str, target: str) -> None:
        """Continue this directory at ``target`` in the layers below; ``trusted`` flavour only."""
        os.setxattr(self.path(name), "trusted.overlay.redirect", target.encode())

    def _finish(self, name: str, mode: int, uid: int, gid: int, size: int) -> None:
        self.size += size
        if uid or gid:
            self.own(name, uid, gid)
        os.chmod(self.path(name), mode)  # after chown, which clears setuid bits


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENOENT, errno.ENOTDIR):
            return []
        raise


def _copy_bytes(source: int, target: int, size: int) -> int:
    """Copy to the end of file, inside the kernel where possible."""
    done = 0
    try:
        while done < size:
            count = os.copy_file_range(source, target, size - done)
            if not count:
                break
            done += count
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    while chunk := os.read(source, 1 << 20):
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
        done += len(chunk)
    return done
