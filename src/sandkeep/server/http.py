"""A request as handlers see it, and the replies they return.

Handlers never touch the connection: they read ``Request.body`` or iterate ``Request.stream``, and return a
`Reply`. A body is read only by a handler that wants one and never beyond its limit. A `Stream` is sent as
fast as the client reads it and is closed as soon as the client goes away.

Where the listener allows it (there is a ``wire``) the connection itself can be lent to whoever is to have a
large body, or to send one: `Request.lend` and `FileStream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

from sandkeep.errors import BodyTooLarge, InvalidRequest, SandkeepError
from sandkeep.wire.base import encode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE: Final = b"application/json"
_LEFTOVER: Final = 256 << 20
"""How much of an unwanted body is read and thrown away so that the client gets to see the answer."""
_LEFTOVER_SECONDS: Final = 60.0
"""And for how long."""
_PATHS: Final = frozenset({"path", "cwd"})
"""Parameters that name files."""


class ClientGone(Exception):
    """The client closed the connection in the middle of its request."""


class StreamCut(Exception):
    """An answer was ended early because the server is going away."""


class Wire(Protocol):
    """The connection of a request, for those who can do without us."""

    def cut(self) -> None: ...
    def left(self) -> bool: ...
    def lend_body(self) -> int | None: ...
    def body_taken(self) -> None: ...
    async def flushed(self) -> int | None: ...
    def body_sent(self, receive: Receive) -> None: ...


class Upload(Protocol):
    """Takes a body from a connection. ``answered``: all of it has been read, however it went."""

    @property
    def answered(self) -> bool: ...
    async def receive_from(self, fd: int, *, left: int, first: bytes) -> dict[str, Any]: ...


class Download(Protocol):
    """Sends a body on a connection."""

    async def send_to(self, fd: int) -> None: ...
    async def aclose(self) -> None: ...


class Request:
    """One HTTP request."""

    __slots__ = ("_headers", "_query", "_receive", "_torn", "body_read", "method", "path", "scope", "wire")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._receive = receive
        self._headers: dict[bytes, bytes] | None = None
        self._query: dict[str, str] | None = None
        self.body_read = False
        self._torn = False
        """Nobody knows how much of the body has been read."""
        self.wire: Wire | None = (scope.get("state") or {}).get("wire")

    def header(self, name: bytes) -> bytes | None:
        if self._headers is None:
            self._headers = dict(self.scope["headers"])
        return self._headers.get(name)

    def text_header(self, name: bytes) -> str | None:
        """A header that is text: percent-free UTF-8, as clients send paths."""
        value = self.header(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"the header {name.decode()} is not UTF-8", field=name.decode()) from None

    @property
    def query(self) -> dict[str, str]:
        """The parameters; of one that is repeated, the last."""
        if self._query is None:
            raw: bytes = self.scope["query_string"]
            try:
                pairs = parse_qsl(
                    raw.decode(), keep_blank_values=True, errors="surrogateescape", max_num_fields=100
                )
            except (UnicodeDecodeError, ValueError):
                raise InvalidRequest("the query string is not readable", field="query") from None
            for name, value in pairs:
                # Names of files are bytes; everything else is text.
                if name not in _PATHS and not _is_text(name + value):
                    raise InvalidRequest("the query string is not UTF-8", field="query")
            self._query = dict(pairs)
        return self._query

    def content_length(self) -> int | None:
        value = self.header(b"content-length")
        return int(value) if value is not None and value.isdigit() else None

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises `BodyTooLarge` without reading much more than ``limit`` bytes."""
        parts = [piece async for piece in self.stream(limit)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it arrives. The client is held back while nobody asks for the next piece."""
        _check(self.content_length() or 0, limit)
        size = 0
        while not self.body_read:
            piece = await self._piece()
            if piece is None:
                raise ClientGone
            size += len(piece)
            _check(size, limit)
            if piece:
                yield piece

    async def _piece(self) -> bytes | None:
        """What has arrived; ``None`` when the client is gone.

        That the body is complete is noted at once: whoever takes the last piece may never ask for another.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return None
        self.body_read = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def lend(self, upload: Upload) -> dict[str, Any]:
        """Have the body, whose length is known, read from the connection itself.

        Raises what the upload does; the connection is closed after the answer if that leaves it unclear
        where the next request begins.
        """
        size = self.content_length() or 0
        first = await self._piece()
        fd = None if first is None or self.wire is None else self.wire.lend_body()
        if fd is None or self.wire is None or first is None:
            raise ClientGone
        self._torn = True
        try:
            answer = await upload.receive_from(fd, left=size - len(first), first=first)
        except SandkeepError:
            if upload.answered:
                self._taken(self.wire)
            if self.wire.left():
                raise ClientGone from None
            raise
        except BaseException:
            self.wire.cut()
            raise
        self._taken(self.wire)
        return answer

    async def answer_with(self, download: Download) -> None:
        """Have the body of the answer, which was announced, put on the connection itself."""
        fd = None if self.wire is None else await self.wire.flushed()
        if fd is None or self.wire is None:
            raise ClientGone
        await download.send_to(fd)
        self.wire.body_sent(self._receive)

    def _taken(self, wire: Wire) -> None:
        self._torn = False
        if not self.body_read:
            self.body_read = True
            wire.body_taken()

    async def discard(self) -> bool:
        """Read what is left of the body, within reason, so that an early answer is seen.

        False: too much is left, or the client waits for permission to send; the connection has to be closed.
        """
        if self._torn:
            return False
        if self.body_read or not self._has_body():
            return True
        if self.header(b"expect") is not None or (self.content_length() or 0) > _LEFTOVER:
            return False
        left = _LEFTOVER
        try:
            async with asyncio.timeout(_LEFTOVER_SECONDS):
                while left > 0 and not self.body_read:
                    piece = await self._piece()
                    if piece is None:
                        return False
                    left -= len(piece)
        except TimeoutError:
            return False
        return self.body_read

    def _has_body(self) -> bool:
        return bool(self.content_length()) or self.header(b"transfer-encoding") is not None

    async def disconnected(self) -> None:
        """Returns when the client has gone away (or the answer is complete)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def abort(self) -> None:
        """Cut the connection, so that what was sent so far cannot be taken for the whole."""
        state: dict[str, Any] = self.scope.get("state") or {}
        if (cut := state.get("abort")) is not None:
            cut()


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"the body has more than {limit} bytes", limit=limit)


class Reply:
    """A complete answer."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, body: bytes = b"", *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        self.status = status
        self.body = body
        self.headers = headers if headers is not None else [(b"content-type", JSON_TYPE)]

    async def send(self, request: Request, send: Send) -> None:
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        if not await request.discard():
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any, *, status: int = 200) -> Reply:
    return Reply(encode(value), status=status)


class Closing(Protocol):
    async def aclose(self) -> None: ...


class Streaming:
    """An answer that is made while it is sent.

    Its source is closed when the client goes away. Nothing tells a client of a failure after the first byte
    but a connection that is cut, so a source that can fail says so in its own records instead.
    """

    __slots__ = ("_source", "headers", "status")

    def __init__(self, content_type: str, source: Closing, *, status: int = 200) -> None:
        self.status = status
        self._source = source
        self.headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]

    async def send(self, request: Request, send: Send) -> None:
        if request.method == "HEAD":
            await self._source.aclose()
            await self._send_head(send)
            await send({"type": "http.response.body", "body": b""})
            return
        await request.discard()
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(request.disconnected(), name="watch client")
        finished = False
        watcher.add_done_callback(lambda _: None if finished else task.cancel())
        try:
            await self._send(request, send)
            finished = True
        except BaseException as error:
            finished = True
            gone = watcher.done()  # before we cut the connection ourselves
            request.abort()
            # Until the cut is noticed the connection would still take a half answer for a whole one.
            await asyncio.wait((watcher,), timeout=1)
            if isinstance(error, asyncio.CancelledError):
                task.uncancel()
                raise (ClientGone() if gone else StreamCut()) from None
            raise
        finally:
            watcher.cancel()
            await self._source.aclose()

    async def _send_head(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})

    async def _send(self, request: Request, send: Send) -> None:
        raise NotImplementedError


class Stream(Streaming):
    """Pieces, as they come."""

    __slots__ = ("_pieces", "_soon")

    def __init__(
        self,
        content_type: str,
        pieces: AsyncGenerator[bytes, None],
        *,
        status: int = 200,
        soon: bool = False,
    ) -> None:
        """``soon``: the first piece is sure to come at once, and is waited for to be sent with the head."""
        super().__init__(content_type, pieces, status=status)
        self._pieces = pieces
        self._soon = soon

    async def _send(self, request: Request, send: Send) -> None:
        first = await anext(self._pieces, b"") if self._soon else b""
        await self._send_head(send)
        ended = bool(first) and await _send_piece(send, first)
        while not ended:
            ended = await _send_piece(send, await anext(self._pieces, _NO_MORE))


class FileStream(Streaming):
    """So many bytes that somebody else puts on the connection."""

    __slots__ = ("_download",)

    def __init__(self, content_type: str, download: Download, length: int) -> None:
        super().__init__(content_type, download)
        self._download = download
        self.headers.append((b"content-length", b"%d" % length))

    async def _send(self, request: Request, send: Send) -> None:
        await self._send_head(send)
        await request.answer_with(self._download)
        await send({"type": "http.response.body", "body": b""})


class Last(bytes):
    """A piece after which none comes. Sent together with the end of the answer, so that a client which has
    all it wants has the whole answer too, and can use the connection again."""

    __slots__ = ()


_NO_MORE: Final = Last()


async def _send_piece(send: Send, piece: bytes) -> bool:
    """Whether that was the last one."""
    last = isinstance(piece, Last)
    await send({"type": "http.response.body", "body": bytes(piece), "more_body": not last})
    return last


async def started(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same pieces, with the first one already there: its errors can still be answered as errors."""
    try:
        first: bytes | None = await anext(pieces)
    except StopAsyncIteration:
        first = None

    async def again() -> AsyncGenerator[bytes, None]:
        try:
            if first is not None:
                yield first
                async for piece in pieces:
                    yield piece
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    return again()


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
