"""Processes in full: their records, exact output, and processes that run elsewhere and are observed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.server import output, present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire import frames
from sandkeep.wire.base import given
from sandkeep.wire.openapi import NDJSON, OCTETS
from sandkeep.wire.v1 import (
    Appended,
    AppendQuery,
    FinishBody,
    ListProcessesQuery,
    ObserveBody,
    OutputQuery,
    ProcessList,
    ProcessShown,
    StdinShown,
)

if TYPE_CHECKING:
    pass

table = Table("processes")

_PROCESSES = "/v1/sessions/{session}/processes"
_PROCESS = _PROCESSES + "/{process}"
_FAILURES = (*REFUSALS, "not_found")


@table.route(
    "GET",
    _PROCESSES,
    summary="List the processes of a session, newest first",
    query=ListProcessesQuery,
    response=ProcessList,
    errors=_FAILURES,
)
async def list_processes(call: RequestContext) -> Reply:
    query = call.query(ListProcessesQuery)
    scope, session = call.session()
    rows = call.engine.processes.list(scope.project, session)
    if query.metadata:
        key, _, value = query.metadata.partition(":")
        rows = [row for row in rows if row.metadata.get(key) == value]
    return json_reply(ProcessList(processes=[present.process(row) for row in rows]))


@table.route("GET", _PROCESS, summary="Get a process", response=ProcessShown, errors=_FAILURES)
async def get_process(call: RequestContext) -> Reply:
    scope, session = call.session()
    row = call.engine.processes.get(scope.project, session, call.params["process"])
    return json_reply(ProcessShown(process=present.process(row)))


@table.route(
    "GET",
    f"{_PROCESS}/stdin",
    summary="Get how much input a process has been given",
    response=StdinShown,
    errors=(*_FAILURES, "command_stdin_unavailable", "host_cannot"),
)
async def process_input(call: RequestContext) -> Reply:
    scope, session = call.session()
    found = await call.engine.processes.input(scope.project, session, call.params["process"])
    return json_reply(StdinShown(bytes_written=found.received, open=found.open))


@table.route(
    "GET",
    f"{_PROCESS}/output",
    summary="Get the exact output of a process, with offset, time and stream, from any offset",
    query=OutputQuery,
    response_types=(NDJSON, frames.CONTENT_TYPE),
    errors=_FAILURES,
)
async def process_output(call: RequestContext) -> ChunkedReply:
    query = call.query(OutputQuery)
    scope, session = call.session()
    where = (scope.project, session, call.params["process"])
    call.engine.processes.require_output(*where)
    items = call.engine.processes.output(*where, offset=query.offset, follow=query.follow)
    if query.follow:
        items = output.to_the_end(items, query.offset)
    if frames.CONTENT_TYPE.encode() in (call.request.header(b"accept") or b""):
        return ChunkedReply(
            frames.CONTENT_TYPE, output.batched(output.byte_frames(items), heartbeat=frames.HEARTBEAT)
        )
    return ChunkedReply(NDJSON, output.batched(output.guarded(output.byte_records(items), call.app.log)))


@table.route(
    "POST",
    _PROCESSES,
    summary="Begin the record of a process that runs elsewhere",
    request=ObserveBody,
    response=ProcessShown,
    errors=_FAILURES,
)
async def observe_process(call: RequestContext) -> Reply:
    body = await call.body(ObserveBody)
    scope, session = call.session()
    row = call.engine.processes.observe(
        scope.project, session, command=body.command, args=body.args, cwd=body.cwd, metadata=body.metadata
    )
    return json_reply(ProcessShown(process=present.process(row)))


@table.route(
    "POST",
    f"{_PROCESS}/output",
    summary="Append to the output of an observed process",
    query=AppendQuery,
    request=OCTETS,
    response=Appended,
    errors=(*_FAILURES, "payload_too_large"),
)
async def append_output(call: RequestContext) -> Reply:
    query = call.query(AppendQuery)
    data = await call.request.body(call.config.max_json_bytes)
    scope, session = call.session()
    offset = call.engine.processes.append(
        scope.project, session, call.params["process"], stream=query.stream.value, data=data
    )
    return json_reply(Appended(offset=offset))


@table.route(
    "POST",
    f"{_PROCESS}/finish",
    summary="End the record of an observed process",
    request=FinishBody,
    response=ProcessShown,
    errors=_FAILURES,
)
async def finish_process(call: RequestContext) -> Reply:
    body = await call.body(FinishBody)
    scope, session = call.session()
    row = call.engine.processes.finish(
        scope.project,
        session,
        call.params["process"],
        exit_code=given(body.exit_code, None),
        reason=given(body.reason, None),
    )
    return json_reply(ProcessShown(process=present.process(row)))
