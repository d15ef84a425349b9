"""The server itself: health, version, its own description; and the scopes clients ask about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sandkeep
from sandkeep.errors import AccessDenied, WrongState
from sandkeep.server.auth import DEFAULT_TEAM
from sandkeep.server.embedded import API_VERSION
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.additions import HealthShown, VersionShown
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

if TYPE_CHECKING:
    from sandkeep.server.app import Call

table = Table("server")


@table.route("GET", "/health", summary="Whether the server is ready", response=HealthShown, public=True)
async def health(call: Call) -> Reply:
    del call
    return json_reply(HealthShown(status="ok"))


@table.route("GET", "/version", summary="Which server this is", response=VersionShown, public=True)
async def version(call: Call) -> Reply:
    return json_reply(
        VersionShown(version=sandkeep.__version__, api=API_VERSION, embedded=call.config.embedded)
    )


@table.route("GET", "/openapi.json", summary="This document", response=dict[str, Any], public=True)
async def openapi(call: Call) -> Reply:
    routes = [endpoint.route for endpoint in call.app.endpoints]
    return json_reply(
        document(
            routes,
            title="sandkeep",
            version=sandkeep.__version__,
            description="Named Linux sandboxes that keep their files between runs.",
        )
    )


@table.route(
    "GET",
    "/.well-known/jwks",
    summary="The keys that tokens of forwarded requests are verified with",
    response=dict[str, Any],
    public=True,
)
async def jwks(call: Call) -> Reply:
    return json_reply(await call.engine.network.jwks())


@table.route(
    "POST",
    "/v1/server/retire",
    summary="End an embedded server that has nothing to look after, so that another version can start",
    request=Body,
    request_required=False,
    response=Empty,
    errors=(*REFUSALS, "conflict"),
)
async def retire(call: Call) -> Reply:
    if call.caller.project is not None:
        raise AccessDenied("only the local user may do this")
    if call.app.retire is None:
        raise WrongState("this server was not started by a client")
    active = call.engine.store.sessions.active_on_host(call.engine.driver.host)
    if active:
        raise WrongState(f"{len(active)} sessions are active", sessions=len(active))
    call.app.retire()
    return json_reply(Empty())


# --- scopes ----------------------------------------------------------------------------------------------


def _team(call: Call) -> str:
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


@table.route("GET", "/v2/user", summary="Who the token stands for", response=UserShown, errors=REFUSALS)
async def get_user(call: Call) -> Reply:
    team = _team(call)
    return json_reply(UserShown(user=UserObject(default_team_id=team, username=team)))


@table.route("GET", "/v2/teams", summary="The team of the token", response=TeamPage, errors=REFUSALS)
async def list_teams(call: Call) -> Reply:
    teams = [_team_object(_team(call))]
    return json_reply(TeamPage(teams=teams, pagination=TeamsPagination(count=len(teams), next=None)))


@table.route("GET", "/v2/teams/{team}", summary="Get the token's team", response=TeamObject, errors=REFUSALS)
async def get_team(call: Call) -> Reply:
    team = call.params["team"]
    if call.caller.project is not None and team != call.caller.project.team:
        raise AccessDenied("the token does not act for this team", team=team)
    return json_reply(_team_object(team))


@table.route(
    "GET",
    "/v2/projects/{project}",
    summary="Get a project: any name stands for the token's own",
    response=ProjectShown,
    errors=REFUSALS,
)
async def get_project(call: Call) -> Reply:
    call.scope()
    return json_reply(ProjectShown(id=call.params["project"], name=call.params["project"]))


@table.route(
    "POST",
    "/v11/projects",
    summary="Create a project: names need no creation here",
    request=ProjectBody,
    response=ProjectShown,
    errors=REFUSALS,
)
async def create_project(call: Call) -> Reply:
    body = await call.body(ProjectBody)
    call.scope()
    return json_reply(ProjectShown(id=body.name, name=body.name))
