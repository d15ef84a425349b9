"""Damage and its repair, on the wire."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from sandkeep.wire.base import Body, Object


class RepairBody(Body, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    """One sandbox; all of them by default."""
    use_older: bool = False
    drop: bool = False


class DamageObject(Object, kw_only=True, frozen=True):
    """A sandbox that is still damaged."""

    sandbox: str
    snapshot: str
    layer: str
    why: str
    older: str | UnsetType = UNSET
    """Its newest intact snapshot."""


class RepairShown(Object, kw_only=True, frozen=True):
    done: list[str]
    left: list[DamageObject]
