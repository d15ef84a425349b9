"""Bodies and responses of the secret routes below ``/v1/secrets``. Only requests carry values."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sandkeep.wire.base import Body, Object


class SecretBody(Body, kw_only=True, frozen=True):
    value: Annotated[str, Meta(min_length=1, max_length=65_536)]


class SecretObject(Object, kw_only=True, frozen=True):
    name: str
    created_at: int
    updated_at: int


class SecretShown(Object, kw_only=True, frozen=True):
    secret: SecretObject


class SecretList(Object, kw_only=True, frozen=True):
    secrets: list[SecretObject]
