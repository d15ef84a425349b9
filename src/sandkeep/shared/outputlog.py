"""The durable output of one process: append-only frames in segment files.

A frame is a header and bytes. The header has the length, the stream, a mark, the time in µs, the offset, a
checksum of the bytes and one of the header itself. The offset counts payload bytes of all streams together,
in the order they were read, so one number identifies a position in the log permanently. Segments are files
named after the offset they start at. When the log exceeds its cap whole segments in the middle are removed:
people look for the beginning and the end, and every reader gets the missing range as an explicit gap.

The writer never seeks and never buffers: once ``append`` has returned, its data survives ``kill -9`` of every
process. A reader needs only the files, during or after the process, from any offset. A last frame that a
dying writer truncated is left alone while the writer may live; once the reader knows that it does not
(``final``), it yields the bytes that are there.

Damage is reported and never served: where a checksum is wrong the reader yields a gap with that reason, finds
the next intact frame by its mark, and continues there. Supervisors of earlier versions wrote headers without
checksums. Such frames are read unchecked, as long as each follows the one before.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

STDOUT: Final = 1
STDERR: Final = 2
END: Final = 255
"""Written once, when the process has ended and its pipes are drained."""

DROPPED: Final = "dropped"
DAMAGED: Final = "damaged"

_MARK: Final = b"\xf5\x5a\xd1"
_SUMMED: Final = struct.Struct("<IB3sQQI")
"""Length, stream, mark, time in µs, offset, checksum of the bytes: the part the header's checksum covers."""
_HEADER: Final = struct.Struct("<IB3sQQII")
"""The same, followed by the header's own checksum."""
_HEADER_SIZE: Final = _HEADER.size
_MARK_AT: Final = 5
_OLD_HEADER: Final = struct.Struct("<IB3sQQ")
_OLD_MARK: Final = b"\0\0\0"
_STREAMS: Final = (STDOUT, STDERR, END)
_READ: Final = 1 << 20
_HEX: Final = frozenset("0123456789abcdef")


class Chunk(NamedTuple):
    """Bytes read from one stream at one time."""

    offset: int
    time_us: int
    stream: int
    data: bytes


class Gap(NamedTuple):
    """A range of the log that is missing: dropped to stay below the cap, or damaged on disk."""

    offset: int
    length: int
    """0 where the length is unknown: the end of the log is damaged."""
    reason: str = DROPPED


class End(NamedTuple):
    """The process has ended; no output of its own follows."""

    offset: int
    time_us: int


Item = Chunk | Gap | End


def _is_segment(name: str) -> bool:
    return len(name) == 20 and name.endswith(".log") and set(name[:16]) <= _HEX


def _segments(directory: str) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4], 16) for name in names if _is_segment(name))


def _segment_path(directory: str, start: int) -> str:
    return f"{directory}/{start:016x}.log"


class OutputWriter:
    """Appends to one log. Owned by the supervisor; one writer per log."""

    __slots__ = ("_cap", "_directory", "_fd", "_segment_size", "_starts", "_written", "dropped", "offset")

    def __init__(self, directory: str, *, cap: int) -> None:
        """Create a log in an existing directory."""
        self._directory = directory
        self._cap = cap
        self._segment_size = max(64 << 10, min(8 << 20, cap // 8))
        self._starts: list[int] = []
        self._fd = -1
        self._written = 0
        self.offset = 0
        self.dropped = 0

    @classmethod
    def reopen(cls, directory: str, *, cap: int) -> OutputWriter:
        """Open a log to append to it; its end is found by reading it."""
        os.makedirs(directory, exist_ok=True)
        writer = cls(directory, cap=cap)
        with OutputReader(directory) as reader:
            while items := reader.read():
                gaps = (item for item in items if isinstance(item, Gap))
                writer.dropped += sum(gap.length for gap in gaps if gap.reason == DROPPED)
            writer.offset = reader.offset
        writer._starts = _segments(directory)
        # Later frames get a new segment, unless the log is empty.
        if writer._starts and writer._starts[-1] == writer.offset:
            writer._starts.pop()
        return writer

    def append(self, stream: int, data: bytes) -> None:
        if self._fd < 0 or self._written >= self._segment_size:
            self._rotate()
        self._write(stream, data)
        self.offset += len(data)

    def end(self) -> None:
        if self._fd < 0:
            self._rotate()
        self._write(END, b"")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, stream: int, data: bytes) -> None:
        header = _header(len(data), stream, time.time_ns() // 1000, self.offset, zlib.crc32(data))
        total = len(header) + len(data)
        before = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            written = os.writev(self._fd, (header, data))
            while written < total:
                written += os.write(self._fd, (header + data)[written:])
        except OSError:
            # A partial frame in the middle would make everything after it unreadable.
            os.ftruncate(self._fd, before)
            os.lseek(self._fd, before, os.SEEK_SET)
            raise
        self._written += total

    def _rotate(self) -> None:
        fd = os.open(
            _segment_path(self._directory, self.offset),
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
            0o600,
        )
        self.close()
        self._fd = fd
        self._written = 0
        self._starts.append(self.offset)
        self._trim()

    def _trim(self) -> None:
        # Segments that start in the first half of the cap are the head and stay; the oldest of the others is
        # removed, except the one being written.
        while self.offset - self.dropped > self._cap:
            victim = next((i for i, start in enumerate(self._starts) if start >= self._cap // 2), None)
            if victim is None or victim >= len(self._starts) - 1:
                return
            start = self._starts.pop(victim)
            os.unlink(_segment_path(self._directory, start))
            # Only the oldest segment of the tail is ever removed, so its successor starts where it ended.
            self.dropped += self._starts[victim] - start


class _Frame(NamedTuple):
    """A decoded header, and its own length."""

    length: int
    stream: int
    time_us: int
    offset: int
    checksum: int | None
    size: int

    def is_intact(self, data: bytes) -> bool:
        return self.checksum is None or zlib.crc32(data) == self.checksum


def _header(length: int, stream: int, time_us: int, offset: int, checksum: int) -> bytes:
    summed = _SUMMED.pack(length, stream, _MARK, time_us, offset, checksum)
    return summed + zlib.crc32(summed).to_bytes(4, "little")


def _frame_at(block: bytes, position: int, expected: int) -> _Frame | None:
    """Return the header at a position, if its offset is ``expected`` or more; ``None`` if it is damaged."""
    mark = block[position + _MARK_AT : position + _MARK_AT + len(_MARK)]
    if mark == _OLD_MARK:
        length, stream, _, time_us, offset = _OLD_HEADER.unpack_from(block, position)
        if stream not in _STREAMS or offset != expected:
            return None
        return _Frame(length, stream, time_us, offset, None, _OLD_HEADER.size)
    if mark != _MARK or len(block) - position < _HEADER_SIZE:
        return None
    length, stream, _, time_us, offset, checksum, own = _HEADER.unpack_from(block, position)
    if own != zlib.crc32(block[position : position + _SUMMED.size]) or offset < expected:
        return None
    return _Frame(length, stream, time_us, offset, checksum, _HEADER_SIZE)


def _is_whole(block: bytes, position: int) -> bool:
    """Return whether the header is complete."""
    left = len(block) - position
    old = block[position + _MARK_AT : position + _MARK_AT + len(_MARK)] == _OLD_MARK
    return left >= _HEADER_SIZE or (old and left >= _OLD_HEADER.size)


class OutputReader:
    """Reads one log from any offset, as far as it has been written."""

    __slots__ = (
        "_at",
        "_directory",
        "_fd",
        "_next_file",
        "_reason",
        "_segment",
        "ended",
        "final",
        "offset",
    )

    def __init__(self, directory: str, offset: int = 0, *, final: bool = False) -> None:
        self._directory = directory
        self.final = final
        self._fd = -1
        self._segment = -1
        self._next_file = 0
        self._at = 0
        """The payload offset of the next frame in the segment; ``offset`` may be larger."""
        self._reason = DROPPED
        """Reason for a gap before the segment, if there is one."""
        self.offset = offset
        self.ended = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> OutputReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, limit: int = _READ) -> list[Item]:
        """Return up to about ``limit`` bytes of output; empty when no more is written yet."""
        items: list[Item] = []
        size = 0
        for item in self._items():
            items.append(item)
            if isinstance(item, Chunk):
                size += len(item.data)
            if size >= limit or isinstance(item, End):
                break
        return items

    def give_up(self, end: int) -> Gap | None:
        """Return a gap up to ``end``, because the bytes before it cannot be read, and continue after it."""
        return self._gap(end, DAMAGED)

    def _items(self) -> Iterator[Item]:
        while True:
            if self._fd < 0 and not self._open():
                return
            gap = self._gap(self._segment, self._reason)
            if gap is not None:
                yield gap
            if (yield from self._frames()):
                continue
            following = [start for start in _segments(self._directory) if start > self._segment]
            if not following:
                if self.final:
                    yield from self._tail()
                return
            # A successor exists, so this segment is complete; read once more, because its last frames may
            # have been written after this reader reached its end.
            if (yield from self._frames()):
                continue
            left = os.fstat(self._fd).st_size - self._next_file
            if not self._open_at(following[0]):
                return
            self._reason = DAMAGED if left else DROPPED

    def _gap(self, end: int, reason: str) -> Gap | None:
        """Return the range missing between the position and ``end``, if any, and move to its end."""
        if self.offset >= end:
            return None
        gap = Gap(self.offset, end - self.offset, reason)
        self.offset = end
        return gap

    def _frames(self) -> Generator[Item, None, bool]:
        """Yield frames from the current position in the current segment; return whether there was any."""
        block = os.pread(self._fd, _READ, self._next_file)
        position = 0
        while _is_whole(block, position):
            chunk = self._next_chunk(block, position)
            if chunk is not None:
                position += _HEADER_SIZE + len(chunk.data)
                yield chunk
                continue
            frame = _frame_at(block, position, self._at)
            if frame is None:
                if position:
                    break
                return self._find_next()
            end = position + frame.size + frame.length
            if end > len(block):
                if position:
                    break
                data = os.pread(self._fd, frame.length, self._next_file + frame.size)
                if len(data) < frame.length:
                    return False
            else:
                data = block[position + frame.size : end]
            self._next_file += end - position
            position = end
            yield from self._show(frame, data)
        return position > 0

    def _next_chunk(self, block: bytes, position: int) -> Chunk | None:
        """Return the frame at a position if it is an ordinary chunk: a fast path that nearly always fits."""
        if len(block) - position < _HEADER_SIZE:
            return None
        length, stream, mark, time_us, offset, checksum, own = _HEADER.unpack_from(block, position)
        body = position + _HEADER_SIZE
        data = block[body : body + length]
        if (
            mark != _MARK
            or offset != self._at
            or offset != self.offset
            or stream == END
            or not length
            or len(data) != length
            or own != zlib.crc32(block[position : position + _SUMMED.size])
            or checksum != zlib.crc32(data)
        ):
            return None
        self.offset = self._at = offset + length
        self._next_file += _HEADER_SIZE + length
        return Chunk(offset, time_us, stream, data)

    def _show(self, frame: _Frame, data: bytes) -> Iterator[Item]:
        end = frame.offset + frame.length
        self._at = end
        # The range lost before this frame, whose header was found after damage.
        lost = self._gap(frame.offset, DAMAGED)
        if not frame.is_intact(data):
            more = self._gap(end, DAMAGED)
            if lost is not None and more is not None:
                lost = Gap(lost.offset, lost.length + more.length, DAMAGED)
            lost, frame = lost or more, frame._replace(length=0)
        if lost is not None:
            yield lost
        if frame.stream == END:
            self.ended = True
            yield End(frame.offset, frame.time_us)
        elif frame.length and end > self.offset:
            skip = self.offset - frame.offset
            self.offset = end
            yield Chunk(frame.offset + skip, frame.time_us, frame.stream, data[skip:] if skip else data)

    def _find_next(self) -> bool:
        """Move to the next intact header after a damaged one; return False when there is none yet."""
        place = self._next_file + 1
        while block := os.pread(self._fd, _READ, place):
            at = block.find(_MARK)
            while at >= 0:
                header = at - _MARK_AT
                if header >= 0 and _frame_at(block, header, self._at) is not None:
                    self._next_file = place + header
                    return True
                at = block.find(_MARK, at + 1)
            if len(block) < _READ:
                break
            place += len(block) - _HEADER_SIZE
        return False

    def _tail(self) -> Iterator[Item]:
        """Return the unfinished frame that a dead writer left at the end of the log."""
        rest = os.pread(self._fd, _HEADER_SIZE, self._next_file)
        if not _is_whole(rest, 0):
            return
        frame = _frame_at(rest, 0, self._at)
        start, self._next_file = self._next_file, os.fstat(self._fd).st_size
        if frame is None:
            yield Gap(self.offset, 0, DAMAGED)
            return
        data = os.pread(self._fd, frame.length, start + frame.size)
        yield from self._show(frame._replace(length=len(data), checksum=None), data)
        lost = self._gap(frame.offset + frame.length, DAMAGED)
        if lost is not None:
            yield lost

    def _open(self) -> bool:
        starts = _segments(self._directory)
        if not starts:
            return False
        # The last segment that starts at or before the offset, or the first one after it.
        index = max((i for i, start in enumerate(starts) if start <= self.offset), default=0)
        return self._open_at(starts[index])

    def _open_at(self, start: int) -> bool:
        try:
            fd = os.open(_segment_path(self._directory, start), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self.close()
        self._fd, self._segment, self._next_file, self._at = fd, start, 0, start
        self._reason = DROPPED
        return True
