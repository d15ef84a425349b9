"""Unpacking a tar stream into a session, as one of its users.

One entry is held at a time. Names are resolved by ``tree``, so no link that an archive or the sandbox makes
leads outside the sandbox. Hard links stay below the destination; absolute names, ``..``, FIFOs and device
nodes are refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from sandkeep.errors import ArchiveError, SandkeepError, path_error
from sandkeep.linux import syscalls
from sandkeep.shared.tarreader import TarEntry, TarReader
from sandkeep.supervisor.atomicwrite import Draft, temporary_name
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import SESSION_IDS, Identity
from sandkeep.supervisor.tree import Fd, Path, absolute, proc_path


def extract(
    files: SessionFiles,
    reader: TarReader,
    dest: Path,
    identity: Identity,
    *,
    cwd: Path = "/",
    keep_owner: bool = False,
    exact: bool = False,
    on_entry: Callable[[TarEntry], object] | None = None,
) -> int:
    """Unpack an archive below ``dest``, which is made if missing, and return the number of entries.

    Existing files and links are replaced as a whole, existing directories are kept as they are. Without
    ``keep_owner`` everything belongs to ``identity`` and set-id bits are dropped; ``user.*`` attributes are
    set, and file capabilities too with ``keep_owner``. ``on_entry`` is called after each entry is in place.
    With ``exact`` an existing directory gets the mode of its entry, the directory of every entry must exist
    or come before it, and no symbolic link below ``dest`` is followed.

    Stops at the first entry that fails with an ``ArchiveError`` carrying ``path``, ``entry``, ``index`` and
    ``entries``, the number in place. A file whose content is cut short is removed.
    """
    with files.acting_as(identity):
        try:
            fd = files.tree.open_directory(absolute(dest, cwd), parents=True)
        except OSError as error:
            raise path_error(error, "extract to", dest) from error
        with Fd(fd):
            below = absolute(dest, cwd)
            extraction = _Extraction(files, fd, below, keep_owner=keep_owner, exact=exact)
            done = 0
            try:
                for entry in reader:
                    extraction.place(entry)
                    done += 1
                    if on_entry is not None:
                        on_entry(entry)
            except SandkeepError as error:
                error.details["entries"] = done
                if (entry_name := error.details.get("entry")) is not None:
                    error.details["path"] = os.path.join(os.fsdecode(below), entry_name.rstrip("/"))
                raise
            finally:
                extraction.finish()
            return done


class _NewDirectory(NamedTuple):
    """A directory of the archive that gets its mode and time after its contents."""

    name: bytes
    key: tuple[int, int]
    mode: int
    mtime_ns: int | None
    """``None``: the time stays."""


class _Extraction:
    """Places entries one by one. Keeps the last one's directory open: the next is mostly there too."""

    def __init__(
        self, files: SessionFiles, dest_fd: int, dest: bytes, *, keep_owner: bool, exact: bool
    ) -> None:
        self._tree = files.tree
        self._dest_fd = dest_fd
        self._dest = dest
        self._exact = exact
        self._owner = keep_owner and not files.single
        self._modes = 0o7777 if keep_owner else 0o777
        self._directory: bytes | None = None
        self._directory_fd = -1
        self._unfinished: list[_NewDirectory] = []

    def place(self, entry: TarEntry) -> None:
        try:
            name = _relative(entry, entry.name)
            if not name and entry.kind == "directory":
                return
            if not name:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            directory, _, last = name.rpartition(b"/")
            if self._unfinished:
                self._finish_left(name)
            parent = self._parent(directory)
            if entry.kind == "file":
                self._file(entry, parent, last)
            elif entry.kind == "directory":
                self._make_directory(entry, parent, last, name)
            elif entry.kind == "symlink":
                self._link(parent, last, lambda new: os.symlink(entry.link, new, dir_fd=parent))
                self._own_symlink(entry, parent, last)
            elif entry.kind == "hardlink":
                self._hardlink(entry, parent, last)
            else:
                raise _refused(entry, f"is a {entry.kind.replace('_', ' ')}, which cannot be extracted")
        except OSError as error:
            number = error.errno or 0
            raise ArchiveError(
                f"entry {entry.index} ({os.fsdecode(entry.name)}): {os.strerror(number)}",
                entry=os.fsdecode(entry.name),
                index=entry.index,
                errno=number,
            ) from error

    def finish(self) -> None:
        """Set the modes and times of directories and close descriptors."""
        while self._unfinished:
            self._finish_directory(self._unfinished.pop())
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    def _parent(self, directory: bytes) -> int:
        if not directory:
            return self._dest_fd
        if directory != self._directory:
            if self._exact:
                fd = self._tree.open_beneath(self._dest_fd, directory)
            else:
                fd = self._tree.open_directory(self._dest + b"/" + directory, parents=True)
            if self._directory_fd >= 0:
                os.close(self._directory_fd)
            self._directory, self._directory_fd = directory, fd
        return self._directory_fd

    def _file(self, entry: TarEntry, parent: int, name: bytes) -> None:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        except FileExistsError:
            self._replace_file(entry, parent, name)
            return
        try:
            self._fill(entry, fd)
        except BaseException:
            _unlink_if_there(parent, name)
            raise
        finally:
            os.close(fd)

    def _replace_file(self, entry: TarEntry, parent: int, name: bytes) -> None:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        draft = Draft(parent, name)
        try:
            self._fill(entry, draft.fd)
            draft.publish(replace=True)
        finally:
            draft.close()

    def _fill(self, entry: TarEntry, fd: int) -> None:
        entry.copy_to(fd)
        if self._owner:
            os.fchown(fd, *self._ids(entry))
        for key, value in entry.xattrs.items():
            if self._wanted_attribute(key):
                os.setxattr(fd, key, value)
        os.fchmod(fd, entry.mode & self._modes)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _make_directory(self, entry: TarEntry, parent: int, name: bytes, whole: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if self._exact:
                self._change_directory(entry, parent, name, whole)
                return
            # A link to a directory counts as one.
            if not self._tree.exists(self._dest + b"/" + whole, os.O_DIRECTORY):
                raise
            return
        with Fd(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as fd:
            if self._owner:
                os.chown(proc_path(fd), *self._ids(entry))
            info = os.fstat(fd)
        mode = entry.mode & self._modes | info.st_mode & stat.S_ISGID
        self._unfinished.append(_NewDirectory(whole, (info.st_dev, info.st_ino), mode, entry.mtime_ns))

    def _change_directory(self, entry: TarEntry, parent: int, name: bytes, whole: bytes) -> None:
        """Give an existing directory the mode of its entry; until the end its owner can also write to it."""
        with Fd(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)) as fd:
            info = self._tree.check_own(fd)
            mode = entry.mode & self._modes | info.st_mode & stat.S_ISGID
            os.chmod(proc_path(fd), mode | stat.S_IRWXU)
        self._unfinished.append(_NewDirectory(whole, (info.st_dev, info.st_ino), mode, None))

    def _hardlink(self, entry: TarEntry, parent: int, name: bytes) -> None:
        target = _relative(entry, entry.link)
        directory, _, last = target.rpartition(b"/")
        if not last:
            raise _refused(entry, "links to the destination itself")
        resolve = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
        flags = os.O_PATH | os.O_DIRECTORY
        with Fd(syscalls.openat2(self._dest_fd, directory or b".", flags, resolve=resolve)) as source:
            self._tree.check(source)
            self._link(
                parent,
                name,
                lambda new: os.link(last, new, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False),
            )

    def _link(self, parent: int, name: bytes, make: Callable[[bytes], None]) -> None:
        """Make a link under ``name``, in place of anything but a directory."""
        try:
            make(name)
            return
        except FileExistsError:
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise
        temporary = temporary_name()
        make(temporary)
        try:
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        finally:
            # Renaming one name of a file over another name of it leaves both.
            _unlink_if_there(parent, temporary)

    def _own_symlink(self, entry: TarEntry, parent: int, name: bytes) -> None:
        if not self._owner:
            return
        with Fd(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)) as fd:
            # A process in the sandbox may have replaced it by a hard link to another user's file.
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                os.chown(proc_path(fd), *self._ids(entry))

    def _ids(self, entry: TarEntry) -> tuple[int, int]:
        if entry.uid >= SESSION_IDS or entry.gid >= SESSION_IDS:
            raise _refused(entry, f"belongs to {entry.uid}:{entry.gid}, ids the sandbox does not have")
        return self._tree.outside(entry.uid), self._tree.outside(entry.gid)

    def _wanted_attribute(self, key: bytes) -> bool:
        if key.startswith(b"user."):
            # Overlayfs reads these itself if the layer is ever mounted with ``userxattr``.
            return not key.startswith(b"user.overlay.")
        return self._owner and key == b"security.capability"

    def _finish_left(self, name: bytes) -> None:
        """Finish the directories that do not contain ``name``, so that few are pending at a time."""
        while self._unfinished and not name.startswith(self._unfinished[-1].name + b"/"):
            self._finish_directory(self._unfinished.pop())

    def _finish_directory(self, new: _NewDirectory) -> None:
        try:
            with Fd(self._tree.open(self._dest + b"/" + new.name, os.O_PATH | os.O_NOFOLLOW)) as fd:
                info = os.fstat(fd)
                # Looked up by path again, so check that it is the one that was made.
                if (info.st_dev, info.st_ino) == new.key:
                    if new.mtime_ns is not None:
                        os.utime(proc_path(fd), ns=(new.mtime_ns, new.mtime_ns))
                    os.chmod(proc_path(fd), new.mode)
        except OSError:
            # A process in the sandbox removed it.
            pass


def _relative(entry: TarEntry, name: bytes) -> bytes:
    """Return ``name`` without ``.`` and empty parts, ``b""`` for the destination itself."""
    if name.startswith(b"/"):
        raise _refused(entry, "has an absolute name")
    if b"/./" not in name and b"//" not in name and b".." not in name and name[:2] != b"./":
        return b"" if name == b"." else name.rstrip(b"/").removesuffix(b"/.")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise _refused(entry, "has .. in its name")
    return b"/".join(parts)


def _refused(entry: TarEntry, why: str) -> ArchiveError:
    name = os.fsdecode(entry.name)
    return ArchiveError(f"entry {entry.index} ({name}) {why}", entry=name, index=entry.index)


def _unlink_if_there(parent: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except OSError:
        pass
