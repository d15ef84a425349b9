"""Polling with time limits for a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

ENOUGH = 60.0
"""Seconds after which something will not come any more. It is there at once, or soon, on any good day."""


def until(look: Callable[[], T], *, seconds: float = ENOUGH) -> T:
    """What is seen when it is true at last."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.01)
    return found


def longer_and_longer(first: int) -> Iterator[int]:
    """Limits to try in turn, in tests where something has to happen before a limit is reached.

    The first will do unless the machine stands still at the wrong moment, the last on any machine.
    """
    yield from (first, 4 * first, 16 * first, 64 * first)
