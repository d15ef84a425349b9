"""Events of a project, as pages or as they happen."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, Reply, json_reply
from sandkeep.server.output import HEARTBEAT_SECONDS
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS, page_request
from sandkeep.states import SortOrder
from sandkeep.store import Page, PageRequest
from sandkeep.store.events import RECORDED
from sandkeep.store.pages import write_cursor
from sandkeep.store.rows import Event
from sandkeep.wire.openapi import NDJSON
from sandkeep.wire.streams import HEARTBEAT, record
from sandkeep.wire.v1 import EventPage, EventRecord, ListEventsQuery

if TYPE_CHECKING:
    pass

table = Table("events")


@table.route(
    "GET",
    "/v1/events",
    summary="List events; with follow as they happen: from the cursor, the oldest (ascending) or now on",
    query=ListEventsQuery,
    response=EventPage,
    response_types=(NDJSON,),
    errors=(*REFUSALS, "not_found"),
)
async def list_events(call: RequestContext) -> Reply | ChunkedReply:
    query = call.query(ListEventsQuery)
    scope = call.scope()
    store = call.engine.store
    sandbox = store.sandboxes.get(scope.project, query.name).id if query.name else None

    def page(request: PageRequest) -> Page[Event]:
        return store.events.page(
            scope.project,
            request,
            sandbox=sandbox,
            session=query.session or None,
            kind=query.kind or None,
            kind_prefix=query.kind_prefix or None,
        )

    if query.follow:
        page(PageRequest(limit=1, order="asc", cursor=query.cursor or None))  # refuses a bad cursor
        from_now = query.sort_order is SortOrder.DESC

        def over() -> bool:
            return sandbox is not None and store.sandboxes.find_by_id(scope.project, sandbox) is None

        wait = partial(store.events.wait, scope.project, sandbox, HEARTBEAT_SECONDS)
        return ChunkedReply(NDJSON, _follow(page, query.cursor, wait, from_now=from_now, over=over))
    found = page(page_request(query.limit, query.cursor, query.sort_order))
    shown = EventPage(
        events=[present.event(row) for row in found.items], pagination=present.pagination(found)
    )
    return json_reply(shown)


async def _follow(
    page: Callable[[PageRequest], Page[Event]],
    cursor: str,
    wait: Callable[[], Awaitable[bool]],
    *,
    from_now: bool,
    over: Callable[[], bool],
) -> AsyncGenerator[bytes, None]:
    """Yield records of an event and the cursor after it, until no more can happen."""
    forward = PageRequest(limit=100, order="asc", cursor=cursor or None)
    if not cursor and from_now:
        newest = page(PageRequest(limit=1)).items
        cursor = _after(newest[0]) if newest else ""
    while True:
        found = page(replace(forward, cursor=cursor or None)).items
        if found:
            cursor = _after(found[-1])
            yield b"".join(record(EventRecord(event=present.event(row), cursor=_after(row))) for row in found)
            continue
        if over():
            return
        if not await wait():
            yield HEARTBEAT


def _after(event: Event) -> str:
    return write_cursor(PageRequest(order="asc"), RECORDED, event.sequence, event.id)
