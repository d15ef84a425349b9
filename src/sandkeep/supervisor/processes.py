"""The processes of a session: started through init, their output logged, their ends recorded.

Owned by the supervisor and driven by its loop. Operations that clients ask for are the public methods that
take a connection; the others are called when something happens.
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
    StdinUnavailable,
    path_error,
)
from sandkeep.linux import cgroup
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.initlink import InitLink
from sandkeep.supervisor.process import RUNNING, STREAMS, Process, Stdin, output_pipe
from sandkeep.supervisor.reactor import Reactor
from sandkeep.supervisor.request import Requests, start_error

_MAX_PROCESSES: Final = 4096
_DISK_RETRY: Final = 0.5
_TERMINAL_RETRY: Final = 0.1


class Surroundings(NamedTuple):
    """What the session lends to its processes."""

    directory: str
    init_pid: int
    link: InitLink
    group: cgroup.SessionCgroup
    reactor: Reactor
    requests: Requests
    require_running: Callable[[], None]
    on_started: Callable[[], None]


def _answer_output(connection: Connection, request: Any, process: Process) -> None:
    connection.answer(request, {"offset": process.log.offset, "ended": process.status != RUNNING})


class _Asker(NamedTuple):
    """Who asked for a start, and under which ids they want to hear of its first output and its end."""

    connection: Connection
    id: Any
    more: Any
    end: Any

    def refuse(self, error: SandkeepError) -> None:
        self.connection.refuse(self.id, error)

    def answer(self, process: Process) -> None:
        self.connection.answer(self.id, {"process": process.record(), "end": self.end})
        if self.more is not None:
            process.output_waiters.append((0, lambda: _answer_output(self.connection, self.more, process)))
        if self.end is not None:
            process.exit_waiters.append(
                lambda: self.connection.answer(self.end, {"process": process.record()})
            )


class Processes:
    def __init__(self, around: Surroundings) -> None:
        self._directory = around.directory
        self._init_pid = around.init_pid
        self._link = around.link
        self._cgroup = around.group
        self._reactor = around.reactor
        self._requests = around.requests
        self._require_running = around.require_running
        self._on_started = around.on_started
        self._tracks_trees = around.group.capabilities["process_groups"].usable
        self._processes: dict[str, Process] = {}
        self._starting: dict[str, Callable[[dict[str, Any], list[int]], None]] = {}
        self._queue: list[Callable[[], None]] = []
        self._init_busy = False
        self._oom_explained = 0

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes.values())

    def running(self) -> list[Process]:
        return [process for process in self if process.status == RUNNING]

    # --- starting ----------------------------------------------------------------------------------------

    def start(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        request = self._requests.read(body)
        if request["id"] in self._processes or request["id"] in self._starting:
            raise InvalidRequest(f"process {request['id']} exists", field="process")
        if len(self.running()) >= _MAX_PROCESSES:
            raise LimitReached("too many processes", limit="processes", value=_MAX_PROCESSES)
        asker = _Asker(connection, body["id"], body.get("more"), body.get("end"))
        self._queue.append(lambda: self._start_now(asker, request))
        self._next_start()

    def _next_start(self) -> None:
        # One at a time: while a start is under way init may be standing in that process's control group.
        if self._queue and not self._init_busy:
            self._init_busy = True
            self._queue.pop(0)()

    def _start_now(self, asker: _Asker, request: dict[str, Any]) -> None:
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
                fds = self._make_pipes(process, request["stdin"])
            if request["kill_after_ms"] is not None and self._tracks_trees:
                process.group = self._cgroup.process_group(request["id"])
                process.group.enter(self._init_pid)
            process.oom_before = self._cgroup.oom_kills()
            self._starting[process.id] = lambda answer, received: self._started(
                asker, request, process, answer, received
            )
            self._link.tell({"op": "exec", **request}, fds)
        except SandkeepError as error:
            self._abandon_start(process)
            asker.refuse(error)
        except OSError as error:
            self._abandon_start(process)
            asker.refuse(path_error(error, "start", request["argv"][0]))
        finally:
            for fd in fds:
                os.close(fd)

    def _make_pipes(self, process: Process, stdin: str) -> list[int]:
        """The child's three descriptors; our ends go to the process."""
        if stdin == "pipe":
            child_in, ours_in = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours_in, False)
            process.stdin = Stdin(ours_in, is_terminal=False)
        else:
            child_in = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        fds = [child_in]
        for target in (1, 2):
            ours, theirs = output_pipe()
            process.outputs[ours] = STREAMS[target]
            fds.append(theirs)
        return fds

    def _started(
        self,
        asker: _Asker,
        request: dict[str, Any],
        process: Process,
        answer: dict[str, Any],
        received: list[int],
    ) -> None:
        if process.group is not None:
            try:
                self._cgroup.attach(self._init_pid)
            except OSError:
                pass  # init has just died; hearing of that ends the session
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
            self._reactor.later(seconds, lambda: self._kill_tree(process, "time limit reached"))
        asker.answer(process)
        self._next_start()

    def _abandon_start(self, process: Process | None) -> None:
        if process is not None:
            self._starting.pop(process.id, None)
            self._discard(process)
        self._init_busy = False
        self._next_start()

    def _discard(self, process: Process) -> None:
        """Forget a process that never ran; it has no output worth keeping."""
        for fd in process.outputs:
            os.close(fd)
        if process.stdin is not None:
            process.stdin.fail("the process never started")
        self._remove_group(process)
        process.log.close()
        os.rmdir(process.directory)

    def _remove_group(self, process: Process) -> None:
        if process.group is not None:
            try:
                process.group.remove()
            except OSError:
                return  # goes with the session's own
            process.group = None

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
            # The log cannot be written (disk full). Leave the pipe alone: the writer blocks, nothing is lost,
            # and we look again in a while.
            self._reactor.remove(fd)
            self._reactor.later(_DISK_RETRY, lambda: self._resume_output(process, fd))
            return
        if fd == process.terminal and process.status == RUNNING:
            # Nobody has the terminal open, for now: programs close it just before they exit, or to open it
            # anew. Closing our end would hang up on them and turn a clean exit into a death by signal.
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
            if process.stdin is not None:
                process.stdin.fail("the terminal is closed")
                process.stdin = None
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
                # Each death is one count: whoever is killed later is not blamed on this one.
                self._oom_explained = oom_now
        self._conclude(process, status, cpu_ms, killed_for_memory or process.out_of_memory)

    def _conclude(self, process: Process, status: int, cpu_ms: int, out_of_memory: bool) -> None:
        if process.status != RUNNING:
            return  # the session ended meanwhile
        try:
            process.finish(status, cpu_ms=cpu_ms, out_of_memory=out_of_memory)
        except OSError:
            # Its last words come first, and there is no room for them now.
            self._reactor.later(_DISK_RETRY, lambda: self._conclude(process, status, cpu_ms, out_of_memory))
            return
        self._save_record(process)
        if not process.outputs:
            process.log.close()
        if process.group is not None and not process.group.populated():
            self._remove_group(process)

    def _save_record(self, process: Process) -> None:
        if process.unsaved:
            process.save()
            self._reactor.later(_DISK_RETRY, lambda: self._save_record(process))

    def _kill_tree(self, process: Process, reason: str) -> None:
        """Every descendant, also those that left the process's session or group."""
        if process.status == RUNNING:
            process.kill_requested = reason
        if process.group is not None:
            process.group.kill()
        elif not self._tracks_trees:
            self._link.bid({"op": "killtree", "id": process.id})

    def on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        """What init says. Whatever it is, the session goes on."""
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
        """Everything is dead: keep what was printed and end every record."""
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
        """Kill one process of the sandbox, whoever started it, because the session uses too much memory."""
        for process in self:
            if process.pid == victim:
                process.out_of_memory = True
        self._link.bid({"op": "signal", "pid": victim, "signal": signal.SIGKILL, "only": True})

    # --- what clients ask --------------------------------------------------------------------------------

    def list(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        records = [process.record() for process in self._processes.values()]
        connection.answer(body["id"], {"processes": records})

    def get(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], {"process": self._process(body).record()})

    def wait(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        process = self._process(body)

        def answer() -> None:
            connection.answer(body["id"], {"process": process.record()})

        if process.status == RUNNING:
            process.exit_waiters.append(answer)
        else:
            answer()

    def output(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        """Answer as soon as the log has more than ``offset`` bytes, or will never have."""
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
            raise InvalidRequest(f"no signal {number}", field="signal")
        if body.get("process") is None:
            self._link.bid({"op": "signal", "pid": -1, "signal": number})
            connection.answer(body["id"], {})
            return
        process = self._process(body)
        if process.status == RUNNING:
            if number == signal.SIGKILL:
                process.kill_requested = "killed by request"
            self._link.bid({"op": "signal", "pid": process.pid, "signal": number})
        connection.answer(body["id"], {"process": process.record()})

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
        self._watch_stdin(process, stdin, fd)

    def _watch_stdin(self, process: Process, stdin: Stdin, fd: int) -> None:
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
            raise InvalidRequest("rows and columns are positive", field="rows")
        self._process(body).resize(rows, columns)
        connection.answer(body["id"], {})
