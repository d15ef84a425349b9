"""Commands that do the same to several things: each failure is reported, and the others go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from sandkeep.cli.app import App
from sandkeep.cli.exit_status import FAILED, Ended, hint_for, say
from sandkeep.errors import SandkeepError

R = TypeVar("R")

_CONCURRENT: Final = 8
"""Requests that one command has open at the same time."""


@contextmanager
def collecting_errors(results: list[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Add the result for ``name`` to ``results``; report and record an error instead of raising it."""
    result: dict[str, Any] = {"name": name}
    results.append(result)
    try:
        yield result
    except SandkeepError as error:
        say(error.message, hint_for(error))
        result["error"] = error.to_json()


def print_results(app: App, results: list[dict[str, Any]]) -> None:
    """Print the results as JSON if asked for, and end with a failure if one of them failed."""
    if app.json:
        app.out.json(results)
    if any("error" in result for result in results):
        raise Ended(FAILED)


def remove_each(app: App, names: Sequence[str], remove: Callable[[str], object]) -> None:
    """Call ``remove`` for each name once, and print those that were removed."""
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        with collecting_errors(results, name) as result:
            remove(name)
            result["removed"] = True
            if not app.json:
                app.out.line(name)
    print_results(app, results)


def concurrently(
    app: App, doing: str, names: Sequence[str], work: Callable[[str], R]
) -> list[Callable[[], R]]:
    """Call ``work`` for each name, several at a time, and show how many are done.

    Returns one function per name, in order: it returns the result of that call or raises its error. An
    interrupt skips the calls that have not begun.
    """
    from concurrent.futures import ThreadPoolExecutor

    if len(names) == 1:
        doing = f"{doing} {names[0]}"
    pool = ThreadPoolExecutor(_CONCURRENT)
    try:
        with app.counted(doing, len(names)) as count:
            futures = [pool.submit(work, name) for name in names]
            for future in futures:
                future.exception()
                count()
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result for future in futures]


def confirm(what: str) -> None:
    """Ask before doing something that cannot be undone; end the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"this would {what}: confirm with --yes")
    if not click.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        raise Ended(FAILED)
