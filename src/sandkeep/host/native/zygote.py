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
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from sandkeep.errors import InternalError, SandkeepError
from sandkeep.host.native import boot
from sandkeep.linux import sockets, syscalls
from sandkeep.supervisor import checkpoint as checkpoint  # imported here so that no supervisor imports later
from sandkeep.supervisor.session import Supervisor


def main(control_fd: int, data_dir: str, mode: str) -> NoReturn:
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
    _serve(control, host)


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


def _serve(control: socket.socket, host: boot.Host) -> NoReturn:
    while True:
        data, fds = sockets.receive(control)
        if not data:
            os._exit(0)
        request = json.loads(data)
        host.counter += 1
        pid = os.fork()
        if pid == 0:
            control.close()
            if "spawn" in request:
                _spawn(request["spawn"], request["env"], fds[0])
            _supervise(host, request["session"], socket.socket(fileno=fds[0]))
        for fd in fds:
            os.close(fd)


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


def _supervise(host: boot.Host, session: str, reply: socket.socket) -> NoReturn:
    """The life of a supervisor. ``reply`` hears once how the start went."""
    try:
        started = time.monotonic_ns()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.scrub_command_line(f"sandkeep-supervisor {session}")
        directory = f"{host.data_dir}/sessions/{session}"
        try:
            supervisor = _begin(host, directory)
        except Exception as error:
            _remove_work(f"{directory}/work")
            failure = error
            if not isinstance(failure, SandkeepError):
                failure = InternalError(f"starting the session failed: {type(error).__name__}: {error}")
            reply.send(json.dumps({"error": failure.to_json()}).encode())
            os._exit(1)
        boot_us = (time.monotonic_ns() - started) // 1000
        try:
            reply.send(json.dumps({"state": supervisor.state(), "boot_us": boot_us}).encode())
        except OSError:
            pass  # whoever asked is gone; the session is there for whoever comes next
        reply.close()
        supervisor.run()
    finally:
        os._exit(0)


def _remove_work(path: str) -> None:
    """Overlays make work directories that nobody may enter; rootless only we can remove them."""
    try:
        for name in os.listdir(path):
            _remove_work(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        pass  # never made, or somebody's problem to see in the caller's own attempt


def _begin(host: boot.Host, directory: str) -> Supervisor:
    dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = _hold_lock(dir_fd)
    with open(f"{directory}/spec.json", encoding="utf-8") as handle:
        spec = json.load(handle)
    booted = boot.boot(host, spec, directory)
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
