"""The leash: netd's connection to the supervisor of one session.

It ends when the supervisor does, so netd never serves a session that is gone. Over it netd gets sockets that
are inside the session's network namespace, which is how requests from outside reach a port; the supervisor
answers that one operation and no other. The server has no part in this: ports work while it restarts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import HostCannot, TransportError
from sandkeep.net.channel import DescriptorChannel

_SECONDS: Final = 10.0


class Leash:
    """Owns ``fd``. ``ended`` is called once, when the supervisor is gone or the leash is closed."""

    def __init__(self, fd: int, ended: Callable[[], None]) -> None:
        self._fd = fd
        self._channel: DescriptorChannel | None = None
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            self._channel = DescriptorChannel(socket.socket(fileno=fd), _ignore, ended)
        else:
            # A supervisor of an earlier version gives the reading end of a pipe, which it only ever closes.
            asyncio.get_running_loop().add_reader(fd, ended)

    async def sockets(self, family: int, count: int) -> list[int]:
        """Return TCP sockets made inside the session's network namespace; the caller owns them."""
        if self._channel is None:
            raise HostCannot(
                "the session was started by an earlier version, which gives netd no sockets",
                part="ingress",
                why="its supervisor is older than this netd",
                hint="stop and resume the sandbox",
            )
        try:
            request = self._channel.request("sockets", family=family, count=count)
            _, fds = await asyncio.wait_for(request, _SECONDS)
        except TimeoutError:
            raise TransportError("the supervisor does not answer") from None
        return fds

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        else:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)


def _ignore(_body: dict[str, Any], fds: list[int]) -> None:
    """Drop a message that is not an answer: supervisors send none."""
    for fd in fds:
        os.close(fd)
