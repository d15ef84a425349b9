"""Secrets of a project: set, list, delete. Responses never hold a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.base import Body
from sandkeep.wire.responses import Empty
from sandkeep.wire.secrets import SecretBody, SecretList, SecretObject, SecretShown

if TYPE_CHECKING:
    from sandkeep.engine.secrets import Secret

table = Table("secrets")


@table.route("GET", "/v1/secrets", summary="List secrets by name", response=SecretList, errors=REFUSALS)
async def list_secrets(call: RequestContext) -> Reply:
    found = call.engine.secrets.list(call.scope().project)
    return json_reply(SecretList(secrets=[_shown(secret) for secret in found]))


@table.route(
    "PUT",
    "/v1/secrets/{secret}",
    summary="Store a value under a name, replacing the previous one; running sessions get it",
    request=SecretBody,
    response=SecretShown,
    errors=REFUSALS,
)
async def set_secret(call: RequestContext) -> Reply:
    body = await call.body(SecretBody)
    scope = call.scope(make=True)
    stored = await call.engine.secrets.set(scope.project, call.params["secret"], body.value)
    return json_reply(SecretShown(secret=_shown(stored)))


@table.route(
    "DELETE",
    "/v1/secrets/{secret}",
    summary="Delete a value; requests that need it fail from now on",
    request=Body,
    request_required=False,
    response=Empty,
    errors=(*REFUSALS, "not_found"),
)
async def delete_secret(call: RequestContext) -> Reply:
    await call.engine.secrets.remove(call.scope().project, call.params["secret"])
    return json_reply(Empty())


def _shown(secret: Secret) -> SecretObject:
    return SecretObject(name=secret.name, created_at=secret.created_ms, updated_at=secret.updated_ms)
