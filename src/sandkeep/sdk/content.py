"""Local files as request bodies and as targets of response bodies.

Over a unix socket the kernel moves their content; it never passes through this process.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator

from sandkeep.errors import NotRegularFile, TransportError
from sandkeep.sdk.values import Transferred

CHUNK_BYTES = 1 << 18

Progress = Callable[[Transferred], object]


class FileBody:
    """A file as the body of a request: as many bytes as it had when this object was made."""

    def __init__(self, path: str, progress: Progress | None) -> None:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            # Opening a pipe would wait for a writer, and nothing says how much will come.
            raise NotRegularFile(
                f"read {path}: not a regular file",
                path=path,
                operation="read",
                hint="copy its content to a regular file first",
            )
        self._path = path
        self._name = os.path.basename(path)
        self._progress = progress
        self.size: int = info.st_size
        self.mode: int = stat.S_IMODE(info.st_mode) & 0o777
        self.shrunk: bool = False
        """The file became shorter, so sending it again cannot succeed."""

    def open(self) -> io.FileIO:
        return open(self._path, "rb", buffering=0)

    def chunks(self) -> Iterator[bytes]:
        """Return the content in chunks."""
        done = 0
        with self.open() as handle:
            while done < self.size:
                data = handle.read(min(CHUNK_BYTES, self.size - done))
                self.check(len(data))
                yield data
                done += len(data)
                self.sent(done)

    def check(self, count: int) -> None:
        """Raise if nothing more can be read: the file became shorter."""
        if not count:
            self.shrunk = True
            raise TransportError(f"{self._path} became shorter during the upload")

    def sent(self, done: int) -> None:
        if self._progress is not None:
            self._progress(Transferred(self._name, 0, done))


class Pipe:
    """A pipe through which the kernel moves bytes from a connection to a file."""

    SIZE = 1 << 20

    def __init__(self) -> None:
        self.fd: int
        import fcntl  # missing on Windows, which has no unix sockets

        self._out, self.fd = os.pipe()
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, self.SIZE)
        except OSError:
            pass  # the user's pipe quota is used up; the default size works too

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)
        os.close(self.fd)

    def empty(self, fd: int, count: int) -> None:
        """Move the content of the pipe to a file."""
        while count:
            try:
                count -= os.splice(self._out, fd, count)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                data = os.read(self._out, count)  # this file system does not support splice
                write_all(fd, data)
                count -= len(data)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
