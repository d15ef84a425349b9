"""Reading a tar archive as a stream: ustar, PAX and GNU long names, any size, bounded memory.

``TarReader`` yields one ``Member`` at a time; its content must be taken with ``read_into`` or ``read_all``
before the next, and is skipped otherwise. Names are bytes exactly as stored: judging them is the caller's
job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from sandkeep.errors import ImageError
from sandkeep.host.images.streams import CHUNK, Source

BLOCK = 512
_LONGEST_EXTENSION = 8 << 20
_MOST_DIGITS = 20
"""Of a number in an extended header; what 64 bits hold has no more."""
_FURTHEST_NS = (1 << 62) * 1_000_000_000
"""Times beyond are ones no file can have; the kernel brings the others to what the filesystem can hold."""

FILE = b"0"
HARDLINK = b"1"
SYMLINK = b"2"
CHARACTER = b"3"
BLOCK_DEVICE = b"4"
DIRECTORY = b"5"
FIFO = b"6"
_CONTIGUOUS = b"7"
_PLAIN = (b"0", b"\0", _CONTIGUOUS)
_PAX_HERE = b"x"
_PAX_GLOBAL = b"g"
_GNU_NAME = b"L"
_GNU_LINK = b"K"
_GNU_SPARSE = b"S"


@dataclass(slots=True)
class Member:
    name: bytes
    type: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes
    offset: int
    """Where its content starts in the stream."""
    xattrs: dict[str, bytes] = field(default_factory=dict)


class TarReader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = b""
        self._start = 0
        self._position = 0
        self._left = 0
        """Content of the current member not taken yet."""
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        defaults: dict[bytes, bytes] = {}
        extended: dict[bytes, bytes] = {}
        while True:
            self._skip(self._left + self._padding)
            self._left = self._padding = 0
            header = self._take(BLOCK, partial=True)
            if not header or header == bytes(BLOCK):
                return  # some writers end after one zero block, some with none
            member = _parse(header, self._position)
            self._left, self._padding = member.size, -member.size % BLOCK
            if member.type in (_PAX_HERE, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                if member.size > _LONGEST_EXTENSION:
                    raise ImageError("damaged archive: an extended header of more than 8 MiB")
                text = self.read_all()
                if member.type == _PAX_HERE:
                    extended.update(_pax_records(text))
                elif member.type == _PAX_GLOBAL:
                    defaults.update(_pax_records(text))
                else:
                    key = b"path" if member.type == _GNU_NAME else b"linkpath"
                    extended[key] = text.rstrip(b"\0")
                continue
            _extend(member, {**defaults, **extended})
            extended = {}
            if member.type in _PLAIN:
                # Archives from before 1988 mark directories by a trailing slash. The whole name counts: the
                # header itself has only the beginning of a long one, which may end with any character.
                slash = member.name.endswith(b"/") and member.type != _CONTIGUOUS
                member.type = DIRECTORY if slash else FILE
            if member.type in (HARDLINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO):
                member.size = 0
            self._left, self._padding = member.size, -member.size % BLOCK
            yield member

    def read_into(self, fd: int) -> None:
        """Write the current member's content to ``fd``."""
        while self._left:
            if self._start == len(self._buffer):
                self._fill()
            piece = memoryview(self._buffer)[self._start : self._start + self._left]
            written = os.write(fd, piece)
            self._advance(written)
            self._left -= written

    def read_all(self) -> bytes:
        data = self._take(self._left)
        self._left = 0
        return data

    def _advance(self, count: int) -> None:
        self._start += count
        self._position += count

    def _fill(self) -> None:
        self._buffer, self._start = self._source.read(CHUNK), 0
        if not self._buffer:
            raise ImageError("the archive ends too early")

    def _take(self, size: int, *, partial: bool = False) -> bytes:
        parts = []
        wanted = size
        while wanted:
            if self._start == len(self._buffer):
                self._buffer, self._start = self._source.read(CHUNK), 0
                if not self._buffer:
                    if partial and wanted == size:
                        return b""
                    raise ImageError("the archive ends too early")
            piece = self._buffer[self._start : self._start + wanted]
            self._advance(len(piece))
            wanted -= len(piece)
            parts.append(piece)
        return b"".join(parts)

    def _skip(self, count: int) -> None:
        while count:
            if self._start == len(self._buffer):
                self._fill()
            step = min(count, len(self._buffer) - self._start)
            self._advance(step)
            count -= step


def _parse(header: bytes, position: int) -> Member:
    stored = _number(header[148:156])
    if stored != sum(header[:148]) + sum(header[156:]) + 8 * 32:
        raise ImageError("damaged archive: a header's checksum is wrong")
    name = header[0:100].split(b"\0", 1)[0]
    kind = header[156:157]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        if prefix:
            name = prefix + b"/" + name
    if kind == _GNU_SPARSE:
        raise ImageError(f"sparse archive entries are not supported: {os.fsdecode(name)}")
    size = _number(header[124:136])
    if size < 0:
        raise ImageError(f"damaged archive: {os.fsdecode(name)} has a size of {size}")
    return Member(
        name=name,
        type=kind,
        mode=_number(header[100:108]) & 0o7777,
        uid=_number(header[108:116]),
        gid=_number(header[116:124]),
        size=size,
        mtime_ns=_possible(_number(header[136:148]) * 1_000_000_000),
        link=header[157:257].split(b"\0", 1)[0],
        offset=position,
    )


def _number(text: bytes) -> int:
    if text[0] & 0x80:  # base-256, for what octal digits cannot hold
        value = int.from_bytes(text, "big") & ~(0x80 << 8 * (len(text) - 1))
        if text[0] & 0x40:
            value -= 1 << (8 * len(text) - 1)
        return value
    digits = text.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise ImageError(f"damaged archive: {digits!r} is not an octal number") from None


def _pax_records(text: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    while text.strip(b"\0"):
        length, separator, _ = text.partition(b" ")
        if not separator or not _is_number(length) or not len(length) < int(length) <= len(text):
            raise ImageError("damaged archive: an extended header's length is wrong")
        record = text[len(length) + 1 : int(length)]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise ImageError("damaged archive: an extended header record is malformed")
        records[key] = value[:-1]
        text = text[int(length) :]
    return records


def _extend(member: Member, records: dict[bytes, bytes]) -> None:
    """Apply extended header records to a member."""
    for key, value in records.items():
        if b"\0" in key or (b"\0" in value and key in (b"path", b"linkpath")):
            raise ImageError(f"damaged archive: a zero byte in a name: {(key + b'=' + value)[:80]!r}")
        if key == b"path":
            member.name = value
        elif key == b"linkpath":
            member.link = value
        elif key in (b"size", b"uid", b"gid"):
            if not _is_number(value):
                raise ImageError(f"damaged archive: {key.decode()} {value[:80]!r}")
            setattr(member, key.decode(), int(value))
        elif key == b"mtime":
            member.mtime_ns = _time_ns(value)
        elif key.startswith(b"SCHILY.xattr."):
            member.xattrs[os.fsdecode(key[len(b"SCHILY.xattr.") :])] = value
        elif key.startswith(b"GNU.sparse."):
            raise ImageError(f"sparse archive entries are not supported: {os.fsdecode(member.name)}")


def _time_ns(text: bytes) -> int:
    whole, _, fraction = text.partition(b".")
    try:
        nanoseconds = int((fraction + b"000000000")[:9])
        seconds = int(whole) * 1_000_000_000
        return _possible(seconds + (-nanoseconds if whole.startswith(b"-") else nanoseconds))
    except ValueError:
        raise ImageError(f"damaged archive: time {text[:80]!r}") from None


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MOST_DIGITS


def _possible(time_ns: int) -> int:
    return max(-_FURTHEST_NS, min(time_ns, _FURTHEST_NS))
