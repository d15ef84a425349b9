"""Memory of processes, as the kernel accounts for it."""

from __future__ import annotations

import os


def of_tree(pid: int) -> int:
    """Bytes of a process and its descendants, shared pages counted by the share each has in them."""
    return sum(_share(one) for one in _tree(pid))


def resident(pid: int) -> int:
    """Resident bytes of one process."""
    return _field(f"/proc/{pid}/status", "VmRSS")


def available() -> int:
    """Bytes the machine could still give."""
    return _field("/proc/meminfo", "MemAvailable")


def _share(pid: int) -> int:
    try:
        return _field(f"/proc/{pid}/smaps_rollup", "Pss")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as handle:
                    parent = int(handle.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found


def _field(path: str, name: str) -> int:
    with open(path, encoding="ascii") as handle:
        for line in handle:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in {path}")
