"""Events of a soak: counted where they are seen, printed at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter


class Tally:
    """Operations, errors by type, kills by kind, and violations. Threads share it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._guard = threading.Lock()
        self._quiet = quiet
        self._began = time.monotonic()
        self.operations: Counter[str] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.kills: Counter[str] = Counter()
        self.checks = 0
        self.violations: list[str] = []

    def done(self, operation: str) -> None:
        with self._guard:
            self.operations[operation] += 1

    def failed(self, operation: str, error: BaseException) -> None:
        """Count an error of sandkeep's own classes: allowed, and reported."""
        with self._guard:
            self.operations[operation] += 1
            self.errors[operation, f"{type(error).__name__}: {_short(str(error))}"] += 1

    def killed(self, kind: str) -> None:
        with self._guard:
            self.kills[kind] += 1

    def checked(self) -> None:
        with self._guard:
            self.checks += 1

    def violation(self, text: str) -> None:
        with self._guard:
            self.violations.append(text)
        self.say(f"VIOLATION {text}")

    def say(self, text: str) -> None:
        if not self._quiet:
            print(f"{time.monotonic() - self._began:7.1f} {text}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Everything, as lines of text."""
        with self._guard:
            seconds = time.monotonic() - self._began
            total = sum(self.operations.values())
            kills, errors = sum(self.kills.values()), sum(self.errors.values())
            lines = [
                f"{seconds:.0f} seconds, {total} operations, {kills} kills, {self.checks} checks, "
                f"{errors} errors, {len(self.violations)} violations",
                "operations: " + _counts(self.operations),
                "kills: " + _counts(self.kills),
            ]
            for (operation, error), count in sorted(self.errors.items(), key=lambda item: -item[1]):
                lines.append(f"error {count:5} × {operation}: {error}")
            return "\n".join([*lines, *(f"violation: {text}" for text in self.violations)])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"


def _short(text: str) -> str:
    """Without what differs each time, so that the same errors are counted together."""
    words = ["…" if any(letter.isdigit() for letter in word) else word for word in text.split()]
    return " ".join(words)[:120]
