"""Sandboxes: create, get and resume, list, change, fork, delete."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS, page_request
from sandkeep.states import SandboxSort
from sandkeep.store.rows import SessionStatus
from sandkeep.wire.base import given, known
from sandkeep.wire.bodies import CreateBody, ForkBody, UpdateBody
from sandkeep.wire.queries import DeleteSandboxQuery, GetSandboxQuery, ListSandboxesQuery
from sandkeep.wire.responses import SandboxDeleted, SandboxPage, SandboxStarted, SandboxUpdated

if TYPE_CHECKING:
    from sandkeep.engine.sandboxes import Started
    from sandkeep.server.auth import Scope

table = Table("sandboxes")

_SORTS = {
    SandboxSort.CREATED_AT: "created",
    SandboxSort.NAME: "name",
    SandboxSort.STATUS_UPDATED_AT: "status_updated",
    SandboxSort.CURRENT_SNAPSHOT_ID: "current_snapshot",
}


def started(call: RequestContext, found: Started, scope: Scope) -> SandboxStarted:
    return SandboxStarted(
        sandbox=present.sandbox(call.engine, found.sandbox, project=scope.shown, session=found.session),
        session=present.session(found.session, project=scope.shown),
        routes=present.routes(call.engine, found.sandbox),
        resumed=found.resumed,
        **known(left_out=found.left_out),
    )


def started_reply(call: RequestContext, found: Started, scope: Scope) -> Reply:
    return json_reply(started(call, found, scope))


@table.route(
    "POST",
    "/v3/sandboxes",
    summary="Create a sandbox and start its first session",
    request=CreateBody,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def create_sandbox(call: RequestContext) -> Reply:
    return await _create(call, legacy=False)


@table.route(
    "POST",
    "/v2/sandboxes",
    summary="Create a sandbox with a runtime unless an image is given",
    request=CreateBody,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def create_runtime_sandbox(call: RequestContext) -> Reply:
    return await _create(call, legacy=True)


async def _create(call: RequestContext, *, legacy: bool) -> Reply:
    body = await call.body(CreateBody)
    spec = body.spec(legacy=legacy)
    longest = timedelta(milliseconds=call.engine.settings.max_timeout_ms)
    if body.timeout is UNSET and spec.timeout > longest:
        spec = replace(spec, timeout=longest)
    scope = call.scope(project=body.project_id, make=True)
    # Official clients name runtimes only on the older route, and accept what the machine has instead.
    made = await call.engine.sandboxes.create(
        scope.project, spec, key=call.key(), exact=not legacy, operator=call.is_local
    )
    return started_reply(call, made, scope)


@table.route(
    "GET",
    "/v2/sandboxes",
    summary="List sandboxes",
    query=ListSandboxesQuery,
    response=SandboxPage,
    errors=REFUSALS,
)
async def list_sandboxes(call: RequestContext) -> Reply:
    query = call.query(ListSandboxesQuery)
    scope = call.scope()
    status = query.status
    page = call.engine.store.sandboxes.page(
        scope.project,
        page_request(query.limit, query.cursor, query.sort_order),
        sort=_SORTS[query.sort],
        name_prefix=query.name_prefix or None,
        tags=query.wanted,
        status=None if isinstance(status, UnsetType) else SessionStatus(status.value),
    )
    return json_reply(
        SandboxPage(
            sandboxes=[present.sandbox(call.engine, row, project=scope.shown) for row in page.items],
            pagination=present.pagination(page),
        )
    )


@table.route(
    "GET",
    "/v2/sandboxes/{name}",
    summary="Get a sandbox with its latest session; with resume, start one if none is active",
    query=GetSandboxQuery,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def get_sandbox(call: RequestContext) -> Reply:
    query = call.query(GetSandboxQuery)
    scope = call.scope()
    name = call.params["name"]
    if query.resume:
        return started_reply(call, await call.engine.sandboxes.resume(scope.project, name), scope)
    return started_reply(call, call.engine.sandboxes.get(scope.project, name), scope)


@table.route(
    "POST",
    "/v1/sandboxes/{name}/resume",
    summary="Resume a sandbox if its configuration matches the body",
    request=CreateBody,
    response=SandboxStarted,
    errors=(
        *REFUSALS,
        "not_found",
        "snapshot_not_found",
        "conflict",
        "drive_attached",
        "limit_reached",
        "host_cannot",
    ),
)
async def resume_sandbox(call: RequestContext) -> Reply:
    asked = (await call.body(CreateBody)).changes()
    scope = call.scope()
    found = await call.engine.sandboxes.resume(scope.project, call.params["name"], asked=asked)
    return started_reply(call, found, scope)


@table.route(
    "PATCH",
    "/v2/sandboxes/{name}",
    summary="Change the configuration of future sessions",
    request=UpdateBody,
    response=SandboxUpdated,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "host_cannot"),
)
async def update_sandbox(call: RequestContext) -> Reply:
    body = await call.body(UpdateBody)
    changes = body.changes()
    scope = call.scope()
    row = await call.engine.sandboxes.update(
        scope.project,
        call.params["name"],
        changes,
        current_snapshot=given(body.current_snapshot_id, None),
        operator=call.is_local,
    )
    return json_reply(
        SandboxUpdated(
            sandbox=present.sandbox(call.engine, row, project=scope.shown),
            routes=present.routes(call.engine, row) if "ports" in changes else UNSET,
        )
    )


@table.route(
    "DELETE",
    "/v2/sandboxes/{name}",
    summary="End and delete a sandbox",
    query=DeleteSandboxQuery,
    response=SandboxDeleted,
    errors=(*REFUSALS, "not_found", "conflict"),
)
async def delete_sandbox(call: RequestContext) -> Reply:
    query = call.query(DeleteSandboxQuery)
    scope = call.scope()
    row = await call.engine.sandboxes.destroy(
        scope.project,
        call.params["name"],
        delete_orphan_snapshots=query.delete_orphan_snapshots,
        session=given(query.session, None),
        only_stopped=query.only_stopped,
    )
    return json_reply(SandboxDeleted(sandbox=present.sandbox(call.engine, row, project=scope.shown)))


@table.route(
    "POST",
    "/v2/sandboxes/{name}/fork",
    summary="Create a sandbox with the files and configuration of another",
    request=ForkBody,
    request_required=False,
    response=SandboxStarted,
    errors=(*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot"),
)
async def fork_sandbox(call: RequestContext) -> Reply:
    body = await call.body(ForkBody)
    changes = body.changes()
    scope = call.scope()
    return started_reply(
        call,
        await call.engine.sandboxes.fork(
            scope.project,
            call.params["name"],
            changes,
            live=body.live,
            key=call.key(),
            operator=call.is_local,
        ),
        scope,
    )
