"""Which failures are retried, after how long, and when to give up.

A request that never reached the server can always be sent again; so can one that the server says it did not
process. Any other request may have been carried out; it is retried only if doing it twice is harmless.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from sandkeep.errors import RequestTimeout, ServerUnreachable, StreamClosed, TransportError

ATTEMPTS = 3
"""How often a request is sent to a server that responds with a failure."""
OUTAGE_SECONDS = 10.0
"""How long a client waits for a server that it reached before: as long as a restart takes."""
_FIRST_DELAY = 0.1
LONGEST_DELAY = 0.5
"""Longest pause between attempts to reach a server that is away, so that its return is noticed soon."""
_AT_WORK_SECONDS = 1.0
"""A connection lost later than this after the request began was lost by a server that had received it."""
_LONGEST_WAIT = 20.0
UNCLEAR = "the request may or may not have been carried out: check before you repeat it"
"""Hint for a request that may have arrived."""
SEE_SERVER = "check that the server runs: see sandkeep status, or its log"
"""Hint for a server that does not come back."""

_NOT_LOOKED_AT = frozenset({408, 425, 429})
_GATEWAY = frozenset({500, 502, 503, 504})
_NO_SERVER_BEHIND = frozenset({502, 503, 504})


def after_status(attempt: int, status: int, headers: Mapping[str, str], *, replay: bool) -> float | None:
    """Return the seconds to wait before retrying a request that got ``status``; ``None``: give up.

    ``replay``: carrying it out twice is the same as once.
    """
    if attempt >= ATTEMPTS or not (status in _NOT_LOOKED_AT or (replay and status in _GATEWAY)):
        return None
    asked = headers.get("retry-after", "")
    if asked.isdigit():
        return float(asked) if float(asked) <= _LONGEST_WAIT else None
    return backoff(attempt)


def backoff(attempt: int) -> float:
    """Return twice as long each time, with jitter: clients that failed together must not return together."""
    return _FIRST_DELAY * (1 << (attempt - 1)) * random.uniform(0.75, 1.5)


def server_away(status: int, refusal: Exception) -> bool:
    """Whether a proxy responded because there is no server behind it; the server itself responds in JSON."""
    if status not in _NO_SERVER_BEHIND or not isinstance(refusal, TransportError):
        return False
    return "status" in refusal.details and "wire_code" not in refusal.details


def response_lost(error: TransportError) -> bool:
    """Whether a request was sent and its outcome is unknown, because the server went away."""
    if isinstance(error, ServerUnreachable | RequestTimeout):
        return False
    return error.http_status is None or server_away(error.http_status, error)


class Patience:
    """How long one request waits for a server that is away, or goes away while processing it."""

    def __init__(self, within: float | None = None) -> None:
        """``within``: seconds after which the request is not sent again in any case."""
        self._until = None if within is None else time.monotonic() + within
        self._tries = 0
        self._began = 0.0
        self._attempted = 0.0
        self._under_way = 0
        self.unclear = False
        """The request may have been carried out: an attempt was sent, and its response was lost."""

    def attempt(self) -> None:
        """Note that another attempt begins."""
        self._attempted = time.monotonic()

    def after(self, failure: TransportError, seconds: float) -> float:
        """Return the seconds to wait before the next attempt.

        Args:
            failure: how the last attempt ended.
            seconds: how long a server may be away.

        Raises:
            TransportError: the time is over; like ``failure``, with the number of attempts.
        """
        now = time.monotonic()
        if now - self._attempted > _AT_WORK_SECONDS and self._under_way < ATTEMPTS:
            # The server had received the request, so it has been away only since then.
            self._under_way += 1
            self._tries = 0
        if not self._tries:
            self._began = now
        self._tries += 1
        delay = min(backoff(min(self._tries, 8)), LONGEST_DELAY)
        late = self._until is not None and now + delay > self._until
        if late or now + delay - self._began > seconds:
            if self.unclear:
                failure.hint = UNCLEAR
            raise failure if self._tries == 1 else _given_up(failure, self._tries, now - self._began)
        return delay


def _given_up(failure: TransportError, tries: int, seconds: float) -> TransportError:
    details = {**failure.details, "tries": tries, "seconds": round(seconds, 1)}
    hint = failure.hint or SEE_SERVER
    error = type(failure)(f"{failure.message} (tried {tries} times in {seconds:.1f} s)", hint=hint, **details)
    error.http_status, error.request_id = failure.http_status, failure.request_id
    return error


class Reconnecting:
    """Decides whether to reopen a stream that broke off, by how often that happened in a row."""

    def __init__(self) -> None:
        self._ended = 0
        self._lost = 0
        self._since = 0.0

    def heard(self) -> None:
        """Note that the stream works again."""
        self._ended = self._lost = 0

    def after(self, failure: TransportError) -> float:
        """Return the seconds to wait before reopening the stream; raise the failure after too many in a row.

        Opening a stream already waits for a server that cannot be reached. A server that ends the stream
        itself is asked a few times; a server whose connections are lost may be away for a while.
        """
        if isinstance(failure, ServerUnreachable):
            raise failure
        if isinstance(failure, StreamClosed) or not response_lost(failure):
            self._ended += 1
            if self._ended > 2 * ATTEMPTS:
                raise failure
            return 1.5 * backoff(self._ended)
        now = time.monotonic()
        if not self._lost:
            self._since = now
        self._lost += 1
        delay = min(backoff(min(self._lost, 8)), LONGEST_DELAY)
        if now + delay - self._since > OUTAGE_SECONDS:
            raise _given_up(failure, self._lost, now - self._since)
        return delay
