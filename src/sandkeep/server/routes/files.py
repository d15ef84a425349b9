"""Files of a running session.

Content is streamed both ways: an upload is never held in memory, and a download is read from the session as
fast as the client reads it.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from sandkeep.engine.files import DIRECT_BYTES, Acting, WriteOptions
from sandkeep.errors import ArchiveError
from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, DirectReply, Reply, StreamingReply, json_reply, started
from sandkeep.server.output import batched
from sandkeep.server.router import Table
from sandkeep.server.routes.common import NEEDS_SESSION, REFUSALS
from sandkeep.wire import errors
from sandkeep.wire.base import given
from sandkeep.wire.bodies import MkdirBody
from sandkeep.wire.openapi import GZIP, NDJSON, OCTETS
from sandkeep.wire.paths import ReadBody
from sandkeep.wire.responses import Empty
from sandkeep.wire.streams import record
from sandkeep.wire.v1 import (
    ArchiveBody,
    ChangeObject,
    ChangesRecord,
    ChmodBody,
    CopyBody,
    Extracted,
    ExtractQuery,
    FileList,
    FileShown,
    LinesShown,
    LinkShown,
    ListBody,
    MakeDirectoryBody,
    PathShown,
    ReadContentQuery,
    ReadLinesBody,
    ReadlinkBody,
    RealpathBody,
    RemoveBody,
    RenameBody,
    StatBody,
    SymlinkBody,
    WatchBody,
    WriteContentQuery,
    Written,
)

table = Table("files")

_OFFICIAL = "/v2/sandboxes/sessions/{session}/fs"
OWN = "/v1/sessions/{session}/fs"
FAILURES = (*REFUSALS, *NEEDS_SESSION, "file_error")
TAR = "application/x-tar"


def acting_of(call: RequestContext, body: Any) -> Acting:
    """Return as whom to act, and from where relative paths start."""
    return Acting(user=given(body.user, None), root=body.sudo, cwd=_start(call, body))


def _start(call: RequestContext, body: Any) -> str | None:
    """Return where relative paths start; it may itself be relative to the session's own directory."""
    cwd: str | None = given(body.cwd, None)
    if cwd is not None and not cwd.startswith("/"):
        scope, session = call.session()
        cwd = posixpath.join(call.engine.sessions.get(scope.project, session).cwd, cwd)
    return cwd


@table.route(
    "POST",
    f"{_OFFICIAL}/read",
    summary="Read a file",
    request=ReadBody,
    response_types=(OCTETS,),
    errors=FAILURES,
)
async def read_file(call: RequestContext) -> StreamingReply:
    body = await call.body(ReadBody)
    return await _content(call, body.path, Acting(cwd=_start(call, body)))


async def _content(
    call: RequestContext, path: str, acting: Acting, *, offset: int = 0, length: int | None = None
) -> StreamingReply:
    scope, session = call.session()
    direct = call.request.wire is not None and call.request.method != "HEAD"
    opened = await call.engine.files.open_read(
        scope.project, session, path, acting, offset=offset, length=length, direct=direct
    )
    if opened.length is not None:
        return DirectReply(OCTETS, opened, opened.length)

    async def content() -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in opened.pieces():
                yield chunk
        finally:
            await opened.aclose()

    return ChunkedReply(OCTETS, await started(content()))


@table.route(
    "POST",
    f"{_OFFICIAL}/write",
    summary="Unpack a tar archive, plain or compressed with gzip, below X-Cwd",
    request=GZIP,
    response=Empty,
    errors=(*FAILURES, "payload_too_large"),
)
async def write_files(call: RequestContext) -> Reply:
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    cwd = call.request.text_header(b"x-cwd") or row.cwd
    await call.engine.files.extract(scope.project, session, call.upload(), cwd=cwd)
    return json_reply(Empty())


@table.route(
    "POST",
    f"{_OFFICIAL}/mkdir",
    summary="Make a directory and, by default, its parents",
    request=MkdirBody,
    response=Empty,
    errors=(*FAILURES, "path_not_found"),
)
async def make_directory(call: RequestContext) -> Reply:
    body = await call.body(MkdirBody)
    scope, session = call.session()
    acting = Acting(cwd=_start(call, body))
    await call.engine.files.mkdir(scope.project, session, body.path, acting, parents=body.recursive)
    return json_reply(Empty())


# --- our own ---------------------------------------------------------------------------------------------


@table.route(
    "GET",
    f"{OWN}/content",
    summary="Read a file, or a range of it",
    query=ReadContentQuery,
    response_types=(OCTETS,),
    errors=FAILURES,
)
async def read_content(call: RequestContext) -> StreamingReply:
    query = call.query(ReadContentQuery)
    return await _content(
        call, query.path, acting_of(call, query), offset=query.offset, length=given(query.length, None)
    )


@table.route(
    "POST",
    f"{OWN}/lines",
    summary="Read a range of lines of a text file",
    request=ReadLinesBody,
    response=LinesShown,
    errors=FAILURES,
)
async def read_lines(call: RequestContext) -> Reply:
    body = await call.body(ReadLinesBody)
    found = await call.engine.files.lines(
        *target_of(call, body),
        acting_of(call, body),
        start=body.start,
        limit=body.limit,
        max_bytes=body.max_bytes,
    )
    text = found.data.decode(errors="surrogateescape")
    return json_reply(
        LinesShown(text=text, start=body.start, lines=found.lines, more=found.more, cut=found.cut)
    )


@table.route(
    "PUT",
    f"{OWN}/content",
    summary="Write a file atomically",
    query=WriteContentQuery,
    request=OCTETS,
    response=Written,
    errors=(*FAILURES, "payload_too_large"),
)
async def write_content(call: RequestContext) -> Reply:
    query = call.query(WriteContentQuery)
    scope, session = call.session()
    size = call.request.content_length()
    options = WriteOptions(
        mode=given(query.mode, None),
        parents=query.parents,
        append=query.append,
        exclusive=query.exclusive,
        size=size,
    )
    acting = acting_of(call, query)
    files = call.engine.files
    if call.request.wire is not None and DIRECT_BYTES <= (size or 0) <= call.config.max_upload_bytes:
        upload = await files.open_write(scope.project, session, query.path, acting, options)
        if upload is not None:
            with closing(upload):
                written = await call.request.lend(upload)
            files.changed(scope.project, session, "write", query.path, bytes=written)
            return json_reply(Written(bytes_written=written))
    written = await files.write(scope.project, session, query.path, call.upload(), acting, options)
    return json_reply(Written(bytes_written=written))


@table.route(
    "POST",
    f"{OWN}/archive",
    summary="Download files and directories as a tar archive",
    request=ArchiveBody,
    response_types=(TAR,),
    errors=FAILURES,
)
async def download_archive(call: RequestContext) -> ChunkedReply:
    body = await call.body(ArchiveBody)
    scope, session = call.session()
    chunks = call.engine.files.archive(
        scope.project, session, body.paths, acting_of(call, body), ignore=body.ignore
    )
    content = await started(chunks)
    return ChunkedReply(TAR, reported(content) if body.report else content)


async def reported(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the same archive, followed by a report of what it lacks."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except ArchiveError as error:
            if "unreadable" not in error.details:
                raise  # the archive has no end
            yield errors.error_response(error).body


@table.route(
    "PUT",
    f"{OWN}/archive",
    summary="Unpack a tar archive, plain or compressed with gzip, as a user",
    query=ExtractQuery,
    request=TAR,
    response=Extracted,
    errors=(*FAILURES, "payload_too_large"),
)
async def upload_archive(call: RequestContext) -> Reply:
    query = call.query(ExtractQuery)
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    acting = acting_of(call, query)
    entries = await call.engine.files.extract(
        scope.project, session, call.upload(), cwd=acting.cwd or row.cwd, acting=replace(acting, cwd=None)
    )
    return json_reply(Extracted(entries=entries))


def target_of(call: RequestContext, body: Any) -> tuple[str, str, str]:
    """Return the project, the session and the path of an operation on one path."""
    scope, session = call.session()
    return scope.project, session, body.path


@table.route(
    "POST",
    f"{OWN}/stat",
    summary="Get what is at a path",
    request=StatBody,
    response=FileShown,
    errors=FAILURES,
)
async def stat_file(call: RequestContext) -> Reply:
    body = await call.body(StatBody)
    found = await call.engine.files.stat(*target_of(call, body), acting_of(call, body), follow=body.follow)
    return json_reply(FileShown(file=present.file(found)))


@table.route(
    "POST",
    f"{OWN}/list",
    summary="List a directory, sorted by name",
    request=ListBody,
    response=FileList,
    errors=(*FAILURES, "limit_reached"),
)
async def list_files(call: RequestContext) -> Reply:
    body = await call.body(ListBody)
    found = await call.engine.files.list(*target_of(call, body), acting_of(call, body))
    return json_reply(FileList(files=[present.file(entry) for entry in found]))


@table.route(
    "POST",
    f"{OWN}/mkdir",
    summary="Make a directory with a mode, as a user",
    request=MakeDirectoryBody,
    response=Empty,
    errors=(*FAILURES, "path_not_found"),
)
async def make_directory_as(call: RequestContext) -> Reply:
    body = await call.body(MakeDirectoryBody)
    await call.engine.files.mkdir(
        *target_of(call, body), acting_of(call, body), mode=body.mode, parents=body.parents
    )
    return json_reply(Empty())


@table.route(
    "POST", f"{OWN}/rename", summary="Rename or move", request=RenameBody, response=Empty, errors=FAILURES
)
async def rename_file(call: RequestContext) -> Reply:
    body = await call.body(RenameBody)
    await call.engine.files.rename(
        *target_of(call, body), body.target, acting_of(call, body), replace=body.replace
    )
    return json_reply(Empty())


@table.route(
    "POST",
    f"{OWN}/remove",
    summary="Remove a file or a directory",
    request=RemoveBody,
    response=Empty,
    errors=FAILURES,
)
async def remove_file(call: RequestContext) -> Reply:
    body = await call.body(RemoveBody)
    await call.engine.files.remove(
        *target_of(call, body), acting_of(call, body), recursive=body.recursive, missing_ok=body.missing_ok
    )
    return json_reply(Empty())


@table.route(
    "POST",
    f"{OWN}/symlink",
    summary="Make a symbolic link",
    request=SymlinkBody,
    response=Empty,
    errors=FAILURES,
)
async def make_symlink(call: RequestContext) -> Reply:
    body = await call.body(SymlinkBody)
    await call.engine.files.symlink(*target_of(call, body), body.target, acting_of(call, body))
    return json_reply(Empty())


@table.route(
    "POST",
    f"{OWN}/readlink",
    summary="Get the target of a symbolic link",
    request=ReadlinkBody,
    response=LinkShown,
    errors=FAILURES,
)
async def read_symlink(call: RequestContext) -> Reply:
    body = await call.body(ReadlinkBody)
    target = await call.engine.files.readlink(*target_of(call, body), acting_of(call, body))
    return json_reply(LinkShown(target=target))


@table.route(
    "POST",
    f"{OWN}/realpath",
    summary="Get a path without symbolic links",
    request=RealpathBody,
    response=PathShown,
    errors=FAILURES,
)
async def resolve_path(call: RequestContext) -> Reply:
    body = await call.body(RealpathBody)
    path = await call.engine.files.realpath(*target_of(call, body), acting_of(call, body), strict=body.strict)
    return json_reply(PathShown(path=path))


@table.route(
    "POST",
    f"{OWN}/chmod",
    summary="Change the mode of a file",
    request=ChmodBody,
    response=Empty,
    errors=FAILURES,
)
async def change_mode(call: RequestContext) -> Reply:
    body = await call.body(ChmodBody)
    await call.engine.files.chmod(*target_of(call, body), body.mode, acting_of(call, body))
    return json_reply(Empty())


@table.route(
    "POST", f"{OWN}/copy", summary="Copy a file", request=CopyBody, response=Written, errors=FAILURES
)
async def copy_file(call: RequestContext) -> Reply:
    body = await call.body(CopyBody)
    copied = await call.engine.files.copy(
        *target_of(call, body), body.target, acting_of(call, body), parents=body.parents
    )
    return json_reply(Written(bytes_written=copied))


@table.route(
    "POST",
    f"{OWN}/watch",
    summary="Report changes below a directory as they happen, until the client disconnects",
    request=WatchBody,
    response=ChangesRecord,
    response_types=(NDJSON,),
    errors=FAILURES,
)
async def watch_files(call: RequestContext) -> ChunkedReply:
    body = await call.body(WatchBody)
    scope, session = call.session()
    acting = acting_of(call, body)
    cwd = acting.cwd or call.engine.sessions.get(scope.project, session).cwd
    path = posixpath.join(cwd, body.path)
    watching = call.engine.files.watch(scope.project, session, path, acting, recursive=body.recursive)

    async def records() -> AsyncGenerator[bytes, None]:
        begun = False
        async for changes in watching:
            shown = [
                ChangeObject(kind=change.kind, path=change.path, directory=change.directory)
                for change in changes
            ]
            yield record(ChangesRecord(changes=shown, path=UNSET if begun else path))
            begun = True

    return ChunkedReply(NDJSON, batched(await started(records())))
