"""The processes of a session: started through init, their output logged, their ends recorded.

Owned by the supervisor and driven by its loop. The public methods that take a connection are operations of
clients; the loop calls the others on events.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from sandkeep.errors import (
    InvalidRequest,
    LimitReached,
    NotFound,
    SandkeepError,
    SessionStopped,
    StdinUnavailable,
    path_error,
)
from sandkeep.linux import cgroup
from sandkeep.shared.processrecord import KILLED_BY_REQUEST, RUNNING, TIME_LIMIT
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.initlink import InitLink
from sandkeep.supervisor.process import STREAMS, Process, Stdin, output_pipe
from sandkeep.supervisor.reactor import Reactor
from sandkeep.supervisor.request import Requests, check_milliseconds, start_error

_MAX_PROCESSES: Final = 4096
_DISK_RETRY: Final = 0.5
_TERMINAL_RETRY: Final = 0.1
_ENDING: Final = (signal.SIGTERM, signal.SIGKILL)
"""Signals that are sent to every descendant; others go to the process and its group, as from a terminal."""


class ProcessContext(NamedTuple):
    """Parts of the session that its processes use."""

    directory: str
    link: InitLink
    group: cgroup.SessionCgroup
    reactor: Reactor
    requests: Requests
    require_running: Callable[[], None]
    on_started: Callable[[], None]


def _answer_output(connection: Connection, request: Any, process: Process) -> None:
    connection.answer(request, {"offset": process.log.offset, "ended": process.status != RUNNING})


class _StartWaiter(NamedTuple):
    """The client of a start, and the request ids for the first output and the end of the process."""

    connection: Connection
    id: Any
    more: Any
    end: Any

    def refuse(self, error: SandkeepError) -> None:
        self.connection.refuse(self.id, error)

    def answer(self, process: Process) -> None:
        self.connection.answer(self.id, {"process": process.shown(), "end": self.end})
        if self.more is not None:
            process.output_waiters.append((0, lambda: _answer_output(self.connection, self.more, process)))
        if self.end is not None:
            process.exit_waiters.append(
                lambda: self.connection.answer(self.end, {"process": process.shown()})
            )


class Processes:
    def __init__(self, around: ProcessContext) -> None:
        self._directory = around.directory
        self._link = around.link
        self._cgroup = around.group
        self._reactor = around.reactor
        self._requests = around.requests
        self._require_running = around.require_running
        self._on_started = around.on_started
        self._processes: dict[str, Process] = {}
        self._starting: dict[str, Callable[[dict[str, Any], list[int]], None]] = {}
        self._queue: list[tuple[str, Callable[[], None]]] = []
        self._init_busy = False
        self._oom_explained = 0

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    def running(self) -> list[Process]:
        return [process for process in self if process.status == RUNNING]

    # --- starting ----------------------------------------------------------------------------------------

    def start(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        request = self._requests.parse_start_request(body)
        waiting = {name for name, _ in self._queue}
        if request["id"] in {*waiting, *self._starting} or request["id"] in self._processes:
            raise InvalidRequest(f"process {request['id']} exists", field="process")
        if len(self.running()) >= _MAX_PROCESSES:
            raise LimitReached("too many processes", limit="processes", value=_MAX_PROCESSES)
        asker = _StartWaiter(connection, body["id"], body.get("more"), body.get("end"))
        self._queue.append((request["id"], lambda: self._start_now(asker, request)))
        self._next_start()

    def _next_start(self) -> None:
        # One at a time: the socket to init holds few requests.
        if self._queue and not self._init_busy:
            self._init_busy = True
            self._queue.pop(0)[1]()

    def _start_now(self, asker: _StartWaiter, request: dict[str, Any]) -> None:
        fds: list[int] = []
        process: Process | None = None
        try:
            self._require_running()
            process = Process(
                request["id"],
                f"{self._directory}/processes/{request['id']}",
                request,
                cap=request["cap"],
            )
            if not request["pty"]:
                fds = self._make_pipes(process, request["stdin"], merged=request["stderr"] == "stdout")
            process.oom_before = self._cgroup.oom_kills()
            self._starting[process.id] = lambda answer, received: self._started(
                asker, request, process, answer, received
            )
            self._link.send({"op": "exec", **request}, fds)
        except SandkeepError as error:
            self._abandon_start(process)
            asker.refuse(error)
        except ConnectionError:
            self._abandon_start(process)
            asker.refuse(SessionStopped("the session is ending: its init is gone"))
        except OSError as error:
            self._abandon_start(process)
            asker.refuse(path_error(error, "start", request["argv"][0]))
        finally:
            for fd in fds:
                os.close(fd)

    def _make_pipes(self, process: Process, stdin: str, *, merged: bool) -> list[int]:
        """Return the child's descriptors, the last two for its output; ``process`` keeps the other ends.

        Without input there are only those two: init opens the session's /dev/null, since the supervisor's is
        the host's. ``merged``: both are the write end of one pipe, which keeps the order of what is written.
        """
        fds = []
        if stdin == "pipe":
            child_in, ours_in = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours_in, False)
            process.stdin = Stdin(ours_in, is_terminal=False)
            fds.append(child_in)
        for target in (1,) if merged else (1, 2):
            ours, theirs = output_pipe()
            process.outputs[ours] = STREAMS[target]
            fds.append(theirs)
        return [*fds, os.dup(fds[-1])] if merged else fds

    def _started(
        self,
        asker: _StartWaiter,
        request: dict[str, Any],
        process: Process,
        answer: dict[str, Any],
        received: list[int],
    ) -> None:
        self._init_busy = False
        if "failed" in answer:
            self._discard(process)
            try:
                self._require_running()
            except SandkeepError as error:
                asker.refuse(error)
            else:
                asker.refuse(start_error(request, answer))
            self._next_start()
            return
        process.pid = int(answer["pid"])
        if received:
            terminal = received.pop(0)
            os.set_blocking(terminal, False)
            process.terminal = terminal
            process.outputs[terminal] = STREAMS[1]
            process.stdin = Stdin(terminal, is_terminal=True)
        self._processes[process.id] = process
        process.save()
        for fd in list(process.outputs):
            self._reactor.add(fd, lambda _, fd=fd: self._on_output(process, fd))  # type: ignore[misc]
        self._on_started()
        if request["kill_after_ms"] is not None:
            seconds = request["kill_after_ms"] / 1000
            self._reactor.later(seconds, lambda: self._over_time(process, request["grace_ms"]))
        asker.answer(process)
        self._next_start()

    def _abandon_start(self, process: Process | None) -> None:
        if process is not None:
            self._starting.pop(process.id, None)
            self._discard(process)
        self._init_busy = False
        self._next_start()

    def _discard(self, process: Process) -> None:
        """Remove a process that never ran; it has no output to keep."""
        for fd in process.outputs:
            os.close(fd)
        process.end_input("the process never started")
        process.log.close()
        os.rmdir(process.directory)

    # --- running -----------------------------------------------------------------------------------------

    def _process(self, body: dict[str, Any]) -> Process:
        name = body["process"]
        try:
            return self._processes[name]
        except (KeyError, TypeError):
            raise NotFound(f"no process {name!r} in this session", kind="process", name=str(name)) from None

    def _on_output(self, process: Process, fd: int) -> None:
        try:
            if process.read_output(fd):
                return
        except OSError:
            # The log cannot be written (disk full). Stop reading the pipe: the writer blocks, no output is
            # lost, and a timer tries again.
            self._reactor.remove(fd)
            self._reactor.later(_DISK_RETRY, lambda: self._resume_output(process, fd))
            return
        if fd == process.terminal and process.status == RUNNING:
            # No process has the terminal open at the moment: programs close it just before they exit, or to
            # open it again. Closing the master would send SIGHUP and turn a clean exit into a death by it.
            self._reactor.remove(fd)
            self._reactor.later(_TERMINAL_RETRY, lambda: self._resume_output(process, fd))
            return
        self._close_output(process, fd)

    def _resume_output(self, process: Process, fd: int) -> None:
        if fd in process.outputs:
            self._reactor.add(fd, lambda _: self._on_output(process, fd))
            if fd in process.unlogged:
                self._on_output(process, fd)

    def _close_output(self, process: Process, fd: int) -> None:
        self._reactor.remove(fd)
        del process.outputs[fd]
        if fd == process.terminal:
            process.terminal = -1
            process.end_input("the terminal is closed")
        os.close(fd)
        if not process.outputs and process.status != RUNNING:
            process.log.close()

    def on_exit(self, message: dict[str, Any]) -> None:
        process = self._processes.get(message["exit"])
        if process is None or process.status != RUNNING:
            return
        status, cpu_ms = int(message["status"]), int(message["cpu_ms"])
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        killed_for_memory = False
        if killed and process.kill_requested is None:
            oom_now = self._cgroup.oom_kills() or 0
            killed_for_memory = oom_now > max(process.oom_before or 0, self._oom_explained)
            if killed_for_memory:
                # Each OOM kill is one count: a process killed later is not attributed to this one.
                self._oom_explained = oom_now
        self._conclude(process, status, cpu_ms, killed_for_memory or process.out_of_memory)

    def _conclude(self, process: Process, status: int, cpu_ms: int, out_of_memory: bool) -> None:
        if process.status != RUNNING:
            return  # the session has ended
        try:
            process.finish(status, cpu_ms=cpu_ms, out_of_memory=out_of_memory)
        except OSError:
            # Its last output must be logged first, and the disk is full.
            self._reactor.later(_DISK_RETRY, lambda: self._conclude(process, status, cpu_ms, out_of_memory))
            return
        self._save_record(process)
        if not process.outputs:
            process.log.close()

    def _save_record(self, process: Process) -> None:
        if process.unsaved:
            process.save()
            self._reactor.later(_DISK_RETRY, lambda: self._save_record(process))

    def _over_time(self, process: Process, grace_ms: int | None) -> None:
        if process.status == RUNNING:
            process.kill_requested = TIME_LIMIT
        if grace_ms:
            self._signal_tree(process, signal.SIGTERM, to_come=True)
            self._kill_later(process, grace_ms, TIME_LIMIT)
        else:
            self._signal_tree(process, signal.SIGKILL, to_come=False)

    def _kill_later(self, process: Process, grace_ms: int, reason: str) -> None:
        """Kill what is left of a process and its descendants after a grace period."""

        def kill() -> None:
            if process.status == RUNNING:
                process.kill_requested = reason
            self._signal_tree(process, signal.SIGKILL, to_come=False)

        self._reactor.later(grace_ms / 1000, kill)

    def _signal_tree(self, process: Process, number: int, *, to_come: bool | None = None) -> None:
        """Signal every descendant, also those that left the process's session or group.

        ``to_come`` tells init whether it has to know the descendants for another signal after the end of the
        process itself; ``None`` changes nothing about that.
        """
        self._link.send_best_effort(
            {"op": "signaltree", "id": process.id, "signal": number, "to_come": to_come}
        )

    def on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        """Handle a message from init. A malformed one is ignored."""
        try:
            if "exit" in message:
                self.on_exit(message)
            elif "started" in message or "failed" in message:
                handler = self._starting.pop(message.get("started") or message["failed"], None)
                if handler is not None:
                    handler(message, fds)
        except (ValueError, LookupError, TypeError, ArithmeticError):
            return

    def close_all(self, reason: str) -> None:
        """Log the remaining output and end every record, after all processes have died."""
        while self._starting:
            name, answer = self._starting.popitem()
            answer({"failed": name}, [])
        for process in self:
            for fd in list(process.outputs):
                self._exhaust(process, fd)
            if process.status == RUNNING:
                process.lose(reason)
            if process.unsaved:
                process.save()
            process.log.close()

    def _exhaust(self, process: Process, fd: int) -> None:
        try:
            while process.read_output(fd):
                before = process.log.offset
                if not process.read_output(fd):
                    break
                if process.log.offset == before:
                    break
        except OSError:
            process.reason = "output could not be written"
        self._close_output(process, fd)

    def kill_for_memory(self, victim: int) -> None:
        """Kill one process of the sandbox because the session uses too much memory."""
        for process in self:
            if process.pid == victim:
                process.out_of_memory = True
        self._link.send_best_effort({"op": "signal", "pid": victim, "signal": signal.SIGKILL, "only": True})

    # --- what clients ask --------------------------------------------------------------------------------

    def list(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        records = [process.shown() for process in self._processes.values()]
        connection.answer(body["id"], {"processes": records})

    def get(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], {"process": self._process(body).shown()})

    def wait(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        process = self._process(body)

        def answer() -> None:
            connection.answer(body["id"], {"process": process.shown()})

        if process.status == RUNNING:
            process.exit_waiters.append(answer)
        else:
            answer()

    def output(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        """Respond as soon as the log has more than ``offset`` bytes, or never will."""
        process = self._process(body)
        offset = int(body["offset"])

        def answer() -> None:
            _answer_output(connection, body["id"], process)

        if process.status == RUNNING and process.log.offset <= offset:
            process.output_waiters.append((offset, answer))
        else:
            answer()

    def signal(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        number = int(body["signal"])
        if not 0 < number < 65:
            raise InvalidRequest(f"{number} is not a signal", field="signal")
        if body.get("process") is None:
            self._link.send_best_effort({"op": "signal", "pid": -1, "signal": number})
            connection.answer(body["id"], {})
            return
        process, grace_ms = self._process(body), body.get("grace_ms")
        check_milliseconds("grace_ms", grace_ms)
        if process.status == RUNNING:
            if number == signal.SIGKILL:
                process.kill_requested = KILLED_BY_REQUEST
            if grace_ms and number != signal.SIGKILL:
                self._signal_tree(process, number, to_come=True)
                self._kill_later(process, grace_ms, KILLED_BY_REQUEST)
            elif number in _ENDING:
                self._signal_tree(process, number)
            else:
                self._link.send_best_effort({"op": "signal", "pid": process.pid, "signal": number})
        connection.answer(body["id"], {"process": process.shown()})

    def write_stdin(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        process = self._process(body)
        if process.stdin is None:
            ended = process.status != RUNNING
            raise StdinUnavailable(
                "the process has ended" if ended else "the process has no standard input attached",
                process=process.id,
                ended=ended,
            )
        stdin = process.stdin
        fd = stdin.fd

        def answer(error: SandkeepError | None) -> None:
            if error is not None:
                error.details["accepted"] = stdin.accepted
                connection.refuse(body["id"], error)
            else:
                connection.answer(body["id"], {"accepted": stdin.accepted})

        stdin.offer(blob, body.get("offset"), bool(body.get("close")), answer)
        self._watch_stdin(stdin, fd)

    def _watch_stdin(self, stdin: Stdin, fd: int) -> None:
        if not stdin.wants_write():
            return
        # Polled through a duplicate: a terminal's own descriptor is already being polled for output.
        copy = os.dup(fd)

        def ready(_: int) -> None:
            stdin.flush()
            if not stdin.wants_write():
                self._reactor.remove(copy)
                os.close(copy)

        self._reactor.add(copy, ready, select.EPOLLOUT)

    def resize(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        rows, columns = int(body["rows"]), int(body["columns"])
        if not (0 < rows < 65_536 and 0 < columns < 65_536):
            raise InvalidRequest("rows and columns must be positive", field="rows")
        self._process(body).resize(rows, columns)
        connection.answer(body["id"], {})
