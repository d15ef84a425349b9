"""The few network settings a session's namespace needs."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_IFF_RUNNING: Final = 64


def loopback_up() -> None:
    """Bring ``lo`` up in the current network namespace: the only interface a session has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP | _IFF_RUNNING, b""))
