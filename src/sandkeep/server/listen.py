"""The HTTP protocol as we listen with it.

On top of uvicorn's own: who is at the other end of a unix socket, a way to cut a connection, limits on the
size of a request's head and the time it takes, JSON for a request that cannot be parsed, and the bodies of
requests that ask for a protocol we do not speak.
"""

from __future__ import annotations

import os
import socket
import struct
from asyncio import TimerHandle, Transport
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandkeep.wire import errors

MAX_HEAD: Final = 64 << 10
"""Bytes of a request's target and headers together."""
HEAD_SECONDS: Final = 60.0
"""How long a client may take for them, from connecting or from their first byte."""

_CREDENTIALS: Final = struct.Struct("iII")


class Peer(NamedTuple):
    """The process at the other end of a unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


class HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """Puts ``peer`` (unix sockets only), ``abort`` and ``wire`` into the state of every request.

    ``wire`` is how somebody else gets to read a body, or send one, on the connection itself.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Ours alone: the dictionary handed to us is shared by all connections.
        self.app_state = {**self.app_state, "abort": self.cut}
        if transport.get_extra_info("sslcontext") is None:
            self.app_state["wire"] = self
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            self.app_state["peer"] = _peer(sock)
        self._head = 0
        self._declined: bytes | None = None
        """The head of a request that wants to go on in another protocol, without that wish."""
        self._patience: TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEAD_SECONDS, self._head_overdue)

    def _head_complete(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _head_overdue(self) -> None:
        self._patience = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # the answer to an earlier request is still being sent
        else:
            self.transport.close()

    def cut(self) -> None:
        """End the connection, for everybody who holds it."""
        if not self.transport.is_closing():
            with socket.socket(fileno=os.dup(self.fileno())) as own, suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        self.transport.abort()

    def left(self) -> bool:
        """Whether the client has closed the connection, as far as anybody can know who does not read it."""
        if self.transport.is_closing():
            return True
        with socket.socket(fileno=os.dup(self.fileno())) as own:
            try:
                return not own.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def fileno(self) -> int:
        fd: int = self.transport.get_extra_info("socket").fileno()
        return fd

    def lend_body(self) -> int | None:
        """Read nothing until told so; the connection, unless it is gone. What was read has been delivered."""
        if self.transport.is_closing():
            return None
        self.flow.pause_reading()
        return self.fileno()

    def body_taken(self) -> None:
        """Somebody has read the rest of the body: what is on the connection next is another request."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()
        self.flow.resume_reading()

    async def flushed(self) -> int | None:
        """The connection, once all that was sent is on it; ``None`` if it is gone."""
        if self.transport.is_closing():
            return None
        # Tells us to pause if anything is waiting, and to go on when nothing is.
        self.transport.set_write_buffer_limits(high=0)
        await self.flow.drain()
        if self.transport.is_closing():
            return None
        self.transport.set_write_buffer_limits()
        return self.fileno()

    def body_sent(self, receive: Any) -> None:
        """Somebody has sent the whole body that was announced to the request which is read by ``receive``.

        That is a method of what counts the bytes of its answer. ``self.cycle`` may be a later one.
        """
        receive.__self__.expected_content_length = 0

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._declined is not None:
                # The parser takes what follows such a head for the other protocol. It is the body, if the
                # wish is not granted, and clients may wish for HTTP/2 with whatever they send first.
                head, self._declined = self._declined, None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.data_received(head + data[upgrade.args[0] :])

    def _should_upgrade(self) -> bool:
        return self.scope["method"] == "GET" and super()._should_upgrade()

    def on_message_begin(self) -> None:
        self._head = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_complete()
        method: bytes = self.parser.get_method()
        self.scope["method"] = method.decode("ascii")
        if self.parser.should_upgrade() and method != b"CONNECT" and not self._should_upgrade():
            kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            version = self.parser.get_http_version().encode()
            self._declined = b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *kept, b"", b""])
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._declined is None:
            super().on_message_complete()

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
