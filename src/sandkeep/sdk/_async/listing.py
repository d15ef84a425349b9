"""Fetching lists, a page at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sandkeep.sdk._async.paging import Page
from sandkeep.sdk._async.transport import Transport, decode
from sandkeep.sdk.queries import DriveQuery, Parameters, SessionQuery, SnapshotQuery
from sandkeep.sdk.sandboxes import Session
from sandkeep.sdk.values import Drive, Snapshot, SnapshotNode
from sandkeep.wire.responses import DrivePage, SessionPage, SnapshotPage, SnapshotTree

_TREE_PAGE = 10


def with_cursor(parameters: Parameters, cursor: str | None) -> Parameters:
    return parameters if cursor is None else {**parameters, "cursor": cursor}


def fetch_sessions(
    transport: Transport, query: SessionQuery, *, sandbox: str | None = None
) -> Callable[[str | None], Awaitable[Page[Session]]]:
    """Return a function that fetches pages of sessions, of one sandbox if given."""
    parameters: Parameters = {**query.parameters(), **({} if sandbox is None else {"name": sandbox})}

    async def fetch(cursor: str | None) -> Page[Session]:
        response = await transport.request(
            "GET", "/v2/sandboxes/sessions", query=with_cursor(parameters, cursor)
        )
        shown = decode(SessionPage, response)
        return Page(tuple(Session.of(session) for session in shown.sessions), shown.pagination.next)

    return fetch


def fetch_snapshots(
    transport: Transport, query: SnapshotQuery, *, sandbox: str | None = None
) -> Callable[[str | None], Awaitable[Page[Snapshot]]]:
    """Return a function that fetches pages of snapshots, of one sandbox if given."""
    parameters: Parameters = {**query.parameters(), **({} if sandbox is None else {"name": sandbox})}

    async def fetch(cursor: str | None) -> Page[Snapshot]:
        response = await transport.request(
            "GET", "/v2/sandboxes/snapshots", query=with_cursor(parameters, cursor)
        )
        shown = decode(SnapshotPage, response)
        return Page(tuple(Snapshot.of(snapshot) for snapshot in shown.snapshots), shown.pagination.next)

    return fetch


def fetch_drives(transport: Transport, query: DriveQuery) -> Callable[[str | None], Awaitable[Page[Drive]]]:
    """Return a function that fetches pages of drives."""

    async def fetch(cursor: str | None) -> Page[Drive]:
        response = await transport.request(
            "GET", "/v2/sandboxes/drives", query=with_cursor(query.parameters(), cursor)
        )
        shown = decode(DrivePage, response)
        return Page(tuple(Drive.of(drive) for drive in shown.drives), shown.pagination.next)

    return fetch


async def snapshot_tree(transport: Transport, anchor: str, *, descendants: bool) -> list[SnapshotNode]:
    """Return a snapshot and its ancestors or descendants, itself first."""
    found: list[SnapshotNode] = []
    at: str | None = anchor
    while at is not None:
        query = {
            "snapshotId": at,
            "limit": str(_TREE_PAGE),
            "sortOrder": "asc" if descendants else "desc",
        }
        shown = decode(
            SnapshotTree, await transport.request("GET", "/v2/sandboxes/snapshots/tree", query=query)
        )
        if not found:
            found.append(SnapshotNode.of(shown.anchor))
        found.extend(SnapshotNode.of(node) for node in shown.snapshots)
        at = shown.pagination.next
    return found
