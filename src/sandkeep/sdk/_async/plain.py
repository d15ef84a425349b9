"""Requests over a unix socket, as directly as can be: most of what an SDK call takes is spent here.

One connection carries one request at a time and is kept for the next. Whatever goes wrong, or is cut short,
closes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sandkeep.errors import RequestTimeout, TransportError
from sandkeep.sdk.concurrent import Room, UnixStream
from sandkeep.sdk.content import FileBody, Pipe, write_all
from sandkeep.sdk.http1 import LAST_CHUNK, AnswerParser, chunk, head

KEEP_SECONDS = 10.0
_SMALL = 1 << 16
"""Bodies up to this are sent in one piece with their head."""
_READ = 1 << 18


@dataclass(frozen=True, slots=True)
class Answer:
    """A response being read."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]
    network: Any = None
    """The connection itself, after it was upgraded to another protocol."""
    straight: Callable[[int], AsyncGenerator[int, None]] | None = None
    """Where the kernel can do that: as ``into``, instead of taking the pieces."""

    async def into(self, fd: int) -> AsyncGenerator[int, None]:
        """Put the body into a file; tells how many bytes were added each time."""
        if self.straight is not None:
            async with aclosing(self.straight(fd)) as moved:
                async for count in moved:
                    yield count
            return
        async for piece in self.pieces:
            write_all(fd, piece)
            yield len(piece)


class NotConnected(Exception):
    """There was no connection to be had, so nothing was sent."""


class PlainPool:
    """Connections to one unix socket."""

    def __init__(self, path: str, *, connections: int) -> None:
        self._path = path
        self._idle: list[tuple[UnixStream, float]] = []
        self._room = Room(connections)
        self._closed = False

    def disconnect(self) -> None:
        """Close what is idle, and what is in use once it no longer is."""
        self._closed = True
        while (held := self._take_idle()) is not None:
            held[0].close()

    def _take_idle(self) -> tuple[UnixStream, float] | None:
        # In one step: threads may share a pool.
        try:
            return self._idle.pop()
        except IndexError:
            return None

    @asynccontextmanager
    async def exchange(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: Any, *, seconds: float
    ) -> AsyncIterator[Answer]:
        """Send a request and give its answer as soon as its head is there.

        Args:
            method: of the request.
            target: path and query.
            headers: all of them; they say how ``body`` is framed.
            body: bytes, a file, or what makes an iterator of bytes.
            seconds: to wait for room, and for each piece to be sent or to arrive.

        Raises:
            NotConnected: nobody listens there.
            RequestTimeout: something took longer than that.
            TransportError: the connection was lost, or what arrived is no HTTP.
        """
        try:
            await self._room.take(seconds)
        except TimeoutError as error:
            raise RequestTimeout("too many requests are under way") from error
        try:
            stream = await self._connection(seconds)
            parser = AnswerParser()
            try:
                await self._send(stream, head(method, target, headers), body, headers, seconds)
                while not parser.started:
                    await self._receive(stream, parser, seconds)
                async with aclosing(self._pieces(stream, parser, seconds)) as pieces:
                    straight = None
                    if parser.left is not None and hasattr(os, "splice"):
                        straight = partial(self._straight, stream, parser, seconds)
                    yield Answer(parser.status, parser.headers, pieces, straight=straight)
            finally:
                if parser.reusable and not self._closed:
                    self._idle.append((stream, time.monotonic()))
                else:
                    stream.close()
        finally:
            self._room.give()

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
            async for piece in body():
                if piece:
                    await stream.send(chunk(piece) if chunked else piece, seconds)
            if chunked:
                await stream.send(LAST_CHUNK, seconds)
        except TimeoutError as error:
            raise RequestTimeout("the server did not take the request in time") from error
        except OSError:
            return  # it may have answered before it closed the connection

    async def _send_file(self, stream: UnixStream, body: FileBody, seconds: float) -> None:
        done = 0
        with body.open() as handle:
            while done < body.size:
                count = await stream.send_file(handle.fileno(), done, body.size - done, seconds)
                body.check(count)
                done += count
                body.sent(done)

    async def _receive(self, stream: UnixStream, parser: AnswerParser, seconds: float) -> None:
        try:
            data = await stream.receive(_READ, seconds)
        except TimeoutError as error:
            raise RequestTimeout("the server did not answer in time") from error
        except OSError as error:
            raise TransportError(f"the connection to the server was lost: {error}") from error
        if data:
            parser.feed(data)
        else:
            parser.end()

    async def _straight(
        self, stream: UnixStream, parser: AnswerParser, seconds: float, fd: int
    ) -> AsyncGenerator[int, None]:
        """The rest of a body whose length is known, past the parser and into a file."""
        for piece in parser.body():
            write_all(fd, piece)
            yield len(piece)
        left = parser.left or 0
        with Pipe() as pipe:
            while left:
                count = await self._fill(stream, pipe.fd, min(left, pipe.SIZE), seconds)
                pipe.empty(fd, count)
                left -= count
                yield count
        parser.taken()

    async def _fill(self, stream: UnixStream, pipe: int, most: int, seconds: float) -> int:
        try:
            count = await stream.receive_into(pipe, most, seconds)
        except TimeoutError as error:
            raise RequestTimeout("the server did not answer in time") from error
        except OSError as error:
            raise TransportError(f"the connection to the server was lost: {error}") from error
        if not count:
            raise TransportError("the connection to the server was lost")
        return count

    async def _pieces(
        self, stream: UnixStream, parser: AnswerParser, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        while True:
            for piece in parser.body():
                yield piece
            if parser.complete:
                return
            await self._receive(stream, parser, seconds)
