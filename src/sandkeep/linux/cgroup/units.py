"""systemd's control groups: whether systemd runs this machine, and which unit a group belongs to.

Uses only paths and ``/proc``. Paths are those of ``/proc/PID/cgroup``, below the cgroup2 mount.
"""

from __future__ import annotations

import os
import zlib
from typing import Final

from sandkeep.linux.cgroup import groupfs

FIRST: Final = "/proc/1/cgroup"


def path_in(file: str) -> str:
    """Return the cgroup2 path in a ``/proc/PID/cgroup`` file; empty if there is none."""
    try:
        lines = groupfs.read(file).splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def systemd_runs(first: str = FIRST) -> bool:
    """Return whether the visible PID 1 is a systemd that manages the visible cgroup2 groups.

    Only systemd puts its PID 1 into ``init.scope``. Its sockets prove less: a container may have been given
    those of the machine around it, where process ids mean other processes.
    """
    path = path_in(first)
    return os.path.basename(path) == "init.scope" and not path.startswith("/..")


def unit_of(path: str) -> str:
    """Return the path of the innermost unit's group; empty for a group outside any service or scope."""
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        if parts[end - 1].endswith((".service", ".scope")):
            return "/".join(parts[:end])
    return ""


def slice_of(path: str, *, user: int | None = None) -> str:
    """Return the slice of the system manager, or of a user's, that a group is in; empty if there is none.

    Login sessions are in a slice with limits meant for a person, so that slice is not returned.
    """
    parts = path.split("/")
    if user is not None:
        manager = f"user@{user}.service"
        parts = parts[parts.index(manager) + 1 :] if manager in parts else []
    elif "user.slice" in parts:
        parts = []
    return next((part for part in reversed(parts) if part.endswith(".slice")), "")


def group_name(data_dir: str) -> str:
    """Return the name of the group for a data directory's sessions; names of its scopes begin with it."""
    return f"sandkeep-{zlib.crc32(os.fsencode(data_dir)):08x}"
