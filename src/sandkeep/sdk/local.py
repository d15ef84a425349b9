"""Files on this side of an upload or download. Blocking, in small pieces.

A download never leaves the directory it was given: entries that would are refused, and nothing is written
through a symbolic link that the archive itself made.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import stat
from collections.abc import Iterator, Sequence

from sandkeep.errors import ArchiveError
from sandkeep.sdk import tarball
from sandkeep.sdk.content import PIECE, FileBody, Progress, write_all
from sandkeep.sdk.values import Transferred

__all__ = ["FileBody", "FileWriter", "Progress", "TreeReader", "TreeWriter"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


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


class TreeReader:
    """A local tree as a tar stream, gathered into pieces of a useful size."""

    def __init__(self, root: str, prefix: str, ignore: Sequence[str], progress: Progress | None) -> None:
        self._root = root
        self._prefix = prefix
        self._ignore = ignore
        self._progress = progress
        self.files: int = 0
        self.bytes: int = 0

    def stream(self) -> Iterator[bytes]:
        """The archive."""
        gathered: list[bytes] = []
        size = 0
        for piece in self._blocks():
            gathered.append(piece)
            size += len(piece)
            if size >= PIECE:
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
                    mtime = int(entry.stat(follow_symlinks=False).st_mtime)
                    link = os.readlink(entry.path)
                    yield tarball.header(self._named(name), link=link, mode=0o777, mtime=mtime)
                elif entry.is_dir():
                    info = entry.stat()
                    mode, mtime = stat.S_IMODE(info.st_mode), int(info.st_mtime)
                    yield tarball.header(self._named(name), mode=mode, mtime=mtime, directory=True)
                    waiting.append(name)
                elif entry.is_file():
                    yield from self._file(entry.path, name)

    def _file(self, path: str, name: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as handle:
            info = os.fstat(handle.fileno())
            yield tarball.header(
                self._named(name),
                size=info.st_size,
                mode=stat.S_IMODE(info.st_mode),
                mtime=int(info.st_mtime),
            )
            left = info.st_size
            while left:
                data = handle.read(min(PIECE, left))
                if not data:
                    raise ArchiveError(f"{path} became shorter while it was sent", path=path, entry=name)
                left -= len(data)
                yield data
        yield tarball.padding(info.st_size)
        self.files += 1
        self.bytes += info.st_size
        if self._progress is not None:
            self._progress(Transferred(name, self.files, self.bytes))

    def _named(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


class FileWriter:
    """A local file that appears when it is complete, or not at all."""

    def __init__(self, path: str) -> None:
        self._path = path
        directory = os.path.dirname(os.path.abspath(path))
        os.makedirs(directory, exist_ok=True)
        self._draft = os.path.join(directory, f".{secrets.token_hex(8)}.part")
        self._fd = os.open(self._draft, _CREATE, 0o600)
        self.bytes: int = 0

    @classmethod
    def in_tree(cls, path: str) -> FileWriter:
        """One of many, in a directory that is there: under its own name when nothing has it yet."""
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

    def finish(self, mode: int) -> None:
        os.fchmod(self._fd, mode & 0o777)
        self._close()
        if self._draft != self._path:
            os.replace(self._draft, self._path)

    def discard(self) -> None:
        """After a failure."""
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
    """Puts the entries of an archive below a local directory."""

    def __init__(self, root: str, progress: Progress | None) -> None:
        self._root = os.path.abspath(root)
        os.makedirs(self._root, exist_ok=True)
        self._feed = tarball.TarFeed()
        self._progress = progress
        self._entry: tarball.Entry | None = None
        self._file: FileWriter | None = None
        self._left = 0
        self._modes: list[tuple[str, int]] = []
        self._real = {self._root}
        self.files: int = 0
        self.bytes: int = 0

    def write(self, data: bytes) -> None:
        """More of the archive."""
        try:
            for event in self._feed.feed(data):
                if isinstance(event, bytes):
                    self._content(event)
                else:
                    self._start(event)
        except tarball.BadArchive as error:
            raise ArchiveError(f"the archive cannot be read: {error}") from error

    def finish(self) -> None:
        """All of it has arrived."""
        try:
            self._feed.finish()
        except tarball.BadArchive as error:
            raise ArchiveError(str(error), files=self.files) from error
        # Last, and inner ones first: a directory may forbid writing into it.
        for path, mode in reversed(self._modes):
            os.chmod(path, mode)

    def discard(self) -> None:
        """After a failure: complete files stay, the one under way goes."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _start(self, entry: tarball.Entry) -> None:
        name = entry.name.strip("/")
        if name in ("", "."):
            return
        path = self._place(name)
        if entry.kind == "directory":
            if not os.path.isdir(path) or os.path.islink(path):
                os.mkdir(path)
            self._real.add(path)
            self._modes.append((path, (entry.mode & 0o777) | 0o700))
        elif entry.kind == "symlink":
            _remove(path)
            os.symlink(entry.link, path)
            self._real.discard(path)
        elif entry.kind == "hardlink":
            source = self._place(entry.link.strip("/"))
            _remove(path)
            os.link(source, path, follow_symlinks=False)
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
            self._file.finish(self._entry.mode)
            self._file = None
            self.files += 1
            if self._progress is not None:
                self._progress(Transferred(self._entry.name, self.files, self.bytes))

    def _place(self, name: str) -> str:
        """Where an entry goes. Every directory above it is a real one below the root."""
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ArchiveError(f"the archive has an entry called {name}", path=name, entry=name)
        above = self._root
        for part in parts[:-1]:
            above = os.path.join(above, part)
            if above in self._real:
                continue
            if os.path.islink(above):
                raise ArchiveError(f"{name} would be written through a link", path=name, entry=name)
            os.makedirs(above, exist_ok=True)
            self._real.add(above)
        return os.path.join(above, parts[-1])


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
