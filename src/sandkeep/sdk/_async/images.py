"""Images of the server's machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from sandkeep.errors import StreamClosed, from_json
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, read, records, segment
from sandkeep.sdk.images import Image, Pulled
from sandkeep.wire.images import ImageList, ImageShown, ImportKind, PullRecord

_IMPORT_SECONDS = 1800.0


class Images:
    """What sandboxes start from. Reached as ``Client.images``.

    ``host``, the machine's own system, is always there.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Image]:
        """Every image, oldest first."""
        answer = await self._transport.request("GET", "/v1/images")
        return [Image.of(image) for image in read(ImageList, answer).images]

    async def pull(
        self,
        reference: str,
        *,
        platform: str | None = None,
        username: str | None = None,
        password: str | None = None,
        insecure: bool = False,
        progress: Callable[[Pulled], object] | None = None,
    ) -> Image:
        """Fetch an image from a registry. What is here already is not fetched again.

        Args:
            reference: such as ``debian:12`` or ``ghcr.io/owner/name@sha256:…``.
            platform: such as ``linux/arm64``; the machine's own when not given.
            username: for the registry, with ``password``; what ``docker login`` stored there when not given.
            password: see ``username``.
            insecure: allow plain HTTP and certificates nobody vouches for.
            progress: called now and then with what arrived of each part.

        Raises:
            ImageError: the registry does not have it, or will not give it.
        """
        body: dict[str, Any] = {"reference": reference, "insecure": insecure}
        optional = {"platform": platform, "username": username, "password": password}
        body |= {name: value for name, value in optional.items() if value is not None}
        async with (
            self._transport.stream("POST", "/v1/images/pull", json=body, timeout=QUIET_SECONDS) as answer,
            aclosing(records(PullRecord, answer)) as found,
        ):
            async for record in found:
                if not isinstance(record.error, msgspec.UnsetType):
                    raise from_json(record.error)
                if not isinstance(record.image, msgspec.UnsetType):
                    return Image.of(record.image)
                if progress is not None and not isinstance(record.progress, msgspec.UnsetType):
                    progress(Pulled.of(record.progress))
        raise StreamClosed(f"the connection was lost while {reference} was pulled")

    async def import_(self, path: str, name: str, *, kind: ImportKind, reference: str | None = None) -> Image:
        """Make an image from what is on the server's machine already. For its local user only.

        Args:
            path: where it is, on that machine.
            name: what sandboxes will call it.
            kind: ``directory`` or ``tar`` of a root filesystem, ``oci-layout``, or ``docker-archive``.
            reference: which one, where a layout or archive holds several.

        Raises:
            ImageError: it cannot be read, or is not what ``kind`` says.
        """
        body = {"kind": kind, "path": path, "name": name}
        if reference is not None:
            body["reference"] = reference
        answer = await self._transport.request(
            "POST", "/v1/images/import", json=body, timeout=_IMPORT_SECONDS
        )
        return Image.of(read(ImageShown, answer).image)

    async def delete(self, name_or_id: str) -> Image:
        """Delete a name of an image and, with its last name, the image. For the server's local user only.

        Raises:
            NotFound: there is none.
            WrongState: a sandbox or a snapshot uses it.
        """
        answer = await self._transport.request("DELETE", f"/v1/images/{segment(name_or_id)}")
        return Image.of(read(ImageShown, answer).image)
