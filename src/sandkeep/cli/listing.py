"""Listings: their options, fetching their pages, printing them, and the command for the next page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from sandkeep.cli.app import App
from sandkeep.cli.framework import only_one, option, options
from sandkeep.cli.output import clean
from sandkeep.cli.values import NumberType

if TYPE_CHECKING:
    from sandkeep.sync import Page

T = TypeVar("T")

PAGING = "Paging"
_MOST: Final = 100
"""Most items that the server returns in one page."""

CURSOR = option(
    "--cursor",
    metavar="CURSOR",
    section=PAGING,
    help="Cursor of the next page, as an earlier page printed it.",
)
NAME_PREFIX = option(
    "--name-prefix",
    metavar="PREFIX",
    multiple=True,
    callback=only_one,
    help="Only names that begin with this; sorts by name.",
)
paging = options(
    option(
        "--sort-order", type=click.Choice(["asc", "desc"]), section=PAGING, help="Ascending or descending."
    ),
    option(
        "--limit",
        type=NumberType(1),
        metavar="NUMBER",
        section=PAGING,
        help="Show at most this many, and how to see more. [default: all]",
    ),
    CURSOR,
)


def gathered(values: dict[str, Any], fetch: Callable[[int, str | None], Page[T]]) -> Page[T]:
    """Return all items from the cursor on, or as many as the limit allows and the cursor of the rest.

    Args:
        values: of the options of ``paging``.
        fetch: returns a page, given its size and its cursor.
    """
    from sandkeep.sync import Page

    limit, cursor = values["limit"], values["cursor"]
    items: list[T] = []
    while True:
        wanted = _MOST if limit is None else min(_MOST, limit - len(items))
        page = fetch(wanted, cursor)
        items += page.items
        cursor = page.next
        if cursor is None or (limit is not None and len(items) >= limit):
            return Page(tuple(items), cursor)


def paged(
    app: App,
    noun: str,
    page: Page[T],
    *,
    headers: Sequence[str],
    row: Callable[[T], Sequence[str]],
    json: Callable[[T], Any] = lambda item: item,
    empty: str,
) -> None:
    """Print a page, and the command for the next one. With ``--quiet`` print the first column only."""
    if app.json:
        app.out.json({noun: [json(item) for item in page.items], "next": page.next})
        return
    if app.quiet:
        for item in page.items:
            app.out.line(clean(row(item)[0]))
    elif page.items:
        app.out.table(headers, [row(item) for item in page.items])
    else:
        app.note(empty)
    more(app, page)


def total(app: App, values: dict[str, Any], page: Page[T], what: Callable[[Sequence[T]], str | None]) -> None:
    """Print a total of a listing that has several items and shows all of them."""
    whole = page.next is None and values.get("cursor") is None
    if whole and len(page.items) > 1 and not app.json and (text := what(page.items)):
        app.note(f"\n{text}")


def more(app: App, page: Page[T]) -> None:
    """Print the command for the next page, if there is one."""
    if page.next is not None:
        app.note(f"\nMore results: {_again(page.next)}")


def _again(cursor: str) -> str:
    """Return this command line with another cursor, and without the token, which must not be shown."""
    kept: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--cursor", "--token"):
            next(words, None)
        elif not word.startswith(("--cursor=", "--token=")):
            kept.append(word)
    return shlex.join(["sandkeep", *kept, "--cursor", cursor])
