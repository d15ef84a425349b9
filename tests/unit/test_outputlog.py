"""The output log as files: whatever is written in whatever pieces, any reader sees it whole or with gaps."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.shared.outputlog import (
    DAMAGED,
    STDERR,
    STDOUT,
    Chunk,
    End,
    Gap,
    Item,
    OutputReader,
    OutputWriter,
)
from sandkeep.shared.processrecord import add_record, last_record

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


# --- damage --------------------------------------------------------------------------------------------


def log_of(directory: str, sizes: list[int]) -> tuple[bytes, Path]:
    """A finished log in one segment."""
    writer = OutputWriter(directory, cap=CAP)
    whole = b""
    for number, size in enumerate(sizes):
        piece = written(number, size)
        writer.append(STDOUT, piece)
        whole += piece
    writer.end()
    writer.close()
    return whole, next(Path(directory).iterdir())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_damaged_byte_is_told_and_never_served(sizes: list[int], place: int, change: int) -> None:
    """Whichever byte it is: what is served is right, what is missing is said, the rest is found."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        whole, segment = log_of(directory, sizes)
        content = bytearray(segment.read_bytes())
        content[place % len(content)] ^= change
        segment.write_bytes(content)
        with OutputReader(directory, final=True) as reader:
            items = everything(reader, 1 << 20)
    at = missing = 0
    for item in items:
        assert item.offset == at
        if isinstance(item, Chunk):
            assert item.data == whole[at : at + len(item.data)]
            at += len(item.data)
        elif isinstance(item, Gap):
            assert item.reason == DAMAGED
            at += item.length
            missing += 1
    assert missing == 1, items
    lost = len(whole) - sum(len(item.data) for item in items if isinstance(item, Chunk))
    assert lost <= max(sizes), "more is missing than the frame that was damaged"


def test_a_damaged_log_is_read_on_while_it_grows() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        writer = OutputWriter(directory, cap=CAP)
        writer.append(STDOUT, b"one")
        writer.append(STDOUT, b"two")
        segment = next(Path(directory).iterdir())
        content = bytearray(segment.read_bytes())
        content[len(content) - 3 - 20] ^= 1  # in the header of the second frame
        segment.write_bytes(content)
        with OutputReader(directory) as reader:
            assert [item.data for item in everything(reader, 9) if isinstance(item, Chunk)] == [b"one"]
            assert reader.give_up(6) == Gap(3, 3, DAMAGED), "what the writer knows it has written"
            writer.append(STDOUT, b"three")
            (third,) = everything(reader, 1 << 20)
            assert isinstance(third, Chunk) and (third.offset, third.data) == (6, b"three")
        writer.close()


def test_logs_without_checksums_are_read_and_their_headers_are_looked_at() -> None:
    """What supervisors of earlier versions write, who may live on through an upgrade."""

    def frame(stream: int, offset: int, data: bytes) -> bytes:
        return struct.pack("<IB3xQQ", len(data), stream, 7, offset) + data

    frames = [
        frame(STDOUT, 0, b"one"),
        frame(STDERR, 3, b"two"),
        frame(STDOUT, 6, b"three"),
        frame(255, 11, b""),
    ]
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        segment = Path(directory) / f"{0:016x}.log"
        segment.write_bytes(b"".join(frames))
        with OutputReader(directory) as reader:
            items = everything(reader, 1 << 20)
        assert items == [
            Chunk(0, 7, STDOUT, b"one"),
            Chunk(3, 7, STDERR, b"two"),
            Chunk(6, 7, STDOUT, b"three"),
            End(11, 7),
        ]
        segment.write_bytes(frames[0] + b"\x77" * len(frames[1]) + frames[2] + frames[3])
        with OutputReader(directory, final=True) as reader:
            assert everything(reader, 1 << 20) == [items[0], Gap(3, 0, DAMAGED)]


def test_a_damaged_segment_is_a_gap_up_to_the_next() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        writer = OutputWriter(directory, cap=CAP)
        for number in range(4):
            writer.append(STDOUT, written(number, 70_000))
        writer.close()
        second = sorted(Path(directory).iterdir())[1]
        second.write_bytes(bytes(second.stat().st_size))
        with OutputReader(directory) as reader:
            items = everything(reader, 1 << 20)
    assert [type(item) for item in items] == [Chunk, Gap, Chunk, Chunk]
    assert items[1] == Gap(70_000, 70_000, DAMAGED)


def test_a_damaged_record_gives_way_to_the_one_before(tmp_path: Path) -> None:
    directory = str(tmp_path)
    records = tmp_path / "record.jsonl"
    running: dict[str, Any] = {"id": "p", "argv": ["true"], "cwd": "/", "pty": False}
    running |= {"status": "running", "exit_code": None, "reason": None, "started_ms": 1, "finished_ms": None}
    add_record(directory, running)
    add_record(directory, {**running, "status": "exited", "exit_code": 10})
    assert last_record(directory)["exit_code"] == 10
    whole = records.read_bytes()
    records.write_bytes(whole.replace(b'"exit_code":10', b'"exit_code":11'))
    assert last_record(directory) == running, "the checksum is wrong"
    records.write_bytes(whole[:-30] + b"\n")
    assert last_record(directory) == running, "no JSON"
    records.write_text(json.dumps({**running, "status": "lost"}) + "\n")
    assert last_record(directory)["status"] == "lost", "of an earlier version, without a checksum"
    records.write_bytes(b"\0\0\0\n")
    with pytest.raises(ValueError, match="damaged"):
        last_record(directory)
