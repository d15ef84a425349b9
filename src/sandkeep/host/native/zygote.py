"""The zygote, a fork server: a small single-threaded process, fully imported, that forks every supervisor.

It is started as ``python -I -S -E`` with an empty environment before any secret is in memory, because init
shares these pages. It listens to the server on an inherited socket and ends with the server; supervisors do
not.

Rootless it first creates the outer user namespace: everything below runs as uid 0 in it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import nullcontext, suppress
from typing import Any, Final, NamedTuple, NoReturn

from sandkeep.errors import InternalError, SandkeepError, WrongState, path_error
from sandkeep.host.native import boot, inotify
from sandkeep.linux import sockets, syscalls
from sandkeep.linux.overlay import Way
from sandkeep.shared.sealed import read_sealed
from sandkeep.supervisor import checkpoint as checkpoint  # imported here so that no supervisor imports later
from sandkeep.supervisor.session import Supervisor

_QUIET_SECONDS: Final = 0.02
"""How long no request must have come before the pool is refilled: never during a create."""
_LOST_SECONDS: Final = 0.2
"""How often the zygote tries to remove what a dead supervisor left, until its processes have ended."""
_DEATHS: Final = 3
"""How many supervisors may die in a row while preparing a session before the pool stays empty."""
_READY: Final = b"ready"
_FAILED: Final = b"failed"


def main(control_fd: int, data_dir: str, mode: str, pool: int, way: Way | None = None) -> NoReturn:
    """Run the zygote. Sessions mount overlays by ``way`` if given, not by the newest that works."""
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    # The server sends this once the zygote is in its final control group.
    settings = control.recv(1 << 10)
    if not settings:
        os._exit(0)
    try:
        _enter_namespaces(control, mode)
        host = boot.SharedSetup(data_dir, mode, way, json.loads(settings)["scope"])
    except (OSError, SandkeepError) as error:
        body = error.to_json() if isinstance(error, SandkeepError) else _plain(error)
        control.send(json.dumps({"error": body}).encode())
        os._exit(1)
    _disable_imports(data_dir)
    capabilities = {name: item._asdict() for name, item in host.hierarchy.capabilities.items()}
    control.send(
        json.dumps({"ready": os.getpid(), "cgroup": host.hierarchy.layout, "limits": capabilities}).encode()
    )
    _serve(control, host, Pool(host, control, pool))


def _plain(error: OSError) -> dict[str, Any]:
    return boot._unavailable("user-namespace", error).to_json()


def _enter_namespaces(control: socket.socket, mode: str) -> None:
    if mode == "root":
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # Keeps the capabilities of files during setfsuid; see mounts.Builder.overlay.
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.SECBIT_NO_SETUID_FIXUP)
    else:
        uid, gid = os.getuid(), os.getgid()
        allowed = inotify.allowed()
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        if mode == "single":
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"0 {uid} 1")
            _write("/proc/self/gid_map", f"0 {gid} 1")
        else:
            control.send(b'{"map": true}')
            if control.recv(16) != b"mapped":
                os._exit(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if mode == "subuid":
            os.setgroups([])
        # The rest is left for the user's other programs. Some containers have a read-only /proc/sys here;
        # then only each session's own limit applies.
        with suppress(OSError):
            inotify.bound(inotify.half(allowed))
    # Not private: mounts that the host unmounts would stay in use for as long as a session lives.
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _disable_imports(data_dir: str) -> None:
    """Disable later imports, which could find the sandbox's own files: everything is imported.

    Command lines name the data directory, here and in children: an uninstall must find what still runs in it.
    """
    os.umask(0o022)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.scrub_command_line("sandkeep-zygote", data_dir)
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if getattr(finder, "__name__", "") in ("BuiltinImporter", "FrozenImporter")
    ]
    # The zygote does not wait for supervisors: they outlive it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()


def _serve(control: socket.socket, host: boot.SharedSetup, pool: Pool) -> NoReturn:
    while True:
        if not pool.wait(control):
            pool.tend()
            continue
        data, fds = sockets.receive(control)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "spawn" in request:
            if _fork(host) == 0:
                control.close()
                _spawn(request["spawn"], request["env"], fds[0])
        elif not pool.give(data, fds) and _fork(host) == 0:
            control.close()
            pool.leave()
            _supervise(host, request, socket.socket(fileno=fds[0]), None)
        for fd in fds:
            os.close(fd)


def _fork(host: boot.SharedSetup) -> int:
    host.counter += 1
    return os.fork()


class Prepared(NamedTuple):
    """A supervisor of the pool, as the zygote sees it."""

    name: str
    """Name of its file in ``ready`` and of its control group."""
    work: socket.socket
    """Socket on which it gets a session. When it closes, the supervisor has died."""


class Pool:
    """Supervisors that have prepared a session ahead of any request.

    Kept at ``size``, refilled only while the zygote is idle. If preparing fails the pool stays empty: each
    session is then prepared on request, and the server gets the error.
    """

    def __init__(self, host: boot.SharedSetup, control: socket.socket, size: int) -> None:
        self._host = host
        self._control = control
        self._size = size
        self._ready: list[Prepared] = []
        self._making: Prepared | None = None
        self._died_making = 0
        self._lost: set[str] = set()
        """Names of dead supervisors whose processes the kernel may still be ending."""

    def wait(self, control: socket.socket) -> bool:
        """Return whether the server has sent a request; if not, call ``tend``."""
        short = len(self._ready) < self._size and self._making is None
        timeout = _QUIET_SECONDS if short else _LOST_SECONDS if self._lost else None
        waiting = (control, *(one.work for one in self._all()))
        readable, _, _ = select.select(waiting, (), (), timeout)
        return control in readable

    def tend(self) -> None:
        """Remove what dead supervisors left, add the supervisor that became ready, or begin another."""
        for one in [one for one in self._ready if _has_ended(one.work)]:
            self._ready.remove(one)
            self._discard(one)
        self._lost = {name for name in self._lost if not self._host.remove_ready(name)}
        if self._making is None:
            if len(self._ready) < self._size:
                self._begin()
        elif _is_readable(self._making.work):
            made, self._making = self._making, None
            self._collect(made)

    def _collect(self, made: Prepared) -> None:
        message = made.work.recv(16)
        if message == _READY:
            self._died_making = 0
            self._ready.append(made)
            return
        self._died_making += 1
        if message == _FAILED or self._died_making == _DEATHS:
            self._size = 0
        self._discard(made)

    def _discard(self, one: Prepared) -> None:
        one.work.close()
        self._lost.add(one.name)

    def _begin(self) -> None:
        # Remove what killed supervisors with a session left. Only while no other is being made: for a moment,
        # a new one has its file but not its lock.
        self._host.sweep_ready()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _fork(self._host)
        if pid == 0:
            self._control.close()
            ours.close()
            self.leave()
            _wait_for_work(self._host, theirs)
        theirs.close()
        self._making = Prepared(_ready_name(pid, self._host), ours)

    def _all(self) -> tuple[Prepared, ...]:
        return (*self._ready, *([self._making] if self._making else []))

    def leave(self) -> None:
        """Close the sockets of other supervisors, in a fork, so that they end when the zygote closes its."""
        for other in self._all():
            other.work.close()

    def give(self, request: bytes, fds: list[int]) -> bool:
        """Hand a request to a living supervisor of the pool; return whether there was one."""
        while self._ready:
            one = self._ready.pop(0)
            try:
                sockets.send(one.work, request, fds)
            except OSError:
                self._discard(one)
                continue
            one.work.close()
            return True
        return False


def _is_readable(sock: socket.socket) -> bool:
    return bool(select.select((sock,), (), (), 0)[0])


def _has_ended(work: socket.socket) -> bool:
    """Return whether the supervisor at the other end has died: a ready one sends nothing."""
    return _is_readable(work)


def _ready_name(pid: int, host: boot.SharedSetup) -> str:
    return f"ready-{pid}-{host.counter}"


def _wait_for_work(host: boot.SharedSetup, work: socket.socket) -> NoReturn:
    """Run a prepared supervisor until it gets a session, or the zygote is gone."""
    booted: boot.BootState | None = None
    name = _ready_name(os.getpid(), host)
    path = f"{host.data_dir}/ready/{name}"
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.scrub_command_line("sandkeep-ready", host.data_dir)
        os.makedirs(f"{host.data_dir}/ready", mode=0o700, exist_ok=True)
        # Marks the control groups of this name as in use, for as long as this process lives.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        _KEPT.append(fd)
        booted = boot.prepare(host, name)
        work.send(_READY)
        data, fds = sockets.receive(work)
        work.close()
        if data:
            ready, booted = booted, None
            _supervise(host, json.loads(data), socket.socket(fileno=fds[0]), ready)
    except (OSError, SandkeepError):
        with suppress(OSError):  # the zygote may be gone
            work.send(_FAILED)
    finally:
        if booted is not None:
            booted.abandon()
        _forget_ready(path)
        os._exit(0)


def _forget_ready(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _spawn(argv: list[str], environment: dict[str, str], fd: int) -> NoReturn:
    """Exec another program in these namespaces, with one descriptor besides the standard ones."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if fd != 3:
            os.dup2(fd, 3)
        os.set_inheritable(3, True)
        os.execve(argv[0], argv, environment)
    finally:
        os._exit(127)


def _supervise(
    host: boot.SharedSetup, request: dict[str, Any], reply: socket.socket, ready: boot.BootState | None
) -> NoReturn:
    """Run a supervisor. It reports on ``reply``, once, how the start went."""
    session = request["session"]
    try:
        started = time.monotonic_ns()
        if ready is None:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.scrub_command_line(f"sandkeep-supervisor {session}", host.data_dir)
        directory = f"{host.data_dir}/sessions/{session}"
        try:
            supervisor = _begin(host, directory, ready)
        except Exception as error:
            _remove_work(f"{directory}/work")
            _forget_prepared(host, ready)  # ``os._exit`` would skip the code below
            reply.send(json.dumps({"error": _typed(error, directory).to_json()}).encode())
            os._exit(1)
        boot_us = (time.monotonic_ns() - started) // 1000
        answer = json.dumps({"state": supervisor.state(), "boot_us": boot_us}).encode()
        try:
            with supervisor.network_descriptors() if request["network"] else nullcontext() as fds:
                sockets.send(reply, answer, fds)
        except OSError:
            pass  # the server has died; the next server finds the session
        reply.close()
        supervisor.run()
    finally:
        _forget_prepared(host, ready)
        os._exit(0)


def _typed(error: Exception, directory: str) -> SandkeepError:
    if isinstance(error, SandkeepError):
        return error
    if isinstance(error, OSError) and error.errno in boot.NO_ROOM:
        return path_error(error, "start", error.filename or directory)
    return InternalError(f"starting the session failed: {type(error).__name__}: {error}")


def _forget_prepared(host: boot.SharedSetup, ready: boot.BootState | None) -> None:
    if ready is not None and ready.cgroup is not None:
        _forget_ready(f"{host.data_dir}/ready/{ready.cgroup.name}")


def _remove_work(path: str) -> None:
    """Remove a work directory of overlayfs, whose mode is 0; rootless, only its owner can do that."""
    try:
        for name in os.listdir(path):
            _remove_work(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        pass  # never made, or the caller's own attempt will fail and report why


def _begin(host: boot.SharedSetup, directory: str, booted: boot.BootState | None) -> Supervisor:
    dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = _hold_lock(dir_fd)
    if os.path.exists(f"{directory}/state.json"):
        # The server died, and the next one found no supervisor and recorded the session as aborted.
        session = os.path.basename(directory)
        raise WrongState(f"session {session} was given up before it began", session=session)
    spec = read_sealed(f"{directory}/spec.json")
    if booted is not None and not spec["accept"]:
        boot.activate(host, booted, spec, directory)
    else:
        # With barriers waived even the first steps may differ, so they are done again.
        if booted is not None:
            booted.abandon()
        booted = boot.prepare(host, spec["session"], frozenset(spec["accept"]))
        boot.activate(host, booted, spec, directory)
    try:
        listener = sockets.listen_in(dir_fd, "supervisor.sock")
        os.makedirs(f"{directory}/processes", exist_ok=True)
        supervisor = Supervisor(booted, spec, directory, listener, mode=host.mode)
    except BaseException:
        booted.abandon()
        raise
    _KEPT.append(lock)
    os.close(dir_fd)
    return supervisor


_KEPT: list[int] = []
"""Descriptors that are held by being open: the lock that shows this supervisor lives."""


def _hold_lock(dir_fd: int) -> int:
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    fcntl.flock(lock, fcntl.LOCK_EX)  # recovery may hold it for a moment to check it
    return lock
