"""One shape for HTTP, whatever the version: a request goes in, a response comes out, bodies are streams.

Servers (``http1``, ``http2``) turn a connection into calls of a ``Respond``; clients turn a ``Request``
into a ``Response``. A body is read only as fast as the other side takes it. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

Header = tuple[bytes, bytes]
Headers = list[Header]

MOST_HEAD: Final = 32 << 10
PIECE: Final = 64 << 10
HEAD_SECONDS: Final = 15.0
IDLE_SECONDS: Final = 120.0
STALL_SECONDS: Final = 300.0

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
    """What the other side sent cannot be read safely; ``status`` is what to answer where one can."""

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
        """What was agreed in the TLS handshake."""
        tls: ssl.SSLObject | None = self.writer.get_extra_info("ssl_object")
        return tls.selected_alpn_protocol() if tls is not None else None


async def accepted(sock: socket.socket, context: ssl.SSLContext | None = None) -> Stream:
    """A stream on a socket somebody connected to us. The stream owns it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=PIECE, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    patience = HEAD_SECONDS if context is not None else None
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
    """A stream on a socket we connected. The stream owns it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=PIECE, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    patience = HEAD_SECONDS if context is not None else None
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
    headers: Headers
    """Names in lower case, without Host and without what concerns one connection only."""
    body: AsyncIterator[bytes] = field(default_factory=nothing)
    upgrade: bytes | None = None
    """The protocol the client wants to go on with."""
    length: int | None = 0
    """Of the body; ``None`` when it is not known beforehand."""


@dataclass(slots=True)
class Response:
    status: int
    headers: Headers
    body: AsyncIterator[bytes] = field(default_factory=nothing)
    upgraded: Stream | None = None
    """With 101: the connection to go on with, byte by byte."""
    trailers: Headers = field(default_factory=list)
    """Complete once the body has been read."""
    count: Callable[[int, int], None] = lambda out, into: None
    """Hears of bytes an upgraded connection moves: from the client to the server, and back."""
    done: Callable[[], None] = lambda: None
    """To be called when the response has been passed on, or cannot be."""


Respond = Callable[[Request], Awaitable[Response]]


def end_to_end(headers: Headers) -> Headers:
    """Without the headers that are between two neighbours only, those Connection names included."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(part.strip().lower() for part in value.split(b","))
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


def without(headers: Headers, names: Iterable[bytes]) -> Headers:
    """Without the headers of these names, spelled with underscores too: to servers that make variables of
    headers the two are one, and what was set here must not be overruled by what a client sent."""
    removed = {name.replace(b"_", b"-") for name in names}
    return [item for item in headers if item[0].replace(b"_", b"-") not in removed]


def header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def plain(status: int, text: str = "") -> Response:
    """An answer of our own: a status and a line of text, or nothing."""
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    return Response(status, headers, just(body))


async def join(one: Stream, other: Stream, count: Callable[[int, int], None]) -> None:
    """Pass bytes both ways until both have ended. ``count`` hears of bytes out of ``one`` and into it."""

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
            return  # encrypted: there is no half-closing, so one end is the end
        await asyncio.gather(*moves)
    finally:
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)
