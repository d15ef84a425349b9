"""Output and input of a process, by its id: for handles, and for streams that outlive them."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandkeep.errors import OutputDamaged, StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, decode
from sandkeep.sdk._async.unix_http import Response
from sandkeep.sdk._compat_async import sleep
from sandkeep.sdk.output import FrameReader, OutputEnd, OutputItem
from sandkeep.sdk.values import OutputChunk, OutputGap
from sandkeep.states import OutputStream
from sandkeep.wire import frames
from sandkeep.wire.responses import StdinWritten
from sandkeep.wire.v1 import StdinShown


async def items_of(response: Response) -> AsyncGenerator[OutputItem, None]:
    """Yield the frames of a response."""
    reader = FrameReader()
    async for chunk in response.chunks:
        for item in reader.feed(chunk):
            yield item


async def log_of(
    transport: Transport,
    session: str,
    process: str,
    offset: int = 0,
    *,
    follow: bool = True,
    until: float | None = None,
) -> AsyncGenerator[OutputChunk | OutputGap, None]:
    """Yield the durable log; reconnects if the connection is lost, and continues at the same offset.

    ``until``: time on the monotonic clock after which nothing is waited for or tried again.
    """
    again = retry.Reconnecting()
    while True:
        try:
            async with aclosing(_items(transport, session, process, offset, follow, until)) as items:
                async for item in items:
                    again.heard()
                    if isinstance(item, OutputEnd):
                        return
                    if isinstance(item, OutputChunk | OutputGap):
                        offset = item.end
                        yield item
            if not follow:
                return
            raise StreamClosed("the server ended the log before its last record", process=process)
        except TransportError as error:
            delay = again.after(error)
            if until is not None and time.monotonic() + delay > until:
                raise
            await sleep(delay)


async def _items(
    transport: Transport, session: str, process: str, offset: int, follow: bool, until: float | None
) -> AsyncGenerator[OutputItem, None]:
    quiet = QUIET_SECONDS if until is None else max(min(QUIET_SECONDS, until - time.monotonic()), 0.001)
    async with (
        transport.stream(
            "GET",
            f"/v1/sessions/{session}/processes/{process}/output",
            query={"offset": str(offset), "follow": "true" if follow else "false"},
            headers={"Accept": frames.CONTENT_TYPE},
            timeout=quiet,
        ) as response,
        aclosing(items_of(response)) as items,
    ):
        async for item in items:
            yield item


async def stream_of(
    transport: Transport, session: str, process: str, stream: OutputStream
) -> AsyncGenerator[bytes, None]:
    """Yield one of its two streams, from the beginning to the end of the process."""
    async with aclosing(log_of(transport, session, process)) as items:
        async for item in items:
            refuse_gap(item, process)
            if isinstance(item, OutputChunk) and item.stream is stream:
                yield item.data


def refuse_gap(item: OutputChunk | OutputGap, process: str) -> None:
    """Raise for a gap: joined bytes must be complete. ``Process.output`` returns what is intact."""
    if isinstance(item, OutputGap):
        why = "is damaged on the server's disk"
        if item.reason == "dropped":
            why = f"is more than the log keeps: {item.length} bytes were dropped"
        raise OutputDamaged(
            f"the output of {process} {why} at byte {item.offset}",
            hint="Process.output() returns what is intact, with gaps",
            process=process,
            offset=item.offset,
            length=item.length,
        )


async def received_by(transport: Transport, session: str, process: str) -> int:
    """Return how many bytes of input have arrived at a process."""
    path = f"/v1/sessions/{session}/processes/{process}/stdin"
    return decode(StdinShown, await transport.request("GET", path)).bytes_written


async def write_to(
    transport: Transport,
    path: str,
    data: bytes,
    offset: int | None,
    close: bool,
    seconds: float | None = None,
) -> int:
    """Send input to a process; return how many bytes have arrived in total."""
    body: dict[str, object] = {} if offset is None else {"offset": offset}
    if data:
        body["data"] = b64encode(data).decode("ascii")
    if close:
        body["close"] = True
    # The server gives up before the longest timeout.
    limit = 90.0 if seconds is None else min(90.0, seconds)
    # Each chunk states its offset, and closing twice is refused as already closed.
    response = await transport.request(
        "POST", f"{path}/stdin", json=body, replay=True, timeout=limit, within=seconds
    )
    return decode(StdinWritten, response).bytes_written
