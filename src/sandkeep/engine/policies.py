"""Network policies at rest: the complete form as JSON, with secrets, for the store's owner only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sandkeep.types import NetworkPolicy
from sandkeep.wire.policies import PolicyBody, authored


def to_stored(policy: NetworkPolicy) -> dict[str, Any]:
    stored: dict[str, Any] = msgspec.to_builtins(authored(policy))
    return stored


def from_stored(stored: Mapping[str, Any] | None) -> NetworkPolicy:
    if stored is None:
        return NetworkPolicy.allow_all()
    return msgspec.convert(stored, PolicyBody).policy()
