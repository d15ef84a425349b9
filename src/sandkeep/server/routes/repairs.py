"""Damage: finding it, and repairing what can be repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.base import known
from sandkeep.wire.repairs import DamageObject, RepairBody, RepairShown

if TYPE_CHECKING:
    pass

table = Table("server")


@table.route(
    "POST",
    "/v1/repair",
    summary="Find damage, repair what can be repaired, and report the rest",
    request=RepairBody,
    response=RepairShown,
    errors=(*REFUSALS, "not_found"),
)
async def repair(call: RequestContext) -> Reply:
    body = await call.body(RepairBody)
    report = await call.engine.repairs.repair(
        call.scope().project, body.name or None, use_older=body.use_older, drop=body.drop
    )
    left = [
        DamageObject(
            sandbox=item.sandbox,
            snapshot=item.snapshot,
            layer=item.layer,
            why=item.why,
            **known(older=item.older),
        )
        for item in report.left
    ]
    return json_reply(RepairShown(done=report.done, left=left))
