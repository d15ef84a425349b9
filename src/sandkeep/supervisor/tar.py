"""Tar archives as streams: a reader that pulls, a writer that pushes, neither holding more than a header.

The reader understands ustar, PAX and GNU headers, optionally compressed with gzip, which it recognises
itself. Names and attribute values are bytes. Anything wrong with an archive, a missing end included, is an
``ArchiveError`` saying at which entry; sparse files and multi-volume archives are refused.

The writer emits plain ustar headers and adds a PAX header only for what they cannot hold. Times are whole
seconds and no host names or user names are stored: equal input gives equal bytes.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

from sandkeep.errors import ArchiveError, TransportError

BLOCK = 512
EXTENDED_LIMIT = 1 << 20
"""Largest extension header (PAX, or a GNU long name) accepted."""

_CHUNK = 1 << 18
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_ZEROS = bytes(BLOCK)
_LATEST = 1 << 40
"""No time further from the epoch than this many seconds, either way, can be set on a file."""

_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "character_device",
    b"4": "block_device",
    b"5": "directory",
    b"6": "fifo",
}
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "directory": b"5"}
_XATTR = b"SCHILY.xattr."
_GLOBAL_KEYS = (b"path", b"linkpath", b"size", b"mtime", b"uid", b"gid")


class Entry:
    """One entry; its content can be read until the next entry is asked for."""

    __slots__ = (
        "_reader",
        "gid",
        "index",
        "kind",
        "link",
        "mode",
        "mtime_ns",
        "name",
        "size",
        "uid",
        "xattrs",
    )

    def __init__(self, reader: TarReader, kind: str, name: bytes, index: int) -> None:
        self._reader = reader
        self.kind = kind
        self.name = name
        self.index = index
        """How many entries came before it."""
        self.link = b""
        self.mode = 0
        self.uid = 0
        self.gid = 0
        self.size = 0
        self.mtime_ns = 0
        self.xattrs: dict[bytes, bytes] = {}

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes of the content, ``b""`` at its end."""
        return self._reader.content(self, count)

    def copy_to(self, fd: int) -> int:
        """Write the rest of the content to ``fd`` and return how many bytes that was."""
        total = 0
        while chunk := self._reader.content(self, _CHUNK):
            written = os.write(fd, chunk)
            while written < len(chunk):
                written += os.write(fd, memoryview(chunk)[written:])
            total += written
        return total


class TarReader:
    """Iterates over the entries of the archive that ``read(n)`` returns, up to ``n`` bytes at a time."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._buffer = b""
        self._position = 0
        self._current: Entry | None = None
        # Bytes of the current entry's content not yet read, and of the padding after them.
        self._left = 0
        self._padding = 0
        self._count = 0
        self._ended = False
        self._global: dict[bytes, bytes] = {}

    def __iter__(self) -> Iterator[Entry]:
        self._start()
        while (entry := self._next()) is not None:
            yield entry

    def content(self, entry: Entry, count: int) -> bytes:
        if entry is not self._current:
            raise ValueError("the archive has moved on to another entry")
        count = min(count, self._left)
        if count <= 0:
            return b""
        data = self._some(count)
        if not data:
            raise self._error("the archive ends in the middle of its content")
        self._left -= len(data)
        return data

    # --- bytes -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        while len(self._buffer) < 2 and (chunk := self._pull(_CHUNK)):
            self._buffer += chunk
        if self._buffer[:2] == b"\x1f\x8b":
            self._read = _Gunzip(self._buffer, self._read).read
            self._buffer = b""

    def _pull(self, count: int) -> bytes:
        try:
            return self._read(count)
        except OSError as error:
            raise self._error(f"the archive stopped arriving: {error.strerror or error}") from error
        except zlib.error as error:
            raise self._error(f"damaged gzip data: {error}") from error

    def _some(self, count: int) -> bytes:
        """Between one and ``count`` bytes; ``b""`` at the end."""
        start = self._position
        if start < len(self._buffer):
            end = min(start + count, len(self._buffer))
            self._position = end
            return self._buffer[start:end]
        chunk = self._pull(_CHUNK)
        if len(chunk) <= count:
            return chunk
        self._buffer = chunk
        self._position = count
        return chunk[:count]

    def _take(self, count: int) -> bytes:
        """``count`` bytes, fewer only at the end."""
        end = self._position + count
        if end <= len(self._buffer):
            data = self._buffer[self._position : end]
            self._position = end
            return data
        parts = []
        while count and (part := self._some(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _skip(self) -> None:
        count = self._left + self._padding
        self._left = self._padding = 0
        available = len(self._buffer) - self._position
        if count <= available:
            self._position += count
            return
        while count:
            part = self._some(min(count, _CHUNK))
            if not part:
                raise self._error("the archive ends in the middle of its content")
            count -= len(part)

    def _drain(self) -> None:
        """Whoever sends may still be writing padding, and the end of gzip data holds its checksum."""
        self._ended = True
        self._buffer = b""
        while self._pull(_CHUNK):
            pass

    # --- headers ---------------------------------------------------------------------------------------

    def _error(self, message: str, name: bytes | None = None) -> ArchiveError:
        if name is None and self._current is not None:
            name = self._current.name
        text = os.fsdecode(name) if name is not None else None
        where = f"entry {self._count}" + (f" ({text})" if text is not None else "")
        return ArchiveError(f"{where}: {message}", entry=text, index=self._count)

    def _next(self) -> Entry | None:
        if self._ended:
            return None
        self._skip()
        if self._current is not None:
            self._current = None
            self._count += 1
        extended: dict[bytes, bytes] = {}
        long_name = long_link = None
        while True:
            header = self._take(BLOCK)
            if len(header) < BLOCK:
                raise self._error("the archive ends without its end marker")
            if header == _ZEROS:
                self._drain()
                return None
            fields = self._unpack(header)
            kind = fields[7]
            if kind in (b"x", b"X"):
                extended = self._pax(self._extension(fields[4]))
            elif kind == b"g":
                # Attributes are per file; the rest is a handful of keys, however many headers there are.
                records = self._pax(self._extension(fields[4]))
                self._global |= {key: records[key] for key in _GLOBAL_KEYS if key in records}
            elif kind == b"L":
                long_name = self._extension(fields[4]).partition(b"\0")[0]
            elif kind == b"K":
                long_link = self._extension(fields[4]).partition(b"\0")[0]
            elif kind == b"V":
                self._left = self._number(fields[4], "size")
                self._padding = -self._left % BLOCK
                self._skip()
            else:
                return self._entry(fields, {**self._global, **extended}, long_name, long_link)

    def _unpack(self, header: bytes) -> tuple[bytes, ...]:
        fields = _HEADER.unpack(header)
        expected = self._number(fields[6], "checksum")
        stored = fields[6]
        if sum(header) - sum(stored) + 256 != expected:
            signed = sum(struct.unpack("512b", header)) - sum(struct.unpack("8b", stored)) + 256
            if signed != expected:
                raise self._error("not a tar header (wrong checksum)")
        return fields

    def _extension(self, size_field: bytes) -> bytes:
        size = self._number(size_field, "size")
        if size > EXTENDED_LIMIT:
            raise self._error(f"an extension header of {size} bytes; at most {EXTENDED_LIMIT} are accepted")
        data = self._take(size + -size % BLOCK)
        if len(data) < size + -size % BLOCK:
            raise self._error("the archive ends in the middle of a header")
        return data[:size]

    def _entry(
        self,
        fields: tuple[bytes, ...],
        extended: dict[bytes, bytes],
        long_name: bytes | None,
        long_link: bytes | None,
    ) -> Entry:
        name = long_name or fields[0].partition(b"\0")[0]
        if long_name is None and fields[9][:6] == b"ustar\0" and fields[14][0]:
            name = fields[14].partition(b"\0")[0] + b"/" + name
        kind = _KINDS.get(fields[7])
        if extended:
            name = extended.get(b"path", name)
        if kind is None or any(key.startswith(b"GNU.sparse.") for key in extended):
            what = "a sparse file" if kind or fields[7] == b"S" else f"of unknown type {fields[7]!r}"
            raise self._error(f"is {what}, which is not supported", name)
        if kind == "file" and name.endswith(b"/"):
            kind = "directory"
        if not name or b"\0" in name:
            raise self._error("has no usable name", name)

        entry = Entry(self, kind, name, self._count)
        self._current = entry
        entry.mode = self._number(fields[1], "mode") & 0o7777
        entry.uid = self._number(fields[2], "uid")
        entry.gid = self._number(fields[3], "gid")
        size = self._number(fields[4], "size")
        mtime = self._number(fields[5], "time", negative=True)
        if not -_LATEST < mtime < _LATEST:
            raise self._error("has a time out of range")
        entry.mtime_ns = mtime * 1_000_000_000
        if kind in ("symlink", "hardlink"):
            entry.link = long_link or fields[8].partition(b"\0")[0]
        if extended:
            size = self._apply(entry, extended, size)
        if kind in ("symlink", "hardlink") and (not entry.link or b"\0" in entry.link):
            raise self._error("is a link to nowhere")
        if _KINDS[fields[7]] == "file":
            entry.size = self._left = size
            self._padding = -size % BLOCK
        return entry

    def _apply(self, entry: Entry, extended: dict[bytes, bytes], size: int) -> int:
        """What PAX records say overrides the header. Returns the size they leave."""
        for key, value in extended.items():
            if key == b"size":
                size = self._decimal(value)
            elif key == b"uid":
                entry.uid = self._decimal(value)
            elif key == b"gid":
                entry.gid = self._decimal(value)
            elif key == b"mtime":
                entry.mtime_ns = self._time(value)
            elif key == b"linkpath" and entry.link:
                entry.link = value
            elif key.startswith(_XATTR):
                entry.xattrs[key[len(_XATTR) :]] = value
        return size

    def _pax(self, data: bytes) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(data):
            space = data.find(b" ", position, position + 8)
            digits = data[position:space] if space > 0 else b""
            if not digits.isdigit():
                raise self._error("a malformed extension header")
            end = position + int(digits)
            key, equals, value = data[space + 1 : end - 1].partition(b"=")
            if end <= space + 1 or data[end - 1 : end] != b"\n" or not (key and equals) or b"\0" in key:
                raise self._error("a malformed extension header")
            if value or key.startswith(_XATTR):
                records[key] = value
            else:
                records.pop(key, None)
            position = end
        return records

    def _number(self, field: bytes, what: str, *, negative: bool = False) -> int:
        if field[0] & 0x80:
            # Base 256: a marker bit, then a two's complement number.
            marker = 0x80 << 8 * (len(field) - 1)
            value = int.from_bytes(field, "big") - marker
            if value & marker >> 1:
                value -= marker
            if value >= 1 << 63 or (value < 0 and not negative):
                raise self._error(f"has a {what} out of range")
            return value
        digits = field.strip(b" \0").partition(b"\0")[0].rstrip()
        try:
            # int() alone would take signs and underscores.
            if digits.isdigit():
                return int(digits, 8)
        except ValueError:
            pass
        if digits:
            raise self._error(f"has a {what} that is no number")
        return 0

    def _decimal(self, value: bytes) -> int:
        if not value.isdigit() or len(value) > 18:
            raise self._error("has a number out of range in its extension header")
        return int(value)

    def _time(self, value: bytes) -> int:
        sign = -1 if value.startswith(b"-") else 1
        whole, _, fraction = value.removeprefix(b"-").partition(b".")
        seconds = self._decimal(whole or b"0")
        if (fraction and not fraction.isdigit()) or seconds >= _LATEST:
            raise self._error("has a time out of range")
        return sign * (seconds * 1_000_000_000 + int((fraction[:9] + b"000000000")[:9]))


class _Gunzip:
    """``read(n)`` over gzip members, given what was already read of them."""

    __slots__ = ("_compressed", "_member", "_read")

    def __init__(self, start: bytes, read: Callable[[int], bytes]) -> None:
        self._compressed = start
        self._read = read
        self._member: zlib._Decompress | None = zlib.decompressobj(31)

    def read(self, count: int) -> bytes:
        while True:
            if not self._compressed:
                self._compressed = self._read(_CHUNK)
                if not self._compressed:
                    if self._member is not None:
                        raise zlib.error("incomplete")
                    return b""
            if self._member is None:
                # Tapes and some tools pad with zeros after the last member.
                self._compressed = self._compressed.lstrip(b"\0")
                if not self._compressed:
                    continue
                self._member = zlib.decompressobj(31)
            data = self._member.decompress(self._compressed, count)
            if self._member.eof:
                self._compressed = self._member.unused_data
                self._member = None
            else:
                self._compressed = self._member.unconsumed_tail
            if data:
                return data


class TarWriter:
    """Writes an archive through ``write(bytes)``: ``add``, the announced ``content``, at last ``close``.

    ``write`` gets pieces of up to half a megabyte and must take all of each.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._sink = write
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._left = 0
        self._padding = 0

    def add(
        self,
        name: bytes,
        kind: str,
        *,
        mode: int,
        uid: int = 0,
        gid: int = 0,
        size: int = 0,
        mtime: int = 0,
        link: bytes = b"",
        xattrs: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Start an entry. ``size`` bytes of content must follow for a file, none for anything else."""
        if self._left:
            raise ValueError(f"{self._left} bytes of the previous entry are missing")
        if not name or b"\0" in name + link:
            raise ValueError("a name is empty or has a NUL byte")
        if kind == "directory" and not name.endswith(b"/"):
            name += b"/"
        records: dict[bytes, bytes] = {_XATTR + key: value for key, value in sorted((xattrs or {}).items())}
        prefix, short = _fit(name)
        if short is None:
            records[b"path"] = name
            short = name[-100:]
        if len(link) > 100:
            records[b"linkpath"] = link
        if any(_not_text(records.get(key, b"")) for key in (b"path", b"linkpath")):
            records = {b"hdrcharset": b"BINARY", **records}
        numbers = [
            _octal(uid, 8, b"uid", records),
            _octal(gid, 8, b"gid", records),
            _octal(size, 12, b"size", records),
            _octal(mtime, 12, b"mtime", records),
        ]
        header = b""
        if records:
            body = b"".join(_record(key, value) for key, value in records.items())
            plain = [
                _octal(number, width, b"", {}) for number, width in ((0, 8), (0, 8), (len(body), 12), (0, 12))
            ]
            header = _pack(b"PaxHeaders/" + short.rstrip(b"/")[-80:], b"x", 0o644, plain, b"", b"")
            header += body + bytes(-len(body) % BLOCK)
        self._write(header + _pack(short, _TYPES[kind], mode, numbers, link[:100], prefix))
        self._left = size if kind == "file" else 0
        self._padding = -self._left % BLOCK
        self._finish()

    def content(self, data: bytes) -> None:
        """More of the announced content."""
        if len(data) > self._left:
            raise ValueError(f"{len(data) - self._left} bytes more than announced")
        self._left -= len(data)
        self._write(data)
        self._finish()

    def close(self) -> None:
        """Write the end marker."""
        if self._left:
            raise ValueError(f"{self._left} bytes of the last entry are missing")
        self._write(bytes(2 * BLOCK))
        self._flush()

    def _write(self, data: bytes) -> None:
        """Small pieces go out together."""
        self._pending.append(data)
        self._pending_size += len(data)
        if self._pending_size >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending.clear()
        self._pending_size = 0
        try:
            self._sink(data)
        except OSError as error:
            raise TransportError(f"nobody takes the archive any more: {error}") from error

    def _finish(self) -> None:
        if not self._left and self._padding:
            self._write(bytes(self._padding))
            self._padding = 0


def _pack(name: bytes, kind: bytes, mode: int, numbers: list[bytes], link: bytes, prefix: bytes) -> bytes:
    header = _HEADER.pack(
        name,
        b"%07o\0" % (mode & 0o7777),
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        b"        ",
        kind,
        link,
        b"ustar\x0000",
        b"",
        b"",
        b"",
        b"",
        prefix,
    )
    return b"%b%06o\0 %b" % (header[:148], sum(header), header[156:])


def _octal(value: int, width: int, key: bytes, records: dict[bytes, bytes]) -> bytes:
    """The header field; what does not fit goes to ``records`` under ``key``."""
    if not 0 <= value < 8 ** (width - 1):
        records[key] = b"%d" % value
        value = 0
    return b"%0*o\0" % (width - 1, value)


def _fit(name: bytes) -> tuple[bytes, bytes | None]:
    """Prefix and name as a ustar header holds them; no name if it cannot."""
    if len(name) <= 100:
        return b"", name
    cut = name.find(b"/", len(name) - 101, len(name) - 1)
    if 0 < cut <= 155:
        return name[:cut], name[cut + 1 :]
    return b"", None


def _record(key: bytes, value: bytes) -> bytes:
    """One PAX record, whose length counts its own digits."""
    size = len(key) + len(value) + 3
    total = size + len(str(size))
    if len(str(total)) != len(str(size)):
        total = size + len(str(total))
    return b"%d %b=%b\n" % (total, key, value)


def _not_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False
