"""Commands: what official clients call processes. Run, look, wait, logs, signals, input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from sandkeep.errors import Conflict, InvalidRequest, StdinStalled
from sandkeep.server import output, show
from sandkeep.server.http import Reply, Stream, json_reply
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
    from sandkeep.server.app import Call

table = Table("commands")

_COMMANDS = "/v2/sandboxes/sessions/{session}/cmd"
_COMMAND = _COMMANDS + "/{command}"
PATIENCE: Final = 10.0
"""Seconds a waiting request is left without a sign of life."""


@table.route(
    "POST",
    _COMMANDS,
    summary="Run a command; with wait, until it ends, and with logs, its output too",
    request=RunBody,
    response=CommandShown,
    response_types=(NDJSON, frames.CONTENT_TYPE),
    errors=(*REFUSALS, *NEEDS_SESSION, "executable_not_found", "executable_refused", "file_error"),
)
async def run_command(call: Call) -> Reply | Stream:
    body = await call.body(RunBody)
    scope, session = call.session()
    process = await call.engine.processes.start(
        scope.project,
        session,
        command=body.command,
        args=body.args,
        cwd=given(body.cwd, None),
        env=body.env,
        sudo=body.sudo,
        user=given(body.user, None),
        stdin=body.attach_stdin,
        timeout_ms=given(body.timeout, None),
    )
    if not body.wait:
        return json_reply(CommandShown(command=show.command(process)))
    if frames.CONTENT_TYPE.encode() in (call.request.header(b"accept") or b""):
        exact = _run_frames(call.engine.processes, process, logs=body.logs)
        batched = output.batched(exact, heartbeat=frames.HEARTBEAT, linger=True)
        return Stream(frames.CONTENT_TYPE, batched, soon=True)
    records = output.guarded(_run_records(call.engine.processes, process, logs=body.logs), call.app.log)
    # Clients that did not ask for output take the second line for the last one: no heartbeats for them.
    return Stream(NDJSON, output.batched(records, heartbeat=b"\n" if body.logs else b""))


async def _run_records(processes: Processes, process: Process, *, logs: bool) -> AsyncGenerator[bytes, None]:
    where = (process.project, process.session, process.id)
    yield command_record(show.command(process))
    # Asked for early, so that the answer is there by the time the output ends.
    ended = asyncio.ensure_future(processes.wait(*where))
    try:
        if logs:
            async for record in output.text_records(processes.output(*where)):
                yield record
        yield command_record(show.command(await ended))
    finally:
        ended.cancel()


async def _run_frames(processes: Processes, process: Process, *, logs: bool) -> AsyncGenerator[bytes, None]:
    """The same with exact bytes."""
    where = (process.project, process.session, process.id)
    yield output.record_frame(CommandShown(command=show.command(process)))
    ended = asyncio.ensure_future(processes.wait(*where))
    try:
        if logs:
            async for frame in output.byte_frames(processes.output(*where)):
                yield frame
        yield output.record_frame(CommandShown(command=show.command(await ended)))
    finally:
        ended.cancel()


@table.route(
    "GET",
    _COMMANDS,
    summary="List the commands of a session, newest first",
    response=CommandList,
    errors=(*REFUSALS, "not_found"),
)
async def list_commands(call: Call) -> Reply:
    scope, session = call.session()
    rows = call.engine.processes.list(scope.project, session)
    return json_reply(CommandList(commands=[show.command(row) for row in rows]))


@table.route(
    "GET",
    _COMMAND,
    summary="Get a command; with wait, once it has ended",
    query=GetCommandQuery,
    response=CommandShown,
    errors=(*REFUSALS, "not_found"),
)
async def get_command(call: Call) -> Reply | Stream:
    query = call.query(GetCommandQuery)
    scope, session = call.session()
    where = (scope.project, session, call.params["command"])
    row = call.engine.processes.get(*where)
    # There is nothing to wait for where no body is sent.
    wait = query.wait and call.request.method != "HEAD"
    if not wait or row.status is not ProcessStatus.RUNNING:
        return json_reply(CommandShown(command=show.command(row)))
    waiting = asyncio.ensure_future(call.engine.processes.wait(*where))
    done, _ = await asyncio.wait((waiting,), timeout=PATIENCE)
    if done:
        return json_reply(CommandShown(command=show.command(waiting.result())))
    return Stream(JSON, _trickle(waiting))


async def _trickle(waiting: asyncio.Future[Process]) -> AsyncGenerator[bytes, None]:
    """White space, which JSON may begin with, until there is something to say."""
    try:
        while not waiting.done():
            yield b" "
            await asyncio.wait((waiting,), timeout=output.HEARTBEAT_SECONDS)
        yield encode(CommandShown(command=show.command(waiting.result())))
    finally:
        waiting.cancel()


@table.route(
    "GET",
    _COMMAND + "/logs",
    summary="The output of a command from its beginning, followed until it ends",
    response_types=(NDJSON,),
    errors=(*REFUSALS, "not_found"),
)
async def command_logs(call: Call) -> Stream:
    scope, session = call.session()
    where = (scope.project, session, call.params["command"])
    call.engine.processes.get(*where)
    records = output.text_records(call.engine.processes.output(*where))
    return Stream(NDJSON, output.batched(output.guarded(records, call.app.log)))


@table.route(
    "POST",
    _COMMAND + "/kill",
    summary="Send a signal to a command",
    request=KillBody,
    response=CommandShown,
    errors=(*REFUSALS, *NEEDS_SESSION),
)
async def kill_command(call: Call) -> Reply:
    body = await call.body(KillBody)
    scope, session = call.session()
    row = await call.engine.processes.signal(scope.project, session, call.params["command"], body.signal)
    return json_reply(CommandShown(command=show.command(row)))


@table.route(
    "POST",
    _COMMAND + "/stdin",
    summary="Write to the standard input of a command, or close it",
    request=StdinBody,
    request_required=False,
    response=StdinWritten,
    errors=(*REFUSALS, *NEEDS_SESSION, "command_stdin_unavailable", "conflict", "stdin_stalled"),
)
async def write_stdin(call: Call) -> Reply:
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
        # What is under way arrives when the process reads again; a client that resends it changes nothing.
        raise StdinStalled(
            f"the process has taken no input for {call.config.stdin_seconds:g} seconds",
            bytes_written=offset or 0,
        ) from None
    except InvalidRequest as error:
        if error.details.get("field") == "offset":
            raise Conflict(error.message, offset=offset) from None
        raise
    return json_reply(StdinWritten(command=show.command(row), bytes_written=total))
