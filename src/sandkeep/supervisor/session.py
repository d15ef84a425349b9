"""The session as its supervisor runs it: one loop, one owner, no shared state.

Everything a client can ask for is an operation in a table at the end; everything that happens by itself is a
handler here or in ``processes``. The deadline and every ``kill_after`` are timers of this
process, so they hold whether or not anybody is connected.

Life of a session: ``running`` → ``stopping`` → ``stopped``. Whatever ends it — a stop, the deadline, init
dying — goes through ``_begin_stop`` and ``_finish``, and leaves ``state.json`` saying why.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
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
from sandkeep.supervisor import fileops, protocol, watch
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Accounts
from sandkeep.supervisor.initlink import InitLink
from sandkeep.supervisor.network import SessionNetwork
from sandkeep.supervisor.process import RUNNING, now_ms, replace_json
from sandkeep.supervisor.processes import Processes, Surroundings
from sandkeep.supervisor.reactor import Reactor, Timer
from sandkeep.supervisor.request import Requests

_KILL_PATIENCE: Final = 5.0
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
        self._link = InitLink(session.control)
        self._cgroup = session.cgroup
        self._spec = spec
        self._directory = directory
        self._mode = mode
        self._listener = listener
        self._reactor = Reactor()
        self._status = RUNNING
        self._reason: str | None = None
        self._started_ms = now_ms()
        self._stopped_ms: int | None = None
        self._deadline_ms: int | None = spec["deadline_ms"]
        self._deadline: Timer | None = None
        self._usage: dict[str, Any] = {}
        self._end_waiters: list[Callable[[], None]] = []
        accounts = Accounts(session.root_fd, ids=1 if mode == "single" else 65_536)
        self._requests = Requests(
            spec, accounts, tracks_trees=session.cgroup.capabilities["process_groups"].usable
        )
        self._processes = Processes(
            Surroundings(
                directory=directory,
                init_pid=session.pid,
                link=self._link,
                group=session.cgroup,
                reactor=self._reactor,
                requests=self._requests,
                require_running=self._require_running,
                on_started=self._keep_watching,
            )
        )
        self._files = SessionFiles(session.root_fd, base=session.base, single=mode == "single")
        self._network = SessionNetwork(session.listeners, session.netns, self._reactor)
        self._frozen = False
        self._standing_still = threading.Event()
        self._stopped_all = False
        self._checkpointing = False
        self._disk = watch.DiskWatch(f"{directory}/fs", session.limits["disk"].get("value"))
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
            request, identity = (
                body.get("id"),
                self._requests.identity(body.get("user"), root=body.get("root", False)),
            )
            cwd = body.get("cwd") or self._spec["cwd"]
            connection.lend(
                lambda stream: fileops.serve(stream, request, op[3:], body, identity, self._files, cwd)
            )
            return
        area, _, name = op.partition(".") if isinstance(op, str) else ("", "", "")
        if area == "process" and name in _PROCESS_OPERATIONS:
            _PROCESS_OPERATIONS[name](self._processes, connection, body, blob)
        elif op in _OPERATIONS:
            _OPERATIONS[op](self, connection, body, blob)
        else:
            raise InvalidRequest(f"unknown operation {op!r}", field="op")

    def _on_init_message(self, _: int) -> None:
        heard = self._link.hear()
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
                self._processes.kill_for_memory(victim)
        if any(process.status == RUNNING or process.outputs for process in self._processes):
            self._keep_watching()

    def _keep_watching(self) -> None:
        if self._watching is None:
            self._watching = self._reactor.later(self._disk.interval, self._watch)

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
        if grace_ms > 0 and self._processes.running():
            self._link.bid({"op": "signal", "pid": -1, "signal": signal.SIGTERM})
            self._reactor.later(grace_ms / 1000, self._kill_session)
            self._watch_grace()
        else:
            self._kill_session()

    def _watch_grace(self) -> None:
        """Do not sit out the grace period when everything has already gone."""
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
        """Everything inside is dead. Keep what was printed, close the books, tell who waits, and leave."""
        _free(f"{self._directory}/reserve")
        if self._status == RUNNING:
            self._status = "stopping"
        self._processes.close_all(self._reason or "session stopped")
        self._usage = self._measure(cpu_ms)
        self._status = "stopped"
        self._stopped_ms = now_ms()
        self._remove_cgroup()
        self._save()
        for tell in self._end_waiters:
            tell()
        self._reactor.running = False

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

    def network_descriptors(self) -> list[int]:
        """For whoever asked for the session, so that they need not ask again."""
        return self._network.descriptors()

    def _give_listeners(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._network.give_listeners(connection, body)

    def _give_sockets(self, connection: Connection, body: dict[str, Any], blob: bytes) -> None:
        self._require_running()
        self._network.give_sockets(connection, body)

    # --- freezing and checkpoints ------------------------------------------------------------------------

    def _freeze_session(self) -> None:
        """In a thread of its own: it waits until everything inside stands still."""
        self._frozen = True
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.freeze(_KILL_PATIENCE)
            return
        # Without a freezer: stop signals. Parents inside may notice; init itself goes on.
        self._standing_still.clear()
        self._link.bid({"op": "freeze", "seconds": _KILL_PATIENCE})
        if not self._standing_still.wait(_KILL_PATIENCE + 1) or not self._stopped_all:
            raise TimeoutError(errno.ETIMEDOUT, "the session's processes did not stop in time")

    def _thaw_session(self) -> None:
        if self._cgroup.capabilities["freeze"].usable:
            self._cgroup.thaw()
        else:
            self._link.bid({"op": "thaw"})
        self._frozen = False

    def _on_frozen(self, stopped_all: object) -> None:
        self._stopped_all = stopped_all is True
        self._standing_still.set()

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
                # What is on a drive is no part of the sandbox's own files.
                leave_out=[slot["name"] for slot in self._spec["rootfs"]["slots"] if slot["drive"]],
            )
        except (SandkeepError, OSError) as error:
            failure = (
                error if isinstance(error, SandkeepError) else path_error(error, "checkpoint", destination)
            )
            if self._status != RUNNING:
                # Whatever it ran into on the way: the session's end is the news.
                failure = SessionStopped(f"session is {self._status}", session=self._spec["session"])
            self._reactor.post(lambda: done(None, failure))
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
