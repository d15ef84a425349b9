"""A request as handlers see it, and the replies they return.

Handlers never touch the connection: they read ``Request.body`` or iterate ``Request.stream``, and return a
`Reply`. A body is read only if the handler asks for it, and never beyond its limit. A `StreamingReply` is
sent as fast as the client reads it and is closed as soon as the client disconnects.

If the listener allows it (``wire`` is set), a handler can lend the socket to the process that reads a large
body or sends one: `Request.lend` and `DirectReply`.
"""

from __future__ import annotations

import asyncio
import secrets
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
"""How much of an unwanted body is read and discarded so that the client reads the response."""
_LEFTOVER_SECONDS: Final = 60.0
"""Longest time for that."""
_PATHS: Final = frozenset({"path", "cwd"})
"""Parameters that name files."""


class ClientGone(Exception):
    """The client closed the connection in the middle of its request."""


class StreamCut(Exception):
    """A response was ended early because the server shuts down."""


class RawConnection(Protocol):
    """Raw connection of a request, for handlers that bypass ASGI."""

    def cut(self) -> None: ...
    def left(self) -> bool: ...
    def lend_body(self) -> int | None: ...
    def body_taken(self) -> None: ...
    async def flushed(self) -> int | None: ...
    def body_sent(self, receive: Receive) -> None: ...


class Upload(Protocol):
    """Reads a body from a socket. ``answered``: all of it has been read, whether or not that succeeded."""

    @property
    def answered(self) -> bool: ...
    async def receive_from(self, fd: int, *, left: int, first: bytes) -> int: ...


class Download(Protocol):
    """Writes a body to a socket."""

    async def send_to(self, fd: int) -> None: ...
    async def aclose(self) -> None: ...


def new_request_id() -> str:
    return f"req_{secrets.token_hex(8)}"


class Request:
    """One HTTP request."""

    __slots__ = (
        "_headers",
        "_query",
        "_receive",
        "_torn",
        "body_read",
        "facts",
        "id",
        "method",
        "path",
        "scope",
        "wire",
    )

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.id = new_request_id()
        """Id of the request in the log and in its response."""
        self.facts: dict[str, Any] = {}
        """For the log only: the caller, and why the request was refused."""
        self._receive = receive
        self._headers: dict[bytes, bytes] | None = None
        self._query: dict[str, list[str]] | None = None
        self.body_read = False
        self._torn = False
        """It is unknown how much of the body has been read."""
        self.wire: RawConnection | None = (scope.get("state") or {}).get("wire")

    def header(self, name: bytes) -> bytes | None:
        if self._headers is None:
            self._headers = dict(self.scope["headers"])
        return self._headers.get(name)

    def text_header(self, name: bytes) -> str | None:
        """Return a header that is text: UTF-8 without percent-encoding, as clients send paths."""
        value = self.header(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"the header {name.decode()} is not UTF-8", field=name.decode()) from None

    @property
    def query(self) -> dict[str, str]:
        """The query parameters; the last value of one that is repeated."""
        return {name: values[-1] for name, values in self.parameters.items()}

    @property
    def parameters(self) -> dict[str, list[str]]:
        """The query parameters with all their values."""
        if self._query is None:
            raw: bytes = self.scope["query_string"]
            try:
                pairs = parse_qsl(
                    raw.decode(), keep_blank_values=True, errors="surrogateescape", max_num_fields=100
                )
            except (UnicodeDecodeError, ValueError):
                raise InvalidRequest("the query string cannot be parsed", field="query") from None
            for name, value in pairs:
                # File names are bytes; everything else is text.
                if name not in _PATHS and not _is_text(name + value):
                    raise InvalidRequest("the query string is not UTF-8", field="query")
            self._query = {}
            for name, value in pairs:
                self._query.setdefault(name, []).append(value)
        return self._query

    def content_length(self) -> int | None:
        value = self.header(b"content-length")
        return int(value) if value is not None and value.isdigit() else None

    async def body(self, limit: int) -> bytes:
        """Return the whole body. Raises `BodyTooLarge` without reading much more than ``limit`` bytes."""
        parts = [chunk async for chunk in self.stream(limit)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. The client is held back until the next chunk is requested."""
        _check(self.content_length() or 0, limit)
        size = 0
        while not self.body_read:
            chunk = await self._receive_chunk()
            if chunk is None:
                raise ClientGone
            size += len(chunk)
            _check(size, limit)
            if chunk:
                yield chunk

    async def _receive_chunk(self) -> bytes | None:
        """Return what has arrived; ``None`` if the client has disconnected.

        The end of the body is noted here, because a reader of the last chunk may not ask for another.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return None
        self.body_read = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    async def lend(self, upload: Upload) -> int:
        """Have the body, whose length is known, read from the connection itself.

        Raises the upload's errors; the connection is closed after the response if it is unclear where the
        next request begins.
        """
        size = self.content_length() or 0
        first = await self._receive_chunk()
        fd = None if first is None or self.wire is None else self.wire.lend_body()
        if fd is None or self.wire is None or first is None:
            raise ClientGone
        self._torn = True
        try:
            written = await upload.receive_from(fd, left=size - len(first), first=first)
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
        return written

    async def send_download(self, download: Download) -> None:
        """Let ``download`` write the body, whose length was announced, directly to the socket."""
        fd = None if self.wire is None else await self.wire.flushed()
        if fd is None or self.wire is None:
            raise ClientGone
        await download.send_to(fd)
        self.wire.body_sent(self._receive)

    def _taken(self, wire: RawConnection) -> None:
        self._torn = False
        if not self.body_read:
            self.body_read = True
            wire.body_taken()

    async def discard(self) -> bool:
        """Read and discard the rest of the body, within limits, so that the client reads an early response.

        Return False if the connection must be closed: too much is left, or the client waits for permission to
        send.
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
                    chunk = await self._receive_chunk()
                    if chunk is None:
                        return False
                    left -= len(chunk)
        except TimeoutError:
            return False
        return self.body_read

    def _has_body(self) -> bool:
        return bool(self.content_length()) or self.header(b"transfer-encoding") is not None

    async def disconnected(self) -> None:
        """Return when the client has disconnected or the response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def abort(self) -> None:
        """Cut the connection, so that the client does not take a partial response for a complete one."""
        state: dict[str, Any] = self.scope.get("state") or {}
        if (cut := state.get("abort")) is not None:
            cut()


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"the request body has more than {limit} bytes", limit=limit)


class Reply:
    """A complete response."""

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


class StreamingReply:
    """A response that is produced while it is sent.

    Its source is closed when the client disconnects. After the first byte a failure can only cut the
    connection, so a source that can fail reports failures in its own records.
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
            # Until the cut is noticed, the connection would still accept a partial response as complete.
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


class ChunkedReply(StreamingReply):
    """A response sent in chunks as they come."""

    __slots__ = ("_chunks", "_soon")

    def __init__(
        self,
        content_type: str,
        chunks: AsyncGenerator[bytes, None],
        *,
        status: int = 200,
        soon: bool = False,
    ) -> None:
        """``soon``: the first chunk is available immediately; send it together with the headers."""
        super().__init__(content_type, chunks, status=status)
        self._chunks = chunks
        self._soon = soon

    async def _send(self, request: Request, send: Send) -> None:
        del request
        first = await anext(self._chunks, b"") if self._soon else b""
        await self._send_head(send)
        ended = bool(first) and await _send_chunk(send, first)
        while not ended:
            ended = await _send_chunk(send, await anext(self._chunks, _NO_MORE))


class DirectReply(StreamingReply):
    """A response whose body another process writes to the socket."""

    __slots__ = ("_download",)

    def __init__(self, content_type: str, download: Download, length: int) -> None:
        super().__init__(content_type, download)
        self._download = download
        self.headers.append((b"content-length", b"%d" % length))

    async def _send(self, request: Request, send: Send) -> None:
        await self._send_head(send)
        await request.send_download(self._download)
        await send({"type": "http.response.body", "body": b""})


class FinalChunk(bytes):
    """The final chunk of a body. Sent together with the end of the response, so that a client that has read
    it can use the connection again at once."""

    __slots__ = ()


_NO_MORE: Final = FinalChunk()


async def _send_chunk(send: Send, chunk: bytes) -> bool:
    """Send a chunk; return whether it was the last one."""
    last = isinstance(chunk, FinalChunk)
    await send({"type": "http.response.body", "body": bytes(chunk), "more_body": not last})
    return last


async def started(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Wait for the first chunk, whose errors can still become an error response; return all chunks."""
    try:
        first: bytes | None = await anext(chunks)
    except StopAsyncIteration:
        first = None

    async def again() -> AsyncGenerator[bytes, None]:
        try:
            if first is not None:
                yield first
                async for chunk in chunks:
                    yield chunk
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    return again()


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
