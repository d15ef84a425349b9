"""How long sessions have been unused, which an idle timeout is measured by.

A session is in use

* while the server works on a request that names it, and while a response to one is being sent: a stream of
  output, a wait for a process, a transfer;
* while a terminal is attached, or a request through one of its ports is open, WebSockets included;
* when a process in it prints something.

A silent process does not count, nor do requests that only read the session's record or usage. Idle times are
measured on the steady clock. They do not grow while no server runs: they are saved in a file of the data
directory, and the next server continues from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from sandkeep.errors import SandkeepError
from sandkeep.shared import clock

FILE: Final = "activity.json"
_COARSE_MS: Final = 30_000
"""An idle time that has only grown is saved again when it has grown by this much."""


class Activity:
    def __init__(self, data_dir: str) -> None:
        self._path = f"{data_dir}/{FILE}"
        self._attached: dict[str, int] = {}
        """Number of open requests and terminals of each session."""
        self._last: dict[str, int] = {}
        """Time of each session's last use."""
        self._printed: dict[str, dict[str, int]] = {}
        """By session and running process, the bytes it had printed at the last check."""
        self._saved: dict[str, int] = {}
        """The idle times that the file contains."""
        self._load()

    def touch(self, session_id: str) -> None:
        """Record that a session is used now."""
        self._last[session_id] = clock.steady_ms()

    @contextmanager
    def attached(self, session_id: str) -> Iterator[None]:
        """Keep a session in use during the block. A request that is refused does not count as use."""
        self._attached[session_id] = self._attached.get(session_id, 0) + 1
        refused = False
        try:
            yield
        except SandkeepError:
            refused = True
            raise
        finally:
            if not refused:
                self.touch(session_id)
            self._attached[session_id] -= 1
            if not self._attached[session_id]:
                del self._attached[session_id]

    def printed(self, session_id: str, output_bytes: Mapping[str, int]) -> None:
        """Record how much each running process of a session has printed; an increase counts as use."""
        before = self._printed.get(session_id, {})
        if any(count > before.get(process_id, 0) for process_id, count in output_bytes.items()):
            self.touch(session_id)
        self._printed[session_id] = dict(output_bytes)

    def idle_ms(self, session_id: str) -> int:
        """Return how long a session has been unused."""
        now = clock.steady_ms()
        if session_id in self._attached:
            self._last[session_id] = now
        return now - self._last.setdefault(session_id, now)

    def keep_only(self, session_ids: Iterable[str]) -> None:
        """Drop the records of every session but these."""
        kept = frozenset(session_ids)
        self._last = {name: last for name, last in self._last.items() if name in kept}
        self._printed = {name: found for name, found in self._printed.items() if name in kept}

    # --- across restarts ---------------------------------------------------------------------------------

    def save(self, session_ids: Iterable[str], *, exactly: bool = False) -> None:
        """Save the idle times of these sessions, if the file differs too much from them.

        After a crash an idle time may be too long, by half a minute, and too short by at most the time
        between two calls.
        """
        now = {name: self.idle_ms(name) for name in session_ids}
        near = all(0 <= idle - self._saved.get(name, -_COARSE_MS) < _COARSE_MS for name, idle in now.items())
        if now.keys() == self._saved.keys() and near and not exactly:
            return
        if not now and not self._saved:
            return
        body = {name: {"idle_ms": idle, "printed": self._printed.get(name, {})} for name, idle in now.items()}
        with open(f"{self._path}.new", "w", encoding="utf-8") as handle:
            json.dump(body, handle)
        os.replace(f"{self._path}.new", self._path)
        self._saved = now

    def _load(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as handle:
                found = json.load(handle)
            now = clock.steady_ms()
            for session_id, kept in found.items():
                self._last[session_id] = now - int(kept["idle_ms"])
                self._printed[session_id] = {name: int(count) for name, count in kept["printed"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # Truncated by a crash of the machine, which has ended the sessions in it.
            self._last.clear()
            self._printed.clear()
        self._saved = dict.fromkeys(self._last, 0)
