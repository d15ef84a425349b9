"""Lists that come in pages: item by item, or page by page with cursors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items of a list, and where it goes on."""

    items: tuple[T, ...]
    next: str | None
    """The cursor of the next page; ``None`` on the last one."""


class Listing(Generic[T]):
    """A list that is fetched as it is read. ``async for`` gives every item, :meth:`pages` every page.

    Each iteration starts from the beginning. Items added or removed meanwhile neither repeat nor hide others.
    """

    def __init__(self, fetch: Callable[[str | None], Awaitable[Page[T]]]) -> None:
        self._fetch = fetch

    async def page(self, cursor: str | None = None) -> Page[T]:
        """One page: the first, or the one a cursor leads to.

        Args:
            cursor: the ``next`` of an earlier page, from this process or another.

        Raises:
            InvalidRequest: the cursor is not one of this list's.
        """
        return await self._fetch(cursor)

    async def pages(self, cursor: str | None = None) -> AsyncIterator[Page[T]]:
        """Every page, from the first or from a cursor on."""
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
        """Every item, in a list."""
        return [item async for item in self]
