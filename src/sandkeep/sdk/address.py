"""Addresses of servers: unix sockets whose paths are longer than the 107 bytes an address holds, and TLS."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

_MAX_PATH_BYTES = 107


class SocketPath:
    """A path to a socket that is short enough for a socket address, until it is closed."""

    def __init__(self, path: str) -> None:
        self.path: str = path
        self._fd = -1
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            self._fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.path = f"/proc/self/fd/{self._fd}/{os.path.basename(path)}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


CONNECT_AGAIN_SECONDS = 0.005


class UnixEnd:
    """The client's end of a connection to a unix socket, never blocking."""

    def __init__(self) -> None:
        self.socket: socket.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def ended(self) -> bool:
        """Whether the server closed an idle connection, or sent something without a request."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self.socket.close()


def trust() -> ssl.SSLContext:
    """Return the TLS trust store: the system's authorities, or those in ``SSL_CERT_FILE`` instead."""
    import ssl

    return ssl.create_default_context()


def distrusted(error: BaseException) -> bool:
    """Whether the failure is a certificate error."""
    ssl = sys.modules.get("ssl")
    cause: BaseException | None = error
    while cause is not None and ssl is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
