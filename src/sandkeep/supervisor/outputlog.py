"""The durable output of one process: append-only frames in segment files.

A frame is a header and bytes: ``(length, stream, time in µs, offset)``. The offset counts payload bytes of
all streams together, in the order they were read, so one number names a place in the log for ever. Segments
are files named after the offset they start at. When the log outgrows its cap whole segments in the middle are
removed: the beginning and the end are what people look for, and the missing range shows up to every reader as
an explicit gap.

The writer never seeks and never buffers: what ``append`` returned from survives ``kill -9`` of everything. A
reader works on the files alone, during or after the process, from any offset. A last frame that a dying
writer cut short is left alone while the writer may live, and yields the bytes that are there once the reader
knows it does not (``final``).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

STDOUT: Final = 1
STDERR: Final = 2
END: Final = 255
"""Written once, when the process has ended and what it left in its pipes has been read."""

_HEADER: Final = struct.Struct("<IB3xQQ")
_READ: Final = 1 << 20


class Chunk(NamedTuple):
    """Bytes as they were read from one stream."""

    offset: int
    time_us: int
    stream: int
    data: bytes


class Gap(NamedTuple):
    """A range of the log that was dropped to stay below the cap."""

    offset: int
    length: int


class End(NamedTuple):
    """The process has ended; nothing it printed itself comes after this."""

    offset: int
    time_us: int


Item = Chunk | Gap | End


def _segments(directory: str) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4], 16) for name in names if name.endswith(".log"))


def _segment_path(directory: str, start: int) -> str:
    return f"{directory}/{start:016x}.log"


class OutputWriter:
    """Appends to one log. Owned by the supervisor; one writer per log."""

    __slots__ = ("_cap", "_directory", "_fd", "_segment_size", "_starts", "_written", "dropped", "offset")

    def __init__(self, directory: str, *, cap: int) -> None:
        """A new log in a directory that exists."""
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
        """Go on with a log that another process of ours may have begun; its end is found by reading it."""
        os.makedirs(directory, exist_ok=True)
        writer = cls(directory, cap=cap)
        with OutputReader(directory) as reader:
            while items := reader.read():
                writer.dropped += sum(item.length for item in items if isinstance(item, Gap))
            writer.offset = reader.offset
        writer._starts = _segments(directory)
        # A segment of its own for what follows, unless nothing precedes it.
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
        header = _HEADER.pack(len(data), stream, time.time_ns() // 1000, self.offset)
        total = len(header) + len(data)
        before = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            written = os.writev(self._fd, (header, data))
            while written < total:
                written += os.write(self._fd, (header + data)[written:])
        except OSError:
            # A half frame in the middle would make everything after it unreadable.
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
        # Segments that start in the first half of the cap are the head and stay; the oldest of the others
        # goes, except the one being written.
        while self.offset - self.dropped > self._cap:
            victim = next((i for i, start in enumerate(self._starts) if start >= self._cap // 2), None)
            if victim is None or victim >= len(self._starts) - 1:
                return
            start = self._starts.pop(victim)
            os.unlink(_segment_path(self._directory, start))
            # Only the oldest of the tail is ever removed, so its successor starts where it ended.
            self.dropped += self._starts[victim] - start


class OutputReader:
    """Reads one log from any offset, as far as it has been written."""

    __slots__ = ("_directory", "_fd", "_next_file", "_segment", "ended", "final", "offset")

    def __init__(self, directory: str, offset: int = 0, *, final: bool = False) -> None:
        self._directory = directory
        self.final = final
        self._fd = -1
        self._segment = -1
        self._next_file = 0
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
        """Up to about ``limit`` bytes of what follows; empty when there is nothing more yet."""
        items: list[Item] = []
        size = 0
        for item in self._items():
            items.append(item)
            if isinstance(item, Chunk):
                size += len(item.data)
            if size >= limit or isinstance(item, End):
                break
        return items

    def _items(self) -> Iterator[Item]:
        while True:
            if self._fd < 0 and not self._open():
                return
            gap = self._gap_before_segment()
            if gap is not None:
                yield gap
            progressed = yield from self._frames()
            if not progressed and not self._advance():
                return

    def _gap_before_segment(self) -> Gap | None:
        if self.offset >= self._segment:
            return None
        gap = Gap(self.offset, self._segment - self.offset)
        self.offset = self._segment
        return gap

    def _frames(self) -> Generator[Item, None, bool]:
        """Frames from the current place in the current segment; returns whether there was any."""
        block = os.pread(self._fd, _READ, self._next_file)
        position = 0
        while position + _HEADER.size <= len(block):
            length, stream, time_us, offset = _HEADER.unpack_from(block, position)
            end = position + _HEADER.size + length
            if end > len(block):
                if position:
                    break
                data = os.pread(self._fd, length, self._next_file + _HEADER.size)
                if len(data) < length and not self.final:
                    return False
                length = len(data)
                end = _HEADER.size + length
            else:
                data = block[position + _HEADER.size : end]
            self._next_file += end - position
            position = end
            if stream == END:
                self.ended = True
                yield End(offset, time_us)
            elif offset + length > self.offset:
                skip = max(self.offset - offset, 0)
                self.offset = offset + length
                yield Chunk(offset + skip, time_us, stream, data[skip:] if skip else data)
        return position > 0

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
        self._fd, self._segment, self._next_file = fd, start, 0
        return True

    def _advance(self) -> bool:
        following = [start for start in _segments(self._directory) if start > self._segment]
        if not following:
            return False
        # A successor exists, so this segment is complete; look once more, because its last frames may have
        # been written after we reached its end. What is missing before the successor shows up as a gap.
        if self._complete_frame_at(self._next_file):
            return True
        return self._open_at(following[0])

    def _complete_frame_at(self, position: int) -> bool:
        header = os.pread(self._fd, _HEADER.size, position)
        if len(header) < _HEADER.size:
            return False
        length: int = _HEADER.unpack(header)[0]
        return os.fstat(self._fd).st_size >= position + _HEADER.size + length
