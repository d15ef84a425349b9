"""Error codes that several modules of routes share."""

from __future__ import annotations

from typing import Final

from sandkeep.states import SortOrder
from sandkeep.store import PageRequest

NEEDS_SESSION: Final = ("not_found", "sandbox_stopped", "sandbox_stopping", "sandbox_snapshotting")
"""Errors of requests that need a running session."""

REFUSALS: Final = ("bad_request", "unauthorized", "forbidden")
"""Errors that any request can get before its handler runs."""


def page_request(limit: int, cursor: str, order: SortOrder) -> PageRequest:
    return PageRequest(limit=limit, cursor=cursor or None, order="asc" if order is SortOrder.ASC else "desc")
