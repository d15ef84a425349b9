"""Lists that come in pages: their options, their table, and how to see more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sandkeep.cli.framework import App, option, options
from sandkeep.cli.values import NumberType

if TYPE_CHECKING:
    from sandkeep.sync import Page

T = TypeVar("T")

PAGING = "Paging"

CURSOR = option(
    "--cursor", metavar="CURSOR", section=PAGING, help="Where an earlier page said that it goes on."
)
paging = options(
    option(
        "--sort-order", type=click.Choice(["asc", "desc"]), section=PAGING, help="Ascending or descending."
    ),
    option(
        "--limit",
        type=NumberType(1, 100),
        default=50,
        metavar="NUMBER",
        show_default=True,
        section=PAGING,
        help="How many at once, up to 100.",
    ),
    CURSOR,
)


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
    """Print a page, and the command for the next one."""
    if app.json:
        app.out.json({noun: [json(item) for item in page.items], "next": page.next})
        return
    if page.items:
        app.out.table(headers, [row(item) for item in page.items])
    else:
        app.note(empty)
    more(app, page)


def more(app: App, page: Page[T]) -> None:
    """The command for the next page, if there is one."""
    if page.next is not None:
        app.note(f"\nMore results: {_again(page.next)}")


def _again(cursor: str) -> str:
    """This command line, from the cursor on; without a token, which is nobody else's to read."""
    kept: list[str] = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--cursor", "--token"):
            next(words, None)
        elif not word.startswith(("--cursor=", "--token=")):
            kept.append(word)
    return shlex.join(["sandkeep", *kept, "--cursor", cursor])
