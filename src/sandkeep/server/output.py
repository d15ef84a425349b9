"""A process's output on its way to a client.

Records are made and sent by two tasks, so that everything made while the client was busy goes out in one
piece, and nothing is made while `FULL` bytes wait: a slow reader costs that much memory and no more.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

from sandkeep.errors import SandkeepError
from sandkeep.server.http import Last
from sandkeep.supervisor.outputlog import STDERR, STDOUT, Chunk, End, Gap, Item
from sandkeep.types import OutputStream
from sandkeep.wire import errors, frames
from sandkeep.wire.base import encode
from sandkeep.wire.streams import HEARTBEAT, OutputText, error_record, output_record, record

FULL: Final = 128 << 10
HEARTBEAT_SECONDS: Final = 15.0
LINGER_SECONDS: Final = 0.004

_STREAMS: Final = {STDOUT: OutputStream.STDOUT, STDERR: OutputStream.STDERR}
_KINDS: Final = {STDOUT: frames.STDOUT, STDERR: frames.STDERR}


async def batched(
    pieces: AsyncGenerator[bytes, None], *, heartbeat: bytes = HEARTBEAT, linger: bool = False
) -> AsyncGenerator[bytes, None]:
    """The same bytes in larger pieces, and ``heartbeat`` (if any) when nothing came for a while.

    With ``linger`` the first piece waits a moment for others: it is not worth waking the client for.
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
            async for piece in pieces:
                waiting.append(piece)
                size += len(piece)
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
                piece = b"".join(waiting)
                waiting.clear()
                size = 0
                quiet = False
                room.set()
                if puller.done() and not puller.cancelled() and puller.exception() is None:
                    yield Last(piece)
                    return
                yield piece
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
        await pieces.aclose()


async def guarded(
    pieces: AsyncGenerator[bytes, None], log: Callable[..., None]
) -> AsyncGenerator[bytes, None]:
    """The same pieces; a failure becomes the last record, and one nobody foresaw is logged."""
    try:
        async for piece in pieces:
            yield piece
    except SandkeepError as error:
        _, code = errors.classify(error)
        if code not in ("sandbox_stopped", "not_found"):
            code = "sandbox_stream_closed"
        yield error_record(code, error.message)
    except Exception as error:
        log("stream failed", level="error", error=error)
        yield error_record("sandbox_stream_closed", "contact with the session was lost")
    finally:
        await pieces.aclose()


async def text_records(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Output as records of text; what was dropped is told on standard error."""
    text = OutputText()
    async for item in items:
        if isinstance(item, Chunk):
            stream = _STREAMS.get(item.stream, OutputStream.STDOUT)
            piece = text.feed(stream, item.data)
            if piece:
                yield output_record(stream, piece)
        elif isinstance(item, Gap):
            yield output_record(
                OutputStream.STDERR, f"\n[sandkeep: {item.length} bytes of output were dropped here]\n"
            )
        else:
            break
    for stream, piece in text.finish():
        yield output_record(stream, piece)


async def byte_records(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Output as NDJSON with exact bytes in base64."""
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
            yield record({"offset": item.offset, "gap": item.length})
        else:
            yield record({"offset": item.offset, "timeUs": item.time_us, "end": True})


async def byte_frames(items: AsyncIterator[Item]) -> AsyncGenerator[bytes, None]:
    """Output as binary frames: nothing is encoded."""
    pack = frames.HEADER.pack
    async for item in items:
        if isinstance(item, Chunk):
            yield pack(len(item.data), _KINDS.get(item.stream, frames.STDOUT), item.time_us, item.offset)
            yield item.data
        elif isinstance(item, Gap):
            length = frames.GAP_LENGTH.pack(item.length)
            yield pack(len(length), frames.GAP, 0, item.offset) + length
        elif isinstance(item, End):
            yield pack(0, frames.END, item.time_us, item.offset)


def record_frame(value: Any) -> bytes:
    """Something that is not output, between frames that are."""
    data = encode(value)
    return frames.HEADER.pack(len(data), frames.RECORD, 0, 0) + data
