"""Images of the server's machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from sandkeep.errors import StreamClosed, from_json
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, decode, records, segment
from sandkeep.sdk.images import Image, Pulled
from sandkeep.wire.images import ImageList, ImageShown, ImportKind, PullRecord

_IMPORT_SECONDS = 1800.0


class Images:
    """Images that sandboxes start from. Reached as ``Client.images``.

    ``host``, the machine's own system, always exists.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Image]:
        """Return the project's images and the shared ones, oldest first."""
        response = await self._transport.request("GET", "/v1/images")
        return [Image.of(image) for image in decode(ImageList, response).images]

    async def pull(
        self,
        reference: str,
        *,
        platform: str | None = None,
        username: str | None = None,
        password: str | None = None,
        insecure: bool = False,
        shared: bool = False,
        progress: Callable[[Pulled], object] | None = None,
    ) -> Image:
        """Fetch an image from a registry for the project. Parts that the project has are not fetched again.

        Args:
            reference: such as ``debian:12`` or ``ghcr.io/owner/name@sha256:…``. platform: such as
                ``linux/arm64``; by default the machine's own. username: for the registry, with ``password``.
                By default the server's local user has the credentials that ``docker login`` stored there, and
                other callers have none. password: see ``username``. insecure: allow plain HTTP and untrusted
                certificates. With a token only for registries that the operator listed. shared: make it
                available to every project of the server's machine. Only for its local user. progress: called
                from time to time with the progress of each part.

        Raises:
            ImageError: the registry does not have the image, or refuses access to it.
        """
        body: dict[str, Any] = {"reference": reference, "insecure": insecure, "shared": shared}
        optional = {"platform": platform, "username": username, "password": password}
        body |= {name: value for name, value in optional.items() if value is not None}
        async with (
            self._transport.stream("POST", "/v1/images/pull", json=body, timeout=QUIET_SECONDS) as response,
            aclosing(records(PullRecord, response)) as found,
        ):
            async for record in found:
                if not isinstance(record.error, msgspec.UnsetType):
                    raise from_json(record.error)
                if not isinstance(record.image, msgspec.UnsetType):
                    return Image.of(record.image)
                if progress is not None and not isinstance(record.progress, msgspec.UnsetType):
                    progress(Pulled.of(record.progress))
        raise StreamClosed(f"the connection was lost during the pull of {reference}")

    async def import_(self, path: str, name: str, *, kind: ImportKind, reference: str | None = None) -> Image:
        """Make an image for every project from files of the server's machine. Only for its local user.

        Args:
            path: path of the files on that machine.
            name: name of the new image.
            kind: ``directory`` or ``tar`` of a root filesystem, ``oci-layout``, or ``docker-archive``.
            reference: which image, if a layout or archive holds several.

        Raises:
            ImageError: the files cannot be read, or are not of this ``kind``.
        """
        body = {"kind": kind, "path": path, "name": name}
        if reference is not None:
            body["reference"] = reference
        response = await self._transport.request(
            "POST", "/v1/images/import", json=body, timeout=_IMPORT_SECONDS
        )
        return Image.of(decode(ImageShown, response).image)

    async def delete(self, name_or_id: str) -> Image:
        """Delete a name of an image and, with its last name, the image.

        Raises:
            NotFound: it does not exist. AccessDenied: the image is shared, and the caller is not the server's
                local user.
            WrongState: a sandbox or a snapshot uses it.
        """
        response = await self._transport.request("DELETE", f"/v1/images/{segment(name_or_id)}")
        return Image.of(decode(ImageShown, response).image)
