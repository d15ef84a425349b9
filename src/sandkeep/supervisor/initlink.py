"""The supervisor's end of the socket to init. What comes back is untrusted."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final

from sandkeep.linux import sockets

_PACKET: Final = 64 << 10
"""Longer requests travel in a memory file."""


class InitLink:
    def __init__(self, control: socket.socket) -> None:
        # Never wait for init: it may be frozen, and what is inside must not stop what is outside.
        control.setblocking(False)
        self._control = control

    def fileno(self) -> int:
        return self._control.fileno()

    def tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        if len(data) <= _PACKET:
            sockets.send(self._control, data, fds)
            return
        memory = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(memory, view) :]
            sockets.send(self._control, b"M", [memory, *(fds or [])])
        finally:
            os.close(memory)

    def bid(self, message: dict[str, Any]) -> None:
        """A request nobody waits for. If init is dying, so is what the request was about."""
        try:
            self.tell(message)
        except OSError:
            pass

    def hear(self) -> tuple[dict[str, Any], list[int]] | None:
        """One message and the descriptors with it, now the caller's; ``None`` once init is gone.

        Whatever is not a message is an empty one: init is inside the sandbox, and we go on.
        """
        try:
            data, fds = sockets.receive(self._control)
        except OSError:
            return {}, []
        if not data:
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = {}
        return (message if isinstance(message, dict) else {}), fds
