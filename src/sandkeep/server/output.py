"""A process's output on its way to a client.

Two tasks make and send records, so that everything made while the client was busy goes out in one chunk, and
nothing is made while `FULL` bytes wait: a slow reader costs that much memory at most.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

from sandkeep.errors import SandkeepError
from sandkeep.server.http import FinalChunk
from sandkeep.shared.outputlog import DROPPED, STDERR, STDOUT, Chunk, End, Gap, Item
from sandkeep.states import OutputStream
from sandkeep.wire import errors, frames
from sandkeep.wire.base import encode
from sandkeep.wire.streams import HEARTBEAT, OutputText, error_record, output_record, record

FULL: Final = 128 << 10
HEARTBEAT_SECONDS: Final = 15.0
LINGER_SECONDS: Final = 0.004

_STREAMS: Final = {STDOUT: OutputStream.STDOUT, STDERR: OutputStream.STDERR}
_KINDS: Final = {STDOUT: frames.STDOUT, STDERR: frames.STDERR}


async def batched(
    chunks: AsyncGenerator[bytes, None], *, heartbeat: bytes = HEARTBEAT, linger: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the same bytes in larger chunks, and ``heartbeat`` (if any) when nothing came for a while.

    With ``linger`` the first chunk waits a moment for others: alone it is not worth waking the client.
    """
    loop = asyncio.get_running_loop()
    waiting: list[bytes] = []
    size = 0
    ready, room = asyncio.Event(), asyncio.Event()
    quiet = False
    timer: asyncio.TimerHandle | None = None
    lingering: asyncio.TimerHandle | None = None

    async def pull() -> None:
        nonlocal size, lingering
        try:
            async for chunk in chunks:
                waiting.append(chunk)
                size += len(chunk)
                if lingering is None and linger:
                    lingering = loop.call_later(LINGER_SECONDS, ready.set)
                else:
                    ready.set()
                if size >= FULL:
                    room.clear()
                    await room.wait()
        finally:
            ready.set()

    def beat() -> None:
        nonlocal quiet, timer
        if quiet and not waiting:
            waiting.append(heartbeat)
            ready.set()
        quiet = True
        timer = loop.call_later(HEARTBEAT_SECONDS / 2, beat)

    if heartbeat:
        timer = loop.call_later(HEARTBEAT_SECONDS / 2, beat)
    puller = asyncio.create_task(pull(), name="output")
    try:
        while True:
            await ready.wait()
            ready.clear()
            if waiting:
                chunk = b"".join(waiting)
                waiting.clear()
                size = 0
                quiet = False
                room.set()
                if puller.done() and not puller.cancelled() and puller.exception() is None:
                    yield FinalChunk(chunk)
                    return
                yield chunk
            elif puller.done():
                puller.result()
                return
            if puller.done():
                ready.set()
    finally:
        for handle in (timer, lingering):
            if handle is not None:
                handle.cancel()
        puller.cancel()
        await asyncio.gather(puller, return_exceptions=True)
        await chunks.aclose()


async def guarded(
    chunks: AsyncGenerator[bytes, None], log: Callable[..., None]
) -> AsyncGenerator[bytes, None]:
    """Yield the same chunks; a failure becomes the last record, and an unexpected one is logged too."""
    try:
        async for chunk in chunks:
            yield chunk
    except SandkeepError as error:
        _, code = errors.classify(error)
        if code not in ("sandbox_stopped", "not_found"):
            code = "sandbox_stream_closed"
        yield error_record(code, error.message)
    except Exception as error:
        log("stream failed", level="error", error=error)
        yield error_record("sandbox_stream_closed", "the connection to the session was lost")
    finally:
        await chunks.aclose()


async def text_records(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Yield output as records of text; a note on standard error replaces dropped output."""
    text = OutputText()
    async for item in items:
        if isinstance(item, Chunk):
            stream = _STREAMS.get(item.stream, OutputStream.STDOUT)
            chunk = text.feed(stream, item.data)
            if chunk:
                yield output_record(stream, chunk)
        elif isinstance(item, Gap):
            yield output_record(OutputStream.STDERR, f"\n[sandkeep: {_missing(item)}]\n")
        else:
            break
    for stream, chunk in text.finish():
        yield output_record(stream, chunk)


async def to_the_end(items: AsyncIterator[Item], offset: int) -> AsyncIterator[Item]:
    """Yield the same items with an end, even if the supervisor died before it wrote one.

    Otherwise a client would assume a lost connection, and ask again.
    """
    time_us = 0
    async for item in items:
        yield item
        if isinstance(item, End):
            return
        if isinstance(item, Gap):
            offset = item.offset + item.length
        else:
            offset, time_us = item.offset + len(item.data), item.time_us
    yield End(offset, time_us)


def _missing(gap: Gap) -> str:
    if gap.reason == DROPPED:
        return f"{gap.length} bytes of output were dropped here"
    amount = f"{gap.length} bytes" if gap.length else "the rest"
    return f"{amount} of output cannot be shown: the log is damaged from byte {gap.offset}"


async def byte_records(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Yield output as NDJSON with exact bytes in base64."""
    async for item in items:
        if isinstance(item, Chunk):
            stream = _STREAMS.get(item.stream, OutputStream.STDOUT).value
            yield (
                b'{"offset":%d,"timeUs":%d,"stream":"%s","data":"'
                % (item.offset, item.time_us, stream.encode())
                + b64encode(item.data)
                + b'"}\n'
            )
        elif isinstance(item, Gap):
            why = {} if item.reason == DROPPED else {"reason": item.reason}
            yield record({"offset": item.offset, "gap": item.length, **why})
        else:
            yield record({"offset": item.offset, "timeUs": item.time_us, "end": True})


async def byte_frames(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Yield output as binary frames, unencoded."""
    pack = frames.HEADER.pack
    async for item in items:
        if isinstance(item, Chunk):
            yield pack(len(item.data), _KINDS.get(item.stream, frames.STDOUT), item.time_us, item.offset)
            yield item.data
        elif isinstance(item, Gap):
            length = frames.GAP_LENGTH.pack(item.length)
            kind = frames.GAP if item.reason == DROPPED else frames.DAMAGED
            yield pack(len(length), kind, 0, item.offset) + length
        elif isinstance(item, End):
            yield pack(0, frames.END, item.time_us, item.offset)


def record_frame(value: Any) -> bytes:
    """Return a JSON record as a frame between frames of output."""
    data = encode(value)
    return frames.HEADER.pack(len(data), frames.RECORD, 0, 0) + data
