"""Trees as tar streams: entries out, and a reader that is fed with what arrives.

Both sides hold one piece at a time. Names that are not UTF-8 survive. Plain headers are packed here, since a
tree has thousands of them; the rare ones that need extensions are left to the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
END = bytes(2 * BLOCK)
_EXTENSION_LIMIT = 1 << 20
_NAME_ERRORS = "surrogateescape"
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "directory",
}


def header(
    name: str, *, size: int = 0, mode: int = 0o644, mtime: int = 0, directory: bool = False, link: str = ""
) -> bytes:
    """The header of one entry: a file unless it is a directory or has a link target."""
    kind = b"5" if directory else b"2" if link else b"0"
    raw, target = name.encode("utf-8", _NAME_ERRORS), link.encode("utf-8", _NAME_ERRORS)
    if len(raw) > 99 or len(target) > 99 or size >= 1 << 33 or not 0 <= mtime < 1 << 33:
        return _extended(name, kind, size=size, mode=mode, mtime=mtime, link=link)
    packed = _HEADER.pack(
        raw,
        b"%07o\0" % (mode & 0o7777),
        b"0000000\0",
        b"0000000\0",
        b"%011o\0" % size,
        b"%011o\0" % mtime,
        b"        ",
        kind,
        target,
        b"ustar\x0000",
        b"",
        b"",
        b"0000000\0",
        b"0000000\0",
        b"",
    )
    return b"%b%06o\0 %b" % (packed[:148], sum(packed), packed[156:])


def _extended(name: str, kind: bytes, *, size: int, mode: int, mtime: int, link: str) -> bytes:
    import tarfile

    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode, entry.mtime, entry.linkname = kind, size, mode & 0o7777, mtime, link
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", _NAME_ERRORS)


def padding(size: int) -> bytes:
    """What follows the content of a file of ``size`` bytes."""
    return bytes(-size % BLOCK)


def file(name: str, data: bytes, mode: int, *, mtime: int = 0) -> bytes:
    """A whole entry."""
    return header(name, size=len(data), mode=mode, mtime=mtime) + data + padding(len(data))


class BadArchive(ValueError):
    """What arrived is not a complete tar archive."""


class Entry(NamedTuple):
    """What an archive says about one entry."""

    name: str
    kind: str
    """``file``, ``directory``, ``symlink``, ``hardlink`` or ``other``."""
    mode: int
    size: int
    link: str


Event = Entry | bytes
"""An entry, or a piece of the content of the file entry before it."""


class TarFeed:
    """Turns pieces of an archive into entries and pieces of their content."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        self._padding = 0
        self._extension: tuple[bytes, int] | None = None
        self._records: dict[str, str] = {}
        self._ended = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """What is complete now."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        at = 0
        while not self._ended and at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                yield piece
            elif self._padding:
                skipped = min(self._padding, len(data) - at)
                at += skipped
                self._padding -= skipped
            else:
                needed = self._needed()
                if len(data) - at < needed:
                    self._rest = data[at:]
                    return
                entry = self._block(data[at : at + needed])
                at += needed
                if entry is not None:
                    if entry.kind == "file":
                        self._left, self._padding = entry.size, -entry.size % BLOCK
                    yield entry

    def finish(self) -> None:
        """The archive must be complete now.

        Raises:
            BadArchive: it was cut short.
        """
        if not self._ended:
            raise BadArchive("the archive was cut short")

    def _needed(self) -> int:
        """Bytes of the next thing that is read whole: a header, or the body of an extended one."""
        if self._extension is None:
            return BLOCK
        size = self._extension[1]
        return size + (-size % BLOCK)

    def _block(self, block: bytes) -> Entry | None:
        if self._extension is not None:
            kind, size = self._extension
            self._extension = None
            self._read_extension(kind, block[:size])
            return None
        if block.count(0) == BLOCK:
            self._ended = True
            return None
        name, mode, _, _, size_field, _, checksum, kind, link, magic, _, _, _, _, prefix = _HEADER.unpack(
            block
        )
        if _number(checksum) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
            raise BadArchive("a header is damaged")
        size = _number(size_field)
        if kind in (b"x", b"g", b"L", b"K"):
            if size > _EXTENSION_LIMIT:
                raise BadArchive("an extended header is too large")
            # An empty one has no body to wait for.
            self._extension = (kind, size) if size else None
            return None
        path = name.partition(b"\0")[0]
        if magic.startswith(b"ustar\0") and prefix[:1] != b"\0":
            path = prefix.partition(b"\0")[0] + b"/" + path
        return self._entry(_text(path), _text(link.partition(b"\0")[0]), kind, _number(mode), size)

    def _entry(self, name: str, link: str, kind: bytes, mode: int, size: int) -> Entry:
        records, self._records = self._records, {}
        if records:
            name, link = records.get("path", name), records.get("linkpath", link)
            if "size" in records:
                if not records["size"].isdecimal():
                    raise BadArchive("an extended header cannot be read")
                size = int(records["size"])
        return Entry(name, _KINDS.get(kind, "other"), mode & 0o7777, size, link)

    def _read_extension(self, kind: bytes, body: bytes) -> None:
        if kind in (b"L", b"K"):
            self._records["path" if kind == b"L" else "linkpath"] = _text(body.rstrip(b"\0"))
        elif kind == b"x":
            while body:
                length, separator, _ = body.partition(b" ")
                if not separator or not length.isdigit() or not len(length) < int(length) <= len(body):
                    raise BadArchive("an extended header cannot be read")
                record, body = body[len(length) + 1 : int(length) - 1], body[int(length) :]
                key, _, value = record.partition(b"=")
                self._records[key.decode("utf-8", "replace")] = _text(value)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", _NAME_ERRORS)


def _number(field: bytes) -> int:
    """An octal field, or a binary one for what octal has no room for."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        raise BadArchive("a header is damaged") from None
