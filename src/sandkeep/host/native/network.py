"""Fetch the descriptors of a session's network from its supervisor.

Blocking, and over a connection of its own rather than over `sandkeep.host.channel`: an asyncio transport
loses descriptors. The frames are those of `sandkeep.shared.protocol`. The supervisor responds at once, so
callers run this in a thread.
"""

from __future__ import annotations

import os
from typing import Final

from sandkeep.errors import NotFound, TransportError, from_json
from sandkeep.host.control import gone
from sandkeep.linux import sockets
from sandkeep.shared import protocol

_SECONDS: Final = 10.0


def get_listeners(directory: str, *, generation: int) -> list[int]:
    """Return the listeners of a session and netd's end of the leash; the caller owns them."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        name = os.path.basename(directory)
        raise NotFound(f"no session {name} on this host", kind="session", name=name) from None
    try:
        sock = sockets.connect_in(fd, "supervisor.sock")
    except (FileNotFoundError, ConnectionError):
        raise gone(directory) from None
    finally:
        os.close(fd)
    with sock:
        sock.settimeout(_SECONDS)
        try:
            sock.sendall(protocol.encode({"id": 1, "op": "network.listeners", "generation": generation}))
            data, fds = sockets.receive(sock)
        except TimeoutError:
            raise TransportError("the supervisor did not answer network.listeners") from None
        except ConnectionError:
            raise gone(directory) from None  # it ended before or while it responded
    try:
        frames = protocol.FrameDecoder().feed(data)
        if not frames:
            raise gone(directory)
        answer = frames[0][0] or {}
        if "error" in answer:
            raise from_json(answer["error"])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
