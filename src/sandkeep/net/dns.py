"""DNS messages, both ways: queries of a session, and netd's own queries to a real name server.

Pure functions over bytes. A query is accepted only if every reader must read its name alike: letters, digits,
hyphens and underscores in labels, one question, class IN. Anything else is malformed.
"""

from __future__ import annotations

import struct
from ipaddress import ip_address
from typing import Final, NamedTuple

from sandkeep.addresses import Address

A: Final = 1
CNAME: Final = 5
PTR: Final = 12
AAAA: Final = 28

OK: Final = 0
FORMAT_ERROR: Final = 1
SERVER_FAILURE: Final = 2
NO_SUCH_NAME: Final = 3
NOT_IMPLEMENTED: Final = 4
REFUSED: Final = 5

_IN: Final = 1
_HEADER: Final = struct.Struct("!HHHHHH")
_LABEL: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_MOST_JUMPS: Final = 32
_MOST_RECORDS: Final = 256


class Malformed(Exception):
    """A message that is not accepted; ``rcode`` is the response code to send."""

    def __init__(self, why: str, rcode: int = FORMAT_ERROR) -> None:
        super().__init__(why)
        self.rcode = rcode


class Question(NamedTuple):
    number: int
    name: str
    """Lower case, without the final dot."""
    kind: int
    recursion: bool
    raw: bytes
    """The question section as sent, to be echoed."""


class NameResponse(NamedTuple):
    """The part of a name server's response that is used."""

    rcode: int
    truncated: bool
    addresses: tuple[Address, ...]
    ttl: int


def encode_name(name: str) -> bytes:
    out = bytearray()
    for label in name.encode("ascii").split(b"."):
        if not 0 < len(label) <= 63:
            raise Malformed("a label has 1 to 63 characters")
        out += bytes([len(label)]) + label
    if len(out) > 254:
        raise Malformed("a name has at most 253 characters")
    return bytes(out) + b"\0"


def question(data: bytes) -> Question:
    """Return the question of a query."""
    if len(data) < _HEADER.size:
        raise Malformed("too short")
    number, flags, count, *_ = _HEADER.unpack_from(data)
    if flags & 0x8000:
        raise Malformed("not a request")
    if flags & 0x7800:
        raise Malformed("only standard queries", NOT_IMPLEMENTED)
    if count != 1:
        raise Malformed("exactly one question")
    name, end = _plain_name(data, _HEADER.size)
    if end + 4 > len(data):
        raise Malformed("too short")
    kind, family = struct.unpack_from("!HH", data, end)
    if family != _IN:
        raise Malformed("only class IN", NOT_IMPLEMENTED)
    return Question(number, name, kind, bool(flags & 0x0100), data[_HEADER.size : end + 4])


def _plain_name(data: bytes, offset: int) -> tuple[str, int]:
    labels: list[bytes] = []
    length = 0
    while True:
        if offset >= len(data):
            raise Malformed("too short")
        size = data[offset]
        if size == 0:
            return b".".join(labels).decode("ascii"), offset + 1
        if size > 63:
            raise Malformed("a question has no pointers")
        label = data[offset + 1 : offset + 1 + size].lower()
        length += size + 1
        if len(label) != size or length > 253 or not _LABEL.issuperset(label):
            raise Malformed("not a host name")
        labels.append(label)
        offset += 1 + size


def reply(
    asked: Question,
    rcode: int,
    *,
    addresses: tuple[Address, ...] = (),
    pointer: str | None = None,
    ttl: int = 30,
) -> bytes:
    """Return a response to a session. ``OK`` without records: the name exists, but has no such record."""
    records = []
    for address in addresses:
        kind = A if address.version == 4 else AAAA
        records.append(_record(kind, ttl, address.packed))
    if pointer is not None:
        records.append(_record(PTR, ttl, encode_name(pointer)))
    flags = 0x8080 | (0x0100 if asked.recursion else 0) | rcode
    header = _HEADER.pack(asked.number, flags, 1, len(records), 0, 0)
    return header + asked.raw + b"".join(records)


def error(data: bytes, rcode: int) -> bytes | None:
    """Return an error response to a malformed query; ``None`` if it is too short for one."""
    if len(data) < 3 or data[2] & 0x80:
        return None
    return data[:2] + struct.pack("!HHHHH", 0x8080 | rcode, 0, 0, 0, 0)


def _record(kind: int, ttl: int, data: bytes) -> bytes:
    return b"\xc0\x0c" + struct.pack("!HHIH", kind, _IN, ttl, len(data)) + data


# --- asking a name server ------------------------------------------------------------------------------


def request(number: int, name: str, kind: int) -> bytes:
    return _HEADER.pack(number, 0x0100, 1, 0, 0, 0) + encode_name(name) + struct.pack("!HH", kind, _IN)


def response(data: bytes, asked: bytes) -> NameResponse:
    """Return the addresses a name server gave for ``asked``, an own request, aliases followed."""
    if len(data) < _HEADER.size or data[:2] != asked[:2]:
        raise Malformed("not the answer to this request")
    _, flags, questions, count, _, _ = _HEADER.unpack_from(data)
    section = asked[_HEADER.size :]
    given = data[_HEADER.size : _HEADER.size + len(section)]
    if not flags & 0x8000 or questions != 1 or given.lower() != section.lower():
        raise Malformed("not the answer to this request")
    offset = _HEADER.size + len(section)
    wanted = struct.unpack("!H", section[-4:-2])[0]
    names = {_name(asked, _HEADER.size)[0]}
    addresses: list[Address] = []
    ttl = 300
    for _ in range(min(count, _MOST_RECORDS)):
        owner, offset = _name(data, offset)
        if offset + 10 > len(data):
            raise Malformed("too short")
        kind, family, life, size = struct.unpack_from("!HHIH", data, offset)
        offset += 10
        body = data[offset : offset + size]
        if len(body) != size:
            raise Malformed("too short")
        if owner in names and family == _IN:
            if kind == CNAME:
                names.add(_name(data, offset)[0])
                ttl = min(ttl, life)
            elif kind == wanted and size == (4 if kind == A else 16):
                addresses.append(ip_address(body))
                ttl = min(ttl, life)
        offset += size
    return NameResponse(flags & 0xF, bool(flags & 0x0200), tuple(addresses), ttl)


def _name(data: bytes, offset: int) -> tuple[bytes, int]:
    """Return a possibly compressed name, in lower case, and the offset behind it."""
    labels: list[bytes] = []
    end = -1
    for _ in range(_MOST_JUMPS + 128):
        if offset >= len(data):
            raise Malformed("too short")
        size = data[offset]
        if size == 0:
            return b".".join(labels), offset + 1 if end < 0 else end
        if size >= 0xC0:
            if offset + 2 > len(data):
                raise Malformed("too short")
            if end < 0:
                end = offset + 2
            offset = struct.unpack_from("!H", data, offset)[0] & 0x3FFF
            continue
        labels.append(data[offset + 1 : offset + 1 + size].lower())
        offset += 1 + size
    raise Malformed("a name that never ends")
