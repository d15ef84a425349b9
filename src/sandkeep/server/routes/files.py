"""Files of a running session.

Content is streamed both ways: an upload is never held here, and a download is read from the session as fast
as the client takes it.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from sandkeep.engine.files import DIRECT_BYTES
from sandkeep.server import show
from sandkeep.server.http import FileStream, Reply, Stream, Streaming, json_reply, started
from sandkeep.server.output import batched
from sandkeep.server.router import Table
from sandkeep.server.routes.common import NEEDS_SESSION, REFUSALS
from sandkeep.wire.additions import (
    ArchiveBody,
    ChangeObject,
    ChangesRecord,
    ChmodBody,
    CopyBody,
    Extracted,
    ExtractQuery,
    FileList,
    FileShown,
    LinkShown,
    ListBody,
    MakeDirectoryBody,
    ReadContentQuery,
    ReadlinkBody,
    RemoveBody,
    RenameBody,
    StatBody,
    SymlinkBody,
    WatchBody,
    WriteContentQuery,
    Written,
)
from sandkeep.wire.base import given, known
from sandkeep.wire.bodies import MkdirBody, ReadBody
from sandkeep.wire.openapi import GZIP, NDJSON, OCTETS
from sandkeep.wire.responses import Empty
from sandkeep.wire.streams import record

if TYPE_CHECKING:
    from sandkeep.server.app import Call

table = Table("files")

_OFFICIAL = "/v2/sandboxes/sessions/{session}/fs"
_OWN = "/v1/sessions/{session}/fs"
_FAILURES = (*REFUSALS, *NEEDS_SESSION, "file_error")
TAR = "application/x-tar"


def _acting(call: Call, body: Any) -> dict[str, Any]:
    """As whom, and from where relative paths start."""
    return {**_start(call, body), **known(user=given(body.user, None), root=body.sudo or None)}


def _start(call: Call, body: Any) -> dict[str, Any]:
    """Where relative paths start; that itself may be relative to the session's own directory."""
    cwd = given(body.cwd, None)
    if cwd is None:
        return {}
    if not cwd.startswith("/"):
        scope, session = call.session()
        cwd = posixpath.join(call.engine.sessions.get(scope.project, session).cwd, cwd)
    return {"cwd": cwd}


@table.route(
    "POST",
    f"{_OFFICIAL}/read",
    summary="Read a file",
    request=ReadBody,
    response_types=(OCTETS,),
    errors=_FAILURES,
)
async def read_file(call: Call) -> Streaming:
    body = await call.body(ReadBody)
    return await _content(call, body.path, **_start(call, body))


async def _content(call: Call, path: str, **arguments: Any) -> Streaming:
    scope, session = call.session()
    direct = call.request.wire is not None and call.request.method != "HEAD"
    opened = await call.engine.files.open_read(scope.project, session, path, direct=direct, **arguments)
    if opened.length is not None:
        return FileStream(OCTETS, opened, opened.length)

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            async for piece in opened.pieces():
                yield piece
        finally:
            await opened.aclose()

    return Stream(OCTETS, await started(pieces()))


@table.route(
    "POST",
    f"{_OFFICIAL}/write",
    summary="Unpack a tar archive, plain or compressed with gzip, below X-Cwd",
    request=GZIP,
    response=Empty,
    errors=(*_FAILURES, "payload_too_large"),
)
async def write_files(call: Call) -> Reply:
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    cwd = call.request.text_header(b"x-cwd") or row.cwd
    await call.engine.files.extract(scope.project, session, call.upload(), cwd=cwd)
    return json_reply(Empty())


@table.route(
    "POST",
    f"{_OFFICIAL}/mkdir",
    summary="Make a directory, with its parents unless told otherwise",
    request=MkdirBody,
    response=Empty,
    errors=(*_FAILURES, "path_not_found"),
)
async def make_directory(call: Call) -> Reply:
    body = await call.body(MkdirBody)
    scope, session = call.session()
    await call.engine.files.do(
        scope.project,
        session,
        "mkdir",
        path=body.path,
        parents=body.recursive,
        **_start(call, body),
    )
    return json_reply(Empty())


# --- our own ---------------------------------------------------------------------------------------------


@table.route(
    "GET",
    f"{_OWN}/content",
    summary="Read a file, or a range of it",
    query=ReadContentQuery,
    response_types=(OCTETS,),
    errors=_FAILURES,
)
async def read_content(call: Call) -> Streaming:
    query = call.query(ReadContentQuery)
    return await _content(
        call,
        query.path,
        offset=query.offset,
        **known(length=given(query.length, None)),
        **_acting(call, query),
    )


@table.route(
    "PUT",
    f"{_OWN}/content",
    summary="Write a file: all of it or nothing",
    query=WriteContentQuery,
    request=OCTETS,
    response=Written,
    errors=(*_FAILURES, "payload_too_large"),
)
async def write_content(call: Call) -> Reply:
    query = call.query(WriteContentQuery)
    scope, session = call.session()
    size = call.request.content_length()
    arguments = {
        "parents": query.parents,
        "append": query.append,
        "exclusive": query.exclusive,
        **known(mode=given(query.mode, None), size=size),
        **_acting(call, query),
    }
    files = call.engine.files
    if call.request.wire is not None and DIRECT_BYTES <= (size or 0) <= call.config.max_upload_bytes:
        upload = await files.open_write(scope.project, session, query.path, **arguments)
        if upload is not None:
            with closing(upload):
                done = await call.request.lend(upload)
            files.changed(scope.project, session, "write", query.path, bytes=done["bytes_written"])
            return json_reply(Written(bytes_written=done["bytes_written"]))
    written = await files.write(scope.project, session, query.path, call.upload(), **arguments)
    return json_reply(Written(bytes_written=written))


@table.route(
    "POST",
    f"{_OWN}/archive",
    summary="Download files and directories as a tar archive",
    request=ArchiveBody,
    response_types=(TAR,),
    errors=_FAILURES,
)
async def download_archive(call: Call) -> Stream:
    body = await call.body(ArchiveBody)
    scope, session = call.session()
    pieces = call.engine.files.archive(
        scope.project, session, body.paths, ignore=body.ignore, **_acting(call, body)
    )
    return Stream(TAR, await started(pieces))


@table.route(
    "PUT",
    f"{_OWN}/archive",
    summary="Unpack a tar archive, plain or compressed with gzip, as a user",
    query=ExtractQuery,
    request=TAR,
    response=Extracted,
    errors=(*_FAILURES, "payload_too_large"),
)
async def upload_archive(call: Call) -> Reply:
    query = call.query(ExtractQuery)
    scope, session = call.session()
    row = call.engine.sessions.get(scope.project, session)
    acting = {"cwd": row.cwd, **_acting(call, query)}
    done = await call.engine.files.extract(scope.project, session, call.upload(), **acting)
    return json_reply(Extracted(entries=done["entries"]))


async def _do(call: Call, operation: str, body: Any, **arguments: Any) -> dict[str, Any]:
    scope, session = call.session()
    return await call.engine.files.do(
        scope.project, session, operation, path=body.path, **arguments, **_acting(call, body)
    )


@table.route(
    "POST",
    f"{_OWN}/stat",
    summary="What is at a path",
    request=StatBody,
    response=FileShown,
    errors=_FAILURES,
)
async def stat_file(call: Call) -> Reply:
    body = await call.body(StatBody)
    return json_reply(FileShown(file=show.file(await _do(call, "stat", body, follow=body.follow))))


@table.route(
    "POST",
    f"{_OWN}/list",
    summary="What is in a directory, sorted by name",
    request=ListBody,
    response=FileList,
    errors=(*_FAILURES, "limit_reached"),
)
async def list_files(call: Call) -> Reply:
    body = await call.body(ListBody)
    found = await _do(call, "list", body)
    return json_reply(FileList(files=[show.file(entry) for entry in found["entries"]]))


@table.route(
    "POST",
    f"{_OWN}/mkdir",
    summary="Make a directory with a mode, as a user",
    request=MakeDirectoryBody,
    response=Empty,
    errors=(*_FAILURES, "path_not_found"),
)
async def make_directory_as(call: Call) -> Reply:
    body = await call.body(MakeDirectoryBody)
    await _do(call, "mkdir", body, parents=body.parents, mode=body.mode)
    return json_reply(Empty())


@table.route(
    "POST", f"{_OWN}/rename", summary="Rename or move", request=RenameBody, response=Empty, errors=_FAILURES
)
async def rename_file(call: Call) -> Reply:
    body = await call.body(RenameBody)
    await _do(call, "rename", body, target=body.target, replace=body.replace)
    return json_reply(Empty())


@table.route(
    "POST",
    f"{_OWN}/remove",
    summary="Remove a file or a directory",
    request=RemoveBody,
    response=Empty,
    errors=_FAILURES,
)
async def remove_file(call: Call) -> Reply:
    body = await call.body(RemoveBody)
    await _do(call, "remove", body, recursive=body.recursive, missing_ok=body.missing_ok)
    return json_reply(Empty())


@table.route(
    "POST",
    f"{_OWN}/symlink",
    summary="Make a symbolic link",
    request=SymlinkBody,
    response=Empty,
    errors=_FAILURES,
)
async def make_symlink(call: Call) -> Reply:
    body = await call.body(SymlinkBody)
    await _do(call, "symlink", body, target=body.target)
    return json_reply(Empty())


@table.route(
    "POST",
    f"{_OWN}/readlink",
    summary="What a symbolic link says",
    request=ReadlinkBody,
    response=LinkShown,
    errors=_FAILURES,
)
async def read_symlink(call: Call) -> Reply:
    body = await call.body(ReadlinkBody)
    return json_reply(LinkShown(target=(await _do(call, "readlink", body))["target"]))


@table.route(
    "POST",
    f"{_OWN}/chmod",
    summary="Change the mode of a file",
    request=ChmodBody,
    response=Empty,
    errors=_FAILURES,
)
async def change_mode(call: Call) -> Reply:
    body = await call.body(ChmodBody)
    await _do(call, "chmod", body, mode=body.mode)
    return json_reply(Empty())


@table.route(
    "POST", f"{_OWN}/copy", summary="Copy a file", request=CopyBody, response=Written, errors=_FAILURES
)
async def copy_file(call: Call) -> Reply:
    body = await call.body(CopyBody)
    copied = await _do(call, "copy", body, target=body.target, parents=body.parents)
    return json_reply(Written(bytes_written=copied["bytes_written"]))


@table.route(
    "POST",
    f"{_OWN}/watch",
    summary="Tell of changes below a directory as they happen, until the client goes away",
    request=WatchBody,
    response=ChangesRecord,
    response_types=(NDJSON,),
    errors=_FAILURES,
)
async def watch_files(call: Call) -> Stream:
    body = await call.body(WatchBody)
    scope, session = call.session()
    acting = _acting(call, body)
    cwd = acting.get("cwd", call.engine.sessions.get(scope.project, session).cwd)
    path = posixpath.join(cwd, body.path)
    watching = call.engine.files.watch(scope.project, session, path, recursive=body.recursive, **acting)

    async def records() -> AsyncGenerator[bytes, None]:
        begun = False
        async for changes in watching:
            shown = [ChangeObject(**change) for change in changes]
            yield record(ChangesRecord(changes=shown, path=UNSET if begun else path))
            begun = True

    return Stream(NDJSON, batched(await started(records())))
