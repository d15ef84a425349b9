"""The server itself: health, version, OpenAPI document; and the scopes that clients ask about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from sandkeep.embedded import API_VERSION
from sandkeep.errors import AccessDenied, WrongState
from sandkeep.server.app import RequestContext
from sandkeep.server.auth import DEFAULT_TEAM
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.version import __version__
from sandkeep.wire.base import Body
from sandkeep.wire.bodies import ProjectBody
from sandkeep.wire.openapi import document
from sandkeep.wire.responses import (
    BillingObject,
    Empty,
    MembershipObject,
    ProjectShown,
    TeamObject,
    TeamPage,
    TeamsPagination,
    UserObject,
    UserShown,
)
from sandkeep.wire.v1 import HealthShown, VersionShown

if TYPE_CHECKING:
    pass

table = Table("server")


@table.route(
    "GET",
    "/health",
    summary="Whether sandboxes can be created; 503 when not",
    response=HealthShown,
    also=(503,),
    public=True,
)
async def health(call: RequestContext) -> Reply:
    problems = await call.engine.problems()
    if problems:
        return json_reply(HealthShown(status="not ready", problems=problems), status=503)
    return json_reply(HealthShown(status="ok"))


@table.route("GET", "/version", summary="Get the server's version", response=VersionShown, public=True)
async def version(call: RequestContext) -> Reply:
    return json_reply(
        VersionShown(
            version=__version__,
            api=API_VERSION,
            embedded=call.config.embedded,
            preparing=call.engine.preparing or UNSET,
        )
    )


@table.route("GET", "/openapi.json", summary="This document", response=dict[str, Any], public=True)
async def openapi(call: RequestContext) -> Reply:
    routes = [endpoint.route for endpoint in call.app.endpoints]
    return json_reply(
        document(
            routes,
            title="sandkeep",
            version=__version__,
            description="Named Linux sandboxes that keep their files between runs.",
        )
    )


@table.route(
    "GET",
    "/.well-known/jwks",
    summary="Get the keys that verify tokens of forwarded requests",
    response=dict[str, Any],
    public=True,
)
async def jwks(call: RequestContext) -> Reply:
    return json_reply(await call.engine.network.jwks())


@table.route(
    "POST",
    "/v1/server/retire",
    summary="Stop an embedded server without active sessions, so that another version can start",
    request=Body,
    request_required=False,
    response=Empty,
    errors=(*REFUSALS, "conflict"),
)
async def retire(call: RequestContext) -> Reply:
    if call.caller.project is not None:
        raise AccessDenied("only the local user of the server's machine may retire it")
    if call.app.retire is None:
        raise WrongState("only a server that was started by a client can be retired")
    active = call.engine.store.sessions.active_on_host(call.engine.driver.host)
    if active:
        raise WrongState(f"{len(active)} sessions are active", sessions=len(active))
    call.app.retire()
    return json_reply(Empty())


# --- scopes ----------------------------------------------------------------------------------------------


def _team(call: RequestContext) -> str:
    if call.caller.project is not None:
        return call.caller.project.team
    return call.request.query.get("teamId") or call.request.query.get("slug") or DEFAULT_TEAM


def _team_object(team: str) -> TeamObject:
    return TeamObject(
        id=team,
        slug=team,
        membership=MembershipObject(role="OWNER"),
        billing=BillingObject(plan="hobby"),
    )


@table.route("GET", "/v2/user", summary="Get the user of the token", response=UserShown, errors=REFUSALS)
async def get_user(call: RequestContext) -> Reply:
    team = _team(call)
    return json_reply(UserShown(user=UserObject(default_team_id=team, username=team)))


@table.route("GET", "/v2/teams", summary="List the teams of the token", response=TeamPage, errors=REFUSALS)
async def list_teams(call: RequestContext) -> Reply:
    teams = [_team_object(_team(call))]
    return json_reply(TeamPage(teams=teams, pagination=TeamsPagination(count=len(teams), next=None)))


@table.route("GET", "/v2/teams/{team}", summary="Get the token's team", response=TeamObject, errors=REFUSALS)
async def get_team(call: RequestContext) -> Reply:
    team = call.params["team"]
    if call.caller.project is not None and team != call.caller.project.team:
        raise AccessDenied(f"the token is not valid for team {team}", team=team)
    return json_reply(_team_object(team))


@table.route(
    "GET",
    "/v2/projects/{project}",
    summary="Get a project: any name means the token's own",
    response=ProjectShown,
    errors=REFUSALS,
)
async def get_project(call: RequestContext) -> Reply:
    call.scope()
    return json_reply(ProjectShown(id=call.params["project"], name=call.params["project"]))


@table.route(
    "POST",
    "/v11/projects",
    summary="Create a project: a no-op, since projects are created on first use",
    request=ProjectBody,
    response=ProjectShown,
    errors=REFUSALS,
)
async def create_project(call: RequestContext) -> Reply:
    body = await call.body(ProjectBody)
    call.scope()
    return json_reply(ProjectShown(id=body.name, name=body.name))
