"""netd's record of its decisions: events, bounded in number however many a session causes.

Each session may cause so many events per second; the rest are counted, and the count is an event of its own.
Events that the engine does not fetch are kept up to a limit; those dropped beyond it are counted too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

_KEPT: Final = 20_000
_BURST: Final = 1000.0
_PER_SECOND: Final = 100.0
_LONGEST_TEXT: Final = 512


class Bucket:
    """A token bucket: ``burst`` at once, ``rate`` per second."""

    __slots__ = ("_burst", "_level", "_rate", "_seen")

    def __init__(self, *, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._level, self._seen = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._seen) * self._rate)
        self._seen = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Audit:
    """Events of all sessions, waiting to be fetched."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._wake = wake
        self._lost = 0

    def add(self, event: dict[str, Any]) -> None:
        if len(self._events) >= _KEPT:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._wake()

    def take(self, most: int) -> tuple[list[dict[str, Any]], int]:
        """Remove and return the oldest events, and how many before them were dropped."""
        batch = [self._events.popleft() for _ in range(min(most, len(self._events)))]
        lost, self._lost = self._lost, 0
        return batch, lost

    def __len__(self) -> int:
        return len(self._events)


def _short(value: Any) -> Any:
    """Truncate a value that the session chose: a method, host or name."""
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


class SessionAudit:
    """The audit as one session uses it, with the session's rate limit."""

    def __init__(self, session: str, audit: Audit) -> None:
        self._session = session
        self._audit = audit
        self._bucket = Bucket(burst=_BURST, rate=_PER_SECOND)
        self._held_back = 0

    def record(self, kind: str, **facts: Any) -> None:
        if not self._bucket.take():
            self._held_back += 1
            return
        if self._held_back:
            self._add("network.suppressed", {"count": self._held_back})
            self._held_back = 0
        self._add(kind, facts)

    def close(self) -> None:
        if self._held_back:
            self._add("network.suppressed", {"count": self._held_back})
            self._held_back = 0

    def _add(self, kind: str, facts: dict[str, Any]) -> None:
        now = time.time_ns() // 1_000_000
        data = {key: _short(value) for key, value in facts.items() if value is not None}
        self._audit.add({"session": self._session, "kind": kind, "time_ms": now, "data": data})
