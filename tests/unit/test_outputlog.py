"""The output log as files: whatever is written in whatever pieces, any reader sees it whole or with gaps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.supervisor.outputlog import STDERR, STDOUT, Chunk, End, Gap, Item, OutputReader, OutputWriter

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
CAP = 256 << 10
"""Small enough for generated logs to outgrow it; segments are then as small as they get."""


def written(number: int, size: int) -> bytes:
    """Content that tells its place: a wrong offset or order shows."""
    pattern = number.to_bytes(4, "big") + bytes(range(1, 252))
    return (pattern * (size // len(pattern) + 1))[:size]


pieces = st.lists(
    st.tuples(st.sampled_from([STDOUT, STDERR]), st.one_of(st.integers(1, 300), st.integers(1, 120_000))),
    max_size=40,
)


def everything(reader: OutputReader, limit: int) -> list[Item]:
    items: list[Item] = []
    while found := reader.read(limit):
        items += found
    return items


def check(items: list[Item], whole: bytes, streams: list[int], start: int) -> None:
    """Items continue each other from ``start``, and every byte is the one written there, on its stream."""
    place = start
    for item in items:
        assert item.offset == place
        if isinstance(item, Chunk):
            assert item.data and item.data == whole[place : place + len(item.data)]
            assert item.stream == streams[place]
            place += len(item.data)
        elif isinstance(item, Gap):
            assert item.length > 0
            place += item.length
    assert place == len(whole)


@settings(max_examples=60, deadline=None)
@given(pieces, st.data())
def test_any_reader_at_any_time_sees_each_byte_in_its_place(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        writer = OutputWriter(directory, cap=CAP)
        follower = OutputReader(directory)
        followed: list[Item] = []
        whole, streams = b"", []
        for number, (stream, size) in enumerate(parts):
            piece = written(number, size)
            writer.append(stream, piece)
            whole += piece
            streams += [stream] * size
            if data.draw(st.booleans()):
                followed += everything(follower, data.draw(st.integers(1, 200_000)))
                check(followed, whole, streams, 0)
        writer.end()
        writer.close()
        followed += everything(follower, 1 << 20)
        assert follower.ended and isinstance(followed[-1], End)
        check(followed, whole, streams, 0)
        follower.close()
        start = data.draw(st.integers(0, len(whole)))
        with OutputReader(directory, start) as later:
            items = everything(later, data.draw(st.integers(1, 1 << 20)))
        check(items, whole, streams, start)
        missing = sum(item.length for item in items if isinstance(item, Gap))
        assert missing <= writer.dropped
        with OutputReader(directory) as first:
            gaps = [item for item in everything(first, 1 << 20) if isinstance(item, Gap)]
        assert sum(gap.length for gap in gaps) == writer.dropped and len(gaps) <= 1
        # What stays is bounded by the cap and the segment being written; the beginning always stays.
        assert len(whole) - writer.dropped <= CAP + 2 * ((64 << 10) + 120_000)
        if gaps:
            assert gaps[0].offset >= CAP // 2


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(1, 100),
    st.sampled_from([True, False]),
)
def test_a_frame_cut_short_is_never_shown_torn(sizes: list[int], cut: int, dead: bool) -> None:
    """While the writer may live the half frame is invisible; once it is known dead its bytes are not lost."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        writer = OutputWriter(directory, cap=CAP)
        whole = b""
        for number, size in enumerate(sizes):
            piece = written(number, size)
            writer.append(STDOUT, piece)
            whole += piece
        writer.close()
        segment = next(Path(directory).iterdir())
        length = segment.stat().st_size
        os.truncate(segment, max(length - cut, 0))
        with OutputReader(directory, final=dead) as reader:
            seen = b"".join(item.data for item in everything(reader, 1 << 20) if isinstance(item, Chunk))
        assert whole.startswith(seen)
        if dead:
            assert len(seen) >= len(whole) - cut - 24 * len(sizes)
        else:
            edges = {sum(sizes[:count]) for count in range(len(sizes) + 1)}
            assert len(seen) in edges


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.data())
def test_a_reader_in_the_middle_of_a_write_waits_for_the_rest(sizes: list[int], data: st.DataObject) -> None:
    """Replay a finished log byte by byte into place, reading in between."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as finished,
        tempfile.TemporaryDirectory(dir=MEMORY) as growing,
    ):
        writer = OutputWriter(finished, cap=CAP)
        whole = b""
        for number, size in enumerate(sizes):
            piece = written(number, size)
            writer.append(STDOUT, piece)
            whole += piece
        writer.end()
        writer.close()
        source = next(Path(finished).iterdir())
        content = source.read_bytes()
        seen, place = b"", 0
        with OutputReader(growing) as reader, open(f"{growing}/{source.name}", "wb", buffering=0) as target:
            while place < len(content):
                step = data.draw(st.integers(1, 4000))
                target.write(content[place : place + step])
                place += step
                for item in everything(reader, 1 << 20):
                    seen += item.data if isinstance(item, Chunk) else b""
                assert whole.startswith(seen)
            assert reader.ended and seen == whole
