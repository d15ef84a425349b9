"""File content moved by the kernel between a file and the socket of the server's HTTP client.

With a file operation the server may pass the socket of its own client, for an agreed number of bytes, which
then go past the server. The socket is non-blocking and stays so, since all its holders share the flag. While
it is used the supervisor watches the control connection: when that closes, the operation ends.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Final

_PIPE: Final = 1 << 20
"""Largest pipe that the kernel gives an unprivileged user."""
_LITTLE: Final = 4096
"""Bytes that every empty pipe takes at once."""
_PATIENCE_MS: Final = 300_000
"""Seconds after which a stalled client is given up, so that it does not block a thread forever."""


class DirectSocket:
    """The socket of the server's client, used by the supervisor until ``close``."""

    __slots__ = ("_control", "_poll", "sock")

    def __init__(self, sock: socket.socket, control: socket.socket) -> None:
        self.sock = sock
        self._control = control.fileno()
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(sock, 0)

    def wait(self, event: int) -> None:
        """Wait until the socket is ready; raise ``OSError`` on a timeout or when the server has gone."""
        self._poll.modify(self.sock, event)
        ready = self._poll.poll(_PATIENCE_MS)
        if not ready:
            raise TimeoutError("the client stalled")
        if any(fd == self._control for fd, _ in ready):
            raise ConnectionAbortedError("the server abandoned the operation")

    def send_file(self, fd: int, offset: int, count: int) -> int:
        """Send part of a file and return the bytes sent: fewer if the file shrank or the client closed."""
        sent = 0
        while sent < count:
            try:
                moved = os.sendfile(self.sock.fileno(), fd, offset + sent, count - sent)
            except BlockingIOError:
                self.wait(select.POLLOUT)
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
            if moved == 0:
                break
            sent += moved
        return sent

    def close(self) -> None:
        self.sock.close()


class DirectUpload:
    """Content of a file to be written: first the bytes the server has already read, then the socket's.

    ``agree`` is called when the first byte is wanted, so that a refused operation reads nothing. It returns
    the socket and how many bytes on it are content.
    """

    __slots__ = ("_agree", "_first", "_left", "_passage", "_write_end", "pipe")

    def __init__(self, agree: Callable[[], tuple[DirectSocket, int]], first: Callable[[int], bytes]) -> None:
        self._agree = agree
        self._first = first
        self._passage: DirectSocket | None = None
        self._left = 0
        self.pipe = self._write_end = -1

    def __call__(self, size: int) -> bytes:
        """Return up to ``size`` of the bytes already read; ``b""`` when the socket comes next."""
        if self._passage is None:
            self._passage, self._left = self._agree()
        return self._first(size)

    def fetch(self) -> int:
        """Move the bytes that have arrived into ``pipe``, which must be empty; return 0 after the last."""
        if not self._left:
            return 0
        if self.pipe < 0:
            self.pipe, self._write_end = os.pipe()
            try:
                fcntl(self.pipe, F_SETPIPE_SZ, _PIPE)
            except OSError:
                pass  # this user has many pipes; a small one does the same
        assert self._passage is not None
        while True:
            # Also when more bytes are ready: a client that never pauses must not hide that the server left.
            self._passage.wait(select.POLLIN)
            try:
                count = os.splice(self._passage.sock.fileno(), self._write_end, min(self._left, _PIPE))
            except BlockingIOError:
                count = 0
            try:
                count = count or self._past_urgent(self._passage.sock)
            except BlockingIOError:
                continue
            if count == 0:
                raise ConnectionResetError("the client disconnected")
            self._left -= count
            return count

    def _past_urgent(self, sock: socket.socket) -> int:
        """Move a few bytes by reading: splice never passes urgent data, which poll reports as readable."""
        data = sock.recv(min(self._left, _LITTLE))
        return os.write(self._write_end, data) if data else 0

    def skip(self) -> None:
        """Discard the rest of the content, so that the server finds the next request on the socket."""
        if self._passage is None:
            return
        while self._first(1 << 20):
            pass
        while self._left:
            self._passage.wait(select.POLLIN)
            try:
                data = self._passage.sock.recv(min(self._left, _PIPE))
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return
            if not data:
                return
            self._left -= len(data)

    def close(self) -> None:
        if self._passage is not None:
            self._passage.close()
        for fd in (self.pipe, self._write_end):
            if fd >= 0:
                os.close(fd)
