"""The session as its supervisor runs it: one loop, one owner, no shared state.

Every operation of clients is in a table at the end; every event has a handler here or in ``processes``. The
deadline and every ``kill_after`` are timers of this process, so they hold without a connected client.

Life of a session: ``running`` → ``stopping`` → ``stopped``. Every end (a stop, the deadline, the death of
init) goes through ``_start_stop`` and ``_finish``, which writes the reason to ``state.json``.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from sandkeep.errors import (
    InternalError,
    InvalidRequest,
    LimitReached,
    SandkeepError,
    SessionStopped,
    path_error,
)
from sandkeep.linux import cgroup
from sandkeep.shared import clock, protocol
from sandkeep.shared.processrecord import RUNNING
from sandkeep.shared.sealed import write_sealed
from sandkeep.supervisor import fileops, limits
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Accounts
from sandkeep.supervisor.initlink import InitLink
from sandkeep.supervisor.network import SessionNetwork
from sandkeep.supervisor.processes import ProcessContext, Processes
from sandkeep.supervisor.reactor import Reactor, Timer
from sandkeep.supervisor.request import Requests

_KILL_PATIENCE: Final = 5.0
_JITTER_MS: Final = 1000
"""Difference between wall clock and steady clock beyond which the shown deadline is adjusted."""
_RESERVE: Final = 64 << 10
"""Disk space reserved for the last records of a session, in case the disk is full."""


class BootedSession(Protocol):
    """Descriptors and state that the boot code passes on. The supervisor owns them from then on."""

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
        self,
        session: BootedSession,
        spec: dict[str, Any],
        directory: str,
        listener: socket.socket,
        *,
        mode: str,
    ) -> None:
        assert session.control is not None
        assert session.cgroup is not None
        self._session = session
        self._link = InitLink(session.control)
        self._cgroup = session.cgroup
        self._spec = spec
        self._directory = directory
        self._mode = mode
        self._listener = listener
        self._reactor = Reactor()
        self._status = RUNNING
        self._reason: str | None = None
        self._started_ms = clock.wall_ms()
        self._began = clock.steady_ms()
        self._stopped_ms: int | None = None
        self._timeout_ms: int | None = spec.get("timeout_ms")
        self._ends_at: int | None = None
        """By the steady clock."""
        self._deadline_ms: int | None = spec["deadline_ms"]
        """The same by the wall clock, for display."""
        self._deadline: Timer | None = None
        self._usage: dict[str, Any] = {}
        self._end_waiters: list[Callable[[], None]] = []
        accounts = Accounts(session.root_fd, ids=1 if mode == "single" else 65_536)
        self._requests = Requests(spec, accounts)
        self._processes = Processes(
            ProcessContext(
                directory=directory,
                link=self._link,
                group=session.cgroup,
                reactor=self._reactor,
                requests=self._requests,
                require_running=self._require_running,
                on_started=self._keep_watching,
            )
        )
        self._files = SessionFiles(session.root_fd, base=session.base, single=mode == "single")
        self._network = SessionNetwork(session.listeners, session.netns, self._reactor, self._require_running)
        self._frozen = False
        self._stop_reported = threading.Event()
        self._stopped_all = False
        self._checkpointing = False
        self._disk = limits.DiskWatch(f"{directory}/fs", session.limits["disk"].get("value"), _drives(spec))
        self._watching: Timer | None = None
        self._reactor.add(session.pidfd, self._on_init_gone)
        self._reactor.add(self._link.fileno(), self._on_init_message)
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
            "oldest": protocol.OLDEST,
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
            "deadline_ms": self._shown_deadline(),
            "remaining_ms": self._remaining_ms(),
            "age_ms": clock.steady_ms() - self._began,
            "barriers": self._session.barriers,
            "limits": self._session.limits,
            "cgroup": self._cgroup.record(),
            "usage": self._usage,
        }

    def _write_state(self) -> None:
        write_sealed(f"{self._directory}/state.json", self.state())

    def _save(self) -> None:
        try:
            self._write_state()
        except OSError:
            pass  # disk full; clients ask the running supervisor, and the reserve holds the final record

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
            request, identity = (
                body.get("id"),
                self._requests.identity(body.get("user"), root=body.get("root", False)),
            )
            cwd = body.get("cwd") or self._spec["cwd"]
            connection.lend(
                lambda stream: fileops.serve(stream, request, op[3:], body, identity, self._files, cwd)
            )
            self._keep_watching()
            return
        area, _, name = op.partition(".") if isinstance(op, str) else ("", "", "")
        if area == "process" and name in _PROCESS_OPERATIONS:
            _PROCESS_OPERATIONS[name](self._processes, connection, body, blob)
        elif op in _OPERATIONS:
            _OPERATIONS[op](self, connection, body, blob)
        else:
            raise InvalidRequest(f"unknown operation {op!r}", field="op")

    def _on_init_message(self, _: int) -> None:
        heard = self._link.receive()
        if heard is None:
            self._reactor.remove(self._link.fileno())
            return
        message, fds = heard
        try:
            if "frozen" in message:
                self._on_frozen(message["frozen"])
            else:
                self._processes.on_message(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _hello(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body.get("id"), {"protocol": protocol.PROTOCOL, "oldest": protocol.OLDEST})

    def _info(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], self.state())

    # --- limits that the kernel does not enforce ---------------------------------------------------------

    def _watch(self) -> None:
        """Poll disk and memory while a process runs or a client writes; an idle session costs nothing."""
        self._watching = None
        if self._status != RUNNING:
            return
        if reason := self._disk.check():
            self._start_stop(reason)
            return
        limit = self._session.limits["memory"]
        if limit["state"] == "watched":
            used, victim = limits.memory_in_use(self._session.root_fd)
            if used > limit["value"] and victim:
                self._processes.kill_for_memory(victim)
        busy = any(process.status == RUNNING or process.outputs for process in self._processes)
        if busy or self._disk.interval == limits.ALERT:
            self._keep_watching()

    def _keep_watching(self) -> None:
        if self._watching is None:
            self._watching = self._reactor.later(self._disk.interval, self._watch)

    # --- the whole session -------------------------------------------------------------------------------

    def _set_deadline(self, deadline_ms: int | None) -> None:
        """Set the deadline by the wall clock as it is now; from here on only the steady clock counts."""
        self._deadline_ms = deadline_ms
        self._end_at(None if deadline_ms is None else clock.steady_ms() + deadline_ms - clock.wall_ms())

    def _end_at(self, steady_ms: int | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._ends_at = steady_ms
        if steady_ms is not None:
            seconds = (steady_ms - clock.steady_ms()) / 1000
            self._deadline = self._reactor.later(seconds, lambda: self._start_stop("deadline reached"))

    def _remaining_ms(self) -> int | None:
        return None if self._ends_at is None else max(self._ends_at - clock.steady_ms(), 0)

    def _shown_deadline(self) -> int | None:
        """Return the deadline by the wall clock; the same number unless that clock is changed."""
        if self._ends_at is not None and self._deadline_ms is not None:
            now = clock.wall_ms() + self._ends_at - clock.steady_ms()
            if abs(now - self._deadline_ms) > _JITTER_MS:
                self._deadline_ms = now
        return self._deadline_ms

    def _extend(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        value, timeout = body["deadline_ms"], body.get("timeout_ms")
        if timeout is not None and self._timeout_ms is not None and self._ends_at is not None:
            # The total, so that a request sent twice has the effect of one.
            more = int(timeout) - self._timeout_ms
            deadline = self._shown_deadline()
            self._timeout_ms = int(timeout)
            self._end_at(self._ends_at + more)
            self._deadline_ms = None if deadline is None else deadline + more
        else:
            self._set_deadline(None if value is None else int(value))
        self._save()
        connection.answer(body["id"], {"deadline_ms": self._shown_deadline()})

    def _stop(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._end_waiters.append(lambda: connection.answer(body["id"], self.state()))
        self._start_stop(str(body.get("reason") or "stopped by request"), int(body.get("grace_ms") or 0))

    def _wait_end(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._end_waiters.append(lambda: connection.answer(body["id"], self.state()))

    def _start_stop(self, reason: str, grace_ms: int = 0) -> None:
        if self._status != RUNNING:
            return
        self._status = "stopping"
        self._reason = reason
        self._save()
        if self._frozen:
            self._thaw_session()
        if grace_ms > 0 and self._processes.running():
            self._link.send_best_effort({"op": "signal", "pid": -1, "signal": signal.SIGTERM})
            self._reactor.later(grace_ms / 1000, self._kill_session)
            self._watch_grace()
        else:
            self._kill_session()

    def _watch_grace(self) -> None:
        """End the grace period early once all processes have exited."""
        for process in self._processes.running():
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
        """Log the last output, write the final records, respond to waiting clients, and exit the loop.

        Called once every process of the session is dead.
        """
        _free(f"{self._directory}/reserve")
        if self._status == RUNNING:
            self._status = "stopping"
        self._processes.close_all(self._reason or "session stopped")
        self._usage = self._measure(cpu_ms)
        self._status = "stopped"
        self._stopped_ms = clock.wall_ms()
        self._remove_cgroup()
        self._save()
        for tell in self._end_waiters:
            tell()
        self._reactor.running = False

    def _remove_cgroup(self) -> None:
        try:
            self._cgroup.remove()
        except OSError:
            pass  # the server removes it later, by name

    def _measure(self, init_cpu_ms: int | None = None) -> dict[str, Any]:
        usage = self._cgroup.usage()
        return {
            "cpu_ms": usage.cpu_ms if usage.cpu_ms is not None else init_cpu_ms,
            "memory_bytes": usage.memory_bytes,
            "memory_peak_bytes": usage.memory_peak_bytes,
            "pids": usage.pids,
            "oom_kills": usage.oom_kills,
            "duration_ms": clock.steady_ms() - self._began,
        }

    def _report_usage(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        connection.answer(body["id"], self._measure())

    # --- network -----------------------------------------------------------------------------------------

    def network_descriptors(self) -> AbstractContextManager[list[int]]:
        """Return the descriptors for netd, which are sent with the report of the start."""
        return self._network.descriptors()

    def _give_listeners(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._network.give_listeners(connection, body)

    def _give_sockets(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        """For servers of earlier versions, whose netd asks through them."""
        self._network.give_sockets(connection, body)

    # --- freezing and checkpoints ------------------------------------------------------------------------

    def _freeze_session(self) -> None:
        """Freeze in a thread of its own, which waits until every process of the session has stopped."""
        self._frozen = True
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.freeze(_KILL_PATIENCE)
            return
        # Without a freezer: SIGSTOP. Parents in the session may notice; init itself keeps running.
        self._stop_reported.clear()
        self._link.send_best_effort({"op": "freeze", "seconds": _KILL_PATIENCE})
        if not self._stop_reported.wait(_KILL_PATIENCE + 1) or not self._stopped_all:
            raise TimeoutError(errno.ETIMEDOUT, "the session's processes did not stop in time")

    def _thaw_session(self) -> None:
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.thaw()
        else:
            self._link.send_best_effort({"op": "thaw"})
        self._frozen = False

    def _on_frozen(self, stopped_all: object) -> None:
        self._stopped_all = stopped_all is True
        self._stop_reported.set()

    def _freeze(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()

        def work() -> None:
            try:
                self._freeze_session()
            except OSError as error:
                self._thaw_session()
                failure = InternalError(f"freezing the session failed: {error.strerror}")
                self._reactor.post(lambda: connection.refuse(body["id"], failure))
            else:
                self._reactor.post(lambda: connection.answer(body["id"], {}))

        self._reactor.thread(work)

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
                # The content of a drive does not belong to the sandbox's own files.
                leave_out=[slot["name"] for slot in self._spec["rootfs"]["slots"] if slot["drive"]],
            )
        except (SandkeepError, OSError) as error:
            failure = (
                error if isinstance(error, SandkeepError) else path_error(error, "checkpoint", destination)
            )
            if self._status != RUNNING:
                # Report the stop rather than the copy error it caused.
                failure = SessionStopped(f"session is {self._status}", session=self._spec["session"])
            self._reactor.post(lambda: done(None, failure))
        else:
            self._reactor.post(lambda: done(dict(report._asdict()), None))


def _drives(spec: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    """Return the drives and their size limits, for ``DiskWatch``."""
    slots = spec["rootfs"]["slots"]
    return {slot["name"]: (slot["target"], slot.get("room_bytes")) for slot in slots if slot["drive"]}


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
}
_PROCESS_OPERATIONS: Final[dict[str, Callable[[Processes, Connection, dict[str, Any], bytes], None]]] = {
    "start": Processes.start,
    "list": Processes.list,
    "get": Processes.get,
    "wait": Processes.wait,
    "output": Processes.output,
    "signal": Processes.signal,
    "stdin": Processes.write_stdin,
    "resize": Processes.resize,
}
