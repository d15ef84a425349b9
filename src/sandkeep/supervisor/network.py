"""The session's ends of the network: listeners that take its traffic, and sockets that reach into it.

The supervisor serves neither. It holds the listeners for as long as the session lives, so that netd can die
and come back, and gives duplicates of them to the server, which passes them to netd. With them goes one end
of a new socket pair, the leash. End of file on the leash tells netd that the supervisor is gone. Over it,
netd can ask for sockets inside the session's network namespace, and for nothing else: netd reads what hostile
programs send, so the supervisor trusts it with one operation and checks its arguments.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sandkeep.errors import HostCannot, InternalError, InvalidRequest, LimitReached, SandkeepError
from sandkeep.linux import syscalls
from sandkeep.supervisor.connection import Connection
from sandkeep.supervisor.reactor import Reactor

_MOST_SOCKETS: Final = 32
_MOST_THREADS: Final = 8
"""Requests for sockets under way at a time; each has a thread."""


class SessionNetwork:
    def __init__(
        self, listeners: list[int], netns: int, reactor: Reactor, require_running: Callable[[], None]
    ) -> None:
        self._listeners = listeners
        self._netns = netns
        self._reactor = reactor
        self._require_running = require_running
        self._threads = 0

    def give_listeners(self, connection: Connection, body: dict[str, Any]) -> None:
        """Respond with the listeners (TCP and DNS, IPv4 then IPv6) and netd's end of a leash."""
        self._require_running()
        if not self._listeners:
            raise HostCannot(
                "the session's network is not steered",
                part="network-steering",
                why="this machine could not set it up and the operator accepted that",
            )
        with self.descriptors() as fds:
            connection.hand_over(body["id"], {"listeners": len(self._listeners)}, fds)

    @contextmanager
    def descriptors(self) -> Iterator[list[int]]:
        """Yield the descriptors for netd, to be sent within the block; none where the network is not steered.

        Each call makes a leash of its own, so an answer never reaches a netd that did not ask.
        """
        if not self._listeners:
            yield []
            return
        ours, theirs = socket.socketpair()
        Connection(ours, self._reactor, self._on_request)
        with theirs:
            yield [*self._listeners, theirs.fileno()]

    def _on_request(self, connection: Connection, body: dict[str, Any], _blob: bytes) -> None:
        if body["op"] != "sockets":
            raise InvalidRequest("netd may ask for sockets only", field="op")
        self.give_sockets(connection, body)

    def give_sockets(self, connection: Connection, body: dict[str, Any]) -> None:
        """Respond with TCP sockets made inside the session's namespace, for the receiver to connect."""
        self._require_running()
        count, family = body["count"], body.get("family", int(socket.AF_INET))
        if type(count) is not int or not 0 < count <= _MOST_SOCKETS:
            raise InvalidRequest(f"must be 1 to {_MOST_SOCKETS} sockets", field="count")
        if type(family) is not int or family not in (socket.AF_INET, socket.AF_INET6):
            raise InvalidRequest("must be an internet address family", field="family")
        if self._threads >= _MOST_THREADS:
            raise LimitReached("too many requests for sockets", limit="requests", value=_MOST_THREADS)
        self._threads += 1
        # A thread of its own: a thread enters a namespace alone, and without root it cannot leave it again.
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
        self._threads -= 1
        try:
            if failure is not None:
                connection.refuse(body["id"], failure)
            else:
                connection.hand_over(body["id"], {"sockets": len(made)}, made)
        except (OSError, SandkeepError):
            connection.close()  # it asked and does not read the answers
        finally:
            for fd in made:
                os.close(fd)
