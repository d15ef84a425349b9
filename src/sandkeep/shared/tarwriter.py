"""Writing of tar archives: ``header`` builds the headers of one entry, ``TarWriter`` a whole archive.

The writer emits plain ustar headers and adds a PAX header only for what they cannot hold. Times are whole
seconds unless the caller gives nanoseconds, and no host names or user names are stored: equal input gives
equal bytes. The writer holds one header and one chunk at most.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from sandkeep.errors import TransportError
from sandkeep.shared.tar import BLOCK, CHUNK, END, XATTR, checksum, padding

# name, mode, uid, gid, size, mtime, checksum, type, link, magic, prefix
_PACKED = struct.Struct("100s8s8s8s12s12s8sc100s8s80x155s12x")
_SECOND = 1_000_000_000
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "directory": b"5"}


def header(
    name: bytes,
    kind: str,
    *,
    mode: int,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    mtime_ns: int | None = None,
    link: bytes = b"",
    xattrs: Mapping[bytes, bytes] | None = None,
) -> bytes:
    """Return the header of one entry, with a PAX header in front of it if it needs one.

    ``size`` bytes of content and their ``padding`` must follow for a file, nothing for anything else.
    ``mtime_ns``, if given, is the time instead of the whole seconds of ``mtime``.

    Raises:
        ValueError: a name is empty or has a NUL byte.
    """
    if not name or b"\0" in name or b"\0" in link:
        raise ValueError("a name is empty or has a NUL byte")
    if kind == "directory" and not name.endswith(b"/"):
        name += b"/"
    short, prefix, extension = name, b"", b""
    if mtime_ns is not None:
        mtime = mtime_ns // _SECOND
    fraction = mtime_ns is not None and mtime_ns % _SECOND != 0
    fits = len(name) <= 100 and len(link) <= 100 and not xattrs and not fraction and uid | gid < 1 << 21
    # A negative number among them makes the result negative.
    if not (fits and 0 <= uid | gid | size | mtime < 1 << 33):
        records, short, prefix = _records(name, link, xattrs or {})
        uid, gid = _fitting(uid, 7, b"uid", records), _fitting(gid, 7, b"gid", records)
        size, mtime = _fitting(size, 11, b"size", records), _fitting(mtime, 11, b"mtime", records)
        if mtime_ns is not None and fraction:
            records[b"mtime"] = _seconds(mtime_ns)
        if records:
            body = b"".join(_record(key, value) for key, value in records.items())
            above = b"PaxHeaders/" + short.rstrip(b"/")[-80:]
            extension = _pack(above, b"x", 0o644, 0, 0, len(body), 0) + body + padding(len(body))
    return extension + _pack(short, _TYPES[kind], mode, uid, gid, size, mtime, link[:100], prefix)


class TarWriter:
    """Writes an archive through ``write(bytes)``: ``add``, the announced ``content``, at last ``close``.

    ``write`` gets chunks of up to half a megabyte and must take all of each.
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
        mtime_ns: int | None = None,
        link: bytes = b"",
        xattrs: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Start an entry. ``size`` bytes of content must follow for a file, none for anything else."""
        if self._left:
            raise ValueError(f"{self._left} bytes of the previous entry are missing")
        self._write(
            header(
                name,
                kind,
                mode=mode,
                uid=uid,
                gid=gid,
                size=size,
                mtime=mtime,
                mtime_ns=mtime_ns,
                link=link,
                xattrs=xattrs,
            )
        )
        if kind == "file":
            self._left = size
            self._padding = -size % BLOCK

    def content(self, data: bytes) -> None:
        """Write more of the announced content."""
        if len(data) > self._left:
            raise ValueError(f"{len(data) - self._left} bytes more than announced")
        self._left -= len(data)
        self._write(data)
        if not self._left and self._padding:
            self._write(bytes(self._padding))
            self._padding = 0

    def close(self) -> None:
        """Write the end marker."""
        if self._left:
            raise ValueError(f"{self._left} bytes of the last entry are missing")
        self._write(END)
        self._flush()

    def _write(self, data: bytes) -> None:
        """Collect small chunks and send them together."""
        self._pending.append(data)
        self._pending_size += len(data)
        if self._pending_size >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending.clear()
        self._pending_size = 0
        try:
            self._sink(data)
        except OSError as error:
            raise TransportError(f"the client stopped reading the archive: {error}") from error


def _pack(
    name: bytes,
    kind: bytes,
    mode: int,
    uid: int,
    gid: int,
    size: int,
    mtime: int,
    link: bytes = b"",
    prefix: bytes = b"",
) -> bytes:
    block = _PACKED.pack(
        name,
        b"%07o" % (mode & 0o7777),
        b"%07o" % uid,
        b"%07o" % gid,
        b"%011o" % size,
        b"%011o" % mtime,
        b"        ",
        kind,
        link,
        b"ustar\x0000",
        prefix,
    )
    return b"%b%06o\0 %b" % (block[:148], checksum(block), block[156:])


def _records(
    name: bytes, link: bytes, xattrs: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes], bytes, bytes]:
    """Return the PAX records that an entry needs, and the name and prefix for its header."""
    records = {XATTR + key: value for key, value in sorted(xattrs.items())}
    prefix, short = _split(name)
    if not short:
        records[b"path"] = name
        short = name[-100:]
    if len(link) > 100:
        records[b"linkpath"] = link
    if any(_not_text(records.get(key, b"")) for key in (b"path", b"linkpath")):
        records = {b"hdrcharset": b"BINARY", **records}
    return records, short, prefix


def _fitting(value: int, digits: int, key: bytes, records: dict[bytes, bytes]) -> int:
    """Return the number for a header field; put one that does not fit into ``records`` instead."""
    if 0 <= value < 8**digits:
        return value
    records[key] = b"%d" % value
    return 0


def _seconds(nanoseconds: int) -> bytes:
    """Return a time as a PAX record has it."""
    sign = b"-" if nanoseconds < 0 else b""
    return b"%b%d.%09d" % (sign, *divmod(abs(nanoseconds), _SECOND))


def _split(name: bytes) -> tuple[bytes, bytes]:
    """Return the prefix and the name as a ustar header holds them; an empty name if it cannot."""
    if len(name) <= 100:
        return b"", name
    cut = name.find(b"/", len(name) - 101, len(name) - 1)
    if 0 < cut <= 155:
        return name[:cut], name[cut + 1 :]
    return b"", b""


def _record(key: bytes, value: bytes) -> bytes:
    """Return one PAX record, whose length counts its own digits."""
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
