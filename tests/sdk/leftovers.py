"""What is left of things that should be gone, seen from outside."""

from __future__ import annotations

import os

from tests.server.server_process import ServerProcess


def _open_files(process: str) -> list[str]:
    found = []
    try:
        for fd in os.listdir(f"/proc/{process}/fd"):
            try:
                found.append(os.readlink(f"/proc/{process}/fd/{fd}"))
            except OSError:
                pass
    except OSError:
        pass
    return found


def watches_of(server: ServerProcess, session: str) -> int:
    """How many watches of directories the host holds for a session."""
    home = os.path.join(os.path.realpath(server.data), "sessions", session)
    count = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        held = _open_files(process)
        if any(path.startswith(home) for path in held):
            count += held.count("anon_inode:inotify")
    return count


def sockets_of_this_process() -> int:
    """How many sockets are open here."""
    return sum(path.startswith("socket:") for path in _open_files("self"))
