"""Trees as tar streams: entries out, and the pull-free reader that puts entries into a local directory.

Both sides hold one piece at a time. Names that are not UTF-8 survive.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

BLOCK = 512
END = bytes(2 * BLOCK)
_EXTENSION_LIMIT = 1 << 20
_NAME_ERRORS = "surrogateescape"


def header(
    name: str, *, size: int = 0, mode: int = 0o644, mtime: int = 0, directory: bool = False, link: str = ""
) -> bytes:
    """The header of one entry: a file unless it is a directory or has a link target."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = mode & 0o7777
    entry.mtime = mtime
    if directory:
        entry.type = tarfile.DIRTYPE
    elif link:
        entry.type = tarfile.SYMTYPE
        entry.linkname = link
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", _NAME_ERRORS)


def padding(size: int) -> bytes:
    """What follows the content of a file of ``size`` bytes."""
    return bytes(-size % BLOCK)


def file(name: str, data: bytes, mode: int) -> bytes:
    """A whole entry."""
    return header(name, size=len(data), mode=mode) + data + padding(len(data))


class BadArchive(ValueError):
    """What arrived is not a complete tar archive."""


Event = tarfile.TarInfo | bytes
"""An entry, or a piece of the content of the file entry before it."""


class TarFeed:
    """Turns pieces of an archive into entries and pieces of their content."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._left = 0
        self._padding = 0
        self._extension: tuple[bytes, int] | None = None
        self._records: dict[str, str] = {}
        self._ended = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """What is complete now."""
        if self._ended:
            return
        self._waiting += data
        while True:
            if self._left:
                piece = bytes(self._waiting[: self._left])
                if not piece:
                    return
                del self._waiting[: len(piece)]
                self._left -= len(piece)
                yield piece
                continue
            if self._padding:
                skipped = min(self._padding, len(self._waiting))
                del self._waiting[:skipped]
                self._padding -= skipped
                if self._padding:
                    return
            entry = self._entry()
            if entry is None:
                return
            if entry.isreg():
                self._left, self._padding = entry.size, -entry.size % BLOCK
            yield entry

    def finish(self) -> None:
        """The archive must be complete now.

        Raises:
            BadArchive: it was cut short.
        """
        if not self._ended:
            raise BadArchive("the archive was cut short")

    def _entry(self) -> tarfile.TarInfo | None:
        while True:
            if self._extension is not None:
                kind, size = self._extension
                whole = size + (-size % BLOCK)
                if len(self._waiting) < whole:
                    return None
                self._read_extension(kind, bytes(self._waiting[:size]))
                del self._waiting[:whole]
                self._extension = None
            if len(self._waiting) < BLOCK:
                return None
            block = bytes(self._waiting[:BLOCK])
            del self._waiting[:BLOCK]
            if not any(block):
                self._ended = True
                return None
            try:
                entry = tarfile.TarInfo.frombuf(block, "utf-8", _NAME_ERRORS)
            except tarfile.HeaderError as error:
                raise BadArchive(str(error)) from error
            if entry.type in (b"x", b"g", b"L", b"K"):
                if entry.size > _EXTENSION_LIMIT:
                    raise BadArchive("an extended header is too large")
                self._extension = (entry.type, entry.size)
                continue
            return self._applied(entry)

    def _read_extension(self, kind: bytes, body: bytes) -> None:
        if kind in (b"L", b"K"):
            name = "path" if kind == b"L" else "linkpath"
            self._records[name] = body.rstrip(b"\0").decode("utf-8", _NAME_ERRORS)
        elif kind == b"x":
            while body:
                length, separator, _ = body.partition(b" ")
                if not separator or not length.isdigit() or not len(length) < int(length) <= len(body):
                    raise BadArchive("an extended header cannot be read")
                record, body = body[len(length) + 1 : int(length) - 1], body[int(length) :]
                key, _, value = record.partition(b"=")
                self._records[key.decode("utf-8", "replace")] = value.decode("utf-8", _NAME_ERRORS)

    def _applied(self, entry: tarfile.TarInfo) -> tarfile.TarInfo:
        records, self._records = self._records, {}
        entry.name = records.get("path", entry.name)
        entry.linkname = records.get("linkpath", entry.linkname)
        try:
            entry.size = int(records.get("size", entry.size))
            entry.mtime = float(records.get("mtime", entry.mtime))
        except ValueError as error:
            raise BadArchive("an extended header cannot be read") from error
        return entry
