"""Getting a session's network descriptors from its supervisor.

Blocking, and one connection for each: descriptors cannot travel on a connection an event loop reads as a
stream of bytes. The supervisor answers at once, so callers run this in a thread for a moment.
"""

from __future__ import annotations

import os
from typing import Any, Final

from sandkeep.errors import NotFound, TransportError, from_json
from sandkeep.host.control import gone
from sandkeep.linux import sockets
from sandkeep.supervisor import protocol

_SECONDS: Final = 10.0


def ask(directory: str, op: str, *, generation: int, **body: Any) -> list[int]:
    """The descriptors a supervisor answers an operation with; the caller owns them."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        name = os.path.basename(directory)
        raise NotFound(f"no session {name} on this host", kind="session", name=name) from None
    try:
        sock = sockets.connect_in(fd, "supervisor.sock")
    except (FileNotFoundError, ConnectionRefusedError):
        raise gone(directory) from None
    finally:
        os.close(fd)
    with sock:
        sock.settimeout(_SECONDS)
        sock.sendall(protocol.encode({"id": 1, "op": op, "generation": generation, **body}))
        try:
            data, fds = sockets.receive(sock)
        except TimeoutError:
            raise TransportError(f"the supervisor did not answer {op}") from None
    try:
        if not data:
            raise gone(directory)
        answer = protocol.FrameDecoder().feed(data)[0][0] or {}
        if "error" in answer:
            raise from_json(answer["error"])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
