"""The first bytes of a connection: which protocol, and which name the client asks for.

A connection to an allowed name must not be used to reach another one at the same address: the name in a TLS
greeting, or the Host of a plain HTTP request, has to be the name that was allowed. Protocols without a
name pass. Pure functions over the bytes received so far.
"""

from __future__ import annotations

import re
import struct
from enum import Enum
from typing import Final, NamedTuple

MOST_BYTES: Final = 16 << 10
"""A greeting or a request head longer than this is refused."""

_BEGUN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}([ \t][\t\x20-\x7e\x80-\xff]*)?\r?")
"""An incomplete first line that may still become one of HTTP: a method, then text."""
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"


class TrafficKind(Enum):
    MORE = "more"
    """Not enough bytes to decide."""
    TLS = "tls"
    HTTP = "http"
    HTTP2 = "http2"
    OTHER = "other"
    INVALID = "invalid"
    """Begins like TLS or HTTP and is malformed, or names two hosts."""


class Sniffed(NamedTuple):
    kind: TrafficKind
    name: str | None = None
    """The name the client asks for: server name or Host, lower case, without port."""


def sniff(data: bytes) -> Sniffed:
    if data[:1] == b"\x16":
        return _tls(data)
    if data.startswith(_HTTP2_PREFACE):
        return Sniffed(TrafficKind.HTTP2)
    # Servers skip empty lines before a request.
    request = data.lstrip(b"\r\n")
    line, complete, _ = request.partition(b"\n")
    if request and not _BEGUN.fullmatch(line):
        return Sniffed(TrafficKind.OTHER)
    if complete:
        return _http(request) if b"HTTP/" in line else Sniffed(TrafficKind.OTHER)
    return _short(data)


def _http(data: bytes) -> Sniffed:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return Sniffed(TrafficKind.MORE if len(data) < MOST_BYTES else TrafficKind.INVALID)
    lines = data[:end].split(b"\r\n")
    request = lines[0].split(b" ")
    if len(request) != 3 or not request[2].startswith(b"HTTP/1."):
        return Sniffed(TrafficKind.INVALID)
    hosts = [line.partition(b":")[2].strip() for line in lines[1:] if line[:5].lower() == b"host:"]
    # A bare line feed is a line end to some servers: they would see headers here that netd does not.
    if len(hosts) != 1 or b"\n" in data[:end].replace(b"\r\n", b""):
        return Sniffed(TrafficKind.INVALID)
    host = host_name(hosts[0])
    target = request[1]
    if request[0] == b"CONNECT":
        return Sniffed(TrafficKind.INVALID if host is None else TrafficKind.HTTP, host_name(target))
    if b"://" in target.split(b"?")[0]:
        absolute = host_name(target.partition(b"://")[2].split(b"/")[0].rpartition(b"@")[2])
        if absolute != host:
            return Sniffed(TrafficKind.INVALID)
    return Sniffed(TrafficKind.HTTP, host) if host is not None else Sniffed(TrafficKind.INVALID)


def host_name(value: bytes) -> str | None:
    """Return the name in a Host header or authority, without its port; ``None`` if it is not one."""
    try:
        text = value.decode("ascii").lower()
    except UnicodeDecodeError:
        return None
    if text.startswith("["):
        name, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        name, _, port = text.partition(":")
    if not name or (port and not port.isdigit()) or any(c in name for c in " \t/@?#\\%,"):
        return None
    return name.removesuffix(".")


def _tls(data: bytes) -> Sniffed:
    """Find the server name of a ClientHello, which may be spread over several records."""
    hello = bytearray()
    offset = 0
    while True:
        if len(data) < offset + 5:
            return _short(data)
        kind, version, size = data[offset], data[offset + 1], struct.unpack_from("!H", data, offset + 3)[0]
        if kind != 0x16 or version != 3 or not 0 < size <= 1 << 14:
            return Sniffed(TrafficKind.INVALID)
        hello += data[offset + 5 : offset + 5 + size]
        if len(hello) >= 4:
            if hello[0] != 1:
                return Sniffed(TrafficKind.INVALID)
            length = int.from_bytes(hello[1:4], "big")
            if len(hello) >= 4 + length:
                return _client_hello(bytes(hello[4 : 4 + length]))
        if len(data) < offset + 5 + size:
            return _short(data)
        offset += 5 + size


def _short(data: bytes) -> Sniffed:
    return Sniffed(TrafficKind.MORE if len(data) < MOST_BYTES else TrafficKind.INVALID)


def _client_hello(body: bytes) -> Sniffed:
    try:
        offset = 34
        offset += 1 + body[offset]
        offset += 2 + struct.unpack_from("!H", body, offset)[0]
        offset += 1 + body[offset]
        if offset == len(body):
            return Sniffed(TrafficKind.TLS)
        end = offset + 2 + struct.unpack_from("!H", body, offset)[0]
        offset += 2
        name: str | None = None
        while offset < end:
            kind, size = struct.unpack_from("!HH", body, offset)
            if kind == 0:
                if name is not None:
                    return Sniffed(TrafficKind.INVALID)
                name = _server_name(body[offset + 4 : offset + 4 + size])
                if name is None:
                    return Sniffed(TrafficKind.INVALID)
            offset += 4 + size
    except (IndexError, struct.error):
        return Sniffed(TrafficKind.INVALID)
    return Sniffed(TrafficKind.TLS, name)


def _server_name(extension: bytes) -> str | None:
    # One entry of type host_name: a list of several could be read either way.
    if len(extension) < 5 or extension[2] != 0:
        return None
    size = struct.unpack_from("!H", extension, 3)[0]
    if len(extension) != 5 + size:
        return None
    return host_name(extension[5:])
