"""The protocol of the control socket: frames of one JSON object and an optional blob of bytes.

Shared by both ends and free of I/O. A frame is two big-endian lengths, the JSON text, the blob. On a
connection the client sends requests ``{"id", "op", …}``; every request gets exactly one response with the
same ``id``, either ``{"id", "ok": {…}}`` or ``{"id", "error": {…}}``, in the order they become ready.

``process.start`` may carry two more ids, ``end`` and ``more``. Its response repeats ``end``; a response under
``end`` comes when the process has ended, and one under ``more`` as if its first output had been requested.
Supervisors that do not know these ids do not repeat ``end``.

A ``fs.*`` operation has its connection to itself until its response. Its content travels as data frames (a
blob and no JSON), from the client up to an ``{"end": true}`` frame, or to the client before the response.

Content can also travel past this connection, if ``fs.read`` (of at least so many bytes) or ``fs.write`` is
requested with ``direct``: the supervisor sends ``{"id", "direct": {…}}`` once the file is open. The client
then sends a socket with a frame ``{"left": n}``; the content is the data of that frame and then n bytes of
the socket. The supervisor reads all n bytes, also if the operation fails. Since protocol 2.

Supervisors outlive the programs that started them, so both ends may be of different versions. A supervisor
says which protocols it speaks, from ``oldest`` to ``protocol``, in the session's ``state.json`` and in the
response to ``hello``. The client compares that with its own range before it sends anything else, once per
session: it reads the file, which costs no round trip, and sends ``hello`` only where the file says nothing.
``hello``, its response and these two fields of ``state.json`` are the same in every version.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

PROTOCOL: Final = 4
"""The newest protocol that supervisors and clients of this version speak."""
DIRECT: Final = 2
"""The first version that takes content from a socket."""
LONG: Final = 3
"""The first version that takes requests longer than `SHORT_JSON`."""
RECORDS_INPUT: Final = 4
"""The first version whose records of processes have ``stdin`` and ``metadata``."""
OLDEST: Final = 1
"""The oldest protocol that supervisors and clients of this version still speak."""

HEADER: Final = struct.Struct("!II")
MAX_JSON: Final = 48 << 20
"""The longest arguments the kernel takes, every character of them escaped."""
SHORT_JSON: Final = 4 << 20
"""Limit of supervisors of earlier protocols; they close the connection when more is announced."""
MAX_BLOB: Final = 4 << 20

Frame = tuple[dict[str, Any] | None, bytes]


class ProtocolError(Exception):
    """The peer sent something that is not a frame."""


def encode(body: dict[str, Any] | None, blob: bytes = b"") -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode("ascii") if body is not None else b""
    return HEADER.pack(len(text), len(blob)) + text + blob


def encode_json_line(body: Any) -> bytes:
    """Encode a value that travels as data rather than in a frame of its own."""
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def decode_header(header: bytes) -> tuple[int, int]:
    json_length, blob_length = HEADER.unpack(header)
    if json_length > MAX_JSON or blob_length > MAX_BLOB:
        raise ProtocolError(f"frame too large: {json_length} bytes of JSON, {blob_length} of data")
    return json_length, blob_length


def decode_json(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ProtocolError("frame is not an object")
    return body


def unsupported(said: dict[str, Any]) -> str | None:
    """Return why a client of this version cannot talk to a supervisor; ``None`` if it can.

    ``said`` is the supervisor's ``state.json`` or its response to ``hello``.
    """
    newest = said.get("protocol")
    oldest = said.get("oldest", newest)
    if not isinstance(newest, int) or not isinstance(oldest, int):
        return "its supervisor does not say which protocol it speaks"
    if newest < OLDEST:
        return f"its supervisor speaks protocol {newest}, and this version {OLDEST} to {PROTOCOL}"
    if oldest > PROTOCOL:
        return f"its supervisor speaks protocol {oldest} or later, and this version {OLDEST} to {PROTOCOL}"
    return None


class FrameDecoder:
    """Splits bytes, received in chunks of any size, into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= HEADER.size:
            json_length, blob_length = decode_header(bytes(self._buffer[: HEADER.size]))
            end = HEADER.size + json_length + blob_length
            if len(self._buffer) < end:
                break
            middle = HEADER.size + json_length
            body = decode_json(bytes(self._buffer[HEADER.size : middle])) if json_length else None
            frames.append((body, bytes(self._buffer[middle:end])))
            del self._buffer[:end]
        return frames

    def take_rest(self) -> bytes:
        """Return the bytes received after the last frame, for the next reader of the connection."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
