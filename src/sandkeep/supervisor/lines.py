"""A range of lines of a file, for callers that want a part of a large one.

Lines end with a line feed, in any encoding that writes it as one byte. The file is read in chunks up to the
first line of the range; the range itself is bounded in bytes and held as a whole.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from sandkeep.errors import InvalidRequest

MAX_BYTES: Final = 4 << 20
"""Most bytes that a range of lines can have: one data frame."""
_CHUNK: Final = 1 << 20


class Lines(NamedTuple):
    """A range of lines."""

    data: bytes
    lines: int
    """Number of lines in ``data``; the last may lack its line feed."""
    more: bool
    """Whether the file has bytes after these."""
    cut: bool
    """Whether the line is longer than the limit of bytes, so that its end is missing."""


def read_lines(fd: int, *, start: int, limit: int, max_bytes: int) -> Lines:
    """Return ``limit`` lines from line ``start``, the first being 1; fewer where ``max_bytes`` allow fewer.

    A line that has more than ``max_bytes`` itself is returned alone and cut.
    """
    for field, value, most in (("start", start, 1 << 53), ("limit", limit, 1 << 53)):
        if not 1 <= value <= most:
            raise InvalidRequest(f"{field} must be at least 1, not {value}", field=field)
    if not 1 <= max_bytes <= MAX_BYTES:
        raise InvalidRequest(f"max_bytes must be between 1 and {MAX_BYTES}", field="max_bytes")
    offset = _offset(fd, start)
    if offset is None:
        return Lines(b"", 0, more=False, cut=False)
    found = _read(fd, offset, max_bytes + 1)
    end = _end(found, 0, limit)
    if 0 <= end <= max_bytes:
        more = end < len(found) or bool(os.pread(fd, 1, offset + end))
        return Lines(found[:end], limit, more, cut=False)
    if len(found) <= max_bytes:
        return Lines(found, found.count(b"\n") + (found[-1:] not in (b"", b"\n")), more=False, cut=False)
    end = found.rfind(b"\n", 0, max_bytes) + 1
    if end:
        return Lines(found[:end], found.count(b"\n", 0, end), more=True, cut=False)
    return Lines(found[:max_bytes], 1, more=True, cut=True)


def _offset(fd: int, start: int) -> int | None:
    """Return where line ``start`` begins; ``None`` if the file has fewer lines."""
    left, offset = start - 1, 0
    while left:
        chunk = os.pread(fd, _CHUNK, offset)
        if not chunk:
            return None
        feeds = chunk.count(b"\n")
        if feeds >= left:
            return offset + _end(chunk, 0, left)
        left -= feeds
        offset += len(chunk)
    return offset


def _end(data: bytes, start: int, count: int) -> int:
    """Return the offset after ``count`` line feeds; -1 if there are fewer."""
    at = start - 1
    for _ in range(count):
        at = data.find(b"\n", at + 1)
        if at < 0:
            return -1
    return at + 1


def _read(fd: int, offset: int, size: int) -> bytes:
    parts, left = [], size
    while left and (chunk := os.pread(fd, left, offset)):
        parts.append(chunk)
        offset += len(chunk)
        left -= len(chunk)
    return b"".join(parts)
