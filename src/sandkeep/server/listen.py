"""The HTTP protocol of our listening sockets.

It adds to uvicorn's: the identity of a unix socket's peer, a way to cut a connection, limits on the size of a
request's head and the time it takes, a limit on connections without a token, JSON for a request that cannot
be parsed, and bodies of requests that ask for an upgrade we do not support.
"""

from __future__ import annotations

import os
import socket
import struct
from asyncio import TimerHandle, Transport
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, ClassVar, Final, NamedTuple

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandkeep.wire import errors
from sandkeep.wire.tunnel import target

MAX_HEAD: Final = 64 << 10
"""Bytes of a request's target and headers together."""
HEAD_SECONDS: Final = 10.0
"""How long a client may take to send them, from connecting or from their first byte."""

MAX_STRANGERS: Final = 256
"""TCP connections that have sent no token. One more closes the oldest: clients send a token at once."""

_CREDENTIALS: Final = struct.Struct("iII")


class Peer(NamedTuple):
    """The process at the other end of a unix socket, as reported by the kernel."""

    pid: int
    uid: int
    gid: int


class HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """Puts ``peer`` (unix sockets only), ``abort`` and ``wire`` into the state of every request.

    ``wire`` lets another process read a body, or send one, on the socket itself.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A copy of our own: all connections share the dictionary that uvicorn passes.
        self.app_state = {**self.app_state, "abort": self.cut}
        if transport.get_extra_info("sslcontext") is None:
            self.app_state["wire"] = self
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            self.app_state["peer"] = _peer(sock)
        else:
            self.app_state["known"] = self.known
            self._meet()
        self._head = 0
        self._declined: bytes | None = None
        """The head of a request that asks for an upgrade we decline, without that header."""
        self._patience: TimerHandle | None = None
        self._expect_head()

    _strangers: ClassVar[dict[Protocol, None]] = {}
    """Connections without a token in this process, oldest first."""

    def _meet(self) -> None:
        self._strangers[self] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.known()
            oldest.transport.abort()

    def known(self) -> None:
        """Stop counting the connection: it has sent a token, or is closed or upgraded."""
        self._strangers.pop(self, None)

    def handle_websocket_upgrade(self) -> None:
        self.known()
        if target(self.url.partition(b"?")[0].decode("latin-1")) is not None:
            # An end of a tunnel may leave what it is sent unread for long, and then sees no ping either.
            self.config = copy(self.config)
            self.config.ws_ping_timeout = None
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        self.known()
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
            self._expect_head()  # the response to an earlier request is still being sent
        else:
            self.transport.close()

    def cut(self) -> None:
        """Close the connection for every holder of the socket."""
        if not self.transport.is_closing():
            with socket.socket(fileno=os.dup(self.fileno())) as own, suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        self.transport.abort()

    def left(self) -> bool:
        """Whether the client has disconnected (peeks, does not consume)."""
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
        """Stop reading; return the socket, or ``None`` if closed. Bytes read so far were delivered."""
        if self.transport.is_closing():
            return None
        self.flow.pause_reading()
        return self.fileno()

    def body_taken(self) -> None:
        """Note that another process has read the rest of the body: the next bytes are another request."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()
        self.flow.resume_reading()

    async def flushed(self) -> int | None:
        """Return the socket once everything sent is on it; ``None`` if it is closed."""
        if self.transport.is_closing():
            return None
        # The transport calls pause if anything is buffered, and resume once nothing is.
        self.transport.set_write_buffer_limits(high=0)
        await self.flow.drain()
        if self.transport.is_closing():
            return None
        self.transport.set_write_buffer_limits()
        return self.fileno()

    def body_sent(self, receive: Any) -> None:
        """Mark the response body as sent by another process.

        ``receive`` is a method of the request cycle that counts the bytes; ``self.cycle`` may be a later one.
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
                # The parser treats the bytes after such a head as the other protocol. They are the body if
                # the upgrade is declined, and some clients ask for HTTP/2 in their first request.
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
    # The loop's socket object lacks some methods of a socket, so ask through a descriptor of our own.
    with socket.socket(fileno=os.dup(sock.fileno())) as own:
        raw = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


class Listener(uvicorn.Server):
    """One listening socket. The server process handles signals, not this class."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
