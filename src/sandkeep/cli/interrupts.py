"""Signals that ask the program to end raise an exception, so that everything is cleaned up on the way out.

An exception raised by a signal handler can get lost: the interpreter prints and drops it inside some of its
own callbacks, such as those that release import locks, and other code may replace it by an error of its own.
So the signal is recorded as well: code that is about to wait for long checks for it, and so does code that is
about to report an error.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from sandkeep.cli.exit_status import Ended

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_pending: list[int] = []


@contextmanager
def raised(*numbers: int) -> Iterator[None]:
    """Raise an exception for these signals while the block runs."""

    def end(number: int, frame: object) -> None:
        _pending.append(number)
        raise_pending()

    with handled(end, numbers):
        try:
            yield
        except Exception:
            raise_pending()
            raise
        finally:
            _pending.clear()


@contextmanager
def handled(handler: Callable[[int, object], None], numbers: Iterable[int]) -> Iterator[None]:
    """Handle these signals while the block runs, except those ignored from the start, as by ``nohup``."""
    before = {}
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def pending() -> bool:
    """Whether a signal has arrived, even if its exception got lost."""
    return bool(_pending)


def raise_pending() -> None:
    """Raise the exception of a recorded signal again, if there is one."""
    if signal.SIGINT in _pending:
        raise KeyboardInterrupt
    if _pending:
        raise Ended(128 + _pending[-1])


def take_pending() -> list[int]:
    """Return the recorded signals and clear the record."""
    found = _pending.copy()
    _pending.clear()
    return found
