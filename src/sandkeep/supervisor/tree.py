"""Finding things in a session's tree, which the sandbox may rearrange at any moment.

``Tree`` resolves a path once, by the kernel, with ``openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)`` from
the root descriptor: no symbolic link, ``..`` or race leads outside the sandbox. What follows works on
descriptors, or on one name below a descriptor. File systems that are an interface of the kernel are refused:
the supervisor has rights there the sandbox must not borrow.

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


class KernelFileSystem(PermissionError):
    """Something on procfs, sysfs, a cgroup or the like."""


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
        """A directory's descriptor, making missing directories on the way if ``parents``."""
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

    def entry(self, path: bytes, *, follow: bool, parents: bool = False) -> tuple[int, bytes]:
        """Descriptor of the directory that holds ``path`` (the caller's to close), and the name in it.

        ``follow`` goes on to where a symbolic link of that name points, existing or not.
        """
        for _ in range(_SYMLINK_HOPS):
            directory, name = split(path)
            fd = self.open_directory(directory, parents=parents)
            target = _link_target(fd, name) if follow else None
            if target is None:
                return fd, name
            os.close(fd)
            # The kernel may refuse to follow a link that others planted in a shared directory.
            self.exists(path)
            path = target if target.startswith(b"/") else directory + b"/" + target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def exists(self, path: bytes, flags: int = 0) -> bool:
        """Whether there is such a thing; ``O_DIRECTORY`` in ``flags`` raises if it is something else."""
        try:
            os.close(self.open(path, os.O_PATH | flags))
        except FileNotFoundError:
            return False
        return True

    def check(self, fd: int) -> os.stat_result:
        """Refuse what belongs to the kernel."""
        info = os.fstat(fd)
        if info.st_dev != self._root_device and syscalls.fstatfs_type(fd) in syscalls.KERNEL_FILESYSTEMS:
            raise KernelFileSystem(errno.EPERM, "a file system of the kernel")
        return info

    def outside(self, number: int) -> int:
        """The id on the mount of a session's id; ``-1`` stays."""
        return number if number < 0 else self.base + number

    def inside(self, number: int) -> int:
        """The session's id of an id on the mount; one the session does not have shows as nobody's."""
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
    """``path`` as bytes, starting at ``cwd`` if relative. Not normalised: only the kernel resolves ``..``."""
    encoded = encode(path, "path")
    return encoded if encoded.startswith(b"/") else encode(cwd, "cwd") + b"/" + encoded


def encode(path: Path, field: str) -> bytes:
    encoded = os.fsencode(path)
    if not encoded or b"\0" in encoded:
        raise InvalidRequest(f"{field} is empty or has a NUL byte", field=field)
    return encoded


def split(path: bytes) -> tuple[bytes, bytes]:
    """Directory and last name of a path that must have one."""
    directory, _, name = path.rstrip(b"/").rpartition(b"/")
    if name in (b"", b".", b".."):
        raise InvalidRequest(f"{os.fsdecode(path)} does not name an entry of a directory", field="path")
    return directory or b"/", name


def make_directory(parent: int, name: bytes, mode: int) -> None:
    """``mkdir`` with exactly ``mode``, whatever the process's umask is."""
    os.mkdir(name, mode, dir_fd=parent)
    with Fd(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as fd:
        actual = stat.S_IMODE(os.fstat(fd).st_mode)
        # A set-group-id bit inherited from the parent stays.
        if mode & ~actual or (actual ^ mode) & 0o777:
            os.chmod(proc_path(fd), mode)


def proc_path(fd: int) -> bytes:
    """A path for calls that take no ``O_PATH`` descriptor; it means that very inode."""
    return b"/proc/self/fd/%d" % fd


def _link_target(parent: int, name: bytes) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None
