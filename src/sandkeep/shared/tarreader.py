"""Read tar archives: one parser of headers without I/O, and two readers around it.

``TarParser`` is the core. It takes blocks and returns entries, and every decision about what an archive
means is made there. ``TarReader`` pulls an archive through ``read(n)``; ``TarFeed`` is given the chunks as
they arrive. None of them holds more than one header and one chunk.

The parser understands ustar, PAX and GNU headers. Names and attribute values are bytes. Anything wrong is
an ``ArchiveError`` that names the entry. Where implementations of tar disagree, the parser decides as
follows, the same for images, uploads and downloads:

- **End marker**: one block of zeros ends the archive. Without one the archive is refused: it may be cut
  short.
- **Type**: an unknown type, a sparse file (GNU or PAX) and a part of a multi-volume archive are refused. A
  volume label is skipped; one with content is refused. A contiguous file (type 7) is a file.
- **V7 directory**: a file whose whole name ends with a slash is a directory. If its size is not zero it is
  refused: readers disagree on whether content follows.
- **Content**: only files have any. The size of links, directories, FIFOs and devices is ignored, as POSIX
  says.
- **Names**: an empty one, one with a NUL byte, and an empty link target are refused. A PAX ``path`` wins
  over a GNU long name, and that over the header. The prefix field counts in POSIX headers only: GNU has
  other data there.
- **Global PAX headers**: ``uid``, ``gid`` and ``mtime`` apply to the entries that follow; ``path``,
  ``linkpath`` and ``size`` are refused, since they would name or cut every entry alike; all else is
  ignored.
- **Extension headers**: at most 1 MiB each, one of each type in front of an entry, and an entry must
  follow. A malformed record is refused. An empty value takes back what a global header set.
- **Numbers**: octal digits, or base 256. Signs, underscores and other text are refused, as are negative
  numbers except for times, and times more than 2**40 seconds from the epoch.
- **Checksum**: the sum of the bytes, unsigned or signed: historical writers summed signed ones.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator

from sandkeep.errors import ArchiveError
from sandkeep.shared.tar import BLOCK, CHUNK, XATTR, checksum

EXTENDED_LIMIT = 1 << 20
"""Largest extension header (PAX, or a GNU long name) accepted."""
TRAILER_LIMIT = 1 << 20
"""Most bytes after the end marker that ``TarFeed`` keeps."""

# name, mode, uid, gid, size, mtime, checksum, type, link, magic, prefix
_PARSED = struct.Struct("100s8s8s8s12s12s8sc100s6s82x155s12x")
_ZEROS = bytes(BLOCK)
_LATEST = 1 << 40
"""Largest distance from the epoch, in seconds, of a time that a file can have."""

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
_EXTENSIONS = {b"x": b"x", b"X": b"x", b"g": b"g", b"L": b"L", b"K": b"K"}
_LABEL = b"V"
_SPARSE = b"S"
_PAX_SPARSE = b"GNU.sparse."
_GLOBAL_KEYS = (b"uid", b"gid", b"mtime")
_NEVER_GLOBAL = (b"path", b"linkpath", b"size")


class TarEntry:
    """One entry. If a ``TarReader`` made it, its content can be read until the next entry is asked for."""

    __slots__ = (
        "_reader",
        "gid",
        "index",
        "kind",
        "link",
        "mode",
        "mtime_ns",
        "name",
        "offset",
        "size",
        "uid",
        "xattrs",
    )

    _reader: TarReader | None
    mode: int
    uid: int
    gid: int
    size: int
    """Bytes of content that follow the header; 0 for anything but a file."""
    mtime_ns: int
    offset: int
    """Where the content starts in the archive."""

    def __init__(self, kind: str, name: bytes, index: int) -> None:
        self._reader = None
        self.kind = kind
        self.name = name
        self.index = index
        """Number of entries before it."""
        self.link = b""
        self.xattrs: dict[bytes, bytes] = {}

    def read(self, count: int) -> bytes:
        """Return up to ``count`` bytes of the content, ``b""`` at its end."""
        if self._reader is None:
            raise ValueError("only entries of a TarReader can be read")
        return self._reader.content(self, count)

    def copy_to(self, fd: int) -> int:
        """Write the rest of the content to ``fd`` and return its length."""
        total = 0
        while chunk := self.read(CHUNK):
            written = os.write(fd, chunk)
            while written < len(chunk):
                written += os.write(fd, memoryview(chunk)[written:])
            total += written
        return total


class TarParser:
    """The meaning of headers, without I/O.

    Call ``take`` with exactly ``wanted`` bytes, repeatedly, until ``ended``. After each entry that it
    returns, skip ``entry.size`` bytes of content and ``padding(entry.size)`` before the next call.
    """

    def __init__(self) -> None:
        self.wanted = BLOCK
        """Length of the next block: a header, or the body of an extension header with its padding."""
        self.ended = False
        self.count = 0
        """Entries returned so far."""
        self._position = 0
        self._name: bytes | None = None
        # The type and size of the extension header whose body is wanted next.
        self._extension = b""
        self._extension_size = 0
        # Bodies of the extension headers in front of the next entry, by type.
        self._extensions: dict[bytes, bytes] = {}
        self._global: dict[bytes, bytes] = {}

    def take(self, block: bytes) -> TarEntry | None:
        """Read one block; return the entry if the block completes one."""
        self._position += len(block)
        if self._extension:
            self._end_extension(block)
            return None
        if block == _ZEROS:
            self._end()
            return None
        self._name = None
        fields = _PARSED.unpack(block)
        stored = fields[6]
        expected = self._number(stored, "checksum")
        if checksum(block) - sum(stored) + 256 != expected:
            self._check_signed(block, expected)
        kind = _KINDS.get(fields[7])
        if kind is None:
            self._start_special(fields)
            return None
        return self._entry(kind, fields)

    def error(self, message: str, entry: TarEntry | None = None) -> ArchiveError:
        """Return an error about ``entry``, or about the one whose header is being read."""
        name, index = (self._name, self.count) if entry is None else (entry.name, entry.index)
        text = os.fsdecode(name) if name is not None else None
        where = f"entry {index}" + (f" ({text})" if text is not None else "")
        return ArchiveError(f"{where}: {message}", entry=text, index=index)

    # --- blocks ----------------------------------------------------------------------------------------

    def _check_signed(self, block: bytes, expected: int) -> None:
        signed = sum(struct.unpack("512b", block)) - sum(struct.unpack("8b", block[148:156])) + 256
        if signed != expected:
            raise self.error("not a tar header (wrong checksum)")

    def _end(self) -> None:
        if self._extensions:
            raise self.error("the archive ends after an extension header")
        self.ended = True

    def _start_special(self, fields: tuple[bytes, ...]) -> None:
        """Read the header of anything that is not an entry."""
        size = self._number(fields[4], "size")
        extension = _EXTENSIONS.get(fields[7])
        if extension is not None:
            self._start_extension(extension, size)
            return
        self._name = fields[0].partition(b"\0")[0]
        if fields[7] == _SPARSE:
            raise self._sparse()
        if fields[7] != _LABEL:
            raise self.error(f"is of unknown type {fields[7]!r}, which is not supported")
        if size:
            raise self.error("is a volume label with content, which is not supported")

    def _start_extension(self, extension: bytes, size: int) -> None:
        if size > EXTENDED_LIMIT:
            raise self.error(f"an extension header of {size} bytes; at most {EXTENDED_LIMIT} are accepted")
        if extension in self._extensions:
            raise self.error("two extension headers of the same type")
        self._extension, self._extension_size = extension, size
        self.wanted = size + -size % BLOCK
        if not size:
            self._end_extension(b"")

    def _end_extension(self, block: bytes) -> None:
        body = block[: self._extension_size]
        extension, self._extension, self.wanted = self._extension, b"", BLOCK
        if extension == b"g":
            self._end_global(self._records(body))
        else:
            self._extensions[extension] = body

    def _end_global(self, records: dict[bytes, bytes]) -> None:
        for key in _NEVER_GLOBAL:
            if records.get(key):
                raise self.error(f"a global extension header with a {key.decode()}, which is not supported")
        # Only a handful of keys is kept, however many headers there are.
        self._global |= {key: records[key] for key in _GLOBAL_KEYS if key in records}

    # --- entries ---------------------------------------------------------------------------------------

    def _entry(self, kind: str, fields: tuple[bytes, ...]) -> TarEntry:
        name, mode, uid, gid, size, mtime, _, _, link, magic, prefix = fields
        name = name.partition(b"\0")[0]
        link = link.partition(b"\0")[0]
        if prefix[0] and magic == b"ustar\0":
            name = prefix.partition(b"\0")[0] + b"/" + name
        records = self._global
        if self._extensions:
            name, link, records = self._extended(name, link)
        self._name = name
        if not name or b"\0" in name:
            raise self.error("has no usable name")

        entry = TarEntry(kind, name, self.count)
        entry.mode = self._number(mode, "mode") & 0o7777
        entry.uid = self._number(uid, "uid")
        entry.gid = self._number(gid, "gid")
        entry.size = self._number(size, "size")
        seconds = self._number(mtime, "time", negative=True)
        if not -_LATEST < seconds < _LATEST:
            raise self.error("has a time out of range")
        entry.mtime_ns = seconds * 1_000_000_000
        if records:
            self._apply(entry, records)
        if kind != "file":
            entry.size = 0
            if kind in ("symlink", "hardlink"):
                entry.link = self._link(link)
        elif name.endswith(b"/"):
            if entry.size:
                raise self.error("is a directory with content, which is not supported")
            entry.kind = "directory"
        entry.offset = self._position
        self._position += entry.size + -entry.size % BLOCK
        self.count += 1
        return entry

    def _extended(self, name: bytes, link: bytes) -> tuple[bytes, bytes, dict[bytes, bytes]]:
        """Return the entry's name, link target and PAX records, as its extension headers have them."""
        extensions, self._extensions = self._extensions, {}
        name = extensions.get(b"L", b"").partition(b"\0")[0] or name
        link = extensions.get(b"K", b"").partition(b"\0")[0] or link
        records = {**self._global, **self._records(extensions.get(b"x", b""))}
        return records.get(b"path") or name, records.get(b"linkpath") or link, records

    def _link(self, link: bytes) -> bytes:
        if not link or b"\0" in link:
            raise self.error("is a link without a usable target")
        return link

    def _apply(self, entry: TarEntry, records: dict[bytes, bytes]) -> None:
        """Let the values of PAX records override the header's."""
        for key, value in records.items():
            if key.startswith(XATTR):
                entry.xattrs[key[len(XATTR) :]] = value
            elif not value:
                continue
            elif key == b"size":
                entry.size = self._decimal(value)
            elif key == b"uid":
                entry.uid = self._decimal(value)
            elif key == b"gid":
                entry.gid = self._decimal(value)
            elif key == b"mtime":
                entry.mtime_ns = self._time(value)

    def _records(self, body: bytes) -> dict[bytes, bytes]:
        """Return the records of a PAX header."""
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(body):
            space = body.find(b" ", position, position + 8)
            digits = body[position:space] if space > 0 else b""
            if not digits.isdigit():
                raise self.error("a malformed extension header")
            end = position + int(digits)
            key, equals, value = body[space + 1 : end - 1].partition(b"=")
            if end <= space + 1 or body[end - 1 : end] != b"\n" or not (key and equals) or b"\0" in key:
                raise self.error("a malformed extension header")
            if key.startswith(_PAX_SPARSE):
                raise self._sparse()
            records[key] = value
            position = end
        return records

    def _sparse(self) -> ArchiveError:
        return self.error("is a sparse file, which is not supported")

    # --- numbers ---------------------------------------------------------------------------------------

    def _number(self, field: bytes, what: str, *, negative: bool = False) -> int:
        digits = field.rstrip(b" \0")
        try:
            # int() alone would accept signs and underscores.
            if digits.isdigit():
                return int(digits, 8)
        except ValueError:
            pass
        if field[0] & 0x80:
            return self._base256(field, what, negative=negative)
        digits = field.strip(b" \0").partition(b"\0")[0].rstrip()
        try:
            if digits.isdigit():
                return int(digits, 8)
        except ValueError:
            pass
        if digits:
            raise self.error(f"has a {what} that is not a number")
        return 0

    def _base256(self, field: bytes, what: str, *, negative: bool) -> int:
        """Read a marker bit and a two's complement number."""
        marker = 0x80 << 8 * (len(field) - 1)
        value = int.from_bytes(field, "big") - marker
        if value & marker >> 1:
            value -= marker
        if value >= 1 << 63 or (value < 0 and not negative):
            raise self.error(f"has a {what} out of range")
        return value

    def _decimal(self, value: bytes) -> int:
        if not value.isdigit() or len(value) > 18:
            raise self.error("has a number out of range in its extension header")
        return int(value)

    def _time(self, value: bytes) -> int:
        sign = -1 if value.startswith(b"-") else 1
        whole, _, fraction = value.removeprefix(b"-").partition(b".")
        seconds = self._decimal(whole or b"0")
        if (fraction and not fraction.isdigit()) or seconds >= _LATEST:
            raise self.error("has a time out of range")
        return sign * (seconds * 1_000_000_000 + int((fraction[:9] + b"000000000")[:9]))


class TarReader:
    """Iterates over the entries of the archive that ``read(n)`` returns, up to ``n`` bytes at a time.

    With ``gunzip`` an archive compressed with gzip is recognised and decompressed. The source is read to
    its end.
    """

    def __init__(self, read: Callable[[int], bytes], *, gunzip: bool = True) -> None:
        self._read = read
        self._gunzip = gunzip
        self._parser = TarParser()
        self._buffer = b""
        self._position = 0
        self._current: TarEntry | None = None
        # Bytes of the current entry's content not yet read, and of the padding after them.
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[TarEntry]:
        if self._gunzip:
            self._detect_gzip()
        parser = self._parser
        while not parser.ended:
            self._skip()
            self._current = None
            block = self._take(parser.wanted)
            if len(block) < parser.wanted:
                in_header = parser.wanted != BLOCK
                what = "in the middle of a header" if in_header else "without its end marker"
                raise parser.error(f"the archive ends {what}")
            entry = parser.take(block)
            if entry is not None:
                entry._reader = self
                self._current = entry
                self._left = entry.size
                self._padding = -entry.size % BLOCK
                yield entry
        self._drain()

    def content(self, entry: TarEntry, count: int) -> bytes:
        """Return up to ``count`` bytes of the content of ``entry``, ``b""`` at its end."""
        if entry is not self._current:
            raise ValueError("the archive has moved on to another entry")
        count = min(count, self._left)
        if count <= 0:
            return b""
        data = self._some(count)
        if not data:
            raise self._cut_short()
        self._left -= len(data)
        return data

    def _detect_gzip(self) -> None:
        while len(self._buffer) < 2 and (chunk := self._pull(CHUNK)):
            self._buffer += chunk
        if self._buffer[:2] == b"\x1f\x8b":
            self._read = _Gunzip(self._buffer, self._read).read
            self._buffer = b""

    def _pull(self, count: int) -> bytes:
        try:
            return self._read(count)
        except OSError as error:
            message = f"the archive stopped arriving: {error.strerror or error}"
            raise self._parser.error(message, self._current) from error
        except zlib.error as error:
            raise self._parser.error(f"damaged gzip data: {error}", self._current) from error

    def _some(self, count: int) -> bytes:
        """Return between one and ``count`` bytes; ``b""`` at the end."""
        start = self._position
        if start < len(self._buffer):
            end = min(start + count, len(self._buffer))
            self._position = end
            return self._buffer[start:end]
        chunk = self._pull(CHUNK)
        if len(chunk) <= count:
            return chunk
        self._buffer = chunk
        self._position = count
        return chunk[:count]

    def _take(self, count: int) -> bytes:
        """Return ``count`` bytes, fewer only at the end."""
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
            part = self._some(min(count, CHUNK))
            if not part:
                raise self._cut_short()
            count -= len(part)

    def _cut_short(self) -> ArchiveError:
        return self._parser.error("the archive ends in the middle of its content", self._current)

    def _drain(self) -> None:
        """Read the rest: the sender may still be writing padding, and gzip data ends with a checksum."""
        self._buffer = b""
        while self._pull(CHUNK):
            pass


class TarFeed:
    """Turns the chunks of an archive into entries and chunks of their content, as they arrive."""

    def __init__(self) -> None:
        self._parser = TarParser()
        self._rest = b""
        self._left = 0
        self._padding = 0
        self.trailer = b""
        """Bytes that follow the end of the archive, without the zeros between."""

    def feed(self, data: bytes) -> Iterator[TarEntry | bytes]:
        """Yield each entry that ``data`` completes, and after a file's entry the chunks of its content."""
        parser = self._parser
        data = self._rest + data if self._rest else data
        self._rest = b""
        position, end = 0, len(data)
        while position < end and not parser.ended:
            if self._left:
                chunk = data[position : position + self._left]
                position += len(chunk)
                self._left -= len(chunk)
                yield chunk
            elif self._padding:
                skipped = min(self._padding, end - position)
                position += skipped
                self._padding -= skipped
            elif end - position < parser.wanted:
                self._rest = data[position:]
                return
            else:
                block = data[position : position + parser.wanted]
                position += len(block)
                entry = parser.take(block)
                if entry is not None:
                    self._left = entry.size
                    self._padding = -entry.size % BLOCK
                    yield entry
        if parser.ended:
            self.trailer = (self.trailer + data[position:]).lstrip(b"\0")
            if len(self.trailer) > TRAILER_LIMIT:
                raise parser.error("too much data follows the end of the archive")

    def finish(self) -> None:
        """Check that the archive is complete.

        Raises:
            ArchiveError: it was cut short.
        """
        if not self._parser.ended:
            raise self._parser.error("the archive was cut short")


class _Gunzip:
    """``read(n)`` over gzip members, given the bytes already read of them."""

    __slots__ = ("_compressed", "_member", "_read")

    def __init__(self, start: bytes, read: Callable[[int], bytes]) -> None:
        self._compressed = start
        self._read = read
        self._member: zlib._Decompress | None = zlib.decompressobj(31)

    def read(self, count: int) -> bytes:
        while True:
            if not self._compressed:
                self._compressed = self._read(CHUNK)
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
