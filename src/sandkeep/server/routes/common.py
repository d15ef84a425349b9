"""What several nouns share."""

from __future__ import annotations

from typing import Final

from sandkeep.store import PageRequest
from sandkeep.types import SortOrder

NEEDS_SESSION: Final = ("not_found", "sandbox_stopped", "sandbox_stopping", "sandbox_snapshotting")
"""How anything that needs a running session can fail because of the session."""

REFUSALS: Final = ("bad_request", "unauthorized", "forbidden")
"""How any request can fail before it is looked at."""


def page_request(limit: int, cursor: str, order: SortOrder) -> PageRequest:
    return PageRequest(limit=limit, cursor=cursor or None, order="asc" if order is SortOrder.ASC else "desc")
