"""Content that goes straight between a file and a connection somebody else speaks on, moved by the kernel.

Whoever asks for a file operation may hand over the connection its own client is on, for as many bytes as
were agreed: nobody in between reads them. The socket is non-blocking and stays so, since the flag belongs to
all who hold it. While it is used the control connection is watched: when that ends, so does the operation.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Final

_PIPE: Final = 1 << 20
"""As much as an unprivileged user may ask for."""
_LITTLE: Final = 4096
"""What every empty pipe takes at once."""
_PATIENCE_MS: Final = 300_000
"""A client that stops in the middle must not hold a thread for ever."""


class Passage:
    """Somebody's connection, ours until ``close``."""

    __slots__ = ("_control", "_poll", "sock")

    def __init__(self, sock: socket.socket, control: socket.socket) -> None:
        self.sock = sock
        self._control = control.fileno()
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(sock, 0)

    def wait(self, event: int) -> None:
        """Until something can be done; ``OSError`` when it takes too long or was given up."""
        self._poll.modify(self.sock, event)
        ready = self._poll.poll(_PATIENCE_MS)
        if not ready:
            raise TimeoutError("the client stands still")
        if any(fd == self._control for fd, _ in ready):
            raise ConnectionAbortedError("the operation was given up")

    def send_file(self, fd: int, offset: int, count: int) -> int:
        """Send part of a file; returns how much went, less when the file shrank or the client left."""
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


class Incoming:
    """Content of a file to be written: what was read off the connection already, then what is on it.

    ``agree`` is called when the first of it is wanted, so that nothing is read of what is refused. It gives
    the connection and how many bytes of it are content.
    """

    __slots__ = ("_agree", "_first", "_left", "_passage", "_write_end", "pipe")

    def __init__(self, agree: Callable[[], tuple[Passage, int]], first: Callable[[int], bytes]) -> None:
        self._agree = agree
        self._first = first
        self._passage: Passage | None = None
        self._left = 0
        self.pipe = self._write_end = -1

    def __call__(self, size: int) -> bytes:
        """Up to ``size`` bytes of what was read already; empty when the connection comes next."""
        if self._passage is None:
            self._passage, self._left = self._agree()
        return self._first(size)

    def fetch(self) -> int:
        """Move what has arrived into ``pipe``, which must be empty; returns 0 once all of it has."""
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
            # Also when there is more: a client that never pauses must not hide that we were given up.
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
                raise ConnectionResetError("the client went away")
            self._left -= count
            return count

    def _past_urgent(self, sock: socket.socket) -> int:
        """Move a little by reading it: splice stops for good at urgent data, which poll calls readable."""
        data = sock.recv(min(self._left, _LITTLE))
        return os.write(self._write_end, data) if data else 0

    def skip(self) -> None:
        """Read and forget the rest, so that whoever uses the connection next finds what follows it."""
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
