"""Streaming trees of a session out as tar, as one of its users.

Directories are walked by descriptor, never through a symbolic link, and file systems of the kernel are left
out. One chunk of one file is held at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sandkeep.errors import ArchiveError, InvalidRequest, path_error
from sandkeep.shared.tarwriter import TarWriter
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Identity
from sandkeep.supervisor.tree import Fd, KernelFileSystem, Path, absolute, encode, split_below

_CHUNK = 1 << 18
DEPTH = 256
"""Most directories inside each other."""
_NAMED = 100
"""Most names that an error lists."""


class Archived(NamedTuple):
    entries: int
    left_out: tuple[str, ...]
    """FIFOs, sockets, devices and file systems of the kernel, which an archive does not hold; at most 100."""


def archive(
    files: SessionFiles,
    paths: Iterable[Path],
    writer: TarWriter,
    identity: Identity,
    *,
    cwd: Path = "/",
    ignore: Sequence[str] = (),
) -> Archived:
    """Write the trees at ``paths`` to ``writer`` and end the archive.

    Entries are named as the paths are given, less a leading ``/``; ``.`` and ``/`` give their contents.
    Names come sorted, links are stored as links, further names of one file as hard links. ``ignore`` holds
    names, or with a ``/`` whole entry names, in which ``*`` matches anything.

    A file that cannot be read, or that changes size while it is read, does not stop the archive, which stays
    well-formed: an ``ArchiveError`` with ``unreadable`` and ``changed`` is raised after its end. ``path`` and
    ``entry`` of the error name the first such file, and ``errno`` says why that could not be read.
    """
    with files.acting_as(identity):
        outgoing = _Outgoing(files, writer, ignore)
        for path in paths:
            outgoing.start = b"/" if encode(path, "path").startswith(b"/") else encode(cwd, "cwd")
            name = b"/".join(part for part in encode(path, "path").split(b"/") if part not in (b"", b"."))
            if b".." in name.split(b"/"):
                raise InvalidRequest(f"{os.fsdecode(path)} has .. in it", field="path")
            try:
                outgoing.add_path(absolute(path, cwd), name)
            except OSError as error:
                raise path_error(error, "archive", path) from error
        writer.close()
    return _finished(outgoing)


def archive_entries(
    files: SessionFiles,
    path: Path,
    names: Sequence[str],
    writer: TarWriter,
    identity: Identity,
    *,
    cwd: Path = "/",
) -> Archived:
    """Write chosen entries of the tree at ``path``, and end the archive.

    ``names`` are relative to the tree. A directory is written without what is below it. Times are exact to
    the nanosecond, and no symbolic link below the tree is followed. An entry that is gone is left out; what
    cannot be read, or changes meanwhile, is reported as ``archive`` does.
    """
    with files.acting_as(identity):
        outgoing = _Outgoing(files, writer, (), exact=True)
        outgoing.start = absolute(path, cwd)
        try:
            top = files.tree.open_directory(outgoing.start)
        except OSError as error:
            raise path_error(error, "archive", path) from error
        with Fd(top):
            for name in names:
                try:
                    outgoing.add_entry(top, name)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:
                    raise path_error(error, "archive", os.path.join(os.fsdecode(path), name)) from error
        writer.close()
    return _finished(outgoing)


def too_deep(top: str, name: str) -> ArchiveError:
    """Return the error for a tree with more directories inside each other than are followed."""
    return ArchiveError(f"{name}: deeper than {DEPTH} directories", path=os.path.join(top, name), entry=name)


def _finished(outgoing: _Outgoing) -> Archived:
    """Return what was archived, or raise for entries that could not be."""
    if outgoing.failed is not None:
        first, path = outgoing.failed
        others = " and others" if len(outgoing.unreadable) + len(outgoing.changed) > 1 else ""
        why: dict[str, Any] = {} if outgoing.errno is None else {"errno": outgoing.errno}
        raise ArchiveError(
            f"{first}{others} could not be archived as they are",
            **why,
            path=path,
            entry=first,
            entries=outgoing.entries,
            unreadable=outgoing.unreadable,
            changed=outgoing.changed,
        )
    return Archived(outgoing.entries, tuple(outgoing.left_out))


class _Outgoing:
    def __init__(
        self, files: SessionFiles, writer: TarWriter, ignore: Sequence[str], *, exact: bool = False
    ) -> None:
        self._tree = files.tree
        self._writer = writer
        self._exact = exact
        self._ignored = [os.fsencode(pattern).split(b"*") for pattern in ignore if "/" not in pattern]
        self._ignored_whole = [os.fsencode(p).strip(b"/").split(b"*") for p in ignore if "/" in p]
        self._links: dict[tuple[int, int], bytes] = {}
        self.start = b"/"
        """Directory that entry names are relative to."""
        self.failed: tuple[str, str] | None = None
        """Entry name and path of the first file that is missing from the archive or differs."""
        self.entries = 0
        self.unreadable: list[str] = []
        self.errno: int | None = None
        self.changed: list[str] = []
        self.left_out: list[str] = []

    def add_path(self, path: bytes, name: bytes) -> None:
        if not name:
            with Fd(self._tree.open_directory(path, os.O_RDONLY)) as fd:
                self._walk(fd, b"")
            return
        parent, last = self._tree.entry(path, follow=False)
        with Fd(parent):
            info = os.stat(last, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                below = self._directory(parent, last, name)
                if below >= 0:
                    with Fd(below):
                        self._walk(below, name)
            else:
                self._leaf(parent, last, name, info)

    def add_entry(self, top: int, name: str) -> None:
        """Add one entry below an open directory, without what is below it."""
        directory, last = split_below(name, "names")
        with Fd(self._tree.open_beneath(top, directory)) as parent:
            info = os.stat(last, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                self._leaf(parent, last, os.fsencode(name), info)
            elif (below := self._directory(parent, last, os.fsencode(name))) >= 0:
                os.close(below)

    def _walk(self, top: int, top_name: bytes) -> None:
        """Add everything below an open directory. The caller keeps and closes the descriptor."""
        levels = [(top, top_name, iter(sorted(os.fsencode(name) for name in os.listdir(top))))]
        try:
            while levels:
                fd, prefix, names = levels[-1]
                last = next(names, None)
                if last is None:
                    levels.pop()
                    if levels:
                        os.close(fd)
                    continue
                name = prefix + b"/" + last if prefix else last
                if self._is_ignored(last, name):
                    continue
                try:
                    info = os.stat(last, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(info.st_mode):
                    self._leaf(fd, last, name, info)
                    continue
                if len(levels) == DEPTH:
                    raise too_deep(os.fsdecode(self.start), os.fsdecode(name))
                below = self._directory(fd, last, name)
                if below >= 0:
                    levels.append((below, name, iter(sorted(os.fsencode(n) for n in os.listdir(below)))))
        finally:
            for fd, _, _ in levels[1:]:
                os.close(fd)

    def _directory(self, parent: int, last: bytes, name: bytes) -> int:
        """Add a directory and return its descriptor, or -1 if it is left out."""
        try:
            fd = os.open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            self._cannot_read(name, error)
            return -1
        try:
            info = self._tree.check(fd)
        except KernelFileSystem:
            os.close(fd)
            _note(self.left_out, name)
            return -1
        self._add(name, "directory", info)
        return fd

    def _leaf(self, parent: int, last: bytes, name: bytes, info: os.stat_result) -> None:
        if stat.S_ISREG(info.st_mode):
            self._file(parent, last, name)
        elif stat.S_ISLNK(info.st_mode):
            try:
                link = os.readlink(last, dir_fd=parent)
            except OSError:
                self._failed(self.changed, name)
                return
            self._add(name, "symlink", info, link=link)
        else:
            _note(self.left_out, name)

    def _file(self, parent: int, last: bytes, name: bytes) -> None:
        try:
            fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=parent)
        except OSError as error:
            self._cannot_read(name, error)
            return
        with Fd(fd):
            try:
                info = self._tree.check(fd)
            except KernelFileSystem:
                _note(self.left_out, name)
                return
            if not stat.S_ISREG(info.st_mode):
                self._failed(self.changed, name)
                return
            key = (info.st_dev, info.st_ino)
            if info.st_nlink > 1 and key in self._links:
                self._add(name, "hardlink", info, link=self._links[key])
                return
            if info.st_nlink > 1:
                self._links[key] = name
            self._add(name, "file", info, size=info.st_size)
            self._content(fd, name, info.st_size)

    def _content(self, fd: int, name: bytes, size: int) -> None:
        left = size
        while left:
            try:
                data = os.read(fd, min(left, _CHUNK))
            except OSError as error:
                self._cannot_read(name, error)
                data = b""
            if not data:
                break
            self._writer.content(data)
            left -= len(data)
        if left or os.fstat(fd).st_size != size:
            self._failed(self.changed, name)
        while left:
            # The header has announced these bytes.
            data = bytes(min(left, _CHUNK))
            self._writer.content(data)
            left -= len(data)

    def _cannot_read(self, name: bytes, error: OSError) -> None:
        if self.failed is None:
            self.errno = error.errno
        self._failed(self.unreadable, name)

    def _failed(self, names: list[str], name: bytes) -> None:
        _note(names, name)
        if self.failed is None:
            self.failed = os.fsdecode(name), os.fsdecode(os.path.join(self.start, name))

    def _add(self, name: bytes, kind: str, info: os.stat_result, *, size: int = 0, link: bytes = b"") -> None:
        self._writer.add(
            name,
            kind,
            mode=stat.S_IMODE(info.st_mode),
            uid=self._tree.inside(info.st_uid),
            gid=self._tree.inside(info.st_gid),
            size=size,
            mtime=info.st_mtime_ns // 1_000_000_000,
            mtime_ns=info.st_mtime_ns if self._exact else None,
            link=link,
        )
        self.entries += 1

    def _is_ignored(self, last: bytes, name: bytes) -> bool:
        return any(_matches(last, pattern) for pattern in self._ignored) or any(
            _matches(name, pattern) for pattern in self._ignored_whole
        )


def _matches(name: bytes, literals: list[bytes]) -> bool:
    """Return whether ``name`` is the literals of a pattern with anything in between."""
    if len(literals) == 1:
        return name == literals[0]
    first, *middle, final = literals
    if len(name) < len(first) + len(final) or not (name.startswith(first) and name.endswith(final)):
        return False
    position, end = len(first), len(name) - len(final)
    for literal in middle:
        start = name.find(literal, position, end)
        if start < 0:
            return False
        position = start + len(literal)
    return True


def _note(names: list[str], name: bytes) -> None:
    if len(names) < _NAMED:
        names.append(os.fsdecode(name))
