"""Images: what sandboxes start from, as our own routes below ``/v1/images`` speak of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from sandkeep.wire.base import Body, Object

Text = Annotated[str, Meta(min_length=1, max_length=4096)]
ImportKind = Literal["directory", "tar", "oci-layout", "docker-archive"]


class PullBody(Body, kw_only=True, frozen=True):
    """An image of a registry."""

    reference: Text
    platform: Text | UnsetType = UNSET
    username: Text | UnsetType = UNSET
    password: Text | UnsetType = UNSET
    insecure: bool = False
    """Allow plain HTTP and certificates nobody vouches for."""


class ImportBody(Body, kw_only=True, frozen=True):
    """An image that is on the server's machine already."""

    kind: ImportKind
    path: Text
    name: Text
    reference: Text | UnsetType = UNSET
    """Which one, where the layout or archive holds several."""


class ImageObject(Object, kw_only=True, frozen=True):
    id: str
    kind: str
    names: list[str]
    size_bytes: int
    created_at: int
    warnings: list[str]


class ImageList(Object, kw_only=True, frozen=True):
    images: list[ImageObject]


class ImageShown(Object, kw_only=True, frozen=True):
    image: ImageObject


class PullProgress(Object, kw_only=True, frozen=True):
    what: str
    done: int
    total: int


class PullRecord(Object, kw_only=True, frozen=True):
    """A line of the answer to a pull: progress, and at the end the image or why there is none."""

    progress: PullProgress | UnsetType = UNSET
    image: ImageObject | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET
