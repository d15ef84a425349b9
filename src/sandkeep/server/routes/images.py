"""Images: list, pull, import, delete.

A pulled image belongs to the project it was pulled for. Importing reads the server's own files and makes an
image for every project, so it is for the local user only, as is deleting such an image.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from sandkeep.engine.images import Wanted
from sandkeep.errors import AccessDenied, InvalidRequest, SandkeepError
from sandkeep.server.app import RequestContext
from sandkeep.server.http import ChunkedReply, Reply, json_reply
from sandkeep.server.output import HEARTBEAT_SECONDS
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS
from sandkeep.wire.base import Body, given
from sandkeep.wire.image_config import ImageConfigObject
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
    from sandkeep.host.images.image import Image

table = Table("images")


@table.route("GET", "/v1/images", summary="List images, oldest first", response=ImageList, errors=REFUSALS)
async def list_images(call: RequestContext) -> Reply:
    found = await call.engine.images.list(call.scope().project)
    return json_reply(ImageList(images=[_shown(image) for image in found]))


@table.route(
    "POST",
    "/v1/images/pull",
    summary="Fetch an image from a registry: progress as it comes, then the image or an error",
    request=PullBody,
    response=PullRecord,
    response_types=(NDJSON,),
    errors=REFUSALS,
)
async def pull_image(call: RequestContext) -> ChunkedReply:
    body = await call.body(PullBody)
    project = call.scope(make=True).project
    username, password = given(body.username, ""), given(body.password, "")
    if bool(username) != bool(password):
        raise InvalidRequest("username and password must be given together", field="password")
    wanted = Wanted(
        reference=body.reference,
        platform=given(body.platform, None),
        auth=(username, password) if username else None,
        insecure=body.insecure,
        operator=call.is_local,
        shared=body.shared,
    )
    call.engine.images.check(wanted)
    return ChunkedReply(NDJSON, _pulling(call, project, wanted))


async def _pulling(call: RequestContext, project: str, wanted: Wanted) -> AsyncGenerator[bytes, None]:
    """Yield records. A client that disconnects does not end the pull: the next one finds what has arrived."""
    news: asyncio.Queue[PullProgress | None] = asyncio.Queue()
    pull = asyncio.create_task(
        call.engine.images.pull(
            project,
            wanted,
            progress=lambda what, done, total: news.put_nowait(
                PullProgress(what=what, done=done, total=total)
            ),
        ),
        name=f"pull {wanted.reference}",
    )

    def ended(task: asyncio.Task[Any]) -> None:
        news.put_nowait(None)
        if not task.cancelled():
            task.exception()  # retrieve it, even if no client is left to get it

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
        yield record(PullRecord(image=_shown(pull.result())))
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
async def import_image(call: RequestContext) -> Reply:
    body = await call.body(ImportBody)
    _only_local(call)
    reference = given(body.reference, "") or None
    if reference and body.kind not in ("oci-layout", "docker-archive"):
        raise InvalidRequest(f"a {body.kind} holds one image only", field="reference")
    project = call.scope(make=True).project
    made = await call.engine.storage.import_image(
        body.path, kind=body.kind, name=body.name, reference=reference
    )
    call.engine.record("image.imported", project, image=made.id, name=body.name)
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
async def delete_image(call: RequestContext) -> Reply:
    project = call.scope(make=call.is_local).project
    deleted = await call.engine.images.delete(project, call.params["image"], operator=call.is_local)
    return json_reply(ImageShown(image=_shown(deleted)))


def _only_local(call: RequestContext) -> None:
    if not call.is_local:
        raise AccessDenied("only the local user of the server's machine may do this")


def _shown(image: Image) -> ImageObject:
    return ImageObject(
        id=image.id,
        kind=image.kind,
        shared=not image.owners,
        names=list(image.names),
        size_bytes=image.size,
        created_at=image.created_ms,
        warnings=list(image.warnings),
        config=ImageConfigObject.of(image.config),
    )
