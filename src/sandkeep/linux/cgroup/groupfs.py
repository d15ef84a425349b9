"""The kernel's control group files: read, write and remove them; freeze and kill for both versions.

Functions of a directory or a ``GroupPlace``. They depend on the kernel's behaviour, not on sessions.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Final, NamedTuple

from sandkeep.errors import InvalidRequest

REMOVE_SECONDS: Final = 1.0


class GroupPlace(NamedTuple):
    """Where one capability is: a version and the directory of the group."""

    version: str
    path: str


# --- files ---------------------------------------------------------------------------------------------


def read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "surrogateescape")


def write(path: str, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def read_int(path: str) -> int | None:
    try:
        return int(read(path))
    except (OSError, ValueError):
        return None


def read_key(path: str, key: str) -> int | None:
    """Return the value of one line of a flat keyed file such as ``cpu.stat``."""
    try:
        for line in read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


mkdir = os.mkdir
rmdir = os.rmdir


def children(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def tree(path: str) -> list[str]:
    """Return the group and every group below it, deepest first."""
    found = [below for name in children(path) for below in tree(f"{path}/{name}")]
    return [*found, path]


def remove_dir(path: str, deadline: float) -> None:
    """Remove one group; the kernel reports EBUSY for a moment after its last process was reaped."""
    pause = 0.001
    while True:
        try:
            rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def remove_tree(path: str) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    for directory in tree(path):
        remove_dir(directory, deadline)


def remove_parent(path: str) -> None:
    """Remove the group that holds all sessions if it is empty; another session keeps it."""
    try:
        rmdir(path)
    except OSError:
        pass


def check_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\n" in name or "\0" in name:
        raise InvalidRequest(f"not a usable control group name: {name!r}", field="name")
    return name


def write_optional(path: str, value: int) -> None:
    try:
        write(path, value)
    except FileNotFoundError:
        pass  # a kernel without swap accounting


# --- killing and freezing, by version ------------------------------------------------------------------


def pids(path: str) -> list[int]:
    """Return processes of a group and of all groups below. One outside this pid namespace shows as 0."""
    found = []
    for directory in tree(path):
        try:
            found += [int(pid) for pid in read(f"{directory}/cgroup.procs").split()]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
    return [pid for pid in found if pid > 0]


def populated(place: GroupPlace) -> bool:
    if place.version == "v2":
        return read_key(f"{place.path}/cgroup.events", "populated") == 1
    return bool(pids(place.path))


def freeze(place: GroupPlace, timeout: float) -> None:
    """Freeze the group and everything below; thaw it again if that takes longer than ``timeout``."""
    deadline = time.monotonic() + timeout
    if place.version == "v2":
        write(f"{place.path}/cgroup.freeze", 1)
        state, done = f"{place.path}/cgroup.events", "frozen 1"
    else:
        write(f"{place.path}/freezer.state", "FROZEN")
        state, done = f"{place.path}/freezer.state", "FROZEN"
    # Polled, not waited for: the kernel sends change events of one file at most every 10 ms, and a process
    # that just entered the group has used up that turn.
    pause = 0.0001
    while done not in read(state).splitlines():
        if time.monotonic() >= deadline:
            thaw(place)
            raise TimeoutError(errno.ETIMEDOUT, "control group did not freeze in time", place.path)
        time.sleep(pause)
        pause = min(pause * 2, 0.005)


def thaw(place: GroupPlace) -> None:
    if place.version == "v2":
        write(f"{place.path}/cgroup.freeze", 0)
    else:
        write(f"{place.path}/freezer.state", "THAWED")


def kill(place: GroupPlace) -> None:
    """Send SIGKILL to the group and all below. Return when the signals are sent, not when all are dead."""
    if place.version == "v2":
        try:
            write(f"{place.path}/cgroup.kill", 1)
            return
        except FileNotFoundError:
            pass  # Linux before 5.14
    can_freeze = os.path.exists(
        f"{place.path}/{'cgroup.freeze' if place.version == 'v2' else 'freezer.state'}"
    )
    if can_freeze:
        # Frozen processes can neither fork nor exit, so the list stays complete and no pid is reused.
        try:
            freeze(place, 1.0)
        except TimeoutError:
            can_freeze = False
    try:
        for _ in range(1 if can_freeze else 100):
            alive = pids(place.path)
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not alive:
                break
    finally:
        if can_freeze:
            thaw(place)
