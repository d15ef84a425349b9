"""The fork server: a small, import-complete, single-threaded process that every supervisor is forked from.

Started as ``python -I -S -E`` with an empty environment before anything secret is in memory, because init
shares these pages. It listens to one caller on an inherited socket and dies with it; supervisors do not.

Rootless it first makes the outer user namespace: everything below runs as uid 0 of it.
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
from typing import Any, Final, NoReturn

from sandkeep.errors import InternalError, SandkeepError, WrongState
from sandkeep.host.native import boot
from sandkeep.linux import sockets, syscalls
from sandkeep.supervisor import checkpoint as checkpoint  # imported here so that no supervisor imports later
from sandkeep.supervisor.session import Supervisor

_QUIET_SECONDS: Final = 0.02
"""How long nothing must have been asked before the pool is refilled: never beside a create."""


def main(control_fd: int, data_dir: str, mode: str, pool: int) -> NoReturn:
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    try:
        _enter_namespaces(control, mode)
        host = boot.Host(data_dir, mode)
    except (OSError, SandkeepError) as error:
        body = error.to_json() if isinstance(error, SandkeepError) else _plain(error)
        control.send(json.dumps({"error": body}).encode())
        os._exit(1)
    _settle()
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
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _settle() -> None:
    """Everything is imported: close the door for later imports, which could find the sandbox's own files."""
    os.umask(0o022)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.scrub_command_line("sandkeep-zygote")
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if getattr(finder, "__name__", "") in ("BuiltinImporter", "FrozenImporter")
    ]
    # Supervisors are nobody's to wait for: they outlive us.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()


def _serve(control: socket.socket, host: boot.Host, pool: Pool) -> NoReturn:
    while True:
        if not pool.wait(control):
            pool.refill()
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


def _fork(host: boot.Host) -> int:
    host.counter += 1
    return os.fork()


class Pool:
    """Supervisors that have prepared a session ahead of anybody asking for it.

    Kept at ``size``, refilled only while nothing else is to do. Where preparing fails there is no pool: each
    session is then made from the beginning, and whoever asked for it hears why that fails.
    """

    def __init__(self, host: boot.Host, control: socket.socket, size: int) -> None:
        self._host = host
        self._control = control
        self._size = size
        self._ready: list[socket.socket] = []
        self._making: socket.socket | None = None

    def wait(self, control: socket.socket) -> bool:
        """Whether the caller has said something, or the moment has come to do something for the pool."""
        waiting = [control, *([self._making] if self._making else [])]
        short = len(self._ready) < self._size and self._making is None
        readable, _, _ = select.select(waiting, (), (), _QUIET_SECONDS if short else None)
        return control in readable

    def refill(self) -> None:
        """Take in what has become ready, or begin another."""
        if self._making is not None:
            made, self._making = self._making, None
            if made.recv(16):
                self._ready.append(made)
            else:
                made.close()
                self._size = 0
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if _fork(self._host) == 0:
            self._control.close()
            ours.close()
            self.leave()
            _wait_for_work(self._host, theirs)
        theirs.close()
        self._making = ours

    def leave(self) -> None:
        """In a fork: let go of the others, who end when nobody but the zygote's end is left to close."""
        for other in (*self._ready, *([self._making] if self._making else [])):
            other.close()

    def give(self, request: bytes, fds: list[int]) -> bool:
        """Hand a request to a prepared supervisor, if there is one that lives."""
        while self._ready:
            with self._ready.pop(0) as ready:
                try:
                    sockets.send(ready, request, fds)
                except OSError:
                    continue
                return True
        return False


def _wait_for_work(host: boot.Host, work: socket.socket) -> NoReturn:
    """The life of a prepared supervisor until it gets a session, or the zygote is gone."""
    booted: boot.Booted | None = None
    name = f"ready-{os.getpid()}-{host.counter}"
    path = f"{host.data_dir}/ready/{name}"
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.scrub_command_line("sandkeep-ready")
        os.makedirs(f"{host.data_dir}/ready", mode=0o700, exist_ok=True)
        # Says that the control groups of this name are somebody's, for as long as we live.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        _KEPT.append(fd)
        booted = boot.prepare(host, name)
        work.send(b"ready")
        data, fds = sockets.receive(work)
        work.close()
        if data:
            ready, booted = booted, None
            _supervise(host, json.loads(data), socket.socket(fileno=fds[0]), ready)
    except (OSError, SandkeepError):
        pass  # the zygote sees us go
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
    """Become another program in these namespaces, with one descriptor besides the standard ones."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if fd != 3:
            os.dup2(fd, 3)
        os.set_inheritable(3, True)
        os.execve(argv[0], argv, environment)
    finally:
        os._exit(127)


def _supervise(
    host: boot.Host, request: dict[str, Any], reply: socket.socket, ready: boot.Booted | None
) -> NoReturn:
    """The life of a supervisor. ``reply`` hears once how the start went."""
    session = request["session"]
    try:
        started = time.monotonic_ns()
        if ready is None:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.scrub_command_line(f"sandkeep-supervisor {session}")
        directory = f"{host.data_dir}/sessions/{session}"
        try:
            supervisor = _begin(host, directory, ready)
        except Exception as error:
            _remove_work(f"{directory}/work")
            failure = error
            if not isinstance(failure, SandkeepError):
                failure = InternalError(f"starting the session failed: {type(error).__name__}: {error}")
            reply.send(json.dumps({"error": failure.to_json()}).encode())
            os._exit(1)
        boot_us = (time.monotonic_ns() - started) // 1000
        answer = json.dumps({"state": supervisor.state(), "boot_us": boot_us}).encode()
        try:
            sockets.send(reply, answer, supervisor.network_descriptors() if request["network"] else None)
        except OSError:
            pass  # whoever asked is gone; the session is there for whoever comes next
        reply.close()
        supervisor.run()
    finally:
        if ready is not None and ready.cgroup is not None:
            _forget_ready(f"{host.data_dir}/ready/{ready.cgroup.name}")
        os._exit(0)


def _remove_work(path: str) -> None:
    """Overlays make work directories that nobody may enter; rootless only we can remove them."""
    try:
        for name in os.listdir(path):
            _remove_work(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        pass  # never made, or somebody's problem to see in the caller's own attempt


def _begin(host: boot.Host, directory: str, booted: boot.Booted | None) -> Supervisor:
    dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = _hold_lock(dir_fd)
    if os.path.exists(f"{directory}/state.json"):
        # Whoever asked has died, and whoever came after found nobody here and went on without us.
        session = os.path.basename(directory)
        raise WrongState(f"session {session} was given up before it began", session=session)
    with open(f"{directory}/spec.json", encoding="utf-8") as handle:
        spec = json.load(handle)
    if booted is not None and not spec["accept"]:
        boot.activate(host, booted, spec, directory)
    else:
        # With barriers waived even the first steps may go another way, so they are done anew.
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
"""Descriptors that are held by being open: the lock that says this supervisor lives."""


def _hold_lock(dir_fd: int) -> int:
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    fcntl.flock(lock, fcntl.LOCK_EX)  # recovery may hold it for a moment to look
    return lock
