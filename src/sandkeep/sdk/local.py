"""Local files of an upload or download. Blocking, in small chunks.

A download never leaves its target directory: entries that would are refused, and nothing is written through a
symbolic link that the archive itself made.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from sandkeep.errors import ArchiveError
from sandkeep.sdk import tarball
from sandkeep.sdk.content import CHUNK_BYTES, FileBody, Progress, write_all
from sandkeep.sdk.values import Transferred
from sandkeep.shared.tarreader import TarEntry, TarFeed
from sandkeep.states import FileKind
from sandkeep.wire.errors import exception

__all__ = [
    "ChosenReader",
    "FileBody",
    "FileWriter",
    "Progress",
    "TreeReader",
    "TreeWriter",
    "local_kind",
    "own_errors",
]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY", "O_NOINHERIT"):
    _CREATE |= getattr(os, _flag, 0)  # not every system has all of them
_SEPARATORS = "\\:" if os.name == "nt" else ""
"""Characters besides ``/`` that can lead out of a directory on this system."""


def ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether a relative path, or any name in it, matches one of the patterns (``*`` matches anything)."""
    parts = name.split("/")
    for pattern in patterns:
        pattern = pattern.rstrip("/")
        if "/" in pattern:
            if any(fnmatch.fnmatchcase("/".join(parts[: i + 1]), pattern) for i in range(len(parts))):
                return True
        elif any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            return True
    return False


class SourceFailed(Exception):
    """A local file cannot be read; the cause says why.

    A transport must not take that for an ``OSError`` of its connection.
    """


class TreeReader:
    """A local tree as a tar stream, joined into chunks of a useful size."""

    def __init__(self, root: str, prefix: str, ignore: Sequence[str], progress: Progress | None) -> None:
        self._root = root
        self._prefix = prefix
        self._ignore = ignore
        self._progress = progress
        self.files: int = 0
        self.bytes: int = 0

    def stream(self) -> Iterator[bytes]:
        """Return the archive in chunks.

        Raises:
            SourceFailed: something cannot be read.
        """
        try:
            yield from self._chunks()
        except OSError as error:
            raise SourceFailed(str(error)) from error

    def _chunks(self) -> Iterator[bytes]:
        gathered: list[bytes] = []
        size = 0
        for chunk in self._blocks():
            gathered.append(chunk)
            size += len(chunk)
            if size >= CHUNK_BYTES:
                yield b"".join(gathered)
                gathered.clear()
                size = 0
        gathered.append(tarball.END)
        yield b"".join(gathered)

    def _blocks(self) -> Iterator[bytes]:
        if self._prefix:
            mtime = int(os.stat(self._root).st_mtime)
            yield tarball.header(self._prefix, mode=0o755, mtime=mtime, directory=True)
        waiting = [""]
        while waiting:
            below = waiting.pop()
            with os.scandir(os.path.join(self._root, below)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if ignored(name, self._ignore):
                    continue
                if entry.is_symlink():
                    yield self._link(entry.path, name, entry.stat(follow_symlinks=False))
                elif entry.is_dir():
                    yield self._directory(name, entry.stat())
                    waiting.append(name)
                elif entry.is_file():
                    yield from self._file(entry.path, name)

    def _link(self, path: str, name: str, info: os.stat_result) -> bytes:
        link = os.readlink(path)
        return tarball.header(self._named(name), link=link, mode=0o777, mtime_ns=self._time(info))

    def _directory(self, name: str, info: os.stat_result) -> bytes:
        mode = stat.S_IMODE(info.st_mode)
        return tarball.header(self._named(name), mode=mode, directory=True, mtime_ns=self._time(info))

    def _time(self, info: os.stat_result) -> int:
        """Return the time of an entry, in nanoseconds; whole seconds take less room."""
        return info.st_mtime_ns // 1_000_000_000 * 1_000_000_000

    def _file(self, path: str, name: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0, opener=_opener) as handle:
            info = os.fstat(handle.fileno())
            yield tarball.header(
                self._named(name),
                size=info.st_size,
                mode=stat.S_IMODE(info.st_mode),
                mtime_ns=self._time(info),
            )
            left = info.st_size
            while left:
                data = handle.read(min(CHUNK_BYTES, left))
                if not data:
                    raise ArchiveError(f"{path} became shorter during the upload", path=path, entry=name)
                left -= len(data)
                yield data
        yield tarball.padding(info.st_size)
        self.files += 1
        self.bytes += info.st_size
        if self._progress is not None:
            self._progress(Transferred(name, self.files, self.bytes))

    def _named(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


class ChosenReader(TreeReader):
    """Chosen entries of a local tree as a tar stream, with exact times; directories before what is in them.

    An entry that is gone, or of another kind than before, is left out: it is in ``missing``.
    """

    def __init__(self, root: str, chosen: Mapping[str, FileKind], progress: Progress | None) -> None:
        super().__init__(root, "", (), progress)
        self._chosen = chosen
        self.missing: set[str] = set()

    def _blocks(self) -> Iterator[bytes]:
        for name, kind in self._chosen.items():
            path = os.path.join(self._root, name)
            try:
                info = os.lstat(path)
                if local_kind(info) != kind:
                    self.missing.add(name)
                elif kind == FileKind.SYMLINK:
                    yield self._link(path, name, info)
                elif kind == FileKind.DIRECTORY:
                    yield self._directory(name, info)
                else:
                    yield from self._file(path, name)
            except (FileNotFoundError, NotADirectoryError):
                self.missing.add(name)

    def _time(self, info: os.stat_result) -> int:
        return info.st_mtime_ns


_KINDS: Final = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.DIRECTORY,
    stat.S_IFLNK: FileKind.SYMLINK,
    stat.S_IFIFO: FileKind.FIFO,
    stat.S_IFSOCK: FileKind.SOCKET,
    stat.S_IFBLK: FileKind.BLOCK_DEVICE,
    stat.S_IFCHR: FileKind.CHARACTER_DEVICE,
}


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise what made a local file unreadable as it is."""
    try:
        yield
    except SourceFailed as failed:
        assert failed.__cause__ is not None
        raise failed.__cause__ from None


def local_kind(info: os.stat_result) -> FileKind:
    """Return the kind of a local entry."""
    return _KINDS[stat.S_IFMT(info.st_mode)]


def _opener(path: str, flags: int) -> int:
    # Known to be a file: a link that has taken its place meanwhile leads elsewhere.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


class FileWriter:
    """A local file that appears when it is complete, or not at all."""

    def __init__(self, path: str) -> None:
        self._path = path
        directory = os.path.dirname(os.path.abspath(path))
        os.makedirs(directory, exist_ok=True)
        self._draft = os.path.join(directory, f".{os.urandom(8).hex()}.part")
        self._fd = os.open(self._draft, _CREATE, 0o600)
        self.bytes: int = 0

    @classmethod
    def in_tree(cls, path: str) -> FileWriter:
        """Return a writer for a file in an existing directory, under its own name if that is free."""
        self = cls.__new__(cls)
        try:
            self._fd = os.open(path, _CREATE, 0o600)
        except FileExistsError:
            return cls(path)
        self._path = self._draft = path
        self.bytes = 0
        return self

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> None:
        write_all(self._fd, data)
        self.bytes += len(data)

    def finish(self, mode: int, mtime_ns: int | None = None) -> None:
        if hasattr(os, "fchmod"):
            os.fchmod(self._fd, mode & 0o777)
        self._close()
        if mtime_ns is not None:
            os.utime(self._draft, ns=(mtime_ns, mtime_ns))
        if self._draft != self._path:
            os.replace(self._draft, self._path)

    def discard(self) -> None:
        """Clean up after a failure."""
        self._close()
        try:
            os.unlink(self._draft)
        except FileNotFoundError:
            pass

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class TreeWriter:
    """Writes the entries of an archive below a local directory; with ``exact``, with their times."""

    def __init__(self, root: str, progress: Progress | None, *, exact: bool = False) -> None:
        self._exact = exact
        self._root = os.path.abspath(root)
        os.makedirs(self._root, exist_ok=True)
        self._feed = TarFeed()
        self._progress = progress
        self._entry: TarEntry | None = None
        self._file: FileWriter | None = None
        self._left = 0
        self._modes: list[tuple[str, int]] = []
        self._real = {self._root}
        self.files: int = 0
        self.bytes: int = 0
        self.report: ArchiveError | None = None
        """Report of the server, at the end of the archive, about entries it could not read."""

    def write(self, data: bytes) -> None:
        """Add a chunk of the archive."""
        try:
            for event in self._feed.feed(data):
                if isinstance(event, bytes):
                    self._content(event)
                else:
                    self._start(event)
        except ArchiveError as error:
            error.details.setdefault("path", self._root)
            raise

    def finish(self) -> None:
        """Complete the tree after the last chunk."""
        try:
            self._feed.finish()
        except ArchiveError as error:
            error.details |= {"path": self._root, "files": self.files}
            raise
        # Last, and inner ones first: a directory may forbid writing into it.
        for path, mode in reversed(self._modes):
            os.chmod(path, mode)
        if self._feed.trailer:
            told = exception(200, self._feed.trailer)
            self.report = told if isinstance(told, ArchiveError) else None

    def discard(self) -> None:
        """Clean up after a failure: keep complete files, remove the incomplete one."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _start(self, entry: TarEntry) -> None:
        name = tarball.text(entry.name).strip("/")
        if name in ("", "."):
            return
        path = self._place(name)
        if entry.kind == "directory":
            if not os.path.isdir(path) or os.path.islink(path):
                os.mkdir(path)
            self._real.add(path)
            self._modes.append((path, (entry.mode & 0o777) | 0o700))
        elif entry.kind == "symlink":
            _symlink(tarball.text(entry.link), path)
            self._real.discard(path)
        elif entry.kind == "hardlink":
            source = self._place(tarball.text(entry.link).strip("/"))
            _remove(path)
            os.link(source, path, follow_symlinks=os.link not in os.supports_follow_symlinks)
            self.files += 1
        elif entry.kind == "file":
            self._file = FileWriter.in_tree(path)
            self._entry, self._left = entry, entry.size
            if not entry.size:
                self._content(b"")

    def _content(self, data: bytes) -> None:
        assert self._file is not None and self._entry is not None
        self._file.write(data)
        self._left -= len(data)
        self.bytes += len(data)
        if not self._left:
            self._file.finish(self._entry.mode, self._entry.mtime_ns if self._exact else None)
            self._file = None
            self.files += 1
            if self._progress is not None:
                self._progress(Transferred(tarball.text(self._entry.name), self.files, self.bytes))

    def _place(self, name: str) -> str:
        """Return the local path of an entry. Every directory above it is a real one below the root."""
        parts = name.split("/")
        if any(part in ("", ".", "..") or set(_SEPARATORS) & set(part) for part in parts):
            raise ArchiveError(f"the archive has an unsafe entry name: {name!r}", path=name, entry=name)
        above = self._root
        for part in parts[:-1]:
            above = os.path.join(above, part)
            if above in self._real:
                continue
            if os.path.islink(above):
                raise ArchiveError(f"{name} would be written through a symbolic link", path=name, entry=name)
            os.makedirs(above, exist_ok=True)
            self._real.add(above)
        return os.path.join(above, parts[-1])


def _symlink(target: str, path: str) -> None:
    """Make a symbolic link, at once in place of a file or link that is there."""
    try:
        os.symlink(target, path)
    except FileExistsError:
        draft = os.path.join(os.path.dirname(path), f".{os.urandom(8).hex()}.part")
        os.symlink(target, draft)
        try:
            os.replace(draft, path)
        except BaseException:
            _remove(draft)
            raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
