"""Memory of processes, as the kernel accounts for it."""

from __future__ import annotations

import os


def of_installation(data: str) -> int:
    """Bytes of every process that names a data directory, shared pages counted by the share each has in them.

    Supervisors and inits are forks of the zygote and carry its command line.
    """
    return sum(_share(pid) for pid in _naming(data.encode()))


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


def _naming(text: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as handle:
                    if text in handle.read():
                        found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _field(path: str, name: str) -> int:
    with open(path, encoding="ascii") as handle:
        for line in handle:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in {path}")
