"""Bodies and responses of the image routes below ``/v1/images``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.wire.base import Body, Object
from sandkeep.wire.image_config import ImageConfigObject

Text = Annotated[str, Meta(min_length=1, max_length=4096)]
ImportKind = Literal["directory", "tar", "oci-layout", "docker-archive"]


class PullBody(Body, kw_only=True, frozen=True):
    """An image of a registry."""

    reference: Text
    platform: Text | UnsetType = UNSET
    username: Text | UnsetType = UNSET
    password: Text | UnsetType = UNSET
    insecure: bool = False
    """Allow plain HTTP and untrusted certificates."""
    shared: bool = False
    """Make it available to every project of the machine, not only to this one."""


class ImportBody(Body, kw_only=True, frozen=True):
    """An image in files of the server's machine."""

    kind: ImportKind
    path: Text
    name: Text
    reference: Text | UnsetType = UNSET
    """Which image, if the layout or archive holds several."""


class ImageObject(Object, kw_only=True, frozen=True):
    id: str
    kind: str
    names: list[str]
    size_bytes: int
    created_at: int
    warnings: list[str]
    shared: bool
    """Available to every project, not only to this one."""
    config: ImageConfigObject = field(default_factory=ImageConfigObject)
    """What its author configured."""


class ImageList(Object, kw_only=True, frozen=True):
    images: list[ImageObject]


class ImageShown(Object, kw_only=True, frozen=True):
    image: ImageObject


class PullProgress(Object, kw_only=True, frozen=True):
    what: str
    done: int
    total: int


class PullRecord(Object, kw_only=True, frozen=True):
    """A line of the response to a pull: progress, and at the end the image or the error."""

    progress: PullProgress | UnsetType = UNSET
    image: ImageObject | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET
