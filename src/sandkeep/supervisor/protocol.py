"""What the control socket carries: frames of one JSON object and an optional blob of bytes.

Shared by both ends and free of I/O. A frame is two big-endian lengths, the JSON text, the blob. On a
connection the client sends requests ``{"id", "op", …}``; every request gets exactly one answer with the same
``id``, either ``{"id", "ok": {…}}`` or ``{"id", "error": {…}}``, in whatever order they are ready.

``process.start`` can be given two more ids, as ``end`` and ``more``. Its answer repeats ``end``; an answer
under that comes when the process has ended, and one under ``more`` as if its first output had been asked
for. Supervisors that do not know them do not repeat ``end``.

A ``fs.*`` operation has its connection to itself until it is answered. Its content travels as data frames (a
blob and no JSON), from the client up to an ``{"end": true}`` frame, or to the client before the answer.

Content can also travel past this connection, where ``fs.read`` (of at least so many bytes) or ``fs.write`` is
asked for with ``direct``: the supervisor says ``{"id", "direct": {…}}`` once the file is open, and is then
given a socket with a frame ``{"left": n}``, the data of which comes before n bytes of that socket. Whatever
the answer, the supervisor has then read all n. Since protocol 2.

The version is part of every ``hello``: supervisors outlive the programs that started them, so a client must
be ready to meet an older one.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

PROTOCOL: Final = 2
DIRECT: Final = 2
"""The first one that takes content from a socket."""
OLDEST: Final = 1
"""The oldest protocol a client of this version still speaks."""

HEADER: Final = struct.Struct("!II")
MAX_JSON: Final = 4 << 20
MAX_BLOB: Final = 4 << 20

Frame = tuple[dict[str, Any] | None, bytes]


class ProtocolError(Exception):
    """The other side sent something that is not a frame."""


def encode(body: dict[str, Any] | None, blob: bytes = b"") -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode("ascii") if body is not None else b""
    return HEADER.pack(len(text), len(blob)) + text + blob


def encode_json_line(body: Any) -> bytes:
    """A value that travels as data rather than in a frame of its own."""
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


class FrameDecoder:
    """Bytes in, frames out, however the bytes were cut."""

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
        """What was received beyond the last frame, for whoever reads the connection next."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
