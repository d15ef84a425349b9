"""Drives: get or create, get, list, fork, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.errors import Conflict, NameTaken
from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS, page_request
from sandkeep.spec import DEFAULT_REGION
from sandkeep.states import DriveSort
from sandkeep.store.rows import Drive
from sandkeep.wire.base import given
from sandkeep.wire.bodies import DriveBody, DriveForkBody
from sandkeep.wire.objects import DriveObject
from sandkeep.wire.queries import ListDrivesQuery
from sandkeep.wire.responses import DrivePage, DriveShown

if TYPE_CHECKING:
    from sandkeep.server.auth import Scope

table = Table("drives")

_SORTS = {DriveSort.CREATED_AT: "created", DriveSort.UPDATED_AT: "updated", DriveSort.NAME: "name"}


def _shown(call: RequestContext, row: Drive, scope: Scope) -> DriveObject:
    user = call.engine.store.sessions.find(row.current_session) if row.current_session else None
    return present.drive(row, project=scope.shown, sandbox_name=user.sandbox_name if user else None)


@table.route(
    "GET",
    "/v2/sandboxes/drives",
    summary="List drives",
    query=ListDrivesQuery,
    response=DrivePage,
    errors=REFUSALS,
)
async def list_drives(call: RequestContext) -> Reply:
    query = call.query(ListDrivesQuery)
    scope = call.scope()
    page = call.engine.store.drives.page(
        scope.project,
        page_request(query.limit, query.cursor, query.sort_order),
        sort=_SORTS[query.sort_by],
        name_prefix=query.name_prefix or None,
    )
    return json_reply(
        DrivePage(
            drives=[_shown(call, row, scope) for row in page.items],
            pagination=present.pagination(page),
        )
    )


@table.route(
    "POST",
    "/v2/sandboxes/drives/{drive}",
    summary="Get a drive, created when it is new",
    request=DriveBody,
    response=DriveShown,
    status=201,
    also=(200,),
    errors=REFUSALS,
)
async def get_or_create_drive(call: RequestContext) -> Reply:
    body = await call.body(DriveBody)
    scope = call.scope(project=body.project_id, make=True)
    row, created = await call.engine.drives.get_or_create(
        scope.project,
        call.params["drive"],
        region=given(body.region, DEFAULT_REGION),
        max_size_bytes=given(body.max_size_bytes, None),
    )
    return json_reply(DriveShown(drive=_shown(call, row, scope)), status=201 if created else 200)


@table.route(
    "GET",
    "/v2/sandboxes/drives/{drive}",
    summary="Get a drive by name or id",
    response=DriveShown,
    errors=(*REFUSALS, "not_found"),
)
async def get_drive(call: RequestContext) -> Reply:
    scope = call.scope()
    row = call.engine.drives.get(scope.project, call.params["drive"])
    return json_reply(DriveShown(drive=_shown(call, row, scope)))


@table.route(
    "DELETE",
    "/v2/sandboxes/drives/{drive}",
    summary="Delete a drive that no session writes to and no sandbox mounts as a snapshot",
    response=DriveShown,
    errors=(*REFUSALS, "not_found", "drive_attached"),
)
async def delete_drive(call: RequestContext) -> Reply:
    scope = call.scope()
    row = await call.engine.drives.delete(scope.project, call.params["drive"])
    return json_reply(DriveShown(drive=_shown(call, row, scope)))


@table.route(
    "POST",
    "/v2/sandboxes/drives/{drive}/fork",
    summary="Create a drive with what ended sessions left on another",
    request=DriveForkBody,
    response=DriveShown,
    errors=(*REFUSALS, "not_found", "conflict", "drive_not_initialized"),
)
async def fork_drive(call: RequestContext) -> Reply:
    body = await call.body(DriveForkBody)
    scope = call.scope()
    try:
        row = await call.engine.drives.fork(scope.project, call.params["drive"], name=body.name)
    except NameTaken as error:
        # A taken name is a bad request when a sandbox is created; here clients expect a conflict.
        raise Conflict(error.message, name=body.name) from None
    return json_reply(DriveShown(drive=_shown(call, row, scope)))
