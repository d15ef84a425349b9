"""Local files as bodies of requests and places for bodies of answers.

Over a unix socket the kernel moves their content, without this process ever seeing it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterator

from sandkeep.errors import NotRegularFile, TransportError
from sandkeep.sdk.values import Transferred

PIECE = 1 << 18

Progress = Callable[[Transferred], object]


class FileBody:
    """A file as the body of a request: as much of it as it had when this was made."""

    def __init__(self, path: str, progress: Progress | None) -> None:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            # Opening a pipe would wait for somebody to write into it, and nothing says how much that will be.
            raise NotRegularFile(
                f"read {path}: not a regular file",
                path=path,
                operation="read",
                hint="write what it has into a file first",
            )
        self._path = path
        self._name = os.path.basename(path)
        self._progress = progress
        self.size: int = info.st_size
        self.mode: int = stat.S_IMODE(info.st_mode) & 0o777

    def open(self) -> io.FileIO:
        return open(self._path, "rb", buffering=0)

    def pieces(self) -> Iterator[bytes]:
        """The content."""
        done = 0
        with self.open() as handle:
            while done < self.size:
                data = handle.read(min(PIECE, self.size - done))
                self.check(len(data))
                yield data
                done += len(data)
                self.sent(done)

    def check(self, count: int) -> None:
        """Nothing more to read means that the file is shorter than it was."""
        if not count:
            raise TransportError(f"{self._path} became shorter while it was sent")

    def sent(self, done: int) -> None:
        if self._progress is not None:
            self._progress(Transferred(self._name, 0, done))


class Pipe:
    """What lets the kernel move bytes from a connection to a file."""

    SIZE = 1 << 20

    def __init__(self) -> None:
        self.fd: int
        self._out, self.fd = os.pipe()
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, self.SIZE)
        except OSError:
            pass  # this user has many pipes; a small one does the same

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)
        os.close(self.fd)

    def empty(self, fd: int, count: int) -> None:
        """Move what is in it to a file."""
        while count:
            try:
                count -= os.splice(self._out, fd, count)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                data = os.read(self._out, count)  # not every file system can
                write_all(fd, data)
                count -= len(data)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
