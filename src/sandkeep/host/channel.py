"""One connection that carries numbered requests and their responses, as frames of `sandkeep.shared.protocol`.

For event loops. Responses come in any order; a request may expect more than one response, each under a number
of its own. Not an asyncio stream: a response is a frame or two, and a stream would cost more than decoding
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from sandkeep.errors import from_json
from sandkeep.shared import protocol

ResponseFuture = asyncio.Future[Any]
Progress = Callable[[str, int, int], None]


class Channel(asyncio.Protocol):
    """The client's side of a connection."""

    def __init__(self, lost: Callable[[], Exception]) -> None:
        """Create a client; ``lost`` returns the error for pending requests when the connection is lost."""
        self._lost = lost
        self._decoder = protocol.FrameDecoder()
        self._waiting: dict[int, ResponseFuture] = {}
        self._progress: dict[int, Progress] = {}
        self._transport: asyncio.Transport | None = None
        self._last = 0

    @property
    def open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body, _ in self._decoder.feed(data):
                self._take(body or {})
        except protocol.ProtocolError:
            self.drop(self._lost())

    def _take(self, body: dict[str, Any]) -> None:
        number = body.get("id", 0)
        if "progress" in body:
            if number in self._progress:
                self._progress[number](*body["progress"])
            return
        self._progress.pop(number, None)
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if "error" in body:
            future.set_exception(from_json(body["error"]))
        else:
            future.set_result(body["ok"])

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self.open:
            self.drop(self._lost())

    def drop(self, error: Exception) -> None:
        """Close the connection; pending requests fail with ``error``."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        waiting, self._waiting = self._waiting, {}
        self._progress.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def numbers(self, count: int) -> range:
        """Return numbers that no request of this connection has used."""
        self._last += count
        return range(self._last - count + 1, self._last + 1)

    def send(
        self, body: dict[str, Any], *numbers: int, blob: bytes = b"", progress: Progress | None = None
    ) -> list[ResponseFuture]:
        """Send a request; return one future per number, for the response under that number.

        The request itself has the first number, and ``progress`` is for that one.
        """
        loop = asyncio.get_running_loop()
        futures: list[ResponseFuture] = [loop.create_future() for _ in numbers]
        self._waiting.update(zip(numbers, futures, strict=True))
        if progress is not None:
            self._progress[numbers[0]] = progress
        try:
            if self._transport is None:
                raise ConnectionResetError
            self._transport.write(protocol.encode(body, blob))
        except (RuntimeError, OSError):
            # uvloop raises immediately when the connection is closed; asyncio calls ``connection_lost``
            # later.
            self.drop(self._lost())
        return futures

    def forget(self, *numbers: int) -> None:
        """Ignore responses under these numbers."""
        for number in numbers:
            self._waiting.pop(number, None)
            self._progress.pop(number, None)

    async def request(
        self, body: dict[str, Any], *, blob: bytes = b"", progress: Progress | None = None
    ) -> Any:
        """Send a request and return its response."""
        [number] = self.numbers(1)
        [response] = self.send({"id": number, **body}, number, blob=blob, progress=progress)
        try:
            return await response
        finally:
            self.forget(number)
