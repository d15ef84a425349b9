"""How a client finds the server of a data directory, or starts one.

`ensure_server` returns where to connect. When nobody answers there, one client at a time (a lock says which)
starts a server in the background: detached, logging to ``server.log``, ending by itself when unused. A
server of another version is asked to make room; one that is in use, or that somebody runs by hand, stays,
and is used if it speaks our API.

Standard library only, and nothing of the server's own: every command line pays for what is imported here.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import sandkeep
from sandkeep.errors import Conflict, HostCannot, TransportError

API_VERSION: Final = 1
SOCKET: Final = "server.sock"
LOCK: Final = "server.lock"
LOG: Final = "server.log"
START_LOCK: Final = "start.lock"
START_SECONDS: Final = 30.0
_LOG_LIMIT: Final = 8 << 20
_ATTEMPTS: Final = 2
_ROOM: Final = 256 << 10
"""Bytes without which no server can start."""


class Found(NamedTuple):
    """A server that answers."""

    socket: str
    version: str
    started: bool
    """By this call."""


def ensure_server(data_dir: str, *, seconds: float = START_SECONDS) -> Found:
    """The server of ``data_dir``, started when there is none.

    Raises:
        Conflict: a server runs that speaks another version of the API and cannot be replaced.
        HostCannot: a server could not be started; the message has the end of its log.
    """
    if (found := _usable(data_dir)) is not None:
        return found
    os.makedirs(data_dir, mode=0o700, exist_ok=True)
    deadline = time.monotonic() + seconds
    with _only_starter(data_dir, deadline):
        failures = 0
        while failures < _ATTEMPTS and time.monotonic() < deadline:
            if (found := _usable(data_dir)) is not None:
                return found
            if _being_served(data_dir):
                time.sleep(0.02)  # by one that is on its way up or down
            elif _start(data_dir, deadline) and (found := _usable(data_dir, replace=False)) is not None:
                return found._replace(started=True)
            else:
                failures += 1
    disk = os.statvfs(data_dir)
    if disk.f_bavail * disk.f_frsize < _ROOM:
        # Then its log, which would have said so, had no room either.
        why = f"no space is left on the disk of {data_dir}"
        raise HostCannot(f"the server did not start: {why}", part="server", why=why, hint="make room there")
    raise HostCannot(
        "the server did not start",
        part="server",
        why=_end_of_log(data_dir),
        hint=f"see {os.path.join(data_dir, LOG)}",
    )


def ask(data_dir: str, method: str, path: str, *, seconds: float = 10.0) -> tuple[int, dict[str, Any]] | None:
    """One request without a body over the unix socket; ``None`` when nobody listens there."""
    try:
        directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(seconds)
            # Through the directory's descriptor: socket addresses have room for 107 bytes only.
            sock.connect(f"/proc/self/fd/{directory}/{SOCKET}")
            sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: sandkeep\r\nconnection: close\r\n\r\n".encode())
            data = b""
            while piece := sock.recv(65536):
                data += piece
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return None
    except TimeoutError:
        raise TransportError(f"the server of {data_dir} does not answer", path=data_dir) from None
    finally:
        os.close(directory)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        return None
    try:
        return int(head.split(b" ", 2)[1]), json.loads(body)
    except (ValueError, IndexError):
        raise TransportError(f"what listens in {data_dir} is no sandkeep server", path=data_dir) from None


def _usable(data_dir: str, *, replace: bool = True) -> Found | None:
    answer = ask(data_dir, "GET", "/version")
    if answer is None:
        return None
    status, body = answer
    if status != 200 or "api" not in body:
        raise TransportError(f"what listens in {data_dir} is no sandkeep server", path=data_dir)
    version = str(body.get("version"))
    other = version != sandkeep.__version__
    if replace and other and body.get("embedded") and _retired(data_dir):
        return None
    if body["api"] != API_VERSION:
        raise Conflict(
            f"the server of {data_dir} is sandkeep {version}; {sandkeep.__version__} cannot use it",
            hint="stop its sandboxes so that it can be replaced, or use the same version",
            version=version,
        )
    return Found(os.path.join(data_dir, SOCKET), version, False)


def _retired(data_dir: str) -> bool:
    """Ask an idle server of another version to end; True once it has."""
    answer = ask(data_dir, "POST", "/v1/server/retire")
    if answer is not None and answer[0] != 200:
        return False
    deadline = time.monotonic() + 10
    while ask(data_dir, "GET", "/version") is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def _only_starter(data_dir: str, deadline: float) -> Iterator[None]:
    fd = os.open(os.path.join(data_dir, START_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostCannot(
                        "another client is starting the server and does not get done",
                        part="server",
                        why="start.lock is held",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _being_served(data_dir: str) -> bool:
    """Whether a server holds the directory, ready or not."""
    try:
        fd = os.open(os.path.join(data_dir, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _start(data_dir: str, deadline: float) -> bool:
    """Start a server and wait until it is ready. False when it ended instead."""
    path = os.path.join(data_dir, LOG)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if os.path.exists(path) and os.path.getsize(path) > _LOG_LIMIT:
        flags |= os.O_TRUNC
    ready, told = os.pipe()
    log = os.open(path, flags, 0o600)
    try:
        command = [sys.executable, "-m", "sandkeep", "serve", "--embedded", "--data-dir", data_dir]
        # It detaches itself at once, so this ends at once, and nobody is left a child to wait for.
        subprocess.run(
            [*command, "--ready-fd", str(told)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(told,),
            check=False,
        )
    finally:
        os.close(log)
        os.close(told)
    try:
        os.set_blocking(ready, False)
        while time.monotonic() < deadline:
            try:
                return os.read(ready, 16).startswith(b"ready")
            except BlockingIOError:
                time.sleep(0.005)
        return False
    finally:
        os.close(ready)


def _end_of_log(data_dir: str) -> str:
    try:
        with open(os.path.join(data_dir, LOG), "rb") as handle:
            handle.seek(max(0, os.path.getsize(handle.name) - 2000))
            return handle.read().decode(errors="replace")
    except OSError:
        return "it left no log"
