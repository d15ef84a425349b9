"""How a client finds the server of a data directory, or starts one.

`ensure_server` returns where to connect. If no server responds there, one client at a time (the holder of
``start.lock``) starts a server in the background: detached, logging to ``server.log``, exiting when unused.
A server of another version is asked to exit; if it is in use, or was started by hand, it stays and is used if
it speaks our API version.

Only the standard library is imported, and nothing of the server: every command line pays for these imports.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from sandkeep.errors import (
    Conflict,
    HostCannot,
    InternalError,
    SandkeepError,
    StoreMismatch,
    TransportError,
    from_json,
    path_error,
)
from sandkeep.version import __version__

API_VERSION: Final = 1
SOCKET: Final = "server.sock"
LOCK: Final = "server.lock"
LOG: Final = "server.log"
START_LOCK: Final = "start.lock"
START_SECONDS: Final = 120.0
READY: Final = b"ready\n"
"""Report of a server that accepts requests. A server that cannot start reports the error as JSON instead."""
_LOG_LIMIT: Final = 8 << 20
_ATTEMPTS: Final = 2
_UNUSABLE: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG),
)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MIN_FREE_BYTES: Final = 256 << 10
"""Free disk space without which a server cannot start."""


class ServerInfo(NamedTuple):
    """A server that responds."""

    socket: str
    version: str
    started: bool
    """Whether this call started it."""


def require_linux() -> None:
    """Raise `HostCannot` on a system that cannot run a server; clients of remote ones work there."""
    if sys.platform != "linux":
        raise HostCannot(
            "sandboxes and their server run on Linux only",
            part="operating system",
            why=f"this is {sys.platform}",
            hint="use a server on a Linux machine: --url, SANDKEEP_URL or Client(url)",
        )


def ensure_server(data_dir: str, *, seconds: float = START_SECONDS) -> ServerInfo:
    """Return the server of ``data_dir``; start one if none runs.

    Raises:
        Conflict: a server runs that speaks another version of the API and cannot be replaced.
        HostCannot: a server could not be started, or the data directory cannot be used. If the server
            reported a reason, the error has its class and hint; otherwise ``why`` is the last log line.
        StoreMismatch: the server refuses the data directory.
    """
    require_linux()
    try:
        return _ensure(data_dir, seconds)
    except OSError as error:
        if isinstance(error, SandkeepError) or error.errno not in _UNUSABLE:
            raise
        raise _unusable(data_dir, error) from error


def _unusable(data_dir: str, error: OSError) -> HostCannot:
    """Return the error for a directory of another user, on a read-only disk, or that is not a directory."""
    why = error.strerror or str(error)
    return HostCannot(
        f"the data directory {data_dir} cannot be used: {why}",
        part="data directory",
        why=why,
        hint="choose another with SANDKEEP_HOME or --data-dir, or make this one writable for your user",
    )


def _ensure(data_dir: str, seconds: float) -> ServerInfo:
    if (found := _usable(data_dir)) is not None:
        return found
    deadline = time.monotonic() + seconds
    failure: SandkeepError | None = None
    with _only_starter(data_dir, deadline):
        failures = 0
        while failures < _ATTEMPTS and time.monotonic() < deadline:
            if (found := _usable(data_dir)) is not None:
                return found
            if is_served(data_dir):
                time.sleep(0.02)  # by one that is on its way up or down
            else:
                failure = _start(data_dir, deadline)
                if failure is None and (found := _usable(data_dir, replace=False)) is not None:
                    return found._replace(started=True)
                failures += 1
    disk = os.statvfs(data_dir)
    if disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES:
        # The server could not write this to its log either.
        why = f"no space is left on the disk of {data_dir}"
        raise HostCannot(f"the server did not start: {why}", part="server", why=why, hint="make room there")
    if is_served(data_dir):
        raise HostCannot(
            f"the server is still starting after {seconds:g} s",
            part="server",
            why="it holds the data directory and does not answer yet",
            hint=f"try again in a moment; the server's log is {os.path.join(data_dir, LOG)}",
        )
    raise _not_started(data_dir, failure)


def ask(data_dir: str, method: str, path: str, *, seconds: float = 10.0) -> tuple[int, dict[str, Any]] | None:
    """Send a request without a body over the unix socket; return ``None`` if no server listens."""
    try:
        directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(seconds)
            # Connect through the directory's descriptor: a socket address holds at most 107 bytes.
            sock.connect(f"/proc/self/fd/{directory}/{SOCKET}")
            sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: sandkeep\r\nconnection: close\r\n\r\n".encode())
            data = b""
            while chunk := sock.recv(65536):
                data += chunk
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return None
    except TimeoutError:
        raise TransportError(
            f"the server of {data_dir} did not respond within {seconds:g} s", path=data_dir
        ) from None
    finally:
        os.close(directory)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        return None
    try:
        return int(head.split(b" ", 2)[1]), json.loads(body)
    except (ValueError, IndexError):
        raise TransportError(
            f"the socket in {data_dir} does not belong to a sandkeep server", path=data_dir
        ) from None


def _usable(data_dir: str, *, replace: bool = True) -> ServerInfo | None:
    response = ask(data_dir, "GET", "/version")
    if response is None:
        return None
    status, body = response
    if status != 200 or "api" not in body:
        raise TransportError(f"the socket in {data_dir} does not belong to a sandkeep server", path=data_dir)
    version = str(body.get("version"))
    other = version != __version__
    if replace and other and body.get("embedded") and retire(data_dir):
        return None
    if body["api"] != API_VERSION:
        raise Conflict(
            f"the server of {data_dir} is sandkeep {version}, which this client ({__version__}) cannot use",
            hint="stop its sandboxes so that it can be replaced, or install the same version",
            version=version,
        )
    return ServerInfo(os.path.join(data_dir, SOCKET), version, False)


def retire(data_dir: str, *, seconds: float = 10.0) -> bool:
    """Ask an embedded server to end; return whether it has, and with it its hold on the directory.

    A server that runs sessions, or that was started by hand, refuses.
    """
    answer = ask(data_dir, "POST", "/v1/server/retire")
    if answer is not None and answer[0] != 200:
        return False
    deadline = time.monotonic() + seconds
    while is_served(data_dir):
        if time.monotonic() > deadline:
            return ask(data_dir, "GET", "/version") is None
        time.sleep(0.02)
    return True


@contextmanager
def _only_starter(data_dir: str, deadline: float) -> Iterator[None]:
    fd = _open_start_lock(data_dir)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    break
                os.close(fd)  # the directory was removed while we waited
                fd = _open_start_lock(data_dir)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostCannot(
                        "another client has been starting the server for too long",
                        part="server",
                        why=f"{START_LOCK} in {data_dir} is locked",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _open_start_lock(data_dir: str) -> int:
    path = os.path.join(data_dir, START_LOCK)
    try:
        os.makedirs(data_dir, mode=0o700, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _FULL:
            raise path_error(error, "lock", path) from error
        raise


def is_served(data_dir: str) -> bool:
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


def _not_started(data_dir: str, failure: SandkeepError | None) -> SandkeepError:
    if isinstance(failure, HostCannot | StoreMismatch):
        return failure
    failure = failure or InternalError("it ended without an error message")
    hint = failure.hint
    if isinstance(failure, InternalError):
        hint = f"see {os.path.join(data_dir, LOG)}"  # only the log has the traceback
    why = failure.message
    return HostCannot(f"the server did not start: {why}", part="server", why=why, hint=hint)


def _start(data_dir: str, deadline: float) -> SandkeepError | None:
    """Start a server and wait until it is ready; return its error if it ended instead."""
    path = os.path.join(data_dir, LOG)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    before = os.path.getsize(path) if os.path.exists(path) else 0
    if before > _LOG_LIMIT:
        flags |= os.O_TRUNC
        before = 0
    ready_in, ready_out = os.pipe()
    try:
        log = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # a server without a log is better than none
    try:
        command = [sys.executable, "-m", "sandkeep", "serve", "--embedded", "--data-dir", data_dir]
        import subprocess  # slow to import, and mostly the server runs

        # The server detaches itself, so this returns at once and leaves no child process to wait for.
        subprocess.run(
            [*command, "--ready-fd", str(ready_out)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready_out,),
            check=False,
        )
    finally:
        os.close(log)
        os.close(ready_out)
    try:
        report = _read_report(ready_in, deadline)
    finally:
        os.close(ready_in)
    if report == READY:
        return None
    try:
        return from_json(json.loads(report)["error"])
    except (ValueError, KeyError, TypeError):
        return InternalError(_last_words(data_dir, before) or "it ended without an error message")


def _read_report(ready_in: int, deadline: float) -> bytes:
    """Return what the server reports about its start. A server that reports an error has exited by then."""
    os.set_blocking(ready_in, False)
    report = b""
    while report != READY and time.monotonic() < deadline:
        try:
            chunk = os.read(ready_in, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if not chunk:
            break
        report += chunk
    return report


def _last_words(data_dir: str, since: int) -> str:
    """Return the last log line of a server that ended without a report: that of a traceback, mostly."""
    try:
        with open(os.path.join(data_dir, LOG), "rb") as handle:
            handle.seek(max(since, os.path.getsize(handle.name) - 2000))
            lines = handle.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    # Indented lines are hints or the body of a traceback.
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith(" ")), "")
