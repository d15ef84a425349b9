"""The supervisor's end of the socket to init. Messages from init are untrusted."""

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
        # Never wait for init: it may be frozen, and the session must not block the supervisor.
        control.setblocking(False)
        self._control = control

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
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

    def send_best_effort(self, message: dict[str, Any]) -> None:
        """Send a request without a response. If init is dying, so are the processes it is about."""
        try:
            self.send(message)
        except OSError:
            pass

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return one message and its descriptors, which the caller closes; ``None`` once init is gone.

        A malformed message is returned as an empty one: init is inside the sandbox and not trusted.
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
