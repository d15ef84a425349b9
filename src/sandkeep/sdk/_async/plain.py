"""Requests over a unix socket, as directly as can be: most of what an SDK call takes is spent here.

One connection carries one request at a time and is kept for the next. Whatever goes wrong, or is cut short,
closes it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sandkeep.errors import RequestTimeout, TransportError
from sandkeep.sdk.concurrent import Room, UnixStream
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
            body: bytes, or what makes an iterator of them.
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
                    yield Answer(parser.status, parser.headers, pieces)
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

    async def _pieces(
        self, stream: UnixStream, parser: AnswerParser, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        while True:
            for piece in parser.body():
                yield piece
            if parser.complete:
                return
            await self._receive(stream, parser, seconds)
