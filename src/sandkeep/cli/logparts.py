"""Parts of a process's output log: its last lines, and what was printed since a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sandkeep.sync import OutputChunk, OutputGap, Process


def log_part(
    process: Process, *, offset: int = 0, tail: int | None = None, since: datetime | None = None, follow: bool
) -> Generator[OutputChunk | OutputGap]:
    """Yield the log from an offset or a time on, or its last lines; with ``follow`` also what comes."""
    if tail is not None:
        with closing(process.output(offset, follow=False)) as items:
            last = _Tail(tail)
            for item in _since(items, since):
                last.add(item)
        yield from last.items()
        if not follow:
            return
        offset = max(offset, last.end)
    with closing(process.output(offset, follow=follow)) as items:
        yield from _since(items, since)


def _since(
    items: Iterable[OutputChunk | OutputGap], since: datetime | None
) -> Iterator[OutputChunk | OutputGap]:
    """Leave out what was printed before ``since``. A gap has no time: that of the next chunk counts."""
    from sandkeep.sync import OutputGap

    gaps: list[OutputGap] = []
    for item in items:
        if isinstance(item, OutputGap):
            gaps.append(item)
            continue
        if since is None or item.time >= since:
            yield from gaps
            yield item
        gaps.clear()
    yield from gaps


class _Piece(NamedTuple):
    """A part of an item; of a chunk, one line of it or less."""

    item: OutputChunk | OutputGap
    start: int
    end: int
    ends_line: bool


class _Tail:
    """The last lines of what is added, in the order of the log."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._pieces: deque[_Piece] = deque()
        self._ended = 0
        """Ends of lines among the pieces."""
        self.end = 0
        """Offset after all that was added."""

    def add(self, item: OutputChunk | OutputGap) -> None:
        from sandkeep.sync import OutputGap

        self.end = item.end
        if isinstance(item, OutputGap):
            self._pieces.append(_Piece(item, 0, 0, False))
            return
        start = 0
        for line in _lines(item.data):
            self._push(_Piece(item, start, start + len(line), line.endswith(b"\n")))
            start += len(line)

    def _push(self, piece: _Piece) -> None:
        self._pieces.append(piece)
        self._ended += piece.ends_line
        while self._ended + (not piece.ends_line) > self._lines and self._pieces:
            gone = self._pieces.popleft()
            while not gone.ends_line and self._pieces:
                gone = self._pieces.popleft()
            self._ended -= gone.ends_line

    def items(self) -> Iterator[OutputChunk | OutputGap]:
        """Yield what is left, the pieces of a chunk joined again."""
        from sandkeep.sync import OutputGap

        pieces = self._pieces
        while pieces:
            first = pieces.popleft()
            if isinstance(first.item, OutputGap):
                yield first.item
                continue
            end = first.end
            while pieces and pieces[0].item is first.item:
                end = pieces.popleft().end
            yield replace(
                first.item, offset=first.item.offset + first.start, data=first.item.data[first.start : end]
            )


def _lines(data: bytes) -> list[bytes]:
    """Split after line feeds alone."""
    *ended, rest = data.split(b"\n")
    return [line + b"\n" for line in ended] + ([rest] if rest else [])
