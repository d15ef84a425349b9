"""Commands: the official clients' word for processes. Run, get, wait, logs, signals, input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from sandkeep.errors import Conflict, InvalidRequest, StdinStalled
from sandkeep.server import output, present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import NEEDS_SESSION, REFUSALS
from sandkeep.store.rows import Process, ProcessStatus
from sandkeep.wire import frames
from sandkeep.wire.base import encode, given
from sandkeep.wire.bodies import KillBody, RunBody, StdinBody
from sandkeep.wire.openapi import JSON, NDJSON
from sandkeep.wire.queries import GetCommandQuery
from sandkeep.wire.responses import CommandList, CommandShown, StdinWritten
from sandkeep.wire.streams import command_record

if TYPE_CHECKING:
    from sandkeep.engine.processes import Processes

table = Table("commands")

_COMMANDS = "/v2/sandboxes/sessions/{session}/cmd"
_COMMAND = _COMMANDS + "/{command}"
PATIENCE: Final = 10.0
"""Seconds between heartbeats of a waiting request."""


@table.route(
    "POST",
    _COMMANDS,
    summary="Run a command; with wait, until it ends, and with logs, its output too",
    request=RunBody,
    response=CommandShown,
    response_types=(NDJSON, frames.CONTENT_TYPE),
    errors=(*REFUSALS, *NEEDS_SESSION, "executable_not_found", "executable_refused", "file_error"),
)
async def run_command(call: RequestContext) -> Reply | ChunkedReply:
    body = await call.body(RunBody, call.config.max_command_bytes)
    scope, session = call.session()
    process = await call.engine.processes.start(scope.project, session, body.options(), key=call.key())
    if not body.wait:
        return json_reply(CommandShown(command=present.command(process)))
    if frames.CONTENT_TYPE.encode() in (call.request.header(b"accept") or b""):
        exact = _run_frames(call.engine.processes, process, logs=body.logs)
        batched = output.batched(exact, heartbeat=frames.HEARTBEAT, linger=True)
        return ChunkedReply(frames.CONTENT_TYPE, batched, soon=True)
    records = output.guarded(_run_records(call.engine.processes, process, logs=body.logs), call.app.log)
    # Clients that did not ask for output take the second line for the last one, so they get no heartbeats.
    return ChunkedReply(NDJSON, output.batched(records, heartbeat=b"\n" if body.logs else b""))


async def _run_records(processes: Processes, process: Process, *, logs: bool) -> AsyncGenerator[bytes, None]:
    where = (process.project, process.session, process.id)
    yield command_record(present.command(process))
    # Requested early, so that the result is there by the time the output ends.
    ended = asyncio.ensure_future(processes.wait(*where))
    try:
        if logs:
            async for record in output.text_records(processes.output(*where)):
                yield record
        yield command_record(present.command(await ended))
    finally:
        ended.cancel()


async def _run_frames(processes: Processes, process: Process, *, logs: bool) -> AsyncGenerator[bytes, None]:
    """As above, with exact bytes."""
    where = (process.project, process.session, process.id)
    yield output.record_frame(CommandShown(command=present.command(process)))
    ended = asyncio.ensure_future(processes.wait(*where))
    try:
        if logs:
            async for frame in output.byte_frames(processes.output(*where)):
                yield frame
        yield output.record_frame(CommandShown(command=present.command(await ended)))
    finally:
        ended.cancel()


@table.route(
    "GET",
    _COMMANDS,
    summary="List the commands of a session, newest first",
    response=CommandList,
    errors=(*REFUSALS, "not_found"),
)
async def list_commands(call: RequestContext) -> Reply:
    scope, session = call.session()
    rows = call.engine.processes.list(scope.project, session)
    return json_reply(CommandList(commands=[present.command(row) for row in rows]))


@table.route(
    "GET",
    _COMMAND,
    summary="Get a command; with wait, once it has ended",
    query=GetCommandQuery,
    response=CommandShown,
    errors=(*REFUSALS, "not_found"),
)
async def get_command(call: RequestContext) -> Reply | ChunkedReply:
    query = call.query(GetCommandQuery)
    scope, session = call.session()
    where = (scope.project, session, call.params["command"])
    row = call.engine.processes.get(*where)
    # Without a body there is nothing to wait for.
    wait = query.wait and call.request.method != "HEAD"
    if not wait or row.status is not ProcessStatus.RUNNING:
        return json_reply(CommandShown(command=present.command(row)))
    waiting = asyncio.ensure_future(call.engine.processes.wait(*where))
    closing = asyncio.ensure_future(call.app.closing.wait())
    await asyncio.wait((waiting, closing), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    closing.cancel()
    if waiting.done():
        return json_reply(CommandShown(command=present.command(waiting.result())))
    return ChunkedReply(JSON, _trickle(waiting))


async def _trickle(waiting: asyncio.Future[Process]) -> AsyncGenerator[bytes, None]:
    """Yield white space, which JSON may begin with, until the result is there."""
    try:
        while not waiting.done():
            yield b" "
            await asyncio.wait((waiting,), timeout=output.HEARTBEAT_SECONDS)
        yield encode(CommandShown(command=present.command(waiting.result())))
    finally:
        waiting.cancel()


@table.route(
    "GET",
    _COMMAND + "/logs",
    summary="The output of a command from its beginning, followed until it ends",
    response_types=(NDJSON,),
    errors=(*REFUSALS, "not_found"),
)
async def command_logs(call: RequestContext) -> ChunkedReply:
    scope, session = call.session()
    where = (scope.project, session, call.params["command"])
    call.engine.processes.get(*where)
    records = output.text_records(call.engine.processes.output(*where))
    return ChunkedReply(NDJSON, output.batched(output.guarded(records, call.app.log)))


@table.route(
    "POST",
    _COMMAND + "/kill",
    summary="Send a signal to a command",
    request=KillBody,
    response=CommandShown,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def kill_command(call: RequestContext) -> Reply:
    body = await call.body(KillBody)
    scope, session = call.session()
    row = await call.engine.processes.signal(
        scope.project, session, call.params["command"], body.signal, grace_ms=given(body.grace, None)
    )
    return json_reply(CommandShown(command=present.command(row)))


@table.route(
    "POST",
    _COMMAND + "/stdin",
    summary="Write to the standard input of a command, or close it",
    request=StdinBody,
    request_required=False,
    response=StdinWritten,
    errors=(*REFUSALS, *NEEDS_SESSION, "command_stdin_unavailable", "conflict", "stdin_stalled"),
)
async def write_stdin(call: RequestContext) -> Reply:
    body = await call.body(StdinBody)
    scope, session = call.session()
    command = call.params["command"]
    offset = given(body.offset, None)
    writing = call.engine.processes.write_stdin(
        scope.project, session, command, body.data, offset=offset, close=body.close
    )
    try:
        row, total = await asyncio.wait_for(writing, call.config.stdin_seconds)
    except TimeoutError:
        # Input in flight arrives when the process reads again; sending it again changes nothing.
        raise StdinStalled(
            f"the process has read no input for {call.config.stdin_seconds:g} seconds",
            bytes_written=offset or 0,
        ) from None
    except InvalidRequest as error:
        if error.details.get("field") == "offset":
            raise Conflict(error.message, offset=offset) from None
        raise
    return json_reply(StdinWritten(command=present.command(row), bytes_written=total))
