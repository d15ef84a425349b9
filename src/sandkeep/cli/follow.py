"""A process without a terminal, as if it ran here: its output live, our input and signals passed on.

The first Ctrl-C is for the process, the second one kills it. Signals are sent by a thread: a handler may run
in the middle of anything, also while a connection's lock is held.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sandkeep.cli import interrupts
from sandkeep.cli.ending import say
from sandkeep.errors import NotFound, SandkeepError, SessionStopped, SessionStopping
from sandkeep.types import OutputStream

if TYPE_CHECKING:
    from sandkeep.sync import Process

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def follow(process: Process, *, stdin: bool) -> int:
    """See a process to its end; returns its exit status."""
    if stdin:
        _Feeder(process).start()
    with _signals_passed_on(process):
        try:
            show(process)
        except BrokenPipeError:
            # Nobody reads our output any more, which is what the process would have been told here.
            _try_to_send(process, signal.SIGPIPE)
            raise
        return process.wait()


def show(process: Process, *, offset: int = 0, live: bool = True) -> None:
    """Write what a process prints to our own standard output and error."""
    from sandkeep.sync import OutputGap

    sys.stdout.flush()
    with closing(process.output(offset, follow=live)) as items:
        for item in items:
            if isinstance(item, OutputGap):
                say(f"{item.length} bytes of output were dropped: more than the log keeps")
            else:
                write(2 if item.stream is OutputStream.STDERR else 1, item.data)


def write(fd: int, data: bytes) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Feeder(threading.Thread):
    """Gives the process what comes in on our standard input."""

    def __init__(self, process: Process) -> None:
        super().__init__(name="stdin", daemon=True)
        self._process = process

    def run(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            while data := os.read(0, 1 << 16):
                stdin.write(data)
            stdin.close()
        except (SandkeepError, OSError):
            pass  # it does not read any more, or has ended


class _Sender(threading.Thread):
    def __init__(self, process: Process) -> None:
        super().__init__(name="signals", daemon=True)
        self._process = process
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._interrupts = 0

    def put(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                number = signal.SIGKILL
        self._waiting.put(number)

    def finish(self) -> None:
        self._waiting.put(None)
        self.join(5)

    def run(self) -> None:
        while (number := self._waiting.get()) is not None:
            _try_to_send(self._process, number)


def _try_to_send(process: Process, number: int) -> None:
    try:
        process.send_signal(number)
    except (NotFound, SessionStopped, SessionStopping):
        pass  # it has ended, and so do we in a moment
    except SandkeepError as error:
        say(f"{signal.Signals(number).name} did not reach the command: {error.message}", error.hint)


@contextmanager
def _signals_passed_on(process: Process) -> Iterator[None]:
    sender = _Sender(process)
    sender.start()

    def handle(number: int, frame: object) -> None:
        sender.put(number)

    before = {number: signal.signal(number, handle) for number in _PASSED_ON}
    for number in interrupts.taken():
        sender.put(number)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        sender.finish()
