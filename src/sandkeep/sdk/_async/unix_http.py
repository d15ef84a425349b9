"""HTTP requests over a unix socket, without a general HTTP library, whose overhead would dominate short
calls.

One connection carries one request at a time and is kept for the next. Any error, or a response that is not
read to its end, closes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from sandkeep.dataclass import dataclass
from sandkeep.errors import RequestTimeout, TransportError
from sandkeep.sdk._compat_async import Slots, UnixStream
from sandkeep.sdk.content import FileBody, Pipe, write_all
from sandkeep.sdk.http1 import LAST_CHUNK, ResponseParser, frame_chunk, head

KEEP_SECONDS = 10.0
_SMALL = 1 << 16
"""Bodies up to this are sent together with the head."""
_READ = 1 << 18


@dataclass(frozen=True, slots=True)
class Response:
    """A response being read."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    network: Any = None
    """The connection itself, after it was upgraded to another protocol."""
    straight: Callable[[int], AsyncGenerator[int, None]] | None = None
    """If the kernel can do it: as ``into``, instead of reading the chunks."""

    async def into(self, fd: int) -> AsyncGenerator[int, None]:
        """Write the body to a file; yield the number of bytes after each write."""
        if self.straight is not None:
            async with aclosing(self.straight(fd)) as moved:
                async for count in moved:
                    yield count
            return
        async for chunk in self.chunks:
            write_all(fd, chunk)
            yield len(chunk)


class NotConnected(Exception):
    """No connection could be made, so nothing was sent."""


class UnixPool:
    """Connections to one unix socket."""

    def __init__(self, path: str, *, connections: int) -> None:
        self._path = path
        self._idle: list[tuple[UnixStream, float]] = []
        self._slots = Slots(connections)
        self._closed = False

    def disconnect(self) -> None:
        """Close idle connections now, and others when their request is done."""
        self._closed = True
        while (held := self._take_idle()) is not None:
            held[0].close()

    def _take_idle(self) -> tuple[UnixStream, float] | None:
        # Atomic: threads may share a pool.
        try:
            return self._idle.pop()
        except IndexError:
            return None

    @asynccontextmanager
    async def exchange(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: Any, *, seconds: float
    ) -> AsyncIterator[Response]:
        """Send a request and yield its response as soon as its head has arrived.

        Args:
            method: of the request.
            target: path and query.
            headers: all of them; they say how ``body`` is framed.
            body: bytes, a file, or a function that returns an iterator of bytes.
            seconds: longest wait for a free slot, and for each chunk to be sent or to arrive.

        Raises:
            NotConnected: no server listens there.
            RequestTimeout: something took longer than ``seconds``.
            TransportError: the connection was lost, or the response is not HTTP.
        """
        try:
            await self._slots.acquire(seconds)
        except TimeoutError as error:
            raise RequestTimeout(
                "connection pool exhausted", hint="the request was not sent: make fewer requests at a time"
            ) from error
        try:
            stream = await self._connection(seconds)
            parser = ResponseParser()
            try:
                await self._send(stream, head(method, target, headers), body, headers, seconds)
                while not parser.started:
                    await self._receive(stream, parser, seconds)
                async with aclosing(self._chunks(stream, parser, seconds)) as chunks:
                    straight = None
                    if parser.left is not None and hasattr(os, "splice"):
                        straight = partial(self._straight, stream, parser, seconds)
                    yield Response(parser.status, parser.headers, chunks, straight=straight)
            finally:
                if parser.reusable and not self._closed:
                    self._idle.append((stream, time.monotonic()))
                else:
                    stream.close()
        finally:
            self._slots.release()

    async def _connection(self, seconds: float) -> UnixStream:
        while (held := self._take_idle()) is not None:
            stream, since = held
            if time.monotonic() - since < KEEP_SECONDS and not stream.ended():
                return stream
            stream.close()
        stream = UnixStream()
        try:
            await stream.connect(self._path, seconds)
        except OSError as error:
            stream.close()
            raise NotConnected(str(error)) from error
        except BaseException:
            stream.close()
            raise
        return stream

    async def _send(
        self, stream: UnixStream, start: bytes, body: Any, headers: list[tuple[bytes, bytes]], seconds: float
    ) -> None:
        try:
            if isinstance(body, bytes):
                if len(body) <= _SMALL:
                    await stream.send(start + body, seconds)
                else:
                    await stream.send(start, seconds)
                    await stream.send(body, seconds)
                return
            await stream.send(start, seconds)
            if isinstance(body, FileBody):
                await self._send_file(stream, body, seconds)
                return
            chunked = (b"Transfer-Encoding", b"chunked") in headers
            async for chunk in body():
                if chunk:
                    await stream.send(frame_chunk(chunk) if chunked else chunk, seconds)
            if chunked:
                await stream.send(LAST_CHUNK, seconds)
        except TimeoutError as error:
            raise RequestTimeout(f"the server did not read the request within {seconds:g} s") from error
        except OSError:
            return  # the server may have responded before it closed the connection

    async def _send_file(self, stream: UnixStream, body: FileBody, seconds: float) -> None:
        done = 0
        with body.open() as handle:
            while done < body.size:
                count = await stream.send_file(handle.fileno(), done, body.size - done, seconds)
                body.check(count)
                done += count
                body.sent(done)

    async def _receive(self, stream: UnixStream, parser: ResponseParser, seconds: float) -> None:
        try:
            data = await stream.receive(_READ, seconds)
        except TimeoutError as error:
            raise RequestTimeout(f"the server did not respond within {seconds:g} s") from error
        except OSError as error:
            raise TransportError(f"the connection to the server was lost: {error}") from error
        if data:
            parser.feed(data)
        else:
            parser.end()

    async def _straight(
        self, stream: UnixStream, parser: ResponseParser, seconds: float, fd: int
    ) -> AsyncGenerator[int, None]:
        """Move the rest of a body of known length past the parser into a file."""
        for chunk in parser.body():
            write_all(fd, chunk)
            yield len(chunk)
        left = parser.left or 0
        with Pipe() as pipe:
            while left:
                count = await self._fill(stream, pipe.fd, min(left, pipe.SIZE), seconds)
                pipe.empty(fd, count)
                left -= count
                yield count
        parser.mark_read()

    async def _fill(self, stream: UnixStream, pipe: int, most: int, seconds: float) -> int:
        try:
            count = await stream.receive_into(pipe, most, seconds)
        except TimeoutError as error:
            raise RequestTimeout(f"the server did not respond within {seconds:g} s") from error
        except OSError as error:
            raise TransportError(f"the connection to the server was lost: {error}") from error
        if not count:
            raise TransportError("the connection to the server was lost")
        return count

    async def _chunks(
        self, stream: UnixStream, parser: ResponseParser, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        while True:
            for chunk in parser.body():
                yield chunk
            if parser.complete:
                return
            await self._receive(stream, parser, seconds)
