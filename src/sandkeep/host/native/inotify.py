"""Limit how many inotify instances and watches sessions may use.

The kernel counts instances and watches per user, and a user namespace may set a lower limit for each of its
users; what nested namespaces use is charged to the user who created them. Under root each session has ids of
its own and so a count of its own. Without root all counts are part of the count of the user who runs
sandkeep, whose other programs need some, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

_KINDS: Final = ("instances", "watches")


def allowed() -> dict[str, int]:
    """Return this user's limits: the machine's, or a lower one of this user namespace."""
    found: dict[str, int] = {}
    for kind in _KINDS:
        values = [_read(f"/proc/sys/{name}") for name in (f"fs/inotify/max_user_{kind}", name_of(kind))]
        if known := [value for value in values if value is not None]:
            found[kind] = min(known)
    return found


def half(of: dict[str, int]) -> dict[str, int]:
    return {kind: max(value // 2, 1) for kind, value in of.items()}


def name_of(kind: str) -> str:
    return f"user/max_inotify_{kind}"


def bound(limits: dict[str, int], proc: str = "/proc") -> None:
    """Set limits of this process's user namespace. Kernels without inotify have no such limits."""
    for kind, value in limits.items():
        with suppress(FileNotFoundError):
            fd = os.open(f"{proc}/sys/{name_of(kind)}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, str(value).encode())
            finally:
                os.close(fd)


def _read(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
