"""Which failures may be repeated, and after how long.

A request that never reached the server can always be sent again; so can one the server says it did not look
at. Anything else may have been carried out, and is repeated only by callers for which that changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

ATTEMPTS = 3
"""How often a request is sent, at most."""
_FIRST_DELAY = 0.1
_LONGEST_WAIT = 20.0

_NOT_LOOKED_AT = frozenset({408, 425, 429})
_GATEWAY = frozenset({500, 502, 503, 504})


def after_status(attempt: int, status: int, headers: Mapping[str, str], *, replay: bool) -> float | None:
    """Seconds to wait before repeating a request answered with ``status``; ``None``: give up.

    ``replay``: carrying it out twice is the same as once.
    """
    if attempt >= ATTEMPTS or not (status in _NOT_LOOKED_AT or (replay and status in _GATEWAY)):
        return None
    asked = headers.get("retry-after", "")
    if asked.isdigit():
        return float(asked) if float(asked) <= _LONGEST_WAIT else None
    return backoff(attempt)


def after_failure(attempt: int, *, sent: bool, replay: bool) -> float | None:
    """Seconds to wait before repeating a request that got no answer; ``None``: give up."""
    if attempt >= ATTEMPTS or (sent and not replay):
        return None
    return backoff(attempt)


def backoff(attempt: int) -> float:
    """Twice as long each time, and never exactly: clients that failed together come back apart."""
    return _FIRST_DELAY * (1 << (attempt - 1)) * random.uniform(0.75, 1.5)
