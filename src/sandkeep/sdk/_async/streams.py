"""What a process prints and reads, as streams: bytes first, text as a view of them."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from sandkeep.errors import NotFound, RequestTimeout, StdinStalled, StdinUnavailable
from sandkeep.types import expect

PIECE = 512 << 10
"""Bytes of input sent in one request."""
STALLS = 2
"""How often in a row a process may take nothing before writing to it fails."""


class ByteReader:
    """One output stream of a process, from its beginning. Every reader reads the durable log for itself."""

    def __init__(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._open = chunks
        self._chunks: AsyncGenerator[bytes, None] | None = None
        self._buffer = bytearray()
        self._ended = False

    async def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, waiting until there is at least one; everything when it is negative.

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

    async def readline(self) -> bytes:
        """A line with its line feed; at the end, what is left, then nothing."""
        start = 0
        while True:
            at = self._buffer.find(b"\n", start)
            if at >= 0:
                return self._take(at + 1)
            start = len(self._buffer)
            if not await self._more():
                return self._take(len(self._buffer))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Line by line."""
        while line := await self.readline():
            yield line

    def text(self, encoding: str = "utf-8", errors: str = "replace") -> TextReader:
        """The same stream as text. Read from one of the two only."""
        return TextReader(self, encoding, errors)

    async def aclose(self) -> None:
        """Stop reading and give the connection back. Nothing happens to the process."""
        self._ended = True
        if self._chunks is not None:
            await self._chunks.aclose()

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

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


class TextReader:
    """A stream decoded as it comes: characters are never torn, whatever pieces their bytes came in."""

    def __init__(self, stream: ByteReader, encoding: str, errors: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)(errors)
        self._buffer = ""

    async def read(self, size: int = -1) -> str:
        """Up to ``size`` characters, waiting until there is at least one; everything when it is negative."""
        if size < 0:
            data = await self._stream.read()
            text, self._buffer = self._buffer + self._decoder.decode(data, True), ""
            return text
        while size and not self._buffer:
            data = await self._stream.read(1 << 16)
            self._buffer = self._decoder.decode(data, not data)
            if not data:
                break
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text

    async def readline(self) -> str:
        """A line with its line feed; at the end, what is left, then nothing."""
        while "\n" not in self._buffer:
            data = await self._stream.read(1 << 16)
            self._buffer += self._decoder.decode(data, not data)
            if not data:
                text, self._buffer = self._buffer, ""
                return text
        line, feed, self._buffer = self._buffer.partition("\n")
        return line + feed

    async def __aiter__(self) -> AsyncIterator[str]:
        """Line by line."""
        while line := await self.readline():
            yield line


class StdinWriter:
    """The standard input of a process. Writing waits until the process's pipe has taken the bytes."""

    def __init__(self, send: Callable[[bytes, int, bool, float | None], Awaitable[int]]) -> None:
        self._send = send
        self._written = 0
        self._closed = False

    async def write(self, data: bytes | str) -> None:
        """Give the process input; text is sent as UTF-8.

        Each piece names its place in the stream, so one that is sent again after a failure on the way is not
        read twice.

        Raises:
            StdinUnavailable: the process has closed its input or no longer reads it.
            StdinStalled: it has taken nothing for a while; ``bytes_written`` says how much it has in all.
            NotFound: it has ended.
        """
        view = input_bytes(data)
        while view:
            taken = await self._piece(bytes(view[:PIECE]), close=False)
            view = view[taken:]

    async def _all(self, data: bytes | str, until: float | None) -> None:
        """Everything it gets and the end of it, however long the process takes to read it.

        Raises:
            RequestTimeout: it had not taken all of it at ``until``, on the monotonic clock.
        """
        view = input_bytes(data)
        while view:
            before = self._written
            try:
                await self._piece(bytes(view[:PIECE]), close=False, until=until)
            except StdinStalled:
                pass  # it may have better things to do for now
            view = view[self._written - before :]
        await self.aclose()

    async def aclose(self) -> None:
        """Close it: the process reads the end of its input. Can be repeated, and after the process ended."""
        if not self._closed:
            self._closed = True
            try:
                await self._piece(b"", close=True)
            except (NotFound, StdinUnavailable):
                pass

    async def _piece(self, data: bytes, *, close: bool, until: float | None = None) -> int:
        """Bytes of ``data`` that arrived; all of them."""
        stalls = 0
        start = self._written
        while True:
            try:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestTimeout("the process has not taken its input in time")
                self._written = await self._send(data[self._written - start :], self._written, close, left)
                return self._written - start
            except StdinStalled as error:
                arrived = int(error.details.get("bytes_written", self._written))
                stalls = stalls + 1 if arrived <= self._written else 0
                self._written = max(self._written, arrived)
                if stalls >= STALLS:
                    raise


def input_bytes(data: bytes | str) -> memoryview:
    """What is typed or piped into a process; text as UTF-8."""
    expect("input", data, (bytes, bytearray, memoryview, str), "bytes or text")
    return memoryview(data.encode() if isinstance(data, str) else data)
