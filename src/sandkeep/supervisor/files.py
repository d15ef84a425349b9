"""File operations on a session from outside it, as one of its users.

Every operation names a path of the sandbox, an ``Identity`` to act as, and runs on the calling thread. Names
are resolved by ``tree``, so no path leads outside the sandbox. Content is only read from and written to
regular files, opened with ``O_NONBLOCK`` until that is known; FIFOs, devices and sockets are refused.

Paths are ``str`` (with surrogate escapes for bytes that are not UTF-8) or ``bytes``; a relative one starts at
``cwd``. Failures are ``PathError`` and its subclasses; an invalid path is ``InvalidRequest``.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from sandkeep.errors import (
    InvalidRequest,
    LimitReached,
    NotRegularFile,
    PathError,
    SandkeepError,
    path_error,
)
from sandkeep.linux import syscalls
from sandkeep.shared.removal import remove_tree
from sandkeep.supervisor.atomicwrite import Draft, InPlace, ReadContent
from sandkeep.supervisor.identity import SESSION_IDS, ActingAs, Identity
from sandkeep.supervisor.tree import (
    Fd,
    KernelFileSystem,
    NotOfTheSession,
    Path,
    Tree,
    absolute,
    encode,
    make_directory,
    proc_path,
)

LIST_LIMIT = 100_000
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR)
"""Errors of renaming that are caused by an entry at the new name."""

KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character_device",
    stat.S_IFBLK: "block_device",
}


class Stat(NamedTuple):
    """One directory entry; ids as the sandbox sees them."""

    name: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ino: int
    nlink: int
    target: str | None
    """Target of a symbolic link, as stored."""


class Opened(NamedTuple):
    """A regular file positioned at ``offset``; the caller closes ``fd``."""

    fd: int
    size: int
    offset: int
    length: int
    """Bytes of the requested range that the file had when it was opened."""


class SessionFiles:
    """The files of one session. Safe to share between threads; uses ``root_fd`` but does not own it."""

    def __init__(self, root_fd: int, *, base: int = 0, single: bool = False) -> None:
        """``base`` is the id on the mount of the session's id 0; ``single`` means it has only that one."""
        self.tree = Tree(root_fd, base=base)
        self.single = single

    def acting_as(self, identity: Identity) -> ActingAs:
        return ActingAs(identity, base=self.tree.base, single=self.single)

    # --- reading ---------------------------------------------------------------------------------------

    def stat(self, path: Path, identity: Identity, *, cwd: Path = "/", follow: bool = True) -> Stat:
        with self._operation("stat", path, identity):
            whole = absolute(path, cwd)
            with Fd(self.tree.open(whole, os.O_PATH | (0 if follow else os.O_NOFOLLOW))) as fd:
                info = os.fstat(fd)
                target = os.readlink("", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else None
            return self._stat(whole.rstrip(b"/").rpartition(b"/")[2] or b"/", info, target)

    def listdir(
        self, path: Path, identity: Identity, *, cwd: Path = "/", limit: int = LIST_LIMIT
    ) -> list[Stat]:
        """Return the entries sorted by name; entries that vanish during the call are left out.

        Raises ``LimitReached`` beyond ``limit`` entries.
        """
        with (
            self._operation("list", path, identity),
            Fd(self.tree.open_directory(absolute(path, cwd), os.O_RDONLY)) as fd,
        ):
            found: list[Stat] = []
            with os.scandir(fd) as entries:
                for entry in entries:
                    if len(found) == limit:
                        raise LimitReached(
                            f"{os.fsdecode(path)} has more than {limit} entries",
                            limit="directory entries",
                            value=limit,
                        )
                    try:
                        info = entry.stat(follow_symlinks=False)
                        target = os.readlink(entry.name, dir_fd=fd) if entry.is_symlink() else None
                    except OSError as error:
                        if error.errno in (errno.ENOENT, errno.EINVAL):
                            continue
                        raise
                    found.append(self._stat(os.fsencode(entry.name), info, target))
            found.sort(key=lambda entry: os.fsencode(entry.name))
            return found

    def open_read(
        self,
        path: Path,
        identity: Identity,
        *,
        cwd: Path = "/",
        offset: int = 0,
        length: int | None = None,
    ) -> Opened:
        """Open a regular file for reading, for ``sendfile`` or ``read`` from where it is positioned."""
        if not 0 <= offset < 1 << 63 or (length is not None and length < 0):
            raise InvalidRequest(f"{length} bytes from offset {offset} is not a range", field="offset")
        with self._operation("read", path, identity):
            fd = self.tree.open(absolute(path, cwd), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                size = self._check_regular(fd, path, "read").st_size
                os.lseek(fd, offset, os.SEEK_SET)
            except BaseException:
                os.close(fd)
                raise
            rest = max(size - offset, 0)
            return Opened(fd, size, offset, rest if length is None else min(rest, length))

    def readlink(self, path: Path, identity: Identity, *, cwd: Path = "/") -> str:
        with (
            self._operation("readlink", path, identity),
            Fd(self.tree.open(absolute(path, cwd), os.O_PATH | os.O_NOFOLLOW)) as fd,
        ):
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                raise _Explained(errno.EINVAL, "Not a symbolic link")
            return os.readlink("", dir_fd=fd)

    def realpath(self, path: Path, identity: Identity, *, cwd: Path = "/", strict: bool = False) -> str:
        """Return the path without symbolic links; with ``strict`` everything on it must exist."""
        with self._operation("realpath", path, identity):
            return os.fsdecode(self.tree.real(absolute(path, cwd), strict=strict))

    # --- writing ---------------------------------------------------------------------------------------

    def write(
        self,
        path: Path,
        source: ReadContent,
        identity: Identity,
        *,
        cwd: Path = "/",
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        exclusive: bool = False,
        size: int | None = None,
    ) -> int:
        """Write the content of ``source`` and return its length.

        The file appears, or replaces an existing one, when it is complete; processes that read the old one
        keep it. A replaced file keeps its permissions unless ``mode`` is given, and its owner where the
        identity may set it. In a directory where the identity may not create files, an existing file is
        written in place instead. ``append`` writes at the end, in place. ``exclusive`` refuses an existing
        entry. ``size``, if given, must equal the length that arrives.

        Errors carry ``bytes_written``; an unfinished file is removed, unless it was written in place.
        """
        _check_mode(mode)
        with self._operation("write", path, identity) as operation:
            parent, name = self.tree.entry(absolute(path, cwd), follow=not exclusive, parents=parents)
            with Fd(parent):
                existing = self._existing_file(parent, name, path, exclusive=exclusive)
                output = self._output(parent, name, path, existing, mode=mode, append=append)
                try:
                    output.fill(source)
                    if size is not None and output.written != size:
                        text = os.fsdecode(path)
                        raise PathError(
                            f"write {text}: {output.written} bytes arrived, {size} were announced",
                            path=text,
                            operation="write",
                        )
                    output.publish(replace=not exclusive)
                finally:
                    operation.facts["bytes_written"] = output.written
                    output.close()
            return output.written

    def copy(
        self,
        source: Path,
        target: Path,
        identity: Identity,
        *,
        cwd: Path = "/",
        parents: bool = False,
    ) -> int:
        """Copy one regular file with its permissions, replacing ``target`` as ``write`` does."""
        opened = self.open_read(source, identity, cwd=cwd)
        with Fd(opened.fd) as fd:
            mode = stat.S_IMODE(os.fstat(fd).st_mode) & 0o777
            return self.write(target, lambda n: os.read(fd, n), identity, cwd=cwd, mode=mode, parents=parents)

    def mkdir(
        self,
        path: Path,
        identity: Identity,
        *,
        cwd: Path = "/",
        mode: int = 0o755,
        parents: bool = False,
    ) -> None:
        """Make a directory; with ``parents`` also missing ones above it, and accept an existing one."""
        _check_mode(mode)
        with self._operation("mkdir", path, identity):
            whole = absolute(path, cwd)
            if parents and self._is_directory(whole):
                return
            parent, name = self.tree.entry(whole, follow=False, parents=parents)
            with Fd(parent):
                make_directory(parent, name, mode)

    def symlink(self, target: Path, path: Path, identity: Identity, *, cwd: Path = "/") -> None:
        """Make a symbolic link at ``path``; ``target`` is stored as given."""
        with self._operation("symlink", path, identity):
            parent, name = self.tree.entry(absolute(path, cwd), follow=False)
            with Fd(parent):
                os.symlink(encode(target, "target"), name, dir_fd=parent)

    def rename(
        self,
        source: Path,
        target: Path,
        identity: Identity,
        *,
        cwd: Path = "/",
        replace: bool = True,
    ) -> None:
        with self._operation("rename", source, identity) as operation:
            operation.facts["target"] = os.fsdecode(target)
            old_parent, old = self.tree.entry(absolute(source, cwd), follow=False)
            with Fd(old_parent):
                operation.about("rename to", target)
                new_parent, new = self.tree.entry(absolute(target, cwd), follow=False)
                with Fd(new_parent):
                    refuse_mounted(new_parent, new)
                    operation.about("rename", source)
                    refuse_mounted(old_parent, old)
                    flags = 0 if replace else syscalls.RENAME_NOREPLACE
                    try:
                        syscalls.renameat2(old_parent, old, new_parent, new, flags)
                    except OSError as error:
                        if error.errno in _IN_THE_WAY:
                            operation.about("rename to", target)
                        elif error.errno == errno.EINVAL:
                            raise _Explained(errno.EINVAL, "A directory cannot go below itself") from None
                        raise

    def remove(
        self,
        path: Path,
        identity: Identity,
        *,
        cwd: Path = "/",
        recursive: bool = False,
        missing_ok: bool = False,
    ) -> None:
        """Remove a file, a link (not its target), or a directory, which must be empty unless ``recursive``.

        Another file system mounted below is neither entered nor removed.
        """
        try:
            with self._operation("remove", path, identity) as operation:
                parent, name = self.tree.entry(absolute(path, cwd), follow=False)
                with Fd(parent):
                    refuse_mounted(parent, name)
                    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                        os.unlink(name, dir_fd=parent)
                    elif recursive:
                        try:
                            remove_tree(parent, name)
                        except OSError as error:
                            operation.facts["stopped_at"] = os.fsdecode(error.filename)
                            raise
                    else:
                        os.rmdir(name, dir_fd=parent)
        except PathError as error:
            if not (missing_ok and error.details.get("errno") == errno.ENOENT):
                raise

    def chmod(self, path: Path, mode: int, identity: Identity, *, cwd: Path = "/") -> None:
        _check_mode(mode)
        with (
            self._operation("chmod", path, identity),
            Fd(self.tree.open(absolute(path, cwd), os.O_PATH)) as fd,
        ):
            self._check_changeable(fd, path, "chmod")
            os.chmod(proc_path(fd), mode)

    def chown(
        self,
        path: Path,
        uid: int,
        gid: int,
        identity: Identity,
        *,
        cwd: Path = "/",
        follow: bool = True,
    ) -> None:
        """Set owner and group, ``-1`` leaving one as it is. A ``single`` session has one owner: no effect."""
        for field, number in (("uid", uid), ("gid", gid)):
            if not -1 <= number < SESSION_IDS:
                raise InvalidRequest(f"{field} {number} is not below {SESSION_IDS}", field=field)
        with (
            self._operation("chown", path, identity),
            Fd(self.tree.open(absolute(path, cwd), os.O_PATH | (0 if follow else os.O_NOFOLLOW))) as fd,
        ):
            self._check_changeable(fd, path, "chown")
            if not self.single:
                os.chown(proc_path(fd), self.tree.outside(uid), self.tree.outside(gid))

    # --- details ---------------------------------------------------------------------------------------

    def _operation(self, name: str, path: Path, identity: Identity) -> _Operation:
        return _Operation(name, path, self.acting_as(identity))

    def _stat(self, name: bytes, info: os.stat_result, target: str | None) -> Stat:
        return Stat(
            os.fsdecode(name),
            KINDS.get(stat.S_IFMT(info.st_mode), "unknown"),
            info.st_size,
            stat.S_IMODE(info.st_mode),
            self.tree.inside(info.st_uid),
            self.tree.inside(info.st_gid),
            info.st_mtime_ns,
            info.st_ino,
            info.st_nlink,
            target,
        )

    def _is_directory(self, path: bytes) -> bool:
        """Return whether a directory is at ``path``; raise ``FileExistsError`` if it is something else."""
        try:
            return self.tree.exists(path, os.O_DIRECTORY)
        except NotADirectoryError:
            # The same error means that a directory above is a file: then the second lookup raises it too.
            self.tree.exists(path.rstrip(b"/"))
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def _check_regular(self, fd: int, path: Path, operation: str) -> os.stat_result:
        info = self.tree.check(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(info.st_mode, path, operation)
        return info

    def _check_changeable(self, fd: int, path: Path, operation: str) -> None:
        mode = self.tree.check_own(fd).st_mode
        if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise _not_regular(mode, path, operation)

    def _existing_file(
        self, parent: int, name: bytes, path: Path, *, exclusive: bool
    ) -> os.stat_result | None:
        """Open the existing file if the identity may write to it."""
        try:
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(info.st_mode, path, "write")
        syscalls.faccessat2(parent, name, os.W_OK)
        return info

    def _output(
        self,
        parent: int,
        name: bytes,
        path: Path,
        existing: os.stat_result | None,
        *,
        mode: int | None,
        append: bool,
    ) -> InPlace:
        if append:
            return self._in_place(parent, name, path, mode=mode, append=True)
        try:
            draft = Draft(parent, name)
        except PermissionError:
            if existing is None:
                raise
            return self._in_place(parent, name, path, mode=mode, append=False)
        try:
            if existing is not None:
                _keep_owner(draft.fd, existing)
            if mode is None:
                # Like writing in place, replacing drops set-id bits and capabilities of the old content.
                mode = 0o644 if existing is None else existing.st_mode & 0o777
            os.fchmod(draft.fd, mode)
        except BaseException:
            draft.close()
            raise
        return draft

    def _in_place(self, parent: int, name: bytes, path: Path, *, mode: int | None, append: bool) -> InPlace:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        flags |= os.O_APPEND | os.O_CREAT if append else 0
        output = InPlace(os.open(name, flags, 0o644, dir_fd=parent))
        try:
            self._check_regular(output.fd, path, "write")
            if not append:
                os.ftruncate(output.fd, 0)
            if mode is not None:
                os.fchmod(output.fd, mode)
        except BaseException:
            output.close()
            raise
        return output


class _Explained(OSError):
    """An ``OSError`` whose text says more than its number."""


class _Operation:
    """Acts as an identity, and turns an ``OSError`` of the block into the typed error."""

    __slots__ = ("_acting", "_name", "_path", "facts")

    def __init__(self, name: str, path: Path, acting: ActingAs) -> None:
        self._name = name
        self._path = path
        self._acting = acting
        self.facts: dict[str, object] = {}
        """Further details for an error of this operation."""

    def about(self, name: str, path: Path) -> None:
        """Attribute later errors of this block to ``path``."""
        self._name = name
        self._path = path

    def __enter__(self) -> _Operation:
        self._acting.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._acting.__exit__()
        if isinstance(error, SandkeepError):
            error.details.update(self.facts)
        elif isinstance(error, OSError):
            problem = error.strerror if isinstance(error, _Explained) else None
            typed = path_error(error, self._name, self._path, problem=problem)
            if error.errno == errno.ENXIO:
                # The error of opening a socket, or a FIFO without a reader.
                typed = NotRegularFile(typed.message, **typed.details)
            typed.details.update(self.facts)
            if isinstance(error, KernelFileSystem):
                typed.hint = "Files of /proc, /sys and the like can be used by processes in the sandbox only."
            elif isinstance(error, NotOfTheSession):
                typed.hint = "Its owner is not a user of the sandbox."
            raise typed from error


def _check_mode(mode: int | None) -> None:
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"not a permission mode: {mode:#o}", field="mode")


def refuse_mounted(parent: int, name: bytes) -> None:
    """Refuse an entry something is mounted on.

    The kernel refuses only if the mount is in the caller's own mount namespace. The supervisor is in another
    one, so it would remove the session's /proc or /dev.
    """
    flags = os.O_PATH | os.O_NOFOLLOW
    try:
        os.close(syscalls.openat2(parent, name, flags, resolve=syscalls.RESOLVE_NO_XDEV))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise _Explained(errno.EBUSY, "A file system is mounted there", name) from None
        raise


def _keep_owner(fd: int, existing: os.stat_result) -> None:
    for uid in (existing.st_uid, -1):
        try:
            os.fchown(fd, uid, existing.st_gid)
            return
        except PermissionError:
            continue


def _not_regular(mode: int, path: Path, operation: str) -> PathError:
    text = os.fsdecode(path)
    if stat.S_ISDIR(mode):
        return path_error(IsADirectoryError(errno.EISDIR, ""), operation, path)
    kind = KINDS.get(stat.S_IFMT(mode), "unknown").replace("_", " ")
    return NotRegularFile(
        f"{operation} {text}: a {kind}, not a regular file",
        path=text,
        errno=errno.EINVAL,
        operation=operation,
    )
