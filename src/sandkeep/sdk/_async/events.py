"""Events of the server: those recorded, and new ones as they happen."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.listing import with_cursor
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, decode, records
from sandkeep.sdk._compat_async import sleep
from sandkeep.sdk.queries import Parameters
from sandkeep.wire.v1 import EventObject, EventPage, EventRecord

_PAGE = "100"


async def events(
    transport: Transport, *, sandbox: str | None = None, kind: str | None = None, follow: bool = False
) -> AsyncGenerator[EventObject, None]:
    """Yield events of a project or one sandbox whose kind starts with ``kind``, oldest first."""
    query: Parameters = {"sortOrder": "asc", "limit": _PAGE}
    if sandbox is not None:
        query["name"] = sandbox
    if kind is not None:
        query["kindPrefix"] = kind
    async with aclosing((_followed if follow else _recorded)(transport, query)) as found:
        async for event in found:
            yield event


async def _recorded(transport: Transport, query: Parameters) -> AsyncGenerator[EventObject, None]:
    """Yield the recorded events, oldest first."""
    cursor: str | None = None
    while True:
        response = await transport.request("GET", "/v1/events", query=with_cursor(query, cursor))
        page = decode(EventPage, response)
        for event in page.events:
            yield event
        cursor = page.pagination.next
        if cursor is None:
            return


async def _followed(transport: Transport, query: Parameters) -> AsyncGenerator[EventObject, None]:
    """Yield recorded and then new events; reconnects if the connection is lost, and misses nothing."""
    cursor: str | None = None
    again = retry.Reconnecting()
    while True:
        try:
            async with aclosing(_records(transport, query, cursor)) as found:
                async for record in found:
                    again.heard()
                    cursor = record.cursor
                    yield record.event
            raise StreamClosed("the server ended the stream of events")
        except TransportError as error:
            await sleep(again.after(error))


async def _records(
    transport: Transport, query: Parameters, cursor: str | None
) -> AsyncGenerator[EventRecord, None]:
    query = with_cursor({**query, "follow": "true"}, cursor)
    async with (
        transport.stream("GET", "/v1/events", query=query, timeout=QUIET_SECONDS) as response,
        aclosing(records(EventRecord, response)) as lines,
    ):
        async for record in lines:
            yield record
