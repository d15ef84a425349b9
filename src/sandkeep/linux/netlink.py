"""Set up a session's network namespace: the loopback interface, and redirection of all traffic to listeners.

No packet can leave, since loopback is the only interface. ``steer`` makes every address local to the
namespace (an "AnyIP" route), so that every connection is made to the namespace itself, and nftables redirects
it to a listener: TCP to ``TCP_PORT``, UDP port 53 to ``DNS_PORT``. Other UDP has no listener, and the kernel
refuses it at once. Loopback and the namespace's own address are not redirected.

The listeners are created inside, before privileges are dropped, and passed on by descriptor; a socket stays
in the namespace it was created in, whichever process holds it. Messages are built by hand: two packets, well
under a millisecond, where a program or a library would take longer than the rest of the session's start.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Final

ADDRESS: Final = "10.0.2.15"
"""The namespace's own global address, so that resolvers query IPv4 and programs find an address."""
TCP_PORT: Final = 65_101
DNS_PORT: Final = 65_053
"""Above the range of ephemeral ports, where programs rarely listen."""

_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_IFF_RUNNING: Final = 64

_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_ERROR: Final = 2
_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
_NEWADDR, _NEWROUTE = 20, 24
_LOCAL_TABLE, _STATIC, _HOST_SCOPE, _TYPE_LOCAL = 255, 4, 254, 2

_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES: Final = 10
_NEWTABLE, _NEWCHAIN, _NEWRULE = (_NFTABLES << 8) + 0, (_NFTABLES << 8) + 3, (_NFTABLES << 8) + 6
_OUTPUT_HOOK, _NAT_PRIORITY, _ACCEPT = 3, -100, 1
_REGISTER: Final = 8
_WIDE_REGISTER: Final = 1
_META_L4PROTO: Final = 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_TABLE, _CHAIN = b"sandkeep\0", b"steer\0"


def loopback_up() -> None:
    """Bring ``lo`` up in the current network namespace: the only interface a session has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP | _IFF_RUNNING, b""))


def steer() -> list[int]:
    """Redirect the current namespace's traffic; return the listeners: TCP and DNS per address family.

    The process that holds the listeners is the session's whole network. On a kernel without IPv6 only IPv4 is
    redirected.
    """
    families = [socket.AF_INET]
    if _has_ipv6():
        families.append(socket.AF_INET6)
    _send(_NETLINK_ROUTE, _routes(families), acknowledgements=1 + len(families))
    _send(_NETLINK_NETFILTER, _redirects(families), acknowledgements=1)
    listeners: list[int] = []
    try:
        for family in families:
            listeners += _listen(family)
    except BaseException:
        for fd in listeners:
            os.close(fd)
        raise
    return listeners


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _listen(family: socket.AddressFamily) -> list[int]:
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    made: list[int] = []
    for kind, port in ((socket.SOCK_STREAM, TCP_PORT), (socket.SOCK_DGRAM, DNS_PORT)):
        with socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            sock.bind((loopback, port))
            if kind == socket.SOCK_STREAM:
                sock.listen(1024)
            made.append(sock.detach())
    return made


# --- netlink -------------------------------------------------------------------------------------------


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _nest(kind: int, *parts: bytes) -> bytes:
    return _attribute(kind | 0x8000, b"".join(parts))


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST, 0, 0) + body


def _send(protocol: int, messages: bytes, *, acknowledgements: int) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        # The kernel responds before send returns; a missing response must not hang the start of a session.
        sock.settimeout(5)
        sock.send(messages)
        while acknowledgements > 0:
            data, offset = sock.recv(65_536), 0
            while offset < len(data):
                length, kind = struct.unpack_from("=IH", data, offset)
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", data, offset + 16)[0]
                    if number:
                        what = "route" if protocol == _NETLINK_ROUTE else "nftables"
                        raise OSError(number, f"netlink {what}: {os.strerror(number)}")
                    acknowledgements -= 1
                offset += max((length + 3) & ~3, 16)


def _routes(families: list[socket.AddressFamily]) -> bytes:
    address = socket.inet_aton(ADDRESS)
    device = _attribute(4, struct.pack("=i", 1))
    flags = _CREATE | _ACK
    own = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 1)
    parts = [_message(_NEWADDR, flags, own + _attribute(2, address) + _attribute(1, address))]
    for family in families:
        ipv4 = family == socket.AF_INET
        scope = _HOST_SCOPE if ipv4 else 0
        body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, _LOCAL_TABLE, _STATIC, scope, _TYPE_LOCAL, 0)
        source = _attribute(7, address) if ipv4 else b""
        parts.append(_message(_NEWROUTE, flags, body + device + source))
    return b"".join(parts)


# --- nftables ------------------------------------------------------------------------------------------


def _big(value: int) -> bytes:
    return struct.pack(">I", value & 0xFFFFFFFF)


def _netfilter(kind: int, flags: int, family: int, body: bytes, resource: int = 0) -> bytes:
    return _message(kind, flags, struct.pack(">BBH", family, 0, resource) + body)


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return _nest(1, _attribute(1, name + b"\0"), _nest(2, *attributes))


def _protocol_is(number: int) -> bytes:
    load = _expression(b"meta", _attribute(2, _big(_META_L4PROTO)), _attribute(1, _big(_REGISTER)))
    return load + _equals(_REGISTER, bytes([number]))


def _payload(register: int, base: int, offset: int, length: int) -> bytes:
    values = (register, base, offset, length)
    return _expression(b"payload", *(_attribute(kind, _big(value)) for kind, value in enumerate(values, 1)))


def _equals(register: int, data: bytes) -> bytes:
    operands = (_attribute(1, _big(register)), _attribute(2, _big(0)), _nest(3, _attribute(1, data)))
    return _expression(b"cmp", *operands)


def _masked(register: int, mask: bytes) -> bytes:
    operands = (_attribute(1, _big(register)), _attribute(2, _big(register)), _attribute(3, _big(len(mask))))
    masks = (_nest(4, _attribute(1, mask)), _nest(5, _attribute(1, bytes(len(mask)))))
    return _expression(b"bitwise", *operands, *masks)


def _accept() -> bytes:
    return _expression(b"immediate", _attribute(1, _big(0)), _nest(2, _nest(2, _attribute(1, _big(_ACCEPT)))))


def _redirect(port: int) -> bytes:
    number = _nest(2, _attribute(1, struct.pack(">H", port)))
    load = _expression(b"immediate", _attribute(1, _big(_REGISTER)), number)
    return load + _expression(b"redir", _attribute(1, _big(_REGISTER)))


def _exceptions(family: int) -> list[bytes]:
    """Return the destinations that are not redirected: the namespace's own."""
    if family == socket.AF_INET6:
        loopback = socket.inet_pton(socket.AF_INET6, "::1")
        return [_payload(_WIDE_REGISTER, _NETWORK_HEADER, 24, 16) + _equals(_WIDE_REGISTER, loopback)]
    load = _payload(_REGISTER, _NETWORK_HEADER, 16, 4)
    return [
        load + _equals(_REGISTER, socket.inet_aton(ADDRESS)),
        load + _masked(_REGISTER, b"\xff\0\0\0") + _equals(_REGISTER, b"\x7f\0\0\0"),
    ]


def _redirects(families: list[socket.AddressFamily]) -> bytes:
    parts: list[bytes] = [_netfilter(_BATCH_BEGIN, 0, 0, b"", _NFTABLES)]
    for family in families:
        table = _attribute(1, _TABLE)
        parts.append(_netfilter(_NEWTABLE, _CREATE, family, table))
        hook = _nest(4, _attribute(1, _big(_OUTPUT_HOOK)), _attribute(2, struct.pack(">i", _NAT_PRIORITY)))
        chain = table + _attribute(3, _CHAIN) + hook + _attribute(7, b"nat\0") + _attribute(5, _big(_ACCEPT))
        parts.append(_netfilter(_NEWCHAIN, _CREATE, family, chain))
        to_dns = _payload(_REGISTER, _TRANSPORT_HEADER, 2, 2) + _equals(_REGISTER, struct.pack(">H", 53))
        rules = [match + _accept() for match in _exceptions(family)]
        rules.append(_protocol_is(socket.IPPROTO_TCP) + _redirect(TCP_PORT))
        rules.append(_protocol_is(socket.IPPROTO_UDP) + to_dns + _redirect(DNS_PORT))
        for rule in rules:
            last = family == families[-1] and rule is rules[-1]
            body = table + _attribute(2, _CHAIN) + _nest(4, rule)
            flags = _CREATE | _APPEND | (_ACK if last else 0)
            parts.append(_netfilter(_NEWRULE, flags, family, body))
    parts.append(_netfilter(_BATCH_END, 0, 0, b"", _NFTABLES))
    return b"".join(parts)
