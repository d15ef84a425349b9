"""systemd's control groups: whether systemd runs this machine, and which unit a group belongs to.

Read from paths and ``/proc`` alone. Paths are those of ``/proc/PID/cgroup``, below the cgroup2 mount.
"""

from __future__ import annotations

import os
import zlib
from typing import Final

from sandkeep.linux.cgroup import groupfs

FIRST: Final = "/proc/1/cgroup"


def path_in(file: str) -> str:
    """The cgroup2 path a ``/proc/PID/cgroup`` file names; empty without one."""
    try:
        lines = groupfs.read(file).splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def systemd_runs(first: str = FIRST) -> bool:
    """Whether PID 1, as we see it, is a systemd that manages the cgroup2 groups we see.

    Only systemd puts its PID 1 into ``init.scope``. Its sockets prove less: a container may have been given
    those of the machine around it, where our process ids mean other processes.
    """
    path = path_in(first)
    return os.path.basename(path) == "init.scope" and not path.startswith("/..")


def unit_of(path: str) -> str:
    """The path of the innermost unit's group; empty for a group that is in no service or scope."""
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        if parts[end - 1].endswith((".service", ".scope")):
            return "/".join(parts[:end])
    return ""


def slice_of(path: str, *, user: int | None = None) -> str:
    """The slice of the system manager, or of a user's, that a group is in; empty when it is in none.

    Login sessions are in a slice that has limits meant for a person, so they count as none.
    """
    parts = path.split("/")
    if user is not None:
        manager = f"user@{user}.service"
        parts = parts[parts.index(manager) + 1 :] if manager in parts else []
    elif "user.slice" in parts:
        parts = []
    return next((part for part in reversed(parts) if part.endswith(".slice")), "")


def group_name(data_dir: str) -> str:
    """What the group that holds the sessions of a data directory is called; names of its scopes begin so."""
    return f"sandkeep-{zlib.crc32(os.fsencode(data_dir)):08x}"
