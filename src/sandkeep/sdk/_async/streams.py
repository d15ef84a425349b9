"""Output and input of a process as streams: bytes first, text as a view of them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from sandkeep.checks import expect
from sandkeep.errors import NotFound, RequestTimeout, StdinStalled, StdinUnavailable
from sandkeep.sdk._async.linereader import ByteLines, TextLines

CHUNK_BYTES = 512 << 10
"""Bytes of input sent in one request."""
STALLS = 2
"""How often in a row a process may read nothing before a write fails."""


class ByteReader(ByteLines):
    """One output stream of a process, from its beginning. Each reader reads the durable log independently."""

    def __init__(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        super().__init__()
        self._open = chunks
        self._chunks: AsyncGenerator[bytes, None] | None = None
        self._ended = False

    async def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, waiting for at least one; everything if ``size`` is negative.

        Returns:
            The bytes; none at the end, which comes when the process has ended.
        """
        if size < 0:
            while await self._more():
                pass
            size = len(self._buffer)
        while size and not self._buffer:
            if not await self._more():
                break
        return self._take(size)

    def text(self, encoding: str = "utf-8", errors: str = "replace") -> TextReader:
        """Return the same stream as text. Read from only one of the two."""
        return TextReader(self, encoding, errors)

    async def aclose(self) -> None:
        """Stop reading and release the connection. The process is not affected."""
        self._ended = True
        if self._chunks is not None:
            await self._chunks.aclose()

    async def _more(self) -> bool:
        if self._ended:
            return False
        if self._chunks is None:
            self._chunks = self._open()
        async for data in self._chunks:
            self._buffer += data
            return True
        self._ended = True
        return False


class TextReader(TextLines):
    """A stream decoded while it is read: a character is never split, however its bytes arrive."""

    async def read(self, size: int = -1) -> str:
        """Return up to ``size`` characters, waiting for at least one; everything if ``size`` is negative."""
        if size < 0:
            data = await self._source.read(-1)
            text, self._buffer = self._buffer + self._decoder.decode(data, True), ""
            return text
        while size and not self._buffer:
            if not await self._more():
                break
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text


class StdinWriter:
    """The standard input of a process. Writing waits until the bytes are in the process's pipe."""

    def __init__(self, send: Callable[[bytes, int, bool, float | None], Awaitable[int]]) -> None:
        self._send = send
        self._written = 0
        self._closed = False

    async def write(self, data: bytes | str) -> None:
        """Write input; text is sent as UTF-8.

        Each chunk states its offset, so a chunk that is sent again after a failure is not read twice.

        Raises:
            StdinUnavailable: the process has closed its input or no longer reads it.
            StdinStalled: it has read nothing for a while; ``bytes_written`` says how much arrived in total.
            NotFound: it has ended.
        """
        view = input_bytes(data)
        while view:
            taken = await self._send_chunk(bytes(view[:CHUNK_BYTES]), close=False)
            view = view[taken:]

    async def _all(self, data: bytes | str, until: float | None) -> None:
        """Write all input and close it, however long the process takes to read it.

        Raises:
            RequestTimeout: not all of it was read at ``until``, on the monotonic clock.
        """
        view = input_bytes(data)
        while view:
            before = self._written
            try:
                await self._send_chunk(bytes(view[:CHUNK_BYTES]), close=False, until=until)
            except StdinStalled:
                pass  # it may read later
            view = view[self._written - before :]
        await self.aclose()

    async def aclose(self) -> None:
        """Close the input: the process reads end-of-file. Can be repeated, also after the process ended."""
        if not self._closed:
            self._closed = True
            try:
                await self._send_chunk(b"", close=True)
            except (NotFound, StdinUnavailable):
                pass

    async def _send_chunk(self, data: bytes, *, close: bool, until: float | None = None) -> int:
        """Send a chunk; return how many bytes arrived, which is all of them."""
        stalls = 0
        start = self._written
        while True:
            try:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestTimeout("the process did not read its input in time")
                self._written = await self._send(data[self._written - start :], self._written, close, left)
                return self._written - start
            except StdinStalled as error:
                arrived = int(error.details.get("bytes_written", self._written))
                stalls = stalls + 1 if arrived <= self._written else 0
                self._written = max(self._written, arrived)
                if stalls >= STALLS:
                    raise


def input_bytes(data: bytes | str) -> memoryview:
    """Return input for a process as bytes; text as UTF-8."""
    expect("input", data, (bytes, bytearray, memoryview, str), "bytes or text")
    return memoryview(data.encode() if isinstance(data, str) else data)
