"""The frames of an output log, as the server sends them when bytes matter.

A frame is a header (length, kind, time in µs, offset) and that many bytes. Feeding is independent of how the
network cut them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sandkeep.errors import TransportError
from sandkeep.sdk.values import OutputChunk, OutputGap
from sandkeep.types import OutputStream

FRAMES: Final = "application/x-sandkeep-output"
FRAME: Final = struct.Struct("<IB3xQQ")
_GAP_LENGTH: Final = struct.Struct("<Q")
_STREAMS: Final = {1: OutputStream.STDOUT, 2: OutputStream.STDERR}
_NOTHING, _GAP, _END, _RECORD = 0, 3, 4, 5
_LARGEST: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The process has ended and this was all it printed."""

    offset: int


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """Something in JSON between the frames of output."""

    data: bytes


OutputItem = OutputChunk | OutputGap | OutputEnd | OutputRecord


class FrameReader:
    """Turns pieces of a response into items."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[OutputItem]:
        """The items that are complete now."""
        waiting = self._waiting
        waiting += data
        at = 0
        try:
            while len(waiting) - at >= FRAME.size:
                length, kind, time_us, offset = FRAME.unpack_from(waiting, at)
                if length > _LARGEST:
                    raise TransportError("the server sent something else than output frames")
                end = at + FRAME.size + length
                if end > len(waiting):
                    break
                body = bytes(waiting[at + FRAME.size : end])
                at = end
                if kind in _STREAMS:
                    time = datetime.fromtimestamp(time_us / 1e6, UTC)
                    yield OutputChunk(offset, time, _STREAMS[kind], body)
                elif kind == _GAP:
                    yield OutputGap(offset, _GAP_LENGTH.unpack(body)[0])
                elif kind == _END:
                    yield OutputEnd(offset)
                elif kind == _RECORD:
                    yield OutputRecord(body)
                elif kind != _NOTHING:
                    raise TransportError(f"the server sent an output frame of unknown kind {kind}")
        finally:
            del waiting[:at]
