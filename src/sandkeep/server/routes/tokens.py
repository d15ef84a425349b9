"""Tokens of a running server, for the local user: the server may hold its store exclusively."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from sandkeep.errors import AccessDenied
from sandkeep.server import tokens
from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.base import Body
from sandkeep.wire.tokens import CreateTokenQuery, TokenList, TokenMade, TokenShown, TokensQuery

if TYPE_CHECKING:
    pass

table = Table("tokens")


def _require_local(call: RequestContext) -> None:
    if call.caller.project is not None:
        raise AccessDenied("only the local user of the server's machine may manage tokens")


@table.route(
    "POST",
    "/v1/server/tokens",
    summary="Make a token (the local user only)",
    query=CreateTokenQuery,
    request=Body,
    request_required=False,
    response=TokenMade,
    errors=REFUSALS,
)
async def create_token(call: RequestContext) -> Reply:
    _require_local(call)
    asked = call.query(CreateTokenQuery)
    return json_reply(
        tokens.create(
            call.engine.store,
            team=asked.team,
            project=asked.project,
            name=asked.name,
            lifetime_ms=None if asked.lifetime_ms is UNSET else asked.lifetime_ms,
            jwt_key=call.app.auth.jwt_key if asked.jwt else None,
        )
    )


@table.route(
    "GET",
    "/v1/server/tokens",
    summary="List the tokens of a team (the local user only)",
    query=TokensQuery,
    response=TokenList,
    errors=REFUSALS,
)
async def list_tokens(call: RequestContext) -> Reply:
    _require_local(call)
    asked = call.query(TokensQuery)
    return json_reply(TokenList(tokens=tokens.of_team(call.engine.store, asked.team, asked.project or None)))


@table.route(
    "DELETE",
    "/v1/server/tokens/{token}",
    summary="Revoke a token (the local user only)",
    query=TokensQuery,
    request=Body,
    request_required=False,
    response=TokenShown,
    errors=(*REFUSALS, "not_found"),
)
async def revoke_token(call: RequestContext) -> Reply:
    _require_local(call)
    asked = call.query(TokensQuery)
    ended = tokens.revoke(call.engine.store, asked.team, call.params["token"])
    return json_reply(TokenShown(token=ended))
