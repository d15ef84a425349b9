"""What a process printed and is given to read, by its id: for handles, and for streams that outlive them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.plain import Answer
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, read
from sandkeep.sdk.concurrent import sleep
from sandkeep.sdk.output import FrameReader, OutputEnd, OutputItem
from sandkeep.sdk.values import OutputChunk, OutputGap
from sandkeep.types import OutputStream
from sandkeep.wire import frames
from sandkeep.wire.responses import StdinWritten


async def items_of(answer: Answer) -> AsyncGenerator[OutputItem, None]:
    """The frames of an answer."""
    reader = FrameReader()
    async for piece in answer.pieces:
        for item in reader.feed(piece):
            yield item


async def log_of(
    transport: Transport, session: str, process: str, offset: int = 0, *, follow: bool = True
) -> AsyncGenerator[OutputChunk | OutputGap, None]:
    """The durable log; a connection lost on the way is made again and goes on where it was."""
    attempt = 0
    while True:
        try:
            async with aclosing(_items(transport, session, process, offset, follow)) as items:
                async for item in items:
                    attempt = 0
                    if isinstance(item, OutputEnd):
                        return
                    if isinstance(item, OutputChunk | OutputGap):
                        offset = item.end
                        yield item
            if not follow:
                return
            raise StreamClosed("the log ended without its end", process=process)
        except TransportError:
            attempt += 1
            if attempt > 2 * retry.ATTEMPTS:
                raise
            await sleep(retry.backoff(attempt))


async def _items(
    transport: Transport, session: str, process: str, offset: int, follow: bool
) -> AsyncGenerator[OutputItem, None]:
    async with (
        transport.stream(
            "GET",
            f"/v1/sessions/{session}/processes/{process}/output",
            query={"offset": str(offset), "follow": "true" if follow else "false"},
            headers={"Accept": frames.CONTENT_TYPE},
            timeout=QUIET_SECONDS,
        ) as answer,
        aclosing(items_of(answer)) as items,
    ):
        async for item in items:
            yield item


async def stream_of(
    transport: Transport, session: str, process: str, stream: OutputStream
) -> AsyncGenerator[bytes, None]:
    """One of its two streams, from the beginning to the end of the process."""
    async with aclosing(log_of(transport, session, process)) as items:
        async for item in items:
            if isinstance(item, OutputChunk) and item.stream is stream:
                yield item.data


async def write_to(
    transport: Transport, path: str, data: bytes, offset: int, close: bool, seconds: float | None = None
) -> int:
    """Give the process with that path input; returns how much it has taken altogether."""
    body: dict[str, object] = {"offset": offset}
    if data:
        body["data"] = b64encode(data).decode("ascii")
    if close:
        body["close"] = True
    # The server itself gives up sooner than the longest.
    limit = 90.0 if seconds is None else min(90.0, seconds)
    answer = await transport.request("POST", f"{path}/stdin", json=body, replay=not close, timeout=limit)
    return read(StdinWritten, answer).bytes_written
