"""Sessions: list, get, stop, extend, snapshot, checkpoint, network policy, terminals, usage."""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET

from sandkeep.engine.files import Acting
from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.sessions import Usage
from sandkeep.errors import InvalidRequest, NotFound
from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.auth import Scope
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import NEEDS_SESSION, REFUSALS, page_request
from sandkeep.server.terminal import PATH
from sandkeep.store.rows import Session, SessionStatus, Snapshot
from sandkeep.wire.base import Body, given
from sandkeep.wire.bodies import ExtendBody, SnapshotBody
from sandkeep.wire.policies import PolicyBody
from sandkeep.wire.queries import ListSessionsQuery
from sandkeep.wire.responses import (
    SessionChanged,
    SessionPage,
    SessionShown,
    SessionStopped,
    SnapshotTaken,
    TerminalOpened,
)
from sandkeep.wire.tunnel import ROUTE
from sandkeep.wire.v1 import TerminalBody, UsageShown

table = Table("sessions")

_SESSION = "/v2/sandboxes/sessions/{session}"


@table.route(
    "GET",
    "/v2/sandboxes/sessions",
    summary="List sessions, of one sandbox or of all",
    query=ListSessionsQuery,
    response=SessionPage,
    errors=(*REFUSALS, "not_found"),
)
async def list_sessions(call: RequestContext) -> Reply:
    query = call.query(ListSessionsQuery)
    scope = call.scope()
    store = call.engine.store
    sandbox = store.sandboxes.get(scope.project, query.name).id if query.name else None
    page = store.sessions.page(
        scope.project, page_request(query.limit, query.cursor, query.sort_order), sandbox=sandbox
    )
    return json_reply(
        SessionPage(
            sessions=[present.session(row, project=scope.shown) for row in page.items],
            pagination=present.pagination(page),
        )
    )


@table.route(
    "GET",
    _SESSION,
    summary="Get a session",
    response=SessionShown,
    errors=(*REFUSALS, "not_found"),
    uses_session=False,
)
async def get_session(call: RequestContext) -> Reply:
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    return json_reply(
        SessionShown(
            session=present.session(row, project=scope.shown),
            routes=present.routes(
                call.engine, call.engine.store.sandboxes.find(scope.project, row.sandbox_name)
            ),
        )
    )


@table.route(
    "POST",
    f"{_SESSION}/stop",
    summary="Stop a session and, if its sandbox is persistent, snapshot it",
    request=Body,
    request_required=False,
    response=SessionStopped,
    errors=(*REFUSALS, "not_found"),
)
async def stop_session(call: RequestContext) -> Reply:
    scope, session = call.session()
    before = call.engine.sessions.get(scope.project, session)
    # By id: the name may belong to a new sandbox by now.
    goes = call.engine.store.sandboxes.find_by_id(scope.project, before.sandbox or "")
    row, snapshot = await call.engine.sessions.stop(scope.project, session)
    sandbox = call.engine.store.sandboxes.find_by_id(scope.project, row.sandbox or "")
    if sandbox is None and goes is not None and goes.destroy_on_stop:
        sandbox = replace(goes, status=row.status)  # the server has destroyed it by now
    if sandbox is None:
        name = row.sandbox_name
        raise NotFound(f"the sandbox {name} no longer exists", kind="sandbox", name=name)
    return json_reply(
        SessionStopped(
            session=present.session(row, project=scope.shown),
            sandbox=present.sandbox(call.engine, sandbox, project=scope.shown),
            snapshot=UNSET if snapshot is None else present.snapshot(snapshot),
        )
    )


@table.route(
    "POST",
    f"{_SESSION}/extend-timeout",
    summary="Extend the time limit of a session",
    request=ExtendBody,
    response=SessionChanged,
    errors=(*REFUSALS, *NEEDS_SESSION, "sandbox_timeout_invalid"),
)
async def extend_session(call: RequestContext) -> Reply:
    body = await call.body(ExtendBody)
    scope, session = call.session()
    row = await call.engine.sessions.extend(scope.project, session, by_ms=body.duration)
    return json_reply(SessionChanged(session=present.session(row, project=scope.shown)))


@table.route(
    "POST",
    f"{_SESSION}/network-policy",
    summary="Change what a running session may reach",
    request=PolicyBody,
    response=SessionChanged,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def set_network_policy(call: RequestContext) -> Reply:
    policy = (await call.body(PolicyBody)).policy()
    scope, session = call.session()
    row = await call.engine.sandboxes.set_policy(scope.project, session, policy)
    return json_reply(SessionChanged(session=present.session(row, project=scope.shown)))


@table.route(
    "POST",
    f"{_SESSION}/snapshot",
    summary="Snapshot a session and end it",
    request=SnapshotBody,
    request_required=False,
    response=SnapshotTaken,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def snapshot_session(call: RequestContext) -> Reply:
    body = await call.body(SnapshotBody)
    scope, session = call.session()
    row, snapshot = await call.engine.sessions.snapshot(
        scope.project,
        session,
        lifetime_ms=given(body.expiration, None),
        comment=given(body.comment, None),
    )
    return _snapshot_taken(scope, row, snapshot)


@table.route(
    "POST",
    "/v1/sessions/{session}/checkpoint",
    summary="Snapshot a session that goes on",
    request=SnapshotBody,
    request_required=False,
    response=SnapshotTaken,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def checkpoint_session(call: RequestContext) -> Reply:
    body = await call.body(SnapshotBody)
    scope, session = call.session()
    row, snapshot = await call.engine.sessions.checkpoint(
        scope.project,
        session,
        lifetime_ms=given(body.expiration, None),
        comment=given(body.comment, None),
        key=call.key(),
    )
    return _snapshot_taken(scope, row, snapshot)


def _snapshot_taken(scope: Scope, session: Session, snapshot: Snapshot) -> Reply:
    taken = SnapshotTaken(
        snapshot=present.snapshot(snapshot), session=present.session(session, project=scope.shown)
    )
    return json_reply(taken)


@table.route(
    "POST",
    f"{_SESSION}/interactive",
    summary="Open a terminal as a user: get the address and the one-time token",
    request=TerminalBody,
    request_required=False,
    response=TerminalOpened,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def open_terminal(call: RequestContext) -> Reply:
    body = await call.body(TerminalBody)
    scope, session = call.session()
    await call.engine.sessions.require(scope.project, session, Operation.TERMINAL)
    user = given(body.user, None)
    if user is not None:
        # Looked at as that user, which tells whether there is one before anybody connects.
        await call.engine.files.stat(scope.project, session, "/", Acting(user=user))
    # "http" to "ws" keeps the "s" of "https".
    url = call.origin().replace("http", "ws", 1) + PATH + session
    extend = given(body.extend_timeout, False)
    token = call.app.terminals.issue(scope.project, session, user, token=call.caller.token, extend=extend)
    return json_reply(TerminalOpened(url=url, token=token))


@table.route(
    "GET",
    ROUTE,
    summary="Open a connection to a port of a session, published or not, as a WebSocket",
    errors=REFUSALS,
    uses_session=False,
)
async def open_tunnel(call: RequestContext) -> Reply:
    """Refuse what is not a WebSocket; those do not come here."""
    del call
    raise InvalidRequest("open this address as a WebSocket", field="upgrade")


@table.route(
    "GET",
    "/v1/sessions/{session}/usage",
    summary="Get the usage of a session so far",
    response=UsageShown,
    errors=(*REFUSALS, "not_found"),
    uses_session=False,
)
async def session_usage(call: RequestContext) -> Reply:
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    live = await call.engine.sessions.usage(row) if row.status is SessionStatus.RUNNING else Usage()
    return json_reply(UsageShown(usage=present.usage(row, live)))


@table.route(
    "GET",
    "/v1/sandboxes/{name}/usage",
    summary="Get the usage of all sessions of a sandbox, including the current one",
    response=UsageShown,
    errors=(*REFUSALS, "not_found"),
)
async def sandbox_usage(call: RequestContext) -> Reply:
    scope = call.scope()
    found = call.engine.sandboxes.get(scope.project, call.params["name"])
    running = found.session.status is SessionStatus.RUNNING
    live = await call.engine.sessions.usage(found.session) if running else Usage()
    return json_reply(UsageShown(usage=present.total_usage(found.sandbox, live)))
