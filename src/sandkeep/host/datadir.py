"""Recognise a data directory, and find the processes that belong to it.

Used to remove one, which must work when half of it is gone already: no function here needs a store, a server
or a complete directory, and none touches a directory that may belong to another program.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from sandkeep.errors import AccessDenied, HostCannot, InvalidRequest
from sandkeep.host.remover import DISKS_OWN
from sandkeep.linux import cgroup
from sandkeep.shared.locks import is_locked

_OURS: Final = re.compile(
    r"(ca|empty|images|keys|layers|observed|ready|reserve|sessions"
    r"|activity\.json|jwt\.key|netd\.(lock|log|sock)|server\.(json|lock|log|sock)|settings\.json|start\.lock"
    r"|store\.db.*|[a-z.]+\.new|\.[0-9a-f]+\.part|\.deep-\d+)"
)
"""Names of the entries that sandkeep makes in a data directory."""
_MARKS: Final = {
    ".": re.compile(r"store\.db|jwt\.key|(netd|server|start)\.lock"),
    "layers": re.compile(r"\.identity|\.lock|lay_\w+"),
    "sessions": re.compile(r"sbx_\w+"),
    "images": re.compile(r"(build|host|store)\.lock"),
    "images/host": re.compile(r"[0-9a-f]{12}"),
    "images/layers": re.compile(r"[0-9a-f]{64}"),
    "images/records": re.compile(r"[0-9a-f]{64}"),
    "reserve": re.compile(r"\d-(bytes|small-\d+)"),
}
"""Files that only sandkeep makes, by directory. One is sufficient: the rest may have been removed."""
_SOME: Final = 3
_TITLES: Final = re.compile(rb"sandkeep-(zygote|ready|netd|supervisor [^ ]+)")
_POLL: Final = 0.02
GRACE_SECONDS: Final = 20.0


class LeftProcess(NamedTuple):
    pid: int
    what: str


def check(directory: str) -> bool:
    """Refuse a directory that is not a data directory of this user; return False when it does not exist."""
    try:
        names = [name for name in os.listdir(directory) if name != DISKS_OWN]
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise _not_one(directory, "it is not a directory") from None
    except PermissionError:
        raise _not_yours(directory) from None
    owner = os.stat(directory).st_uid
    if os.geteuid() not in (0, owner):
        raise _not_yours(directory)
    foreign = sorted(name for name in names if not _OURS.fullmatch(name))
    if foreign:
        more = f" and {len(foreign) - _SOME} more" if len(foreign) > _SOME else ""
        some = ", ".join(repr(name) for name in foreign[:_SOME])
        raise _not_one(directory, f"sandkeep did not put {some}{more} there")
    if names and not any(_marked(directory, below, mark) for below, mark in _MARKS.items()):
        raise _not_one(directory, "nothing in it is sandkeep's")
    return bool(names)


def _marked(directory: str, below: str, mark: re.Pattern[str]) -> bool:
    try:
        return any(mark.fullmatch(name) for name in os.listdir(os.path.join(directory, below)))
    except OSError:
        return False


def _not_one(directory: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{directory} is not removed: {why}",
        field="data_dir",
        problem=why,
        hint="name the data directory with --data-dir, and move away what else is in it",
    )


def _not_yours(directory: str) -> AccessDenied:
    return AccessDenied(
        f"{directory} belongs to another user",
        hint=f"run it as that user, or as root with --data-dir {directory}",
    )


# --- processes -------------------------------------------------------------------------------------------


def server_of(directory: str) -> int | None:
    """Return the process that serves a data directory, by the lock it holds."""
    path = os.path.join(directory, "server.lock")
    if not is_locked(path):
        return None
    try:
        with open(path, encoding="ascii") as handle:
            pid = int(handle.read())
        if b"sandkeep" in _command_line(pid):
            return pid
    except (OSError, ValueError):
        pass
    if not is_locked(path):
        return None
    raise HostCannot(
        f"an unknown process serves {directory}",
        part="server",
        why=f"{path} is locked, and does not name the process",
        hint=f"stop it: 'fuser {path}' finds it",
    )


def processes_of(directory: str) -> Iterator[LeftProcess]:
    """Yield every other process of a data directory, even if its files were deleted while it ran."""
    wanted = os.fsencode(directory)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        title, *arguments = _command_line(int(name)).split(b"\0")
        if _TITLES.fullmatch(title) and arguments[:1] == [wanted]:
            yield LeftProcess(int(name), title.decode(errors="replace"))
        elif b"serve" in arguments and _follows(arguments, b"--data-dir", wanted):
            yield LeftProcess(int(name), "server")
        elif any(each.endswith(b"/start_worker.py") for each in arguments) and wanted in arguments:
            yield LeftProcess(int(name), "worker")


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            return handle.read()
    except OSError:
        return b""


def _follows(arguments: list[bytes], option: bytes, value: bytes) -> bool:
    return option in arguments and arguments[arguments.index(option) + 1 :][:1] == [value]


def end_server(pid: int) -> None:
    """End a server as an operator would, by force if it does not end; sessions keep running."""
    _signal(pid, signal.SIGTERM)
    if not _gone(pid, GRACE_SECONDS):
        _signal(pid, signal.SIGKILL)
        _gone(pid, GRACE_SECONDS)


def end_processes(directory: str) -> list[LeftProcess]:
    """End the processes of a data directory that is to be removed, and return those that do not end.

    Sessions that can be stopped were stopped before, so the remaining processes are not needed. Servers
    first: the processes that they started end with them and clean up after themselves.
    """
    for first, number, seconds in (
        (("server", "sandkeep-netd", "sandkeep-supervisor"), signal.SIGTERM, GRACE_SECONDS),
        (("",), signal.SIGTERM, 1.0),
        (("",), signal.SIGKILL, GRACE_SECONDS),
    ):
        found = list(processes_of(directory))
        for process in found:
            if process.what.startswith(first):
                supervisor = process.what.startswith("sandkeep-supervisor")  # they ignore SIGTERM
                _signal(process.pid, signal.SIGKILL if supervisor else number)
        until = time.monotonic() + seconds
        while found and time.monotonic() < until:
            time.sleep(_POLL)
            found = list(processes_of(directory))
        if not found:
            break
    _remove_groups(directory)
    return found


def _remove_groups(directory: str) -> None:
    """Remove control groups of supervisors that were killed."""
    for group in cgroup.detect(parent=cgroup.group_name(directory)).open_leftovers():
        with suppress(OSError):  # an empty group does no harm
            group.remove()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise AccessDenied(
            f"process {pid} is another user's and uses the directory",
            hint="run this as that user, or as root",
        ) from None


def _gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while _command_line(pid):  # a zombie has no command line
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True
