"""Batches: several sandboxes made by one request."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from msgspec import UNSET

from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.server.routes.sandboxes import started
from sandkeep.wire.bodies import CreateManyBody, ForkManyBody
from sandkeep.wire.responses import SandboxesStarted

table = Table("sandboxes")

_ERRORS = (*REFUSALS, "not_found", "snapshot_not_found", "drive_attached", "limit_reached", "host_cannot")


@table.route(
    "POST",
    "/v1/sandboxes",
    summary="Create several sandboxes of the same configuration, all of them or none",
    request=CreateManyBody,
    response=SandboxesStarted,
    errors=_ERRORS,
)
async def create_sandboxes(call: RequestContext) -> Reply:
    body = await call.body(CreateManyBody)
    spec = body.spec()
    longest = timedelta(milliseconds=call.engine.settings.max_timeout_ms)
    if body.timeout is UNSET and spec.timeout > longest:
        spec = replace(spec, timeout=longest)
    scope = call.scope(project=body.project_id, make=True)
    made = await call.engine.batches.create(
        scope.project, spec, body.count, key=call.key(), exact=True, operator=call.is_local
    )
    return json_reply(SandboxesStarted(sandboxes=[started(call, each, scope) for each in made]))


@table.route(
    "POST",
    "/v1/sandboxes/{name}/fork",
    summary="Create several sandboxes with the files and configuration of another, all of them or none",
    request=ForkManyBody,
    response=SandboxesStarted,
    errors=_ERRORS,
)
async def fork_sandboxes(call: RequestContext) -> Reply:
    body = await call.body(ForkManyBody)
    changes = body.changes()
    scope = call.scope()
    made = await call.engine.batches.fork(
        scope.project,
        call.params["name"],
        changes,
        body.count,
        live=body.live,
        key=call.key(),
        operator=call.is_local,
    )
    return json_reply(SandboxesStarted(sandboxes=[started(call, each, scope) for each in made]))
