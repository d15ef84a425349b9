"""Connections into a session, to ports that need not be published: for callers who may run programs in it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from sandkeep.checks import refuse
from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.sessions import Sessions
from sandkeep.errors import NotFound
from sandkeep.net.leash import Leash

_LOOPBACK: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_CONNECT_SECONDS: Final = 10.0


class Tunnels:
    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions

    async def connect(self, project: str, session_id: str, port: int) -> socket.socket:
        """Return a connection to a port inside, at the loopback address that its server listens on.

        Raises:
            NotFound: no program listens on the port.
        """
        if not 1 <= port <= 65535:
            refuse("port", f"must be between 1 and 65535, not {port}")
        session = await self._sessions.require(project, session_id, Operation.TERMINAL)
        # One at a time: a supervisor makes sockets for few requests at once.
        async with self._context.lock(session_id, "tunnels"):
            *listeners, leash_fd = await self._context.driver.listeners(self._context.ref(session))
            for fd in listeners:
                os.close(fd)
            leash = Leash(leash_fd, lambda: None)
            made: list[socket.socket] = []
            try:
                for family, _ in _LOOPBACK:
                    made += [socket.socket(fileno=fd) for fd in await leash.sockets(family, 1)]
                found = await _first(made, port)
            finally:
                leash.close()
                for sock in made:
                    sock.close()
        if found is None:
            raise NotFound(
                f"no program of {session.sandbox_name} listens on port {port}", kind="port", name=str(port)
            )
        self._context.event("session.port-opened", session, port=port)
        return found


async def _first(sockets: list[socket.socket], port: int) -> socket.socket | None:
    """Return the first of these that connects, taken out of the list."""
    loop = asyncio.get_running_loop()
    for sock, (_, address) in zip(list(sockets), _LOOPBACK, strict=True):
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.sock_connect(sock, (address, port))
        except (OSError, TimeoutError):
            continue
        sockets.remove(sock)
        return sock
    return None
