"""Requests and responses, the same for every version of HTTP; bodies are streams.

Servers (``http1``, ``http2``) turn a connection into calls of a ``SendRequest``; clients turn a ``Request``
into a ``Response``. A body is read only as fast as its receiver takes it. Policies are not applied here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from sandkeep.net import turns

Header = tuple[bytes, bytes]
HeaderList = list[Header]

MOST_HEAD: Final = 32 << 10
PIECE: Final = 64 << 10
HEAD_SECONDS: Final = 15.0
IDLE_SECONDS: Final = 120.0
STALL_SECONDS: Final = 300.0

# How much is decrypted in one go. Asyncio's own 256 KiB can be ten thousand records, and as much is held for
# every connection.
sslproto.SSLProtocol.max_size = PIECE

_HANDSHAKE: Final = 0.001
"""Seconds of the thread's time that a TLS handshake takes, outside of any task."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)


class BadMessage(Exception):
    """A message cannot be read safely; ``status`` is for the response, where one can be sent."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Stream:
    """A connection, encrypted or not, with back-pressure both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self, seconds: float = STALL_SECONDS) -> bytes:
        async with asyncio.timeout(seconds):
            return await self.reader.read(PIECE)

    async def write(self, data: bytes, seconds: float = STALL_SECONDS) -> None:
        if self.writer.is_closing():
            raise ConnectionResetError("the connection is closed")
        self.writer.write(data)
        if self.writer.transport.get_write_buffer_size():
            async with asyncio.timeout(seconds):
                await self.writer.drain()

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()

    @property
    def protocol(self) -> str | None:
        """The protocol agreed in the TLS handshake (ALPN)."""
        tls: ssl.SSLObject | None = self.writer.get_extra_info("ssl_object")
        return tls.selected_alpn_protocol() if tls is not None else None


async def accepted(sock: socket.socket, context: ssl.SSLContext | None = None) -> Stream:
    """Return a stream on an accepted socket, which it owns."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=PIECE, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    patience = HEAD_SECONDS if context is not None else None
    if context is not None:
        turns.charge_to_current(_HANDSHAKE)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=patience
        )
    except BaseException:
        sock.close()
        raise
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def connected(
    sock: socket.socket, context: ssl.SSLContext | None = None, server_name: str | None = None
) -> Stream:
    """Return a stream on a connected socket, which it owns."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=PIECE, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    patience = HEAD_SECONDS if context is not None else None
    if context is not None:
        turns.charge_to_current(_HANDSHAKE)
    try:
        transport, _ = await loop.create_connection(
            lambda: protocol,
            sock=sock,
            ssl=context,
            server_hostname=server_name if context is not None else None,
            ssl_handshake_timeout=patience,
        )
    except BaseException:
        sock.close()
        raise
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def nothing() -> AsyncIterator[bytes]:
    """The body of a message without one."""
    return
    yield b""


async def just(data: bytes) -> AsyncIterator[bytes]:
    yield data


@dataclass(slots=True)
class Request:
    method: bytes
    target: bytes
    """Path and query, as sent."""
    authority: bytes
    headers: HeaderList
    """Names in lower case, without Host and without what concerns one connection only."""
    body: AsyncIterator[bytes] = field(default_factory=nothing)
    upgrade: bytes | None = None
    """The protocol the client wants to go on with."""
    length: int | None = 0
    """Of the body; ``None`` when it is not known beforehand."""


@dataclass(slots=True)
class RequestHead:
    """The head of a request as a client sent it, in either version, before it is checked."""

    method: bytes
    target: bytes
    """Path and query."""
    headers: HeaderList
    """All of them, names in lower case."""
    scheme: bytes | None = None
    """Where the request names one: in an absolute target, or in HTTP/2."""
    authority: bytes | None = None
    """The same; besides the Host header."""
    bodiless: bool = False
    """Whether the message ends with its head."""
    upgrade: bytes | None = None


@dataclass(slots=True)
class Response:
    status: int
    headers: HeaderList
    body: AsyncIterator[bytes] = field(default_factory=nothing)
    upgraded: Stream | None = None
    """With 101: the connection to go on with, byte by byte."""
    trailers: HeaderList = field(default_factory=list)
    """Complete once the body has been read."""
    count: Callable[[int, int], None] = lambda _out, _into: None
    """Called with bytes that an upgraded connection moves: from the client to the server, and back."""
    done: Callable[[], None] = lambda: None
    """To be called when the response has been passed on, or cannot be."""


SendRequest = Callable[[Request], Awaitable[Response]]


def checked_request(head: RequestHead, body: AsyncIterator[bytes], *, scheme: bytes) -> Request:
    """Return the request to pass on, if every server must read its head alike.

    Raises:
        BadMessage: it names no host or more than one, another scheme, or an end that can be read in two ways.
    """
    if head.method == b"CONNECT":
        raise BadMessage("CONNECT is not for this server", 405)
    if sum(len(name) + len(value) for name, value in head.headers) > MOST_HEAD:
        raise BadMessage("the head is too large", 431)
    if head.scheme not in (None, scheme):
        raise BadMessage("another scheme")
    # Passed on as a target of HTTP/1.1, anything else could name another host or hide the path.
    if not head.target.startswith(b"/") and (head.method, head.target) != (b"OPTIONS", b"*"):
        raise BadMessage("not a path")
    return Request(
        head.method,
        head.target,
        _authority(head),
        _passed_on(head.headers),
        body,
        head.upgrade,
        _body_length(head),
    )


def _authority(head: RequestHead) -> bytes:
    hosts = [value for name, value in head.headers if name == b"host"]
    if len(hosts) > 1:
        raise BadMessage("more than one Host")
    named = [host for host in (head.authority, *hosts) if host is not None]
    if not named or not all(named):
        raise BadMessage("no host")
    if len({host.lower() for host in named}) > 1:
        raise BadMessage("two different hosts")
    return named[0]


def _body_length(head: RequestHead) -> int | None:
    """Return the length of the body; ``None`` if only its end tells."""
    length = header(head.headers, b"content-length")
    chunked = header(head.headers, b"transfer-encoding") is not None
    if length is not None and chunked:
        raise BadMessage("a length and a transfer coding")
    if head.bodiless:
        if length not in (None, b"0"):
            raise BadMessage("a length and no body")
        return 0
    return int(length) if length is not None and length.isdigit() else None


def _passed_on(headers: HeaderList) -> HeaderList:
    kept = [(name, value) for name, value in end_to_end(headers) if name not in (b"host", b"expect")]
    cookies = [value for name, value in kept if name == b"cookie"]
    if len(cookies) > 1:
        # HTTP/2 may send them in parts; HTTP/1.1 has one header for them.
        kept = [item for item in kept if item[0] != b"cookie"]
        kept.append((b"cookie", b"; ".join(cookies)))
    return kept


def end_to_end(headers: HeaderList) -> HeaderList:
    """Return the headers without hop-by-hop ones, those that Connection names included."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(part.strip().lower() for part in value.split(b","))
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


def without(headers: HeaderList, names: Iterable[bytes]) -> HeaderList:
    """Return the headers without these names, also spelled with underscores.

    Servers that make variables of headers do not tell the two apart, and a client must not override a
    header that netd sets.
    """
    removed = {name.replace(b"_", b"-") for name in names}
    return [item for item in headers if item[0].replace(b"_", b"-") not in removed]


def header(headers: HeaderList, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def plain(status: int, text: str = "") -> Response:
    """Return a response of netd's own: a status and a line of text, or no body."""
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    return Response(status, headers, just(body))


async def join(one: Stream, other: Stream, count: Callable[[int, int], None]) -> None:
    """Pass bytes both ways until both have ended; call ``count`` with bytes out of ``one`` and into it."""

    async def move(source: Stream, target: Stream, outward: bool) -> None:
        while data := await source.reader.read(PIECE):
            await target.write(data)
            count(len(data) if outward else 0, 0 if outward else len(data))
        if target.writer.can_write_eof():
            target.writer.write_eof()

    moves = [asyncio.create_task(move(one, other, True)), asyncio.create_task(move(other, one, False))]
    try:
        done, _ = await asyncio.wait(moves, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if not one.writer.can_write_eof():
            return  # TLS cannot be half-closed, so the end of one direction ends both
        await asyncio.gather(*moves)
    finally:
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)
