"""Paged lists: item by item, or page by page with cursors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from sandkeep.dataclass import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and the cursor of the next page."""

    items: tuple[T, ...]
    next: str | None
    """The cursor of the next page; ``None`` on the last one."""


class Listing(Generic[T]):
    """A list that is fetched while it is read. ``async for`` yields every item, :meth:`pages` every page.

    Each iteration starts from the beginning. Items added or removed during it do not repeat or hide others.
    """

    def __init__(self, fetch: Callable[[str | None], Awaitable[Page[T]]]) -> None:
        self._fetch = fetch

    async def page(self, cursor: str | None = None) -> Page[T]:
        """Fetch one page: the first, or the one at a cursor.

        Args:
            cursor: the ``next`` of an earlier page, from this process or another.

        Raises:
            InvalidRequest: the cursor does not belong to this list.
        """
        return await self._fetch(cursor)

    async def pages(self, cursor: str | None = None) -> AsyncIterator[Page[T]]:
        """Yield every page, starting at the first or at a cursor."""
        while True:
            page = await self._fetch(cursor)
            yield page
            cursor = page.next
            if cursor is None:
                return

    async def __aiter__(self) -> AsyncIterator[T]:
        cursor: str | None = None
        while True:
            page = await self._fetch(cursor)
            for item in page.items:
                yield item
            cursor = page.next
            if cursor is None:
                return

    async def all(self) -> list[T]:
        """Return every item in a list."""
        return [item async for item in self]
