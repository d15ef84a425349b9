"""CPU that this process and all it starts uses: time always, instructions where the machine counts them.

Instructions hardly depend on what else the machine is doing, which makes them the figure to compare changes
by. Many virtual machines have no counters for them. Counted by the kernel's perf events, opened before
anything is started and inherited by all of it, servers, supervisors and what runs inside included; without
the right to look into the kernel, user space only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from dataclasses import dataclass
from typing import Final

_SYSCALL: Final = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL = 1 << 1, 1 << 5
_CLOSE_ON_EXEC: Final = 8
_ATTR_SIZE, _FLAGS_AT = 112, 40


@dataclass(frozen=True, slots=True)
class Cost:
    """``instructions`` is ``None`` if not countable, ``cpu_seconds`` where perf events are closed."""

    cpu_seconds: float | None
    instructions: float | None

    def __sub__(self, before: Cost) -> Cost:
        return Cost(
            _difference(self.cpu_seconds, before.cpu_seconds),
            _difference(self.instructions, before.instructions),
        )

    def __truediv__(self, times: int) -> Cost:
        return Cost(
            None if self.cpu_seconds is None else self.cpu_seconds / times,
            None if self.instructions is None else self.instructions / times,
        )


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _open(kind: int, what: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return -1
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_INHERIT, _INHERIT | _EXCLUDE_KERNEL):
        attr = bytearray(_ATTR_SIZE)
        struct.pack_into("=IIQ", attr, 0, kind, _ATTR_SIZE, what)
        struct.pack_into("=Q", attr, _FLAGS_AT, flags)
        buffer = (ctypes.c_char * _ATTR_SIZE).from_buffer(attr)
        fd = int(libc.syscall(number, buffer, 0, -1, -1, _CLOSE_ON_EXEC))
        if fd >= 0:
            return fd
    return -1


_clock = _open(_SOFTWARE, _TASK_CLOCK)
_counter = _open(_HARDWARE, _INSTRUCTIONS)


def _read(fd: int) -> int | None:
    return None if fd < 0 else int.from_bytes(os.read(fd, 8), "little")


def spent() -> Cost:
    """What was used so far."""
    clock = _read(_clock)
    return Cost(None if clock is None else clock / 1e9, _read(_counter))
