"""A process without a terminal, as if it ran locally: its output live, input and signals passed on.

The first Ctrl-C goes to the process, the second one kills it. A thread sends the signals: a handler can run
at any point, also while the lock of a connection is held.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from sandkeep.cli import interrupts
from sandkeep.cli.exit_status import say
from sandkeep.errors import NotFound, SandkeepError, SessionStopped, SessionStopping
from sandkeep.states import OutputStream

if TYPE_CHECKING:
    from sandkeep.sync import OutputChunk, OutputGap, Process


def follow(process: Process, *, stdin: bool) -> int:
    """Follow a process to its end and return its exit status."""
    if stdin:
        _Feeder(process).start()
    with _signals_passed_on(process):
        try:
            show(process.output())
        except BrokenPipeError:
            # The reader of the output is gone. A local process would get SIGPIPE.
            _try_to_send(process, signal.SIGPIPE)
            raise
        return process.wait()


def show(items: Generator[OutputChunk | OutputGap]) -> None:
    """Write output of a process to standard output and standard error."""
    from sandkeep.sync import OutputGap

    sys.stdout.flush()
    with closing(items):
        for item in items:
            if isinstance(item, OutputGap):
                say(missing(item))
            else:
                write(2 if item.stream is OutputStream.STDERR else 1, item.data)


def missing(gap: OutputGap) -> str:
    if gap.reason == "dropped":
        return f"{gap.length} bytes of output were dropped: more than the log keeps"
    amount = f"{gap.length} bytes" if gap.length else "the rest"
    return f"{amount} of output cannot be shown: the log is damaged from byte {gap.offset}"


def write(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class _Feeder(threading.Thread):
    """Passes standard input on to the process."""

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
            pass  # the process has closed its input, or has ended


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
        pass  # the process has ended, and this command ends with it
    except SandkeepError as error:
        say(f"{signal.Signals(number).name} did not reach the command: {error.message}", error.hint)


@contextmanager
def _signals_passed_on(process: Process) -> Iterator[None]:
    sender = _Sender(process)
    sender.start()

    def handle(number: int, frame: object) -> None:
        sender.put(number)

    try:
        with interrupts.handled(handle, interrupts.ENDING):
            for number in interrupts.take_pending():
                sender.put(number)
            yield
    finally:
        sender.finish()
