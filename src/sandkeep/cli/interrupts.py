"""Being asked to end is an exception, so that everything is cleaned up on the way out.

An exception that a signal raises can come to nothing: the interpreter prints and forgets those raised in one
of its own callbacks, such as the ones that release the locks of imports, and others make an error of their
own of it. So the signal is remembered as well: whoever is about to wait for long looks whether one has come,
and so does whoever would tell of an error.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sandkeep.cli.ending import Ended

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_came: list[int] = []


@contextmanager
def raised() -> Iterator[None]:
    """Signals that ask to end are exceptions in here."""

    def end(number: int, frame: object) -> None:
        _came.append(number)
        look()

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    except Exception:
        look()
        raise
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        _came.clear()


def came() -> bool:
    """Whether a signal was raised, whatever became of it."""
    return bool(_came)


def look() -> None:
    """Raise what a signal raised before, if it came to nothing."""
    if signal.SIGINT in _came:
        raise KeyboardInterrupt
    if _came:
        raise Ended(128 + _came[-1])


def taken() -> list[int]:
    """The signals that came to nothing, for somebody who has a use for them."""
    found = _came.copy()
    _came.clear()
    return found
