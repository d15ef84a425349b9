"""Sandboxes: create, get and resume, list, change, fork, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from sandkeep.server import show
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS, page_request
from sandkeep.store.rows import SessionStatus
from sandkeep.types import SandboxSort
from sandkeep.wire.base import given
from sandkeep.wire.bodies import CreateBody, ForkBody, UpdateBody
from sandkeep.wire.queries import DeleteSandboxQuery, GetSandboxQuery, ListSandboxesQuery
from sandkeep.wire.responses import SandboxDeleted, SandboxPage, SandboxStarted, SandboxUpdated

if TYPE_CHECKING:
    from sandkeep.engine.sandboxes import Started
    from sandkeep.server.app import Call
    from sandkeep.server.auth import Scope

table = Table("sandboxes")

_SORTS = {
    SandboxSort.CREATED_AT: "created",
    SandboxSort.NAME: "name",
    SandboxSort.STATUS_UPDATED_AT: "status_updated",
    SandboxSort.CURRENT_SNAPSHOT_ID: "current_snapshot",
}


def started_reply(call: Call, found: Started, scope: Scope) -> Reply:
    return json_reply(
        SandboxStarted(
            sandbox=show.sandbox(call.engine, found.sandbox, project=scope.shown, session=found.session),
            session=show.session(found.session, project=scope.shown),
            routes=show.routes(call.engine, found.sandbox),
            resumed=found.resumed,
        )
    )


@table.route(
    "POST",
    "/v3/sandboxes",
    summary="Create a sandbox and start its first session",
    request=CreateBody,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def create_sandbox(call: Call) -> Reply:
    return await _create(call, legacy=False)


@table.route(
    "POST",
    "/v2/sandboxes",
    summary="Create a sandbox, of a runtime unless an image is named",
    request=CreateBody,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def create_runtime_sandbox(call: Call) -> Reply:
    return await _create(call, legacy=True)


async def _create(call: Call, *, legacy: bool) -> Reply:
    body = await call.body(CreateBody)
    spec = body.spec(legacy=legacy)
    scope = call.scope(project=body.project_id, make=True)
    return started_reply(call, await call.engine.sandboxes.create(scope.project, spec), scope)


@table.route(
    "GET",
    "/v2/sandboxes",
    summary="List sandboxes",
    query=ListSandboxesQuery,
    response=SandboxPage,
    errors=REFUSALS,
)
async def list_sandboxes(call: Call) -> Reply:
    query = call.query(ListSandboxesQuery)
    scope = call.scope()
    status = query.status
    page = call.engine.store.sandboxes.page(
        scope.project,
        page_request(query.limit, query.cursor, query.sort_order),
        sort=_SORTS[query.sort],
        name_prefix=query.name_prefix or None,
        tag=query.tag,
        status=None if isinstance(status, UnsetType) else SessionStatus(status.value),
    )
    return json_reply(
        SandboxPage(
            sandboxes=[show.sandbox(call.engine, row, project=scope.shown) for row in page.items],
            pagination=show.pagination(page),
        )
    )


@table.route(
    "GET",
    "/v2/sandboxes/{name}",
    summary="Get a sandbox with its latest session; with resume, start one if none is active",
    query=GetSandboxQuery,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached"),
)
async def get_sandbox(call: Call) -> Reply:
    query = call.query(GetSandboxQuery)
    scope = call.scope()
    name = call.params["name"]
    if query.resume:
        return started_reply(call, await call.engine.sandboxes.resume(scope.project, name), scope)
    return started_reply(call, call.engine.sandboxes.get(scope.project, name), scope)


@table.route(
    "PATCH",
    "/v2/sandboxes/{name}",
    summary="Change what future sessions are started with",
    request=UpdateBody,
    response=SandboxUpdated,
    errors=(*REFUSALS, "not_found", "snapshot_not_found"),
)
async def update_sandbox(call: Call) -> Reply:
    body = await call.body(UpdateBody)
    changes = body.changes()
    scope = call.scope()
    row = await call.engine.sandboxes.update(
        scope.project,
        call.params["name"],
        changes,
        current_snapshot=given(body.current_snapshot_id, None),
    )
    return json_reply(
        SandboxUpdated(
            sandbox=show.sandbox(call.engine, row, project=scope.shown),
            routes=show.routes(call.engine, row) if "ports" in changes else UNSET,
        )
    )


@table.route(
    "DELETE",
    "/v2/sandboxes/{name}",
    summary="End and delete a sandbox",
    query=DeleteSandboxQuery,
    response=SandboxDeleted,
    errors=(*REFUSALS, "not_found"),
)
async def delete_sandbox(call: Call) -> Reply:
    query = call.query(DeleteSandboxQuery)
    scope = call.scope()
    row = await call.engine.sandboxes.destroy(
        scope.project, call.params["name"], delete_orphan_snapshots=query.delete_orphan_snapshots
    )
    return json_reply(SandboxDeleted(sandbox=show.sandbox(call.engine, row, project=scope.shown)))


@table.route(
    "POST",
    "/v2/sandboxes/{name}/fork",
    summary="Create a sandbox with the files and configuration of another",
    request=ForkBody,
    request_required=False,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached"),
)
async def fork_sandbox(call: Call) -> Reply:
    body = await call.body(ForkBody)
    changes = body.changes()
    scope = call.scope()
    return started_reply(
        call, await call.engine.sandboxes.fork(scope.project, call.params["name"], changes), scope
    )
