"""Files opened in a sandbox: content is streamed in chunks and never held as a whole."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from sandkeep.checks import expect, refuse
from sandkeep.errors import PathExists, PathNotFound, RequestTimeout, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.filerequests import TRANSFER_SECONDS, check_data, own
from sandkeep.sdk._async.linereader import ByteLines, TextLines
from sandkeep.sdk._async.unix_http import Response
from sandkeep.sdk._compat_async import OwnWith, shielded, sleep
from sandkeep.wire.v1 import FileObject

if TYPE_CHECKING:
    from sandkeep.sdk._async.files import Files

CHUNK_BYTES = 4 << 20
"""Bytes collected before they are sent."""


class BinaryReader(ByteLines, OwnWith):
    """A file of a sandbox open for reading, from its beginning or where :meth:`seek` puts it."""

    def __init__(self, files: Files, session: str, path: str, opened_as: FileObject) -> None:
        super().__init__()
        self._files = files
        self._session = session
        self._path = path
        self._opened_as = opened_as
        self._held = AsyncExitStack()
        self._response: Response | None = None
        self._arrived = 0
        self._again = retry.Reconnecting()
        self._ended = False
        self._closed = False

    async def read(self, size: int = -1) -> bytes:
        """Return exactly ``size`` bytes, fewer only at the end; the rest if ``size`` is negative."""
        while (size < 0 or len(self._buffer) < size) and await self._more():
            pass
        return self._take(len(self._buffer) if size < 0 else size)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the rest of the file in chunks."""
        while self._buffer or await self._more():
            yield self._take(len(self._buffer))

    def tell(self) -> int:
        """Return the offset of the next byte that :meth:`read` returns."""
        return self._arrived - len(self._buffer)

    async def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Continue reading at another offset; return it, counted from the beginning of the file.

        Args:
            offset: number of bytes from where ``whence`` says; can be negative unless that is the beginning.
            whence: ``os.SEEK_SET`` (the beginning), ``os.SEEK_CUR`` (the next byte to be read) or
                ``os.SEEK_END`` (the end that the file had when it was opened).

        Raises:
            InvalidRequest: the offset would be before the beginning of the file.
        """
        if self._closed:
            raise ValueError(f"{self._path} is closed")
        expect("offset", offset, int, "a number")
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._opened_as.size}
        if whence not in starts:
            refuse("whence", f"must be os.SEEK_SET, os.SEEK_CUR or os.SEEK_END, not {whence!r}")
        target = starts[whence] + offset
        if target < 0:
            refuse("offset", f"{target} is before the beginning of the file")
        ahead = target - self.tell()
        if 0 <= ahead <= len(self._buffer):
            del self._buffer[:ahead]
        else:
            held, self._held, self._response = self._held, AsyncExitStack(), None
            self._buffer = bytearray()
            self._arrived = target
            self._ended = False
            await held.aclose()
        return target

    async def aclose(self) -> None:
        """Stop reading and release the connection. Can be repeated."""
        self._closed = self._ended = True
        await self._held.aclose()

    async def __aenter__(self) -> BinaryReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _more(self) -> bool:
        while not self._ended:
            try:
                if self._response is None:
                    self._response = await self._held.enter_async_context(self._opened())
                async for chunk in self._response.chunks:
                    self._again.heard()
                    self._arrived += len(chunk)
                    self._buffer += chunk
                    return True
                self._ended = True
                await self._held.aclose()
            except RequestTimeout:
                raise
            except TransportError as error:
                await self._lost(error)
        return False

    def _opened(self) -> AbstractAsyncContextManager[Response]:
        query = {**self._files._query(self._path), "offset": str(self._arrived)}
        where = own(self._session, "content")
        return self._files._transport.stream("GET", where, query=query, timeout=TRANSFER_SECONDS)

    async def _lost(self, error: TransportError) -> None:
        """Reconnect and continue after the bytes that have arrived, unless the file has changed."""
        held, self._held, self._response = self._held, AsyncExitStack(), None
        await held.aclose()
        await sleep(self._again.after(error))
        _, now = await self._files._reading(self._path)
        if (now.size, now.mtime_ns) != (self._opened_as.size, self._opened_as.mtime_ns):
            raise TransportError(
                f"the connection was lost while {self._path} was read, and the file has changed since",
                hint="read it again from the beginning",
            ) from error


class BinaryWriter(OwnWith):
    """A file of a sandbox open for writing.

    Small files are sent in one request when they are closed. Larger ones grow in a draft beside the file,
    which replaces it at the end.
    """

    def __init__(self, files: Files, path: str, *, append: bool, exclusive: bool) -> None:
        self._files = files
        self._path = path
        self._append = append
        self._exclusive = exclusive
        self._draft: str | None = None
        self._sent = 0
        """Bytes in the draft."""
        self._buffer = bytearray()
        self._closed = False
        self.bytes_written: int = 0
        """Bytes given to :meth:`write` so far."""

    async def _prepare(self) -> None:
        """Refuse now what would fail at the end."""
        if self._exclusive and await self._files.exists(self._path):
            message = f"write {self._path}: the path exists already"
            raise PathExists(message, path=self._path, operation="write")

    async def write(self, data: bytes) -> int:
        """Add bytes; return how many."""
        if self._closed:
            raise ValueError(f"{self._path} is closed")
        check_data(data)
        self._buffer += data
        self.bytes_written += len(data)
        if len(self._buffer) >= CHUNK_BYTES:
            await self._flush()
        return len(data)

    async def aclose(self) -> None:
        """Send the rest and replace the file. Can be repeated."""
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
                await self._files._do(
                    "rename",
                    self._draft,
                    target=self._path,
                    replace=not self._exclusive,
                    # The draft existed: if it is gone, an earlier attempt has renamed it.
                    done=PathNotFound,
                )
        except BaseException:
            await self._remove_draft()
            raise

    async def discard(self) -> None:
        """Abandon the write: the file stays as it was before."""
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
            self._draft = posixpath.join(directory, f".{name[:200]}.{os.urandom(8).hex()}.part")
        if data:
            await self._add(self._draft, data)

    async def _add(self, draft: str, data: bytes) -> None:
        """Append to the draft. Only this writer does, so its size says how much of a lost request arrived."""
        again = retry.Reconnecting()
        rest = data
        while rest:
            try:
                await self._files._put(draft, rest, append=True)
                break
            except RequestTimeout:
                raise
            except TransportError as error:
                await sleep(again.after(error))
                rest = data[await self._size(draft) - self._sent :]
        self._sent += len(data)

    async def _size(self, draft: str) -> int:
        try:
            return (await self._files.stat(draft)).size
        except PathNotFound:
            return 0

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
            # A chunk in flight when the caller was interrupted may arrive after the first removal.
            for pause in (0.0, 0.05, 0.3):
                await sleep(pause)
                await self._files.remove(draft, missing_ok=True)

        await shielded(remove, 10.0)


class TextFileReader(TextLines, OwnWith):
    """A text file of a sandbox open for reading."""

    def __init__(self, reader: BinaryReader, encoding: str) -> None:
        super().__init__(reader, encoding, "strict")
        self._reader = reader

    async def read(self, size: int = -1) -> str:
        """Return exactly ``size`` characters, fewer only at the end; the rest if ``size`` is negative."""
        while (size < 0 or len(self._buffer) < size) and await self._more():
            pass
        size = len(self._buffer) if size < 0 else size
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text

    async def aclose(self) -> None:
        """Stop reading and release the connection. Can be repeated."""
        await self._reader.aclose()

    async def __aenter__(self) -> TextFileReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class TextFileWriter(OwnWith):
    """A text file of a sandbox open for writing."""

    def __init__(self, writer: BinaryWriter, encoding: str) -> None:
        self._writer = writer
        self._encoding = encoding

    async def write(self, text: str) -> int:
        """Add text; return the number of characters."""
        expect("text", text, str, "text")
        await self._writer.write(text.encode(self._encoding))
        return len(text)

    async def aclose(self) -> None:
        """Send the rest and replace the file. Can be repeated."""
        await self._writer.aclose()

    async def discard(self) -> None:
        """Abandon the write: the file stays as it was before."""
        await self._writer.discard()

    async def __aenter__(self) -> TextFileWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.__aexit__(kind, error, trace)
