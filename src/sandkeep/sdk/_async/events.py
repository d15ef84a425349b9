"""What happened, read from the server's events: what is there, or as it happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.listing import with_cursor
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, read, records
from sandkeep.sdk.concurrent import sleep
from sandkeep.wire.additions import EventObject, EventPage, EventRecord

_PAGE = "100"


async def events(
    transport: Transport, *, sandbox: str | None = None, kind: str | None = None, follow: bool = False
) -> AsyncGenerator[EventObject, None]:
    """Those of a project or one sandbox whose kind begins so, oldest first."""
    query = {"sortOrder": "asc", "limit": _PAGE}
    if sandbox is not None:
        query["name"] = sandbox
    if kind is not None:
        query["kindPrefix"] = kind
    async with aclosing((_followed if follow else _recorded)(transport, query)) as found:
        async for event in found:
            yield event


async def _recorded(transport: Transport, query: dict[str, str]) -> AsyncGenerator[EventObject, None]:
    """What is there, oldest first."""
    cursor: str | None = None
    while True:
        answer = await transport.request("GET", "/v1/events", query=with_cursor(query, cursor))
        page = read(EventPage, answer)
        for event in page.events:
            yield event
        cursor = page.pagination.next
        if cursor is None:
            return


async def _followed(transport: Transport, query: dict[str, str]) -> AsyncGenerator[EventObject, None]:
    """What is there and then what happens; a connection lost on the way is made again and misses nothing."""
    cursor: str | None = None
    attempt = 0
    while True:
        try:
            async with aclosing(_records(transport, query, cursor)) as found:
                async for record in found:
                    attempt = 0
                    cursor = record.cursor
                    yield record.event
            raise StreamClosed("the stream of events ended")
        except TransportError:
            attempt += 1
            if attempt > 2 * retry.ATTEMPTS:
                raise
            await sleep(retry.backoff(attempt))


async def _records(
    transport: Transport, query: dict[str, str], cursor: str | None
) -> AsyncGenerator[EventRecord, None]:
    query = with_cursor({**query, "follow": "true"}, cursor)
    async with (
        transport.stream("GET", "/v1/events", query=query, timeout=QUIET_SECONDS) as answer,
        aclosing(records(EventRecord, answer)) as lines,
    ):
        async for record in lines:
            yield record
