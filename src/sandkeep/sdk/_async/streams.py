"""Output and input of a process as streams: bytes first, text as a view of them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from sandkeep.checks import expect, refuse
from sandkeep.errors import Conflict, NotFound, RequestTimeout, StdinStalled, StdinUnavailable
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
    """The standard input of a process. Writing waits until the bytes are in the process's pipe.

    The input is one stream of bytes, and every write has an offset in it. One client writes at a time: what
    another client has written at the same offset counts as written.
    """

    def __init__(
        self,
        send: Callable[[bytes, int | None, bool, float | None], Awaitable[int]],
        received: Callable[[], Awaitable[int]],
        *,
        offset: int | None = 0,
    ) -> None:
        self._send = send
        self._received = received
        self._written = offset
        self._closed = False

    @property
    def offset(self) -> int | None:
        """Where the next write goes; ``None`` for a process found again, until :meth:`tell` or a write."""
        return self._written

    async def tell(self) -> int:
        """Ask the server how many bytes have arrived in total; the next write goes there.

        A client that was interrupted continues with the input after so many bytes.

        Raises:
            StdinUnavailable: the process was started without ``stdin=True``.
            NotFound: its record is gone.
            HostCannot: an earlier version started its session.
        """
        self._written = await self._received()
        return self._written

    async def write(self, data: bytes | str, *, offset: int | None = None) -> None:
        """Write input; text is sent as UTF-8.

        Each chunk states its offset, so a chunk that is sent again after a failure is not read twice.

        Args:
            data: the input.
            offset: where it begins in the stream of all input. Bytes that have arrived already are skipped.
                By default it continues what this handle has written, or for a process found again
                what has arrived.

        Raises:
            StdinUnavailable: the process has closed its input or no longer reads it.
            StdinStalled: it has read nothing for a while; ``bytes_written`` says how much arrived in total.
            Conflict: fewer bytes than ``offset`` have arrived; or another client has written as well.
            NotFound: the process has ended.
        """
        view = input_bytes(data)
        if offset is not None:
            expect("offset", offset, int, "a number of bytes")
            if offset < 0:
                refuse("offset", "must not be negative")
            self._written = offset
        start = await self._position()
        end = start + len(view)
        try:
            while view:
                taken = await self._send_chunk(bytes(view[:CHUNK_BYTES]), close=False)
                view = view[taken:]
        except Conflict:
            self._written = None  # the next write asks
            raise
        if offset is None and await self._position() > end:
            raise Conflict(
                f"another client has written to this input: {self._written} bytes arrived, not {end}",
                offset=start,
                bytes_written=self._written,
            )

    async def _position(self) -> int:
        return await self.tell() if self._written is None else self._written

    async def _all(self, data: bytes | str, until: float | None) -> None:
        """Write all input and close it, however long the process takes to read it.

        Raises:
            RequestTimeout: not all of it was read at ``until``, on the monotonic clock.
        """
        view = input_bytes(data)
        while view:
            before = await self._position()
            try:
                await self._send_chunk(bytes(view[:CHUNK_BYTES]), close=False, until=until)
            except StdinStalled:
                pass  # it may read later
            view = view[await self._position() - before :]
        await self.aclose()

    async def aclose(self) -> None:
        """Close the input: the process reads end-of-file. Can be repeated, also after the process ended."""
        if not self._closed:
            self._closed = True
            try:
                if self._written is None:
                    await self._send(b"", None, True, None)
                else:
                    await self._send_chunk(b"", close=True)
            except (NotFound, StdinUnavailable):
                pass

    async def _send_chunk(self, data: bytes, *, close: bool, until: float | None = None) -> int:
        """Send a chunk; return how many bytes arrived, which is all of them."""
        stalls = 0
        start = written = await self._position()
        while True:
            try:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestTimeout("the process did not read its input in time")
                self._written = await self._send(data[written - start :], written, close, left)
                return self._written - start
            except StdinStalled as error:
                arrived = int(error.details.get("bytes_written", written))
                stalls = stalls + 1 if arrived <= written else 0
                self._written = written = max(written, arrived)
                if stalls >= STALLS:
                    raise


def input_bytes(data: bytes | str) -> memoryview:
    """Return input for a process as bytes; text as UTF-8."""
    expect("input", data, (bytes, bytearray, memoryview, str), "bytes or text")
    return memoryview(data.encode() if isinstance(data, str) else data)
