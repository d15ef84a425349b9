"""HTTP/2 frames, counted before h2 parses them.

Received bytes are split into chunks of a few whole frames, with the kinds of those frames. So the server can
limit kinds that cost a client nothing to send, also those that h2 makes no event of, and can yield between
chunks.
"""

from __future__ import annotations

from typing import Final

DATA, HEADERS, WINDOW_UPDATE, CONTINUATION = 0, 1, 8, 9
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = 9
_LONGEST: Final = 1 << 14
"""The largest payload of a frame unless a setting raises it; the server sends no such setting."""
_MOST: Final = 16
_ENOUGH: Final = 16 << 10


class TooLong(Exception):
    """A frame announces more than the largest payload."""


class FrameSplitter:
    """The bytes of one connection, from the first one."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._begun = False

    def add(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> tuple[bytes, list[int]]:
        """Remove and return some whole frames, if any is complete, and their kinds; the preface as it is."""
        end, kinds = 0, list[int]()
        if not self._begun:
            if len(self._bytes) < len(PREFACE):
                return b"", kinds
            end, self._begun = len(PREFACE), True
        while len(kinds) < _MOST and end < _ENOUGH and len(self._bytes) >= end + _HEAD:
            length = int.from_bytes(self._bytes[end : end + 3], "big")
            if length > _LONGEST:
                raise TooLong(f"a frame of {length} bytes")
            if len(self._bytes) < end + _HEAD + length:
                break
            kinds.append(self._bytes[end + 3])
            end += _HEAD + length
        chunk = bytes(self._bytes[:end])
        del self._bytes[:end]
        return chunk, kinds
