"""Parses output frames from the chunks of a response."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, Literal

from sandkeep.dataclass import dataclass
from sandkeep.errors import TransportError
from sandkeep.sdk.values import OutputChunk, OutputGap
from sandkeep.states import OutputStream
from sandkeep.wire import frames

_STREAMS: Final = {frames.STDOUT: OutputStream.STDOUT, frames.STDERR: OutputStream.STDERR}
_REASONS: Final[dict[int, Literal["dropped", "damaged"]]] = {
    frames.GAP: "dropped",
    frames.DAMAGED: "damaged",
}
_LARGEST: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The process has ended, and its output is complete."""

    offset: int


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A JSON record between the frames of output."""

    data: bytes


OutputItem = OutputChunk | OutputGap | OutputEnd | OutputRecord


class FrameReader:
    """Turns chunks of a response into items."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[OutputItem]:
        """Add a chunk and return the items that are complete now."""
        waiting = self._waiting
        waiting += data
        at = 0
        header = frames.HEADER
        try:
            while len(waiting) - at >= header.size:
                length, kind, time_us, offset = header.unpack_from(waiting, at)
                if length > _LARGEST:
                    raise TransportError("the server's response is not a sequence of output frames")
                end = at + header.size + length
                if end > len(waiting):
                    break
                body = bytes(waiting[at + header.size : end])
                at = end
                if kind in _STREAMS:
                    time = datetime.fromtimestamp(time_us / 1e6, UTC)
                    yield OutputChunk(offset, time, _STREAMS[kind], body)
                elif kind in _REASONS:
                    yield OutputGap(offset, frames.GAP_LENGTH.unpack(body)[0], _REASONS[kind])
                elif kind == frames.END:
                    yield OutputEnd(offset)
                elif kind == frames.RECORD:
                    yield OutputRecord(body)
                elif kind != frames.NOTHING:
                    raise TransportError(f"the server sent an output frame of unknown kind {kind}")
        finally:
            del waiting[:at]
