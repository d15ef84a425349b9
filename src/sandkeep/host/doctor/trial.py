"""Try something in a forked child, step by step, and report which step failed.

The child reports each step over a pipe and exits by ``os._exit``; a child that hangs is killed. Only the
child enters namespaces or mounts, so all effects end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sandkeep.errors import HostCannot

_SECONDS = 60.0
"""Seconds for one step: on a slow machine the kernel may have to load modules."""


class Abandoned(Exception):
    """A step that later ones need has failed, so the attempt ends."""


class TrialSteps:
    """The child's side: names each step and reports its result."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def _report(self, name: str, error: str) -> None:
        os.write(self._pipe, json.dumps([name, error]).encode() + b"\n")

    @contextmanager
    def step(self, name: str, *, essential: bool = True) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error)
            # Wrappers of sandkeep already name the call in strerror; open and the like name only the file.
            self._report(name, f"{text} ({error.filename})" if error.filename else text)
            if essential:
                raise Abandoned from error
        except HostCannot as error:
            self._report(name, str(error.why))
            if essential:
                raise Abandoned from error
        else:
            self._report(name, "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the parent received: the steps that were reached, each with its error or an empty string."""

    steps: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    """Set when the child ended and no step explains why."""

    def failure(self, *names: str) -> str:
        """Return the first error among the named steps, or why one was not reached; empty if all worked."""
        for name, error in self.steps.items():
            if error and name in names:
                return f"{name}: {error}"
        for name in names:
            if name not in self.steps:
                # The step that ended the attempt is the last one that failed.
                errors = [f"{step}: {error}" for step, error in self.steps.items() if error]
                return errors[-1] if errors else self.trouble or f"{name}: not reached"
        return ""


def attempt(tries: Callable[[TrialSteps], None]) -> Outcome:
    """Run ``tries`` in a child and collect its steps."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            os.setpgid(0, 0)
            tries(TrialSteps(write))
            status = 0
        except Abandoned:
            status = 0
        except BaseException as error:  # no exception may escape into the parent's copy of the stack
            os.write(write, json.dumps(["", f"{type(error).__name__}: {error}"]).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(write)
    try:
        return _collect(read)
    finally:
        os.close(read)
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        os.waitpid(pid, 0)


def _collect(read: int) -> Outcome:
    poller = select.poll()
    poller.register(read, select.POLLIN)
    deadline = time.monotonic() + _SECONDS
    data = b""
    trouble = ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            trouble = f"no answer within {_SECONDS:.0f} s"
            break
        part = os.read(read, 65536)
        if not part:
            break
        data += part
    steps: dict[str, str] = {}
    for line in data.splitlines():
        name, error = json.loads(line)
        if name:
            steps[name] = error
        else:
            trouble = error
    return Outcome(steps, trouble)
