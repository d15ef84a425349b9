"""Files being written: in place, or as a draft that has no name until it is complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from sandkeep.errors import TransportError
from sandkeep.linux import syscalls
from sandkeep.supervisor.direct import DirectUpload
from sandkeep.supervisor.tree import proc_path

T = TypeVar("T", bytes, int)

ReadContent = Callable[[int], bytes]
"""Reads up to that many bytes, ``b""`` at the end. Runs with the file rights of the acting identity."""

_CHUNK = 1 << 18


class InPlace:
    """An open file that is already where it belongs."""

    __slots__ = ("fd", "written")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0

    def fill(self, source: ReadContent) -> None:
        while chunk := _arrived(lambda: source(_CHUNK)):
            self._write(chunk)
        if isinstance(source, DirectUpload):
            while count := _arrived(source.fetch):
                self._empty(source.pipe, count)

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            count = os.write(self.fd, view)
            self.written += count
            view = view[count:]

    def _empty(self, pipe: int, count: int) -> None:
        """Move the content of a pipe to the file."""
        while count:
            try:
                moved = os.splice(pipe, self.fd, count)
                self.written += moved
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The kernel refuses splice to a file opened for appending, and on some file systems.
                chunk = os.read(pipe, min(count, _CHUNK))
                moved = len(chunk)
                self._write(chunk)
            count -= moved

    def publish(self, *, replace: bool) -> None:
        pass

    def close(self) -> None:
        os.close(self.fd)


class Draft(InPlace):
    """A file that has no name, or a temporary one, until it is published as ``name`` of ``parent``.

    ``close`` leaves nothing of a draft that was not published.
    """

    __slots__ = ("_name", "_parent", "_temporary")

    def __init__(self, parent: int, name: bytes) -> None:
        self._parent = parent
        self._name = name
        self._temporary: bytes | None = None
        try:
            # The kernel removes the file even if the supervisor dies.
            fd = os.open(b".", os.O_TMPFILE | os.O_WRONLY, 0o600, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._temporary = temporary_name()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            fd = os.open(self._temporary, flags, 0o600, dir_fd=parent)
        super().__init__(fd)

    def publish(self, *, replace: bool) -> None:
        if self._temporary is None:
            try:
                self._link(self._name)
                return
            except FileExistsError:
                if not replace:
                    raise
            temporary = temporary_name()
            self._link(temporary)
            self._temporary = temporary
        flags = 0 if replace else syscalls.RENAME_NOREPLACE
        syscalls.renameat2(self._parent, self._temporary, self._parent, self._name, flags)
        self._temporary = None

    def close(self) -> None:
        super().close()
        if self._temporary is not None:
            try:
                os.unlink(self._temporary, dir_fd=self._parent)
            except OSError:
                pass

    def _link(self, name: bytes) -> None:
        os.link(proc_path(self.fd), name, dst_dir_fd=self._parent, follow_symlinks=True)


def _arrived(fetch: Callable[[], T]) -> T:
    try:
        return fetch()
    except OSError as error:
        raise TransportError(f"the content stopped arriving: {error}") from error


def temporary_name() -> bytes:
    return b".sandkeep-" + os.urandom(8).hex().encode()
