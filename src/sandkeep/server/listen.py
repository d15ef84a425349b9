"""The HTTP protocol as we listen with it.

On top of uvicorn's own: who is at the other end of a unix socket, a way to cut a connection, limits on the
size of a request's head, and JSON for a request that cannot be parsed.
"""

from __future__ import annotations

import os
import socket
import struct
from asyncio import Transport
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandkeep.wire import errors

MAX_HEAD: Final = 64 << 10
"""Bytes of a request's target and headers together."""

_CREDENTIALS: Final = struct.Struct("iII")


class Peer(NamedTuple):
    """The process at the other end of a unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


class HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """Puts ``peer`` (unix sockets only) and ``abort`` into the state of every request."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Ours alone: the dictionary handed to us is shared by all connections.
        self.app_state = {**self.app_state, "abort": transport.abort}
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            self.app_state["peer"] = _peer(sock)
        self._head = 0

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise HeadTooLarge

    def send_400_response(self, msg: str) -> None:
        if self._head > MAX_HEAD:
            msg = f"The request's target and headers have more than {MAX_HEAD} bytes."
        body = errors.plain("bad_request", msg).body
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()


def _peer(sock: Any) -> Peer:
    # The loop shows a look-alike without every method of a socket, so ask through a descriptor of our own.
    with socket.socket(fileno=os.dup(sock.fileno())) as own:
        raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


class Listener(uvicorn.Server):
    """One listening socket. Signals are the business of whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
