"""Images of the host: list, pull, import, delete.

They belong to the machine, not to a project. Everybody may list and pull; importing reads the server's own
files and deleting takes an image away from everybody, so both are for the local user only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from sandkeep.errors import AccessDenied, InvalidRequest, SandkeepError
from sandkeep.server.http import Reply, Stream, json_reply
from sandkeep.server.output import HEARTBEAT_SECONDS
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.base import Body, given
from sandkeep.wire.images import (
    ImageList,
    ImageObject,
    ImageShown,
    ImportBody,
    PullBody,
    PullProgress,
    PullRecord,
)
from sandkeep.wire.openapi import NDJSON
from sandkeep.wire.streams import HEARTBEAT, record

if TYPE_CHECKING:
    from sandkeep.server.app import Call

table = Table("images")


@table.route("GET", "/v1/images", summary="List images, oldest first", response=ImageList, errors=REFUSALS)
async def list_images(call: Call) -> Reply:
    call.scope()
    found = await call.engine.storage.call("image.list")
    return json_reply(ImageList(images=[_shown(image) for image in found["images"]]))


@table.route(
    "POST",
    "/v1/images/pull",
    summary="Fetch an image from a registry: progress as it comes, then the image or an error",
    request=PullBody,
    response=PullRecord,
    response_types=(NDJSON,),
    errors=REFUSALS,
)
async def pull_image(call: Call) -> Stream:
    body = await call.body(PullBody)
    project = call.scope(make=True).project
    username, password = given(body.username, ""), given(body.password, "")
    if bool(username) != bool(password):
        raise InvalidRequest("username and password go together", field="password")
    arguments: dict[str, Any] = {"reference": body.reference, "insecure": body.insecure}
    if username:
        arguments["auth"] = [username, password]
    if platform := given(body.platform, ""):
        arguments["platform"] = platform
    return Stream(NDJSON, _pulling(call, project, arguments))


async def _pulling(call: Call, project: str, arguments: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Records. A client that goes away does not end the pull: the next one finds what has arrived."""
    news: asyncio.Queue[PullProgress | None] = asyncio.Queue()
    pull = asyncio.create_task(
        call.engine.storage.call(
            "image.pull",
            progress=lambda what, done, total: news.put_nowait(
                PullProgress(what=what, done=done, total=total)
            ),
            **arguments,
        ),
        name=f"pull {arguments['reference']}",
    )

    def ended(task: asyncio.Task[Any]) -> None:
        news.put_nowait(None)
        if not task.cancelled():
            task.exception()  # seen, also when nobody is left to be told

    pull.add_done_callback(ended)
    try:
        while True:
            try:
                item = await asyncio.wait_for(news.get(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield HEARTBEAT
                continue
            if item is None:
                break
            yield record(PullRecord(progress=item))
        pulled = pull.result()
        call.engine.record("image.pulled", project, image=pulled["id"], name=arguments["reference"])
        yield record(PullRecord(image=_shown(pulled)))
    except SandkeepError as error:
        yield record(PullRecord(error=error.to_json()))
    finally:
        pull.cancel()


@table.route(
    "POST",
    "/v1/images/import",
    summary="Make an image from a directory or archive on the server's machine",
    request=ImportBody,
    response=ImageShown,
    errors=(*REFUSALS, "bad_request"),
)
async def import_image(call: Call) -> Reply:
    body = await call.body(ImportBody)
    _only_local(call)
    arguments: dict[str, Any] = {"kind": body.kind, "path": body.path, "name": body.name}
    if chosen := given(body.reference, ""):
        if body.kind not in ("oci-layout", "docker-archive"):
            raise InvalidRequest(f"a {body.kind} holds one image only", field="reference")
        arguments["reference" if body.kind == "oci-layout" else "tag"] = chosen
    project = call.scope(make=True).project
    made = await call.engine.storage.call("image.import", **arguments)
    call.engine.record("image.imported", project, image=made["id"], name=body.name)
    return json_reply(ImageShown(image=_shown(made)))


@table.route(
    "DELETE",
    "/v1/images/{image}",
    summary="Delete a name of an image and, with its last name, the image",
    request=Body,
    request_required=False,
    response=ImageShown,
    errors=(*REFUSALS, "not_found", "conflict"),
)
async def delete_image(call: Call) -> Reply:
    _only_local(call)
    name, project = call.params["image"], call.scope(make=True).project
    found = await call.engine.storage.call("image.get", image=name)
    await call.engine.storage.call("image.remove", image=name)
    call.engine.record("image.deleted", project, image=found["id"], name=name)
    return json_reply(ImageShown(image=_shown(found)))


def _only_local(call: Call) -> None:
    if call.caller.project is not None:
        raise AccessDenied("only the local user of the server's machine may do this")


def _shown(image: dict[str, Any]) -> ImageObject:
    return ImageObject(
        id=image["id"],
        kind=image["kind"],
        names=list(image["names"]),
        size_bytes=image["size"],
        created_at=image["created_ms"],
        warnings=list(image["warnings"]),
    )
