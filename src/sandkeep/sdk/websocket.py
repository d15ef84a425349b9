"""WebSocket frames of terminals and tunnels, without I/O."""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sandkeep.dataclass import dataclass
from sandkeep.errors import SandkeepError, StreamClosed, TransportError

if TYPE_CHECKING:
    from websockets.protocol import Protocol

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Closed:
    """The server has closed the connection."""

    code: int
    reason: str


class Handshake:
    """The request that turns a connection into a WebSocket."""

    def __init__(self) -> None:
        self._key = base64.b64encode(os.urandom(16))

    def headers(self) -> dict[str, str]:
        return {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": self._key.decode(),
        }

    def check(self, status: int, accept: str, *, refused: SandkeepError) -> None:
        """Raise ``refused`` if the server did not accept the credentials, another error for other reasons."""
        if status == 403:
            raise refused
        import hashlib  # loads OpenSSL, which little else needs

        expected = base64.b64encode(hashlib.sha1(self._key + _MAGIC).digest()).decode()
        if status != 101 or accept != expected:
            raise TransportError(f"the server responded with {status} instead of opening a WebSocket")


class Frames:
    """Turns bytes of the connection into messages, and messages into bytes."""

    def __init__(self) -> None:
        # Imported here because little else needs it, and it is slow to import.
        from websockets.exceptions import InvalidState
        from websockets.frames import Opcode
        from websockets.protocol import CLIENT, OPEN, Protocol

        self._invalid = InvalidState
        self._opcodes = Opcode
        self._protocol: Protocol = Protocol(CLIENT, state=OPEN, max_size=_LARGEST)

    def feed(self, data: bytes) -> Iterator[bytes | str | Closed]:
        """Return messages that are complete now: binary, text, or the end. Empty ``data`` is the end."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            opcode = getattr(event, "opcode", None)
            payload: bytes = getattr(event, "data", b"")
            if opcode is self._opcodes.BINARY:
                yield bytes(payload)
            elif opcode is self._opcodes.TEXT:
                yield bytes(payload).decode()
            elif opcode is self._opcodes.CLOSE:
                code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
                yield Closed(code, bytes(payload[2:]).decode("utf-8", "replace"))
        if not data:
            yield Closed(1006, "the connection was lost")

    def binary(self, data: bytes) -> None:
        with self._sending():
            self._protocol.send_binary(data)

    def text(self, text: str) -> None:
        with self._sending():
            self._protocol.send_text(text.encode())

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except self._invalid:
            raise StreamClosed("the server has closed the connection") from None

    def close(self) -> None:
        self._protocol.send_close(1000)

    def to_send(self) -> bytes:
        """Return the bytes to send now: our frames, and pongs for the server's pings."""
        return b"".join(self._protocol.data_to_send())


def interrupt(network: Any) -> None:
    """End reading from a connection in other threads: closing it does not."""
    sock = network.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
