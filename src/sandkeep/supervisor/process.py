"""One process of a session, as the supervisor keeps it: pipes, log, record.

The record on disk is replaced whenever something lasting changes (start, end), so that whoever comes later
finds the truth without asking anybody. While the process runs its status there is ``running``; a reader who
finds that with no supervisor alive knows the process was lost.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import InvalidRequest, SandkeepError, StdinUnavailable
from sandkeep.linux import cgroup
from sandkeep.supervisor.outputlog import STDERR, STDOUT, OutputWriter

RUNNING: Final = "running"
EXITED: Final = "exited"
KILLED: Final = "killed"
LOST: Final = "lost"

READ_SIZE: Final = 256 << 10
_RECORDS: Final = "record.jsonl"
_TERMINAL_ROOM: Final = 64 << 10
"""More than the kernel keeps of a terminal's output."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def replace_json(path: str, body: dict[str, Any]) -> None:
    """Publish a small file whole: a reader sees the old one or the new one."""
    fresh = f"{path}.new"
    # Plain calls and one write: done twice for every process, and a file object takes five calls more.
    left = memoryview(json.dumps(body, separators=(",", ":")).encode("ascii"))
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)
    os.replace(fresh, path)


def add_record(directory: str, body: dict[str, Any]) -> None:
    """Add a record to those before it, whole or not at all. Replacing a file would cost two more."""
    line = json.dumps(body).encode("ascii") + b"\n"
    fd = os.open(f"{directory}/{_RECORDS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        before = os.lseek(fd, 0, os.SEEK_END)
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def last_record(directory: str) -> dict[str, Any]:
    """What was last written down about a process, by a supervisor that may have died while writing."""
    with open(f"{directory}/{_RECORDS}", "rb") as handle:
        lines = handle.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        raise FileNotFoundError(errno.ENOENT, "no record", directory)
    record: dict[str, Any] = json.loads(whole[-1])
    return record


class Process:
    """State of one process. The loop calls in; nothing here waits."""

    def __init__(self, name: str, directory: str, request: dict[str, Any], *, cap: int) -> None:
        self.id = name
        self.directory = directory
        self.argv: list[str] = request["argv"]
        self.cwd: str = request["cwd"]
        self.user: str = request["user"]
        self.pty = bool(request["pty"])
        self.status = RUNNING
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.out_of_memory = False
        self.reason: str | None = None
        self.pid = 0
        self.started_ms = now_ms()
        self.finished_ms: int | None = None
        self.cpu_ms: int | None = None
        self.kill_requested: str | None = None
        self.outputs: dict[int, int] = {}
        """Open read ends: descriptor to stream."""
        self.stdin: Stdin | None = None
        self.terminal = -1
        self.group: cgroup.ProcessGroup | None = None
        self.oom_before: int | None = None
        self.unsaved = False
        """The record on disk is behind, because the disk was full."""
        self.unlogged: dict[int, bytes] = {}
        """Read from a descriptor and not in the log yet, because the disk was full."""
        self.output_waiters: list[tuple[int, Callable[[], None]]] = []
        self.exit_waiters: list[Callable[[], None]] = []
        os.mkdir(directory)
        self.log = OutputWriter(directory, cap=cap)

    # --- record ------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        end = self.finished_ms if self.finished_ms is not None else now_ms()
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
            "duration_ms": max(end - self.started_ms, 0),
            "cpu_ms": self.cpu_ms,
            "output_bytes": self.log.offset,
            "dropped_bytes": self.log.dropped,
        }

    def save(self) -> None:
        try:
            add_record(self.directory, self.record())
            self.unsaved = False
        except OSError:
            self.unsaved = True

    # --- output ------------------------------------------------------------------------------------------

    def read_output(self, fd: int) -> bool:
        """Move what is there from a pipe to the log. False when the other end is closed.

        Raises ``OSError`` when the log cannot be written; what was read is kept for the next call.
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
        """Take what the ended process left in its pipes, and no more: a child may go on writing for ever."""
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
        """At most how much is still to be read of what was written before now."""
        if fd == self.terminal:
            # What is on its way through a terminal is not counted before it is read.
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
        """The process itself has ended; what it started may live on and keep its pipes.

        Raises ``OSError``, and has changed nothing, when the log cannot take its last words.
        """
        self.drain()
        self.log.end()
        self.cpu_ms = cpu_ms
        self.out_of_memory = out_of_memory
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
            self.exit_code = 128 + self.signal
            self.status = KILLED
            self.reason = "out of memory" if out_of_memory else self.kill_requested
        else:
            self.exit_code = os.WEXITSTATUS(status)
            self.status = EXITED
        self._close_record()

    def lose(self, reason: str) -> None:
        """The session ended before the process did."""
        self.status = LOST
        self.reason = reason
        try:
            self.log.end()
        except OSError:
            pass  # the record says as much
        self._close_record()

    def _close_record(self) -> None:
        self.finished_ms = now_ms()
        self.save()
        if self.stdin is not None:
            self.stdin.fail("the process has ended")
            self.stdin = None
        waiting = [answer for _, answer in self.output_waiters] + self.exit_waiters
        self.output_waiters, self.exit_waiters = [], []
        for answer in waiting:
            answer()

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal < 0:
            raise InvalidRequest(f"process {self.id} has no terminal", field="process")
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Stdin:
    """What is on its way into a process. Offsets make a resent piece harmless."""

    def __init__(self, fd: int, *, is_terminal: bool) -> None:
        self.fd = fd
        self.accepted = 0
        """Bytes taken from clients in order, whether or not the process has read them."""
        self._is_terminal = is_terminal
        self._pending: deque[tuple[memoryview, Callable[[SandkeepError | None], None]]] = deque()
        self._closing = False

    def offer(
        self, data: bytes, offset: int | None, close: bool, answer: Callable[[SandkeepError | None], None]
    ) -> None:
        """Queue data; ``answer`` is called once the pipe has taken it, or with why it never will."""
        if self.fd < 0 or self._closing:
            raise StdinUnavailable("standard input is closed")
        start = self.accepted if offset is None else offset
        if start > self.accepted:
            raise InvalidRequest(
                f"offset {start} is beyond the {self.accepted} bytes received", field="offset"
            )
        fresh = data[self.accepted - start :]
        self.accepted += len(fresh)
        self._pending.append((memoryview(fresh), answer))
        self._closing = close
        self.flush()

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
        pending, self._pending = self._pending, deque()
        for _, answer in pending:
            answer(StdinUnavailable(why))

    def _close(self) -> None:
        # A terminal's descriptor is also where its output comes from and is closed with that.
        if self.fd >= 0 and not self._is_terminal:
            os.close(self.fd)
        self.fd = -1


def output_pipe() -> tuple[int, int]:
    """A pipe whose read end we poll and whose write end blocks, as programs expect."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    return read_end, write_end


STREAMS: Final = {1: STDOUT, 2: STDERR}
