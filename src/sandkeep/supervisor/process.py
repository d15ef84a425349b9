"""One process of a session, as the supervisor keeps it: pipes, log, record.

The record on disk is replaced at start and at end, so that a server which starts later can read it without a
request. While the process runs the record says ``running``; if no supervisor is alive then, the process was
lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import InvalidRequest, SandkeepError, StdinUnavailable
from sandkeep.shared import clock
from sandkeep.shared.outputlog import STDERR, STDOUT, OutputWriter
from sandkeep.shared.processrecord import EXITED, KILLED, LOST, OUT_OF_MEMORY, RUNNING, TIME_LIMIT, add_record

READ_SIZE: Final = 256 << 10
_SHOWN_ARGUMENTS: Final = 64 << 10
"""Characters of the arguments in a response. Many long ones would be more than a client reads at once."""
_TERMINAL_ROOM: Final = 64 << 10
"""More than the kernel keeps of a terminal's output."""


class Process:
    """State of one process. The loop calls its methods; none of them blocks."""

    def __init__(self, name: str, directory: str, request: dict[str, Any], *, cap: int) -> None:
        self.id = name
        self.directory = directory
        self.argv: list[str] = request["argv"]
        self.cwd: str = request["cwd"]
        self.user: str = request["user"]
        self.pty = bool(request["pty"])
        self.piped = request["stdin"] == "pipe" and not self.pty
        """Whether clients write its standard input."""
        self.metadata: dict[str, str] = request.pop("metadata")
        """Taken out of the request: init does not get it."""
        self.status = RUNNING
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.out_of_memory = False
        self.reason: str | None = None
        self.pid = 0
        self.started_ms = clock.wall_ms()
        self._began = clock.steady_ms()
        self._lasted: int | None = None
        self.finished_ms: int | None = None
        self.cpu_ms: int | None = None
        self.kill_requested: str | None = None
        self.outputs: dict[int, int] = {}
        """Open read ends: stream by descriptor."""
        self.stdin: Stdin | None = None
        self._received = 0
        self.terminal = -1
        self.oom_before: int | None = None
        self.unsaved = False
        """The record on disk is out of date, because the disk was full."""
        self.unlogged: dict[int, bytes] = {}
        """Output read from a descriptor but not logged yet, because the disk was full."""
        self.output_waiters: list[tuple[int, Callable[[], None]]] = []
        self.exit_waiters: list[Callable[[], None]] = []
        os.mkdir(directory)
        self.log = OutputWriter(directory, cap=cap)

    # --- record ------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "argv": self.argv,
            "cwd": self.cwd,
            "user": self.user,
            "pty": self.pty,
            "pid": self.pid,
            "status": self.status,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "out_of_memory": self.out_of_memory,
            "reason": self.reason,
            "started_ms": self.started_ms,
            "finished_ms": self.finished_ms,
            "duration_ms": self._lasted if self._lasted is not None else clock.steady_ms() - self._began,
            "cpu_ms": self.cpu_ms,
            "output_bytes": self.log.offset,
            "dropped_bytes": self.log.dropped,
            "stdin": self._input(),
            "metadata": self.metadata,
        }

    def _input(self) -> dict[str, Any] | None:
        """Return how much input clients have sent, and whether more can follow; ``None`` without a pipe."""
        if not self.piped:
            return None
        if self.stdin is None:
            return {"received": self._received, "open": False}
        return {"received": self.stdin.accepted, "open": self.status == RUNNING and self.stdin.open}

    def shown(self) -> dict[str, Any]:
        """Return the record for a response: where arguments are long, the file alone has all of them."""
        left = _SHOWN_ARGUMENTS
        for index, argument in enumerate(self.argv):
            left -= len(argument)
            if left < 0:
                return {**self.record(), "argv": self.argv[:index], "argv_cut": True}
        return self.record()

    def save(self) -> None:
        try:
            add_record(self.directory, self.record())
            self.unsaved = False
        except OSError:
            self.unsaved = True

    # --- output ------------------------------------------------------------------------------------------

    def read_output(self, fd: int) -> bool:
        """Move available output from a pipe to the log. Return false when the other end is closed.

        Raises ``OSError`` when the log cannot be written; the output is kept for the next call.
        """
        data = self.unlogged.pop(fd, b"")
        if not data:
            try:
                data = os.read(fd, READ_SIZE)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno != errno.EIO:  # a terminal whose last user is gone
                    raise
                return False
        if not data:
            return False
        try:
            self.log.append(self.outputs[fd], data)
        except OSError:
            self.unlogged[fd] = data
            raise
        self._wake_output()
        return True

    def drain(self) -> None:
        """Log the output the ended process left in its pipes, and no more: a child may write forever."""
        for fd in list(self.outputs):
            if fd in self.unlogged:
                self.read_output(fd)
            left = self._left_in(fd)
            while left > 0:
                before = self.log.offset
                if not self.read_output(fd) or self.log.offset == before:
                    break
                left -= self.log.offset - before

    def _left_in(self, fd: int) -> int:
        """Return an upper bound for the unread bytes that were written before this call."""
        if fd == self.terminal:
            # The kernel does not count bytes that are still in the terminal's line discipline.
            return _TERMINAL_ROOM
        try:
            left: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
        except OSError:
            return 0
        return left

    def _wake_output(self) -> None:
        if not self.output_waiters:
            return
        ready = [answer for offset, answer in self.output_waiters if self.log.offset > offset]
        self.output_waiters = [item for item in self.output_waiters if self.log.offset <= item[0]]
        for answer in ready:
            answer()

    # --- the end -----------------------------------------------------------------------------------------

    def finish(self, status: int, *, cpu_ms: int | None, out_of_memory: bool) -> None:
        """Record the end of the process. Its children may live on and keep its pipes open.

        Raises ``OSError``, and changes nothing, when its last output cannot be logged.
        """
        self.drain()
        self.log.end()
        self.cpu_ms = cpu_ms
        self.out_of_memory = out_of_memory
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
            self.exit_code = 128 + self.signal
            self.status = KILLED
            self.reason = OUT_OF_MEMORY if out_of_memory else self.kill_requested
        else:
            self.exit_code = os.WEXITSTATUS(status)
            self.status = EXITED
            if self.kill_requested == TIME_LIMIT:  # it had a grace period, and used it to end by itself
                self.reason = TIME_LIMIT
        self._close_record()

    def lose(self, reason: str) -> None:
        """Record that the session ended before the process did."""
        self.status = LOST
        self.reason = reason
        try:
            self.log.end()
        except OSError:
            pass  # the record has the same facts
        self._close_record()

    def _close_record(self) -> None:
        self.finished_ms = clock.wall_ms()
        self._lasted = clock.steady_ms() - self._began
        self.save()
        self.end_input("the process has ended")
        waiting = [answer for _, answer in self.output_waiters] + self.exit_waiters
        self.output_waiters, self.exit_waiters = [], []
        for answer in waiting:
            answer()

    def end_input(self, why: str) -> None:
        """Close the input; ``why`` is for clients whose data it never takes."""
        if self.stdin is not None:
            self.stdin.fail(why)
            self._received = self.stdin.accepted
            self.stdin = None

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal < 0:
            raise InvalidRequest(f"process {self.id} has no terminal", field="process")
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Stdin:
    """Data on its way to a process. With offsets, a chunk that is sent twice is written once."""

    def __init__(self, fd: int, *, is_terminal: bool) -> None:
        self.fd = fd
        self.accepted = 0
        """Bytes accepted from clients in order, whether or not the process has read them."""
        self._is_terminal = is_terminal
        self._pending: deque[tuple[memoryview, Callable[[SandkeepError | None], None]]] = deque()
        self._closing = False

    def offer(
        self, data: bytes, offset: int | None, close: bool, answer: Callable[[SandkeepError | None], None]
    ) -> None:
        """Queue data; call ``answer`` once the pipe has taken it, or with the reason why it never will."""
        start = self.accepted if offset is None else offset
        repeated = offset is not None and bool(data) and offset + len(data) <= self.accepted
        if not self.open and not (repeated and self._closing):
            raise StdinUnavailable("standard input is closed")
        if start > self.accepted:
            raise InvalidRequest(
                f"offset {start} is beyond the {self.accepted} bytes received", field="offset"
            )
        fresh = data[self.accepted - start :]
        self.accepted += len(fresh)
        self._pending.append((memoryview(fresh), answer))
        self._closing = self._closing or close
        self.flush()

    @property
    def open(self) -> bool:
        """Whether more input can follow."""
        return self.fd >= 0 and not self._closing

    def wants_write(self) -> bool:
        return self.fd >= 0 and bool(self._pending)

    def flush(self) -> None:
        while self._pending:
            data, answer = self._pending[0]
            try:
                while data:
                    data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                self._pending[0] = (data, answer)
                return
            except OSError:
                self.fail("the process no longer reads its standard input")
                return
            self._pending.popleft()
            answer(None)
        if self._closing and self.fd >= 0:
            if self._is_terminal:
                # A terminal has no end of file of its own; the end-of-input character stands for it.
                os.write(self.fd, b"\x04")
            self._close()

    def fail(self, why: str) -> None:
        self._close()
        self._closing = False  # what was not written yet is lost, so that a repeated chunk is refused
        pending, self._pending = self._pending, deque()
        for _, answer in pending:
            answer(StdinUnavailable(why))

    def _close(self) -> None:
        # The output comes from the same descriptor of a terminal, which is closed with that.
        if self.fd >= 0 and not self._is_terminal:
            os.close(self.fd)
        self.fd = -1


def output_pipe() -> tuple[int, int]:
    """Return a pipe whose read end is non-blocking and whose write end blocks, as programs expect."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    return read_end, write_end


STREAMS: Final = {1: STDOUT, 2: STDERR}
