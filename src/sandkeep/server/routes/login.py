"""Log-in for the vendor's command line, which asks for it when it has no token.

There are no accounts here, only tokens that the operator makes. The only response whose text the vendor's
client shows to its user is that of a log-in that was begun and then denied, so it gets one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.wire.v1 import LogInBegun, LogInDenied, LogInEndpoints

if TYPE_CHECKING:
    pass

table = Table("server")
_BEGIN: Final = "/v1/login"
_DENY: Final = "/v1/login/token"


@table.route(
    "GET",
    "/.well-known/openid-configuration",
    summary="Endpoints of a log-in that explains how to get a token",
    response=LogInEndpoints,
    public=True,
)
async def log_in_endpoints(call: RequestContext) -> Reply:
    origin = call.origin()
    return json_reply(
        LogInEndpoints(
            issuer=origin,
            device_authorization_endpoint=f"{origin}{_BEGIN}",
            token_endpoint=f"{origin}{_DENY}",
            revocation_endpoint=f"{origin}{_DENY}",
            introspection_endpoint=f"{origin}{_DENY}",
            jwks_uri=f"{origin}/.well-known/jwks",
        )
    )


@table.route("POST", _BEGIN, summary="Begin a log-in that will be denied", response=LogInBegun, public=True)
async def log_in(call: RequestContext) -> Reply:
    return json_reply(LogInBegun(verification_uri=call.origin(), verification_uri_complete=call.origin()))


@table.route(
    "POST",
    _DENY,
    summary="Deny a log-in, and explain how to get a token",
    response=LogInDenied,
    also=(400,),
    public=True,
)
async def deny_log_in(call: RequestContext) -> Reply:
    del call
    return json_reply(LogInDenied(), status=400)
