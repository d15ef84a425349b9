"""The session's ends of the network: listeners its traffic is steered to, and sockets that reach into it.

The supervisor uses neither. It holds the listeners for as long as the session lives, so that the process that
serves them can die and come back, and hands out duplicates to whoever may open its control socket. With them
goes one end of a pipe whose other end only the supervisor has: end of file there says that the session is
over, even to somebody no one tells.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import HostCannot, InternalError, InvalidRequest, SandkeepError
from sandkeep.linux import syscalls
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.reactor import Reactor

_MOST_SOCKETS: Final = 32


class SessionNetwork:
    def __init__(self, listeners: list[int], netns: int, reactor: Reactor) -> None:
        self._listeners = listeners
        self._netns = netns
        self._reactor = reactor
        self._leash: tuple[int, int] | None = None

    def give_listeners(self, connection: Connection, body: dict[str, Any]) -> None:
        """Answer with the listeners (TCP and DNS, IPv4 then IPv6) and the end of the pipe to watch."""
        if not self._listeners:
            raise HostCannot(
                "the session's network is not steered",
                part="network-steering",
                why="this machine could not set it up and the operator accepted that",
            )
        connection.hand_over(body["id"], {"listeners": len(self._listeners)}, self.descriptors())

    def descriptors(self) -> list[int]:
        """What ``give_listeners`` hands over, still ours; nothing where the network is not steered."""
        if not self._listeners:
            return []
        if self._leash is None:
            self._leash = os.pipe2(os.O_CLOEXEC)
        return [*self._listeners, self._leash[0]]

    def give_sockets(self, connection: Connection, body: dict[str, Any]) -> None:
        """Answer with TCP sockets made inside the session's namespace, to be connected by the receiver."""
        count, family = int(body["count"]), int(body.get("family", socket.AF_INET))
        if not 0 < count <= _MOST_SOCKETS or family not in (socket.AF_INET, socket.AF_INET6):
            raise InvalidRequest(f"1 to {_MOST_SOCKETS} sockets of an internet family", field="count")
        # A thread of its own: entering a namespace is per thread, and rootless there is no way back.
        self._reactor.thread(self._make, count, family, lambda *made: self._made(connection, body, *made))

    def _make(self, count: int, family: int, done: Callable[[list[int], SandkeepError | None], None]) -> None:
        made: list[int] = []
        failure: SandkeepError | None = None
        try:
            syscalls.setns(self._netns, syscalls.CLONE_NEWNET)
            kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            for _ in range(count):
                made.append(socket.socket(family, kind).detach())
        except OSError as error:
            failure = InternalError(f"no socket in the session's network: {error}")
        self._reactor.post(lambda: done(made, failure))

    def _made(
        self, connection: Connection, body: dict[str, Any], made: list[int], failure: SandkeepError | None
    ) -> None:
        try:
            if failure is not None:
                connection.refuse(body["id"], failure)
            else:
                connection.hand_over(body["id"], {"sockets": len(made)}, made)
        finally:
            for fd in made:
                os.close(fd)
