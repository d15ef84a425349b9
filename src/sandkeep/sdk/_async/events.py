"""What happened on a sandbox's network, read from the server's events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.listing import with_cursor
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, read, records
from sandkeep.sdk.concurrent import sleep
from sandkeep.sdk.network import NetworkEvent
from sandkeep.wire.additions import EventPage, EventRecord

_PAGE = "100"


def _query(sandbox: str) -> dict[str, str]:
    return {"name": sandbox, "kindPrefix": "network.", "sortOrder": "asc", "limit": _PAGE}


async def recorded(transport: Transport, sandbox: str) -> AsyncGenerator[NetworkEvent, None]:
    """What is there, oldest first."""
    cursor: str | None = None
    while True:
        answer = await transport.request("GET", "/v1/events", query=with_cursor(_query(sandbox), cursor))
        page = read(EventPage, answer)
        for event in page.events:
            yield NetworkEvent.of(event)
        cursor = page.pagination.next
        if cursor is None:
            return


async def followed(transport: Transport, sandbox: str) -> AsyncGenerator[NetworkEvent, None]:
    """What is there and then what happens; a connection lost on the way is made again and misses nothing."""
    cursor: str | None = None
    attempt = 0
    while True:
        try:
            async with aclosing(_records(transport, sandbox, cursor)) as found:
                async for record in found:
                    attempt = 0
                    cursor = record.cursor
                    yield NetworkEvent.of(record.event)
            raise StreamClosed("the stream of events ended", sandbox=sandbox)
        except TransportError:
            attempt += 1
            if attempt > 2 * retry.ATTEMPTS:
                raise
            await sleep(retry.backoff(attempt))


async def _records(
    transport: Transport, sandbox: str, cursor: str | None
) -> AsyncGenerator[EventRecord, None]:
    query = with_cursor({**_query(sandbox), "follow": "true"}, cursor)
    async with (
        transport.stream("GET", "/v1/events", query=query, timeout=QUIET_SECONDS) as answer,
        aclosing(records(EventRecord, answer)) as lines,
    ):
        async for record in lines:
            yield record
