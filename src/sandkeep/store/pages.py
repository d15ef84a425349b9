"""Pages of a list that changes while it is read.

A cursor names the last row seen by its sort key and id, not by its position. So rows that are added or
removed elsewhere do not shift pages: a row that existed before the first page, still exists, and kept its
sort key is returned exactly once.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from sandkeep.errors import InvalidRequest

LARGEST_PAGE = 100
DEFAULT_PAGE = 20
_LONGEST_CURSOR = 2048

_Item = TypeVar("_Item", covariant=True)
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Sort:
    """An order that rows can be listed in. The column (or expression) is never NULL."""

    name: str
    column: str
    key: type[int] | type[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request for one page; checked on creation."""

    limit: int = DEFAULT_PAGE
    cursor: str | None = None
    order: Order = "desc"

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= LARGEST_PAGE:
            raise InvalidRequest(f"limit must be between 1 and {LARGEST_PAGE}", field="limit")
        if self.order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", field="order")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    items: tuple[_Item, ...]
    next: str | None
    """Cursor of the following page; ``None`` when this one is the last."""


def choose_sort(sorts: tuple[Sort, ...], name: str) -> Sort:
    for sort in sorts:
        if sort.name == name:
            return sort
    known = ", ".join(sort.name for sort in sorts)
    raise InvalidRequest(f"cannot sort by {name!r}; choose one of {known}", field="sort")


def write_cursor(request: PageRequest, sort: Sort, key: int | str, row_id: str) -> str:
    body = json.dumps([sort.name, request.order, key, row_id], separators=(",", ":"))
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def read_cursor(request: PageRequest, sort: Sort) -> tuple[int | str, str] | None:
    """Return the sort key and id to start after, or ``None`` for the first page."""
    if request.cursor is None:
        return None
    try:
        if len(request.cursor) > _LONGEST_CURSOR:
            raise ValueError("too long")
        text = request.cursor.encode("ascii")
        body = json.loads(base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True))
        name, order, key, row_id = body
        if not isinstance(row_id, str) or type(key) is not sort.key:
            raise ValueError("wrong types")
        if isinstance(key, int):
            key.to_bytes(8, "big", signed=True)
        else:
            key.encode()
        row_id.encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest("this cursor was not made by us", field="cursor") from error
    if (name, order) != (sort.name, request.order):
        raise InvalidRequest("this cursor belongs to a list in another order", field="cursor")
    return key, row_id
