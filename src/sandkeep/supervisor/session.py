"""The session as its supervisor runs it: one loop, one owner, no shared state.

Everything a client can ask for is an operation in ``_OPERATIONS``; everything that happens by itself (output,
exits, timers, the end of init) is a handler here. The deadline and every ``kill_after`` are timers of this
process, so they hold whether or not anybody is connected.

Life of a session: ``running`` → ``stopping`` → ``stopped``. Whatever ends it — a stop, the deadline, init
dying — goes through ``_begin_stop`` and ``_finish``, and leaves ``state.json`` saying why.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    LimitReached,
    NotFound,
    PathError,
    ProcessError,
    SandkeepError,
    SessionStopped,
    StdinUnavailable,
    path_error,
)
from sandkeep.linux import cgroup, sockets
from sandkeep.supervisor import fileops, protocol, watch
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Accounts, Identity
from sandkeep.supervisor.network import SessionNetwork
from sandkeep.supervisor.process import RUNNING, STREAMS, Process, Stdin, now_ms, output_pipe, replace_json
from sandkeep.supervisor.reactor import Reactor, Timer

_PACKET: Final = 64 << 10
"""Longer requests to init travel in a memory file."""
_MAX_PROCESSES: Final = 4096
_KILL_PATIENCE: Final = 5.0
_DISK_RETRY: Final = 0.5
_RESERVE: Final = 64 << 10
"""Room kept for the last records of a session, for the day the disk is full."""


class Session(Protocol):
    """What whoever booted the session hands over. Owned by the supervisor from then on."""

    pid: int
    pidfd: int
    control: socket.socket | None
    root_fd: int
    slot_fds: list[int]
    cgroup: cgroup.SessionCgroup | None
    base: int
    barriers: dict[str, Any]
    limits: dict[str, Any]
    listeners: list[int]
    netns: int


class Supervisor:
    def __init__(
        self, session: Session, spec: dict[str, Any], directory: str, listener: socket.socket, *, mode: str
    ) -> None:
        assert session.control is not None
        assert session.cgroup is not None
        self._session = session
        self._control = session.control
        self._cgroup = session.cgroup
        self._spec = spec
        self._directory = directory
        self._mode = mode
        self._listener = listener
        self._reactor = Reactor()
        self._processes: dict[str, Process] = {}
        self._starting: dict[str, Callable[[dict[str, Any], list[int]], None]] = {}
        self._queue: list[Callable[[], None]] = []
        self._init_busy = False
        self._status = RUNNING
        self._reason: str | None = None
        self._started_ms = now_ms()
        self._stopped_ms: int | None = None
        self._deadline_ms: int | None = spec["deadline_ms"]
        self._deadline: Timer | None = None
        self._usage: dict[str, Any] = {}
        self._end_waiters: list[Callable[[], None]] = []
        self._accounts = Accounts(session.root_fd, ids=1 if mode == "single" else 65_536)
        self._files = SessionFiles(session.root_fd, base=session.base, single=mode == "single")
        self._network = SessionNetwork(session.listeners, session.netns, self._reactor)
        self._frozen = False
        self._checkpointing = False
        self._disk = watch.DiskWatch(f"{directory}/fs", session.limits["disk"].get("value"))
        self._watching: Timer | None = None
        self._tracks_trees = session.cgroup.capabilities["process_groups"].usable
        self._reactor.add(session.pidfd, self._on_init_gone)
        self._reactor.add(self._control.fileno(), self._on_init_message)
        self._reactor.add(listener.fileno(), self._on_client)
        self._set_deadline(self._deadline_ms)
        _allocate(f"{directory}/reserve", _RESERVE)
        self._write_state()

    def run(self) -> None:
        self._reactor.run()

    # --- state -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "protocol": protocol.PROTOCOL,
            "session": self._spec["session"],
            "generation": self._spec["generation"],
            "status": self._status,
            "reason": self._reason,
            "tier": "native",
            "mode": self._mode,
            "supervisor_pid": os.getpid(),
            "init_pid": self._session.pid,
            "started_ms": self._started_ms,
            "stopped_ms": self._stopped_ms,
            "deadline_ms": self._deadline_ms,
            "barriers": self._session.barriers,
            "limits": self._session.limits,
            "cgroup": self._cgroup.record(),
            "usage": self._usage,
        }

    def _write_state(self) -> None:
        replace_json(f"{self._directory}/state.json", self.state())

    def _save(self) -> None:
        try:
            self._write_state()
        except OSError:
            pass  # the disk is full; while we live we answer ourselves, and for the end there is the reserve

    def _require_running(self) -> None:
        if self._status != RUNNING:
            raise SessionStopped(f"session is {self._status}", session=self._spec["session"])

    # --- clients -----------------------------------------------------------------------------------------

    def _on_client(self, _: int) -> None:
        sock, _address = self._listener.accept()
        Connection(sock, self._reactor, self._dispatch)

    def _dispatch(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        op = body["op"]
        if body.get("generation", self._spec["generation"]) != self._spec["generation"]:
            raise SessionStopped("the session has been replaced", session=self._spec["session"])
        if isinstance(op, str) and op.startswith("fs."):
            self._require_running()
            request, identity = body.get("id"), self._identity(body.get("user"), root=body.get("root", False))
            cwd = body.get("cwd") or self._spec["cwd"]
            connection.lend(
                lambda stream: fileops.serve(stream, request, op[3:], body, identity, self._files, cwd)
            )
            return
        try:
            operation = _OPERATIONS[op]
        except (KeyError, TypeError):
            raise InvalidRequest(f"unknown operation {op!r}", field="op") from None
        operation(self, connection, body, blob)

    def _hello(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body.get("id"), {"protocol": protocol.PROTOCOL, "oldest": protocol.OLDEST})

    def _info(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], self.state())

    # --- processes: start --------------------------------------------------------------------------------

    def _identity(self, user: str | int | None, *, root: bool = False) -> Identity:
        if root:
            return self._accounts.resolve("root")
        return self._accounts.resolve(user, default=self._spec["user"])

    def _start(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        request = self._check_start(body)
        open_processes = sum(process.status == RUNNING for process in self._processes.values())
        if open_processes >= _MAX_PROCESSES:
            raise LimitReached("too many processes", limit="processes", value=_MAX_PROCESSES)
        self._queue.append(lambda: self._start_now(connection, body["id"], request))
        self._next_start()

    def _check_start(self, body: dict[str, Any]) -> dict[str, Any]:
        argv = body["argv"]
        if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
            raise InvalidRequest("argv must be a list of strings, the command first", field="argv")
        name = body["process"]
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
            raise InvalidRequest("process must be letters, digits, - and _", field="process")
        if name in self._processes:
            raise InvalidRequest(f"process {name} exists", field="process")
        if body.get("stdin", "closed") not in ("closed", "pipe"):
            raise InvalidRequest("stdin is 'closed' or 'pipe'", field="stdin")
        size = body.get("pty")
        if size is not None and not (
            isinstance(size, list) and len(size) == 2 and all(0 < int(edge) < 65_536 for edge in size)
        ):
            raise InvalidRequest("pty is [rows, columns]", field="pty")
        root = bool(body.get("root"))
        identity = self._identity(body.get("user"), root=root)
        cwd = os.path.join(self._spec["cwd"], body.get("cwd") or "")
        environment = self._environment(identity, body.get("env") or {}, root=root)
        kill_after = body.get("kill_after_ms")
        if kill_after is not None and not (isinstance(kill_after, int) and kill_after >= 0):
            raise InvalidRequest("kill_after_ms is a number of milliseconds", field="kill_after_ms")
        return {
            "id": name,
            "argv": argv,
            "cwd": cwd,
            "user": identity.name,
            "uid": identity.uid,
            "gid": identity.gid,
            "groups": list(identity.groups),
            "env": [f"{key}={value}" for key, value in environment.items()],
            "path": environment.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "pty": [int(edge) for edge in size] if size else None,
            "stdin": body.get("stdin", "closed"),
            "rlimits": _limits(body.get("rlimits") or {}),
            "shim": kill_after is not None and not self._tracks_trees,
            "kill_after_ms": kill_after,
            "cap": int(body.get("log_cap_bytes") or self._spec["log_cap_bytes"]),
        }

    def _environment(self, identity: Identity, given: dict[str, str], *, root: bool) -> dict[str, str]:
        """Image and session defaults, then who is asking, then the request's own."""
        environment: dict[str, str] = dict(self._spec["rootfs"]["defaults"]["env"])
        environment.update({"HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name})
        environment.update(self._spec["env"])
        if root:
            environment.update({"HOME": "/root", "USER": "root", "LOGNAME": "root"})
            environment["SUDO_USER"] = self._spec["user"]
        for key, value in given.items():
            if not isinstance(key, str) or not isinstance(value, str) or not key or "=" in key:
                raise InvalidRequest(f"not an environment variable: {key!r}", field="env")
            if "\0" in key or "\0" in value:
                raise InvalidRequest(f"NUL byte in environment variable {key!r}", field="env")
            environment[key] = value
        return environment

    def _next_start(self) -> None:
        # One at a time: while a start is under way init may be standing in that process's control group.
        if self._queue and not self._init_busy:
            self._init_busy = True
            self._queue.pop(0)()

    def _start_now(self, connection: Connection, request_id: Any, request: dict[str, Any]) -> None:
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
                process.group.enter(self._session.pid)
            process.oom_before = self._cgroup.oom_kills()
            self._starting[process.id] = lambda answer, received: self._started(
                connection, request_id, request, process, answer, received
            )
            self._tell_init({"op": "exec", **request}, fds)
        except SandkeepError as error:
            self._abandon_start(process)
            connection.refuse(request_id, error)
        except OSError as error:
            self._abandon_start(process)
            connection.refuse(request_id, path_error(error, "start", request["argv"][0]))
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

    def _bid_init(self, message: dict[str, Any]) -> None:
        """A request nobody waits for. If init is dying, so is what the request was about."""
        try:
            self._tell_init(message)
        except OSError:
            pass

    def _tell_init(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        if len(data) <= _PACKET:
            sockets.send(self._control, data, fds)
            return
        memory = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(memory, view) :]
            sockets.send(self._control, b"M", [memory, *(fds or [])])
        finally:
            os.close(memory)

    def _started(
        self,
        connection: Connection,
        request_id: Any,
        request: dict[str, Any],
        process: Process,
        answer: dict[str, Any],
        received: list[int],
    ) -> None:
        if process.group is not None:
            self._cgroup.attach(self._session.pid)
        self._init_busy = False
        if "failed" in answer:
            self._discard(process)
            connection.refuse(request_id, _start_error(request, answer))
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
        if self._watching is None:
            self._watching = self._reactor.later(self._disk.interval, self._watch)
        if request["kill_after_ms"] is not None:
            seconds = request["kill_after_ms"] / 1000
            self._reactor.later(seconds, lambda: self._kill_tree(process, "time limit reached"))
        connection.answer(request_id, {"process": process.record()})
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
        if process.group is not None:
            process.group.remove()
        process.log.close()
        os.rmdir(f"{process.directory}/output")
        os.rmdir(process.directory)

    # --- processes: running ------------------------------------------------------------------------------

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

    def _on_init_message(self, _: int) -> None:
        try:
            data, fds = sockets.receive(self._control)
        except OSError:
            return
        try:
            if not data:
                self._reactor.remove(self._control.fileno())
                return
            message = json.loads(data)
            if not isinstance(message, dict):
                return
            if "exit" in message:
                self._on_exit(message)
            elif "started" in message or "failed" in message:
                handler = self._starting.pop(message.get("started") or message["failed"], None)
                if handler is not None:
                    handler(message, fds)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            # init is inside the sandbox: whatever it says, we go on.
            return
        finally:
            for fd in fds:
                os.close(fd)

    def _on_exit(self, message: dict[str, Any]) -> None:
        process = self._processes.get(message["exit"])
        if process is None or process.status != RUNNING:
            return
        status, cpu_ms = int(message["status"]), int(message["cpu_ms"])
        oom_now = self._cgroup.oom_kills()
        killed_for_memory = (
            os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and process.kill_requested is None
            and oom_now is not None
            and oom_now > (process.oom_before or 0)
        )
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
            process.group.remove()
            process.group = None

    def _save_record(self, process: Process) -> None:
        if process.unsaved:
            process.save()
            self._reactor.later(_DISK_RETRY, lambda: self._save_record(process))

    def _kill_tree(self, process: Process, reason: str) -> None:
        """Every descendant, also those that left the process's session or group."""
        if self._status != RUNNING:
            return
        if process.status == RUNNING:
            process.kill_requested = reason
        if process.group is not None:
            process.group.kill()
        elif not self._tracks_trees:
            self._bid_init({"op": "killtree", "id": process.id})

    # --- limits nobody enforces for us -------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at disk and memory while something runs; a session with nothing running costs nothing."""
        self._watching = None
        if self._status != RUNNING:
            return
        if reason := self._disk.look():
            self._begin_stop(reason)
            return
        limit = self._session.limits["memory"]
        if limit["state"] == "watched":
            used, victim = watch.memory_in_use(self._session.root_fd)
            if used > limit["value"] and victim:
                self._kill_for_memory(victim)
        if any(process.status == RUNNING or process.outputs for process in self._processes.values()):
            self._watching = self._reactor.later(self._disk.interval, self._watch)

    def _kill_for_memory(self, victim: int) -> None:
        for process in self._processes.values():
            if process.pid == victim:
                process.out_of_memory = True
        self._bid_init({"op": "signal", "pid": victim, "signal": signal.SIGKILL, "only": True})

    # --- processes: what clients ask ---------------------------------------------------------------------

    def _list(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        records = [process.record() for process in self._processes.values()]
        connection.answer(body["id"], {"processes": records})

    def _get(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], {"process": self._process(body).record()})

    def _wait(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        process = self._process(body)

        def answer() -> None:
            connection.answer(body["id"], {"process": process.record()})

        if process.status == RUNNING:
            process.exit_waiters.append(answer)
        else:
            answer()

    def _output(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        """Answer as soon as the log has more than ``offset`` bytes, or will never have."""
        process = self._process(body)
        offset = int(body["offset"])

        def answer() -> None:
            ended = process.status != RUNNING
            connection.answer(body["id"], {"offset": process.log.offset, "ended": ended})

        if process.status == RUNNING and process.log.offset <= offset:
            process.output_waiters.append((offset, answer))
        else:
            answer()

    def _send_signal(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        number = int(body["signal"])
        if not 0 < number < 65:
            raise InvalidRequest(f"no signal {number}", field="signal")
        if body.get("process") is None:
            self._bid_init({"op": "signal", "pid": -1, "signal": number})
            connection.answer(body["id"], {})
            return
        process = self._process(body)
        if process.status == RUNNING:
            if number == signal.SIGKILL:
                process.kill_requested = "killed by request"
            self._bid_init({"op": "signal", "pid": process.pid, "signal": number})
        connection.answer(body["id"], {"process": process.record()})

    def _stdin(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
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

    def _resize(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        rows, columns = int(body["rows"]), int(body["columns"])
        if not (0 < rows < 65_536 and 0 < columns < 65_536):
            raise InvalidRequest("rows and columns are positive", field="rows")
        self._process(body).resize(rows, columns)
        connection.answer(body["id"], {})

    # --- the whole session -------------------------------------------------------------------------------

    def _set_deadline(self, deadline_ms: int | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._deadline_ms = deadline_ms
        if deadline_ms is not None:
            seconds = (deadline_ms - now_ms()) / 1000
            self._deadline = self._reactor.later(seconds, lambda: self._begin_stop("deadline reached"))

    def _extend(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        value = body["deadline_ms"]
        self._set_deadline(None if value is None else int(value))
        self._save()
        connection.answer(body["id"], {"deadline_ms": self._deadline_ms})

    def _stop(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._end_waiters.append(lambda: connection.answer(body["id"], self.state()))
        self._begin_stop(str(body.get("reason") or "stopped by request"), int(body.get("grace_ms") or 0))

    def _wait_end(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._end_waiters.append(lambda: connection.answer(body["id"], self.state()))

    def _begin_stop(self, reason: str, grace_ms: int = 0) -> None:
        if self._status != RUNNING:
            return
        self._status = "stopping"
        self._reason = reason
        self._save()
        if self._frozen:
            self._thaw_session()
        alive = any(process.status == RUNNING for process in self._processes.values())
        if grace_ms > 0 and alive:
            self._bid_init({"op": "signal", "pid": -1, "signal": signal.SIGTERM})
            self._reactor.later(grace_ms / 1000, self._kill_session)
            self._watch_grace()
        else:
            self._kill_session()

    def _watch_grace(self) -> None:
        """Do not sit out the grace period when everything has already gone."""
        for process in self._processes.values():
            if process.status == RUNNING:
                process.exit_waiters.append(self._watch_grace)
                return
        self._kill_session()

    def _kill_session(self) -> None:
        try:
            if self._cgroup.capabilities["kill"].usable:
                self._cgroup.kill()
            signal.pidfd_send_signal(self._session.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_init_gone(self, _: int) -> None:
        self._reactor.remove(self._session.pidfd)
        _, _status, usage = os.wait4(self._session.pid, 0)
        if self._status == RUNNING:
            self._reason = "the session's init died"
        self._finish(round((usage.ru_utime + usage.ru_stime) * 1000))

    def _finish(self, cpu_ms: int) -> None:
        """Everything inside is dead. Keep what was printed, close the books, tell who waits, and leave."""
        _free(f"{self._directory}/reserve")
        for process in self._processes.values():
            for fd in list(process.outputs):
                self._exhaust(process, fd)
            if process.status == RUNNING:
                process.lose(self._reason or "session stopped")
            if process.unsaved:
                process.save()
            process.log.close()
        self._usage = self._measure(cpu_ms)
        self._status = "stopped"
        self._stopped_ms = now_ms()
        self._remove_cgroup()
        self._save()
        for answer in self._end_waiters:
            answer()
        self._reactor.running = False

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

    def _remove_cgroup(self) -> None:
        try:
            self._cgroup.remove()
        except OSError:
            pass  # collected later, by name

    def _measure(self, init_cpu_ms: int | None = None) -> dict[str, Any]:
        usage = self._cgroup.usage()
        return {
            "cpu_ms": usage.cpu_ms if usage.cpu_ms is not None else init_cpu_ms,
            "memory_bytes": usage.memory_bytes,
            "memory_peak_bytes": usage.memory_peak_bytes,
            "pids": usage.pids,
            "oom_kills": usage.oom_kills,
            "duration_ms": (self._stopped_ms or now_ms()) - self._started_ms,
        }

    def _report_usage(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], self._measure())

    # --- network -----------------------------------------------------------------------------------------

    def _give_listeners(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._network.give_listeners(connection, body)

    def _give_sockets(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._network.give_sockets(connection, body)

    # --- freezing and checkpoints ------------------------------------------------------------------------

    def _freeze_session(self) -> None:
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.freeze(_KILL_PATIENCE)
        else:
            # Without a freezer: stop signals. Parents inside may notice; init itself goes on.
            self._bid_init({"op": "signal", "pid": -1, "signal": signal.SIGSTOP})
        self._frozen = True

    def _thaw_session(self) -> None:
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.thaw()
        else:
            self._bid_init({"op": "signal", "pid": -1, "signal": signal.SIGCONT})
        self._frozen = False

    def _freeze(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._freeze_session()
        connection.answer(body["id"], {})

    def _thaw(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._thaw_session()
        connection.answer(body["id"], {})

    def _checkpoint(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        destination = body["destination"]
        if self._checkpointing:
            raise LimitReached("a checkpoint is already being taken", limit="checkpoints", value=1)
        self._checkpointing = True

        def done(result: dict[str, Any] | None, error: SandkeepError | None) -> None:
            self._checkpointing = False
            if error is not None:
                connection.refuse(body["id"], error)
            else:
                connection.answer(body["id"], result or {})

        self._reactor.thread(self._copy, destination, done)

    def _copy(self, destination: str, done: Callable[..., None]) -> None:
        from sandkeep.supervisor import checkpoint

        try:
            report = checkpoint.copy_upper(
                f"{self._directory}/fs",
                destination,
                freeze=self._freeze_session,
                thaw=self._thaw_session,
                cancelled=lambda: self._status != RUNNING,
            )
        except SandkeepError as error:
            failure = error
            self._reactor.post(lambda: done(None, failure))
        except OSError as error:
            problem: PathError = path_error(error, "checkpoint", destination)
            self._reactor.post(lambda: done(None, problem))
        else:
            self._reactor.post(lambda: done(dict(report._asdict()), None))


def _allocate(path: str, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _free(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _start_error(request: dict[str, Any], answer: dict[str, Any]) -> SandkeepError:
    """Why init could not start a process, in the caller's terms."""
    command, number = request["argv"][0], int(answer["errno"])
    reason = os.strerror(number)
    step = answer["step"]
    if step == "cwd":
        return path_error(OSError(number, reason), "enter", request["cwd"])
    if step == "find" or (step == "exec" and number in (2, 20)):
        if number == 13:
            return ExecutableRefused(f"{command}: {reason}", command=command, errno=number)
        return ExecutableNotFound(f"{command}: executable not found", command=command)
    if step == "interpreter":
        return ExecutableRefused(f"{command}: its interpreter is missing", command=command, errno=number)
    if step == "exec":
        return ExecutableRefused(f"{command}: {reason}", command=command, errno=number)
    return ProcessError(f"{command}: cannot set up its {step}: {reason}", command=command, errno=number)


_RLIMITS: Final = {"cpu": 0, "fsize": 1, "core": 4, "nofile": 7, "as": 9}


def _limits(asked: dict[str, int]) -> list[list[int]]:
    try:
        return [[_RLIMITS[name], int(value), int(value)] for name, value in asked.items()]
    except (KeyError, ValueError, TypeError):
        raise InvalidRequest(f"rlimits are {', '.join(_RLIMITS)} with numbers", field="rlimits") from None


_OPERATIONS: Final[dict[str, Callable[[Supervisor, Connection, dict[str, Any], bytes], None]]] = {
    "hello": Supervisor._hello,
    "session.info": Supervisor._info,
    "session.stop": Supervisor._stop,
    "session.wait": Supervisor._wait_end,
    "session.extend": Supervisor._extend,
    "session.usage": Supervisor._report_usage,
    "session.freeze": Supervisor._freeze,
    "session.thaw": Supervisor._thaw,
    "session.checkpoint": Supervisor._checkpoint,
    "network.listeners": Supervisor._give_listeners,
    "network.sockets": Supervisor._give_sockets,
    "process.start": Supervisor._start,
    "process.list": Supervisor._list,
    "process.get": Supervisor._get,
    "process.wait": Supervisor._wait,
    "process.output": Supervisor._output,
    "process.signal": Supervisor._send_signal,
    "process.stdin": Supervisor._stdin,
    "process.resize": Supervisor._resize,
}
