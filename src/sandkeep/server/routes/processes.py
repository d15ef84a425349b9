"""Processes in full: records of every kind, exact output, and what runs elsewhere and is only observed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.server import output, show
from sandkeep.server.http import Reply, Stream, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire import frames
from sandkeep.wire.additions import (
    Appended,
    AppendQuery,
    FinishBody,
    ObserveBody,
    OutputQuery,
    ProcessList,
    ProcessShown,
)
from sandkeep.wire.base import given
from sandkeep.wire.openapi import NDJSON, OCTETS

if TYPE_CHECKING:
    from sandkeep.server.app import Call

table = Table("processes")

_PROCESSES = "/v1/sessions/{session}/processes"
_PROCESS = _PROCESSES + "/{process}"
_FAILURES = (*REFUSALS, "not_found")


@table.route(
    "GET",
    _PROCESSES,
    summary="List the processes of a session, newest first",
    response=ProcessList,
    errors=_FAILURES,
)
async def list_processes(call: Call) -> Reply:
    scope, session = call.session()
    rows = call.engine.processes.list(scope.project, session)
    return json_reply(ProcessList(processes=[show.process(row) for row in rows]))


@table.route("GET", _PROCESS, summary="Get a process", response=ProcessShown, errors=_FAILURES)
async def get_process(call: Call) -> Reply:
    scope, session = call.session()
    row = call.engine.processes.get(scope.project, session, call.params["process"])
    return json_reply(ProcessShown(process=show.process(row)))


@table.route(
    "GET",
    f"{_PROCESS}/output",
    summary="The exact bytes a process printed, with offset, time and stream, from any offset",
    query=OutputQuery,
    response_types=(NDJSON, frames.CONTENT_TYPE),
    errors=_FAILURES,
)
async def process_output(call: Call) -> Stream:
    query = call.query(OutputQuery)
    scope, session = call.session()
    where = (scope.project, session, call.params["process"])
    call.engine.processes.get(*where)
    items = call.engine.processes.output(*where, offset=query.offset, follow=query.follow)
    if frames.CONTENT_TYPE.encode() in (call.request.header(b"accept") or b""):
        return Stream(
            frames.CONTENT_TYPE, output.batched(output.byte_frames(items), heartbeat=frames.HEARTBEAT)
        )
    return Stream(NDJSON, output.batched(output.guarded(output.byte_records(items), call.app.log)))


@table.route(
    "POST",
    _PROCESSES,
    summary="Begin the record of a process that runs elsewhere",
    request=ObserveBody,
    response=ProcessShown,
    errors=_FAILURES,
)
async def observe_process(call: Call) -> Reply:
    body = await call.body(ObserveBody)
    scope, session = call.session()
    row = call.engine.processes.observe(
        scope.project, session, command=body.command, args=body.args, cwd=body.cwd
    )
    return json_reply(ProcessShown(process=show.process(row)))


@table.route(
    "POST",
    f"{_PROCESS}/output",
    summary="Append to the output of an observed process",
    query=AppendQuery,
    request=OCTETS,
    response=Appended,
    errors=(*_FAILURES, "payload_too_large"),
)
async def append_output(call: Call) -> Reply:
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
async def finish_process(call: Call) -> Reply:
    body = await call.body(FinishBody)
    scope, session = call.session()
    row = call.engine.processes.finish(
        scope.project,
        session,
        call.params["process"],
        exit_code=given(body.exit_code, None),
        reason=given(body.reason, None),
    )
    return json_reply(ProcessShown(process=show.process(row)))
