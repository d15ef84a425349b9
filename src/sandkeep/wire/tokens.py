"""Bodies and responses of the token routes below ``/v1/server/tokens``, for the local user."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from sandkeep.wire.base import Body, Object

_Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class CreateTokenQuery(Body, kw_only=True, frozen=True):
    team: _Name
    project: _Name
    name: Annotated[str, Meta(max_length=1024)] = ""
    lifetime_ms: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    jwt: bool = False


class TokensQuery(Body, kw_only=True, frozen=True):
    team: _Name
    project: str = ""


class TokenObject(Object, kw_only=True, frozen=True):
    id: str
    name: str
    team: str
    project: str
    created_at: int
    expires_at: int | UnsetType = UNSET
    last_used_at: int | UnsetType = UNSET
    revoked_at: int | UnsetType = UNSET


class TokenMade(Object, kw_only=True, frozen=True):
    text: str
    """Shown only once."""
    token: TokenObject


class TokenShown(Object, kw_only=True, frozen=True):
    token: TokenObject


class TokenList(Object, kw_only=True, frozen=True):
    tokens: list[TokenObject]
