"""Reading lines: the common part of output streams and open files, for bytes and for text."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from typing import Protocol

_READ = 1 << 16


class ByteLines:
    """Buffered bytes, read line by line. A subclass adds bytes to the buffer in ``_more``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    async def readline(self) -> bytes:
        """Return a line with its line feed; at the end the rest, then nothing."""
        start = 0
        while True:
            at = self._buffer.find(b"\n", start)
            if at >= 0:
                return self._take(at + 1)
            start = len(self._buffer)
            if not await self._more():
                return self._take(len(self._buffer))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield lines."""
        while line := await self.readline():
            yield line

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _more(self) -> bool:
        """Add to the buffer; return False at the end."""
        raise NotImplementedError


class _Source(Protocol):
    async def read(self, size: int) -> bytes: ...


class TextLines:
    """Bytes of a source decoded while they are read: a character is never split, however its bytes arrive."""

    def __init__(self, source: _Source, encoding: str, errors: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)(errors)
        self._buffer = ""

    async def readline(self) -> str:
        """Return a line with its line feed; at the end the rest, then nothing."""
        while "\n" not in self._buffer:
            if not await self._more():
                text, self._buffer = self._buffer, ""
                return text
        line, feed, self._buffer = self._buffer.partition("\n")
        return line + feed

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield lines."""
        while line := await self.readline():
            yield line

    async def _more(self) -> bool:
        data = await self._source.read(_READ)
        self._buffer += self._decoder.decode(data, not data)
        return bool(data)
