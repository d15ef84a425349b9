"""Trees of a running session that a client compares with its own: list, archive, unpack, remove."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from sandkeep.errors import SandkeepError
from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, Reply, json_reply, started
from sandkeep.server.output import batched
from sandkeep.server.router import Table
from sandkeep.server.routes.files import FAILURES, OWN, TAR, acting_of, reported, target_of
from sandkeep.wire import errors
from sandkeep.wire.openapi import NDJSON
from sandkeep.wire.streams import record
from sandkeep.wire.v1 import (
    Extracted,
    ExtractQuery,
    TreeBody,
    TreeNamesBody,
    TreeRecord,
    TreeRemoved,
)

table = Table("files")


@table.route(
    "POST",
    f"{OWN}/tree",
    summary="List everything below a directory, a directory before its contents",
    request=TreeBody,
    response=TreeRecord,
    response_types=(NDJSON,),
    errors=FAILURES,
)
async def list_tree(call: RequestContext) -> ChunkedReply:
    body = await call.body(TreeBody)
    batches = call.engine.files.tree(
        *target_of(call, body), acting_of(call, body), ignore=body.ignore, checksum=body.checksum
    )

    async def records() -> AsyncGenerator[bytes, None]:
        begun = False
        try:
            async for entries in batches:
                yield record(TreeRecord(entries=[present.tree_entry(entry) for entry in entries]))
                begun = True
            yield record(TreeRecord(end=True))
        except SandkeepError as error:
            if not begun:
                raise
            yield errors.error_response(error).body + b"\n"

    return ChunkedReply(NDJSON, batched(await started(records())))


@table.route(
    "POST",
    f"{OWN}/tree/archive",
    summary="Download entries of a tree as a tar archive, with exact times",
    request=TreeNamesBody,
    response_types=(TAR,),
    errors=FAILURES,
)
async def download_entries(call: RequestContext) -> ChunkedReply:
    body = await call.body(TreeNamesBody)
    chunks = call.engine.files.tree_archive(*target_of(call, body), body.names, acting_of(call, body))
    return ChunkedReply(TAR, reported(await started(chunks)))


@table.route(
    "PUT",
    f"{OWN}/tree/archive",
    summary="Unpack such an archive: directories get the modes of their entries, no link is followed",
    query=ExtractQuery,
    request=TAR,
    response=Extracted,
    errors=(*FAILURES, "payload_too_large"),
)
async def upload_entries(call: RequestContext) -> Reply:
    query = call.query(ExtractQuery)
    scope, session = call.session()
    acting = acting_of(call, query)
    path = acting.cwd or call.engine.sessions.get(scope.project, session).cwd
    entries = await call.engine.files.tree_extract(
        scope.project, session, path, call.upload(), replace(acting, cwd=None)
    )
    return json_reply(Extracted(entries=entries))


@table.route(
    "POST",
    f"{OWN}/tree/remove",
    summary="Remove entries of a tree: files, links and empty directories, in the order given",
    request=TreeNamesBody,
    response=TreeRemoved,
    errors=FAILURES,
)
async def remove_entries(call: RequestContext) -> Reply:
    body = await call.body(TreeNamesBody)
    kept = await call.engine.files.tree_remove(*target_of(call, body), body.names, acting_of(call, body))
    return json_reply(TreeRemoved(kept=list(kept)))
