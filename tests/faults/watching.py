"""Looking at the machine from outside: who lives, and who should not any more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sandkeep.linux import cgroup
from tests.driver_lab import Box, Lab
from tests.polling import ENOUGH, until


class Being(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    born: int

    @property
    def alive(self) -> bool:
        return (_stat(self.pid) or ("", 0, 0))[2] == self.born

    @property
    def runs(self) -> bool:
        """Alive and more than an exit code waiting for its parent."""
        state, _, born = _stat(self.pid) or ("", 0, 0)
        return born == self.born and state not in "ZX"


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and time of birth."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])


def being(pid: int) -> Being:
    found = _stat(pid)
    assert found is not None, f"process {pid} is gone"
    return Being(pid, found[2])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def family(pid: int) -> list[Being]:
    """A process and all its descendants."""
    table = {other: stat for other in all_pids() if (stat := _stat(other))}
    found, pending = [], [pid]
    while pending:
        at = pending.pop()
        if at in table:
            found.append(Being(at, table[at][2]))
        pending += [other for other, stat in table.items() if stat[1] == at]
    return found


def running_with(marker: str) -> list[int]:
    """Processes of the machine with ``marker`` as a whole argument."""
    found = []
    for pid in all_pids():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in arguments:
            found.append(pid)
    return found


def eventually(look: Callable[[], Any], *, seconds: float = ENOUGH) -> Any:
    """Wait for something to become true and return it."""
    return until(look, seconds=seconds)


def all_gone(beings: Iterable[Being], *, seconds: float = ENOUGH) -> None:
    """Wait until none of these processes is left, not even as a zombie."""
    deadline = time.monotonic() + seconds
    while left := [one for one in beings if one.alive]:
        assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
        time.sleep(0.01)


def sweep(lab: Lab, box: Box) -> None:
    """What whoever manages sessions does after one whose supervisor died: nothing else holds its groups."""
    record = dict(lab.do(lab.driver.state(box.ref)).cgroup)
    for path in {path for _, path in record.values()}:
        if os.path.isdir(path):
            cgroup.detect().open(box.ref.session, record).remove()
            break
    box.remove()
