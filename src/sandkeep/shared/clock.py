"""The clocks of the program, in milliseconds.

* `wall_ms` is the time of day: for people, for the API, for expiry at a date. It jumps when it is set.
* `steady_ms` is for durations: deadlines, idle times, how long an operation took. It cannot be set, every
  process of a boot sees the same value, and it stops while the machine sleeps. So a session keeps its
  whole working time, and closing the lid of a laptop does not end it.
* `elapsed_ms` continues while the machine sleeps. A difference between it and the wall clock means that
  the wall clock was set.

Callers use the module's names, so that a test can replace a clock for all of them.
"""

from __future__ import annotations

import time
from typing import Final

TOLERANCE_MS: Final = 60_000
"""Largest step of the wall clock that is accepted at once."""
DOUBT_MS: Final = 3_600_000
"""Time for which a larger step forward is not accepted."""


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000_000


def elapsed_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class CautiousClock:
    """The time of day for deleting expired data: a clock set far forward is accepted only after an hour.

    Until then time continues as if the clock had not been set. A clock that was set back is accepted at once,
    since that deletes nothing.
    """

    def __init__(self) -> None:
        self._wall = wall_ms()
        self._elapsed = elapsed_ms()
        self._doubted_since: int | None = None
        self.ahead_ms = 0
        """Milliseconds that the wall clock is ahead of the accepted time."""

    def now_ms(self) -> int:
        wall, elapsed = wall_ms(), elapsed_ms()
        believed = self._wall + elapsed - self._elapsed
        self.ahead_ms = max(wall - believed, 0)
        if self.ahead_ms > TOLERANCE_MS:
            if self._doubted_since is None:
                self._doubted_since = elapsed
            if elapsed - self._doubted_since < DOUBT_MS:
                return believed
        self._wall, self._elapsed = wall, elapsed
        self._doubted_since = None
        self.ahead_ms = 0
        return wall
