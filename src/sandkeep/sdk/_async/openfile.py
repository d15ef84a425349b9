"""Files opened in a sandbox: content streamed in pieces, nothing held whole."""

from __future__ import annotations

import codecs
import posixpath
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from sandkeep.errors import PathExists, PathNotFound
from sandkeep.sdk._async.filerequests import check_data
from sandkeep.sdk._async.plain import Answer
from sandkeep.sdk._async.transport import Transport
from sandkeep.sdk.concurrent import shielded, sleep
from sandkeep.types import expect

if TYPE_CHECKING:
    from sandkeep.sdk._async.files import Files

PIECE = 4 << 20
"""Bytes gathered before they are sent."""
_SECONDS = 300.0


class BinaryReader:
    """A file of a sandbox open for reading, from its beginning."""

    def __init__(self, transport: Transport, session: str, query: dict[str, str]) -> None:
        self._transport = transport
        self._path = f"/v1/sessions/{session}/fs/content"
        self._query = query
        self._held = AsyncExitStack()
        self._answer: Answer | None = None
        self._buffer = bytearray()
        self._ended = False

    async def read(self, size: int = -1) -> bytes:
        """Exactly ``size`` bytes, less only at the end; everything that is left when it is negative."""
        while (size < 0 or len(self._buffer) < size) and await self._more():
            pass
        return self._take(len(self._buffer) if size < 0 else size)

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

    async def chunks(self) -> AsyncIterator[bytes]:
        """What is left, in pieces as they come."""
        while self._buffer or await self._more():
            yield self._take(len(self._buffer))

    async def aclose(self) -> None:
        """Stop reading and give the connection back. Can be repeated."""
        self._ended = True
        await self._held.aclose()

    async def __aenter__(self) -> BinaryReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _more(self) -> bool:
        if self._ended:
            return False
        if self._answer is None:
            stream = self._transport.stream("GET", self._path, query=self._query, timeout=_SECONDS)
            self._answer = await self._held.enter_async_context(stream)
        async for piece in self._answer.pieces:
            self._buffer += piece
            return True
        await self.aclose()
        return False


class BinaryWriter:
    """A file of a sandbox open for writing.

    Small ones are sent when they are closed, in one request. Larger ones grow in a draft beside the file,
    which takes its place at the end.
    """

    def __init__(self, files: Files, path: str, *, append: bool, exclusive: bool) -> None:
        self._files = files
        self._path = path
        self._append = append
        self._exclusive = exclusive
        self._draft: str | None = None
        self._buffer = bytearray()
        self._closed = False
        self.bytes_written: int = 0
        """Bytes given to :meth:`write` so far."""

    async def prepare(self) -> None:
        """Refuse early what would fail at the end."""
        if self._exclusive and await self._files.exists(self._path):
            raise PathExists(f"write {self._path}: it exists", path=self._path, operation="write")

    async def write(self, data: bytes) -> int:
        """Add bytes; returns how many."""
        if self._closed:
            raise ValueError("the file is closed")
        check_data(data)
        self._buffer += data
        self.bytes_written += len(data)
        if len(self._buffer) >= PIECE:
            await self._flush()
        return len(data)

    async def aclose(self) -> None:
        """Send the rest and let the file appear. Can be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._append:
                await self._flush()
            elif self._draft is None:
                rest = bytes(self._buffer)
                await self._files._put(self._path, rest, exclusive=self._exclusive)
            else:
                await self._flush()
                await self._keep_mode(self._draft)
                await self._files._do("rename", self._draft, target=self._path, replace=not self._exclusive)
        except BaseException:
            await self._remove_draft()
            raise

    async def discard(self) -> None:
        """Give up: what was there before stays as it was."""
        if not self._closed:
            self._closed = True
            await self._remove_draft()

    async def __aenter__(self) -> BinaryWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            await self.discard()

    async def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._append:
            if data:
                await self._files._put(self._path, data, append=True)
            return
        if self._draft is None:
            directory, name = posixpath.split(self._path)
            self._draft = posixpath.join(directory, f".{name[:200]}.{secrets.token_hex(8)}.part")
        if data:
            await self._files._put(self._draft, data, append=True)

    async def _keep_mode(self, draft: str) -> None:
        try:
            mode = (await self._files.stat(self._path)).mode
        except PathNotFound:
            return
        await self._files.chmod(draft, mode)

    async def _remove_draft(self) -> None:
        draft = self._draft
        if draft is None:
            return

        async def remove() -> None:
            # A piece that was on its way when we were interrupted may arrive after the first removal.
            for pause in (0.0, 0.05, 0.3):
                await sleep(pause)
                await self._files.remove(draft, missing_ok=True)

        await shielded(remove, 10.0)


class TextFileReader:
    """A text file of a sandbox open for reading."""

    def __init__(self, reader: BinaryReader, encoding: str) -> None:
        self._reader = reader
        self._decoder = codecs.getincrementaldecoder(encoding)("strict")
        self._buffer = ""

    async def read(self, size: int = -1) -> str:
        """Exactly ``size`` characters, less only at the end; everything that is left when it is negative."""
        while (size < 0 or len(self._buffer) < size) and await self._more():
            pass
        size = len(self._buffer) if size < 0 else size
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text

    async def readline(self) -> str:
        """A line with its line feed; at the end, what is left, then nothing."""
        while "\n" not in self._buffer:
            if not await self._more():
                text, self._buffer = self._buffer, ""
                return text
        line, feed, self._buffer = self._buffer.partition("\n")
        return line + feed

    async def __aiter__(self) -> AsyncIterator[str]:
        """Line by line."""
        while line := await self.readline():
            yield line

    async def aclose(self) -> None:
        """Stop reading and give the connection back. Can be repeated."""
        await self._reader.aclose()

    async def __aenter__(self) -> TextFileReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _more(self) -> bool:
        data = await self._reader.read(1 << 16)
        self._buffer += self._decoder.decode(data, not data)
        return bool(data)


class TextFileWriter:
    """A text file of a sandbox open for writing."""

    def __init__(self, writer: BinaryWriter, encoding: str) -> None:
        self._writer = writer
        self._encoding = encoding

    async def write(self, text: str) -> int:
        """Add text; returns how many characters."""
        expect("text", text, str, "text")
        await self._writer.write(text.encode(self._encoding))
        return len(text)

    async def aclose(self) -> None:
        """Send the rest and let the file appear. Can be repeated."""
        await self._writer.aclose()

    async def discard(self) -> None:
        """Give up: what was there before stays as it was."""
        await self._writer.discard()

    async def __aenter__(self) -> TextFileWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.__aexit__(kind, error, trace)
