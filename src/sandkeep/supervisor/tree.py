"""Path resolution in a session's tree, which the sandbox may rearrange at any moment.

``Tree`` resolves a path once, by the kernel, with ``openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)`` from
the root descriptor: no symbolic link, ``..`` or race leads outside the sandbox. Later steps work on
descriptors, or on one name below a descriptor. File systems that are an interface of the kernel are refused,
and so are files whose owner has no id in the session: the supervisor has rights over them that the sandbox
must not borrow.

Everything here raises ``OSError`` and acts with the rights of the calling thread.
"""

from __future__ import annotations

import errno
import os
import stat

from sandkeep.errors import InvalidRequest
from sandkeep.linux import syscalls
from sandkeep.supervisor.identity import SESSION_IDS

Path = str | bytes

_SYMLINK_HOPS = 40
_OVERFLOW_ID = 65534
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


class KernelFileSystem(PermissionError):
    """The file is on procfs, sysfs, a cgroup or the like."""


class NotOfTheSession(PermissionError):
    """The file is mounted in the session, but its owner has no id there."""


class Fd:
    """Closes a descriptor at the end of a block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)


class Tree:
    """The tree below ``root_fd``, not owned by it. ``base`` is the id on the mount of the session's id 0."""

    __slots__ = ("_root_device", "base", "root_fd")

    def __init__(self, root_fd: int, *, base: int = 0) -> None:
        self.root_fd = root_fd
        self.base = base
        self._root_device = os.fstat(root_fd).st_dev

    def open(self, path: bytes, flags: int) -> int:
        return syscalls.openat2(self.root_fd, path, flags)

    def open_directory(self, path: bytes, flags: int = os.O_PATH, *, parents: bool = False) -> int:
        """Open a directory and return its descriptor; with ``parents`` make missing directories."""
        flags |= os.O_DIRECTORY
        try:
            fd = self.open(path, flags)
        except FileNotFoundError:
            if not parents:
                raise
            self._make_directories(path)
            fd = self.open(path, flags)
        try:
            self.check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_beneath(self, top: int, directory: bytes) -> int:
        """Open a directory below an open one, through no symbolic link; ``.`` is that one itself."""
        fd = syscalls.openat2(top, directory, os.O_PATH | os.O_DIRECTORY, resolve=_BENEATH)
        try:
            self.check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def entry(self, path: bytes, *, follow: bool, parents: bool = False) -> tuple[int, bytes]:
        """Return a descriptor of the directory that holds ``path``, for the caller to close, and the name.

        ``follow`` resolves a symbolic link of that name to its target, which need not exist.
        """
        for _ in range(_SYMLINK_HOPS):
            directory, name = split(path)
            fd = self.open_directory(directory, parents=parents)
            target = _link_target(fd, name) if follow else None
            if target is None:
                return fd, name
            os.close(fd)
            # The kernel may refuse to follow a link that another user made in a shared directory.
            self.exists(path)
            path = target if target.startswith(b"/") else directory + b"/" + target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def exists(self, path: bytes, flags: int = 0) -> bool:
        """Return whether ``path`` exists; with ``O_DIRECTORY`` in ``flags``, raise if it is another kind."""
        try:
            os.close(self.open(path, os.O_PATH | flags))
        except FileNotFoundError:
            return False
        return True

    def real(self, path: bytes, *, strict: bool) -> bytes:
        """Return ``path`` without symbolic links, ``.`` and ``..``, as the session sees it.

        Parts that cannot be resolved (missing, closed to the user, a loop of links) stay as they are, unless
        ``strict``. Each prefix is opened from the root again, so the walk stays in the sandbox while a
        process there moves directories; the text returned may then be out of date, as with any ``realpath``.
        """
        waiting = path.split(b"/")[::-1]
        done: list[bytes] = []
        hops = 0
        while waiting:
            part = waiting.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                del done[-1:]
                continue
            whole = b"/" + b"/".join([*done, part])
            try:
                target = self._target(whole)
                if target is None and strict and any(left not in (b"", b".") for left in waiting):
                    os.close(self.open(whole, os.O_PATH | os.O_DIRECTORY))
                hops += target is not None
                if hops > _SYMLINK_HOPS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            except OSError:
                if strict:
                    raise
                target = None
            if target is None:
                done.append(part)
                continue
            if target.startswith(b"/"):
                done.clear()
            waiting += target.split(b"/")[::-1]
        return b"/" + b"/".join(done)

    def _target(self, path: bytes) -> bytes | None:
        """Return the target of a symbolic link, ``None`` for anything else."""
        with Fd(self.open(path, os.O_PATH | os.O_NOFOLLOW)) as fd:
            return os.readlink(b"", dir_fd=fd) if stat.S_ISLNK(os.fstat(fd).st_mode) else None

    def check(self, fd: int) -> os.stat_result:
        """Refuse a file on a file system of the kernel, or whose owner has no id in the session.

        In the session's overlays such an owner is accepted: an image may have ids beyond the session's. The
        kernel itself forbids every change of such a file.
        """
        info = os.fstat(fd)
        if info.st_dev != self._root_device:
            kind = syscalls.fstatfs_type(fd)
            if kind in syscalls.KERNEL_FILESYSTEMS:
                raise KernelFileSystem(errno.EPERM, "a file system of the kernel")
            if kind != syscalls.OVERLAYFS_MAGIC:
                self._check_owner(info)
        return info

    def check_own(self, fd: int) -> os.stat_result:
        """Refuse that in overlays too: the owner of a file to be changed must have an id in the session."""
        info = self.check(fd)
        self._check_owner(info)
        return info

    def _check_owner(self, info: os.stat_result) -> None:
        # Without root, ids on a mount are the session's own, and an unmapped id looks like one of its users.
        if self.base and not 0 <= info.st_uid - self.base < SESSION_IDS:
            raise NotOfTheSession(errno.EPERM, "its owner is not a user of the session")

    def outside(self, number: int) -> int:
        """Return the id on the mount for an id of the session; ``-1`` stays."""
        return number if number < 0 else self.base + number

    def inside(self, number: int) -> int:
        """Return the session's id for an id on the mount; 65534 for one that the session does not have."""
        return number - self.base if 0 <= number - self.base < SESSION_IDS else _OVERFLOW_ID

    def _make_directories(self, path: bytes) -> None:
        # Each prefix starts at the root again: ``..`` below a descriptor could lead above the root.
        parts = [part for part in path.split(b"/") if part]
        for count in range(1, len(parts) + 1):
            prefix = b"/".join(parts[:count])
            if self.exists(prefix, os.O_DIRECTORY):
                continue
            with Fd(self.open_directory(b"/" + b"/".join(parts[: count - 1]))) as parent:
                try:
                    make_directory(parent, parts[count - 1], 0o755)
                except FileExistsError:
                    if not self.exists(prefix, os.O_DIRECTORY):
                        raise


def absolute(path: Path, cwd: Path) -> bytes:
    """Return ``path`` as bytes, starting at ``cwd`` if relative. Only the kernel resolves ``..``."""
    encoded = encode(path, "path")
    return encoded if encoded.startswith(b"/") else encode(cwd, "cwd") + b"/" + encoded


def encode(path: Path, field: str) -> bytes:
    encoded = os.fsencode(path)
    if not encoded or b"\0" in encoded:
        raise InvalidRequest(f"{field} is empty or has a NUL byte", field=field)
    return encoded


def split(path: bytes) -> tuple[bytes, bytes]:
    """Return the directory and the last name of a path that must have one."""
    directory, _, name = path.rstrip(b"/").rpartition(b"/")
    if name in (b"", b".", b".."):
        raise InvalidRequest(f"{os.fsdecode(path)} does not name an entry of a directory", field="path")
    return directory or b"/", name


def split_below(name: str, field: str) -> tuple[bytes, bytes]:
    """Return the directory and the last name of a path below a directory; ``.`` for that directory."""
    parts = os.fsencode(name).split(b"/")
    if any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
        raise InvalidRequest(f"{field}: {name!r} is not a path below the directory", field=field)
    return b"/".join(parts[:-1]) or b".", parts[-1]


def make_directory(parent: int, name: bytes, mode: int) -> None:
    """Call ``mkdir`` so that the directory has exactly ``mode``, independent of the umask."""
    os.mkdir(name, mode, dir_fd=parent)
    with Fd(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as fd:
        actual = stat.S_IMODE(os.fstat(fd).st_mode)
        # A set-group-id bit inherited from the parent stays.
        if mode & ~actual or (actual ^ mode) & 0o777:
            os.chmod(proc_path(fd), mode)


def proc_path(fd: int) -> bytes:
    """Return a path to the inode of ``fd``, for calls that take no ``O_PATH`` descriptor."""
    return b"/proc/self/fd/%d" % fd


def _link_target(parent: int, name: bytes) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None
