"""Tries one thing from inside a sandbox and prints what came of it: given as first argument."""

import errno
import fcntl
import os
import socket
import struct
import sys

what, args = sys.argv[1], sys.argv[2:]
RCODES = {0: "NOERROR", 2: "SERVFAIL", 3: "NXDOMAIN", 5: "REFUSED"}


def family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def dns(transport: str, name: str, kind: str) -> str:
    labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split("."))
    query = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", int(kind), 1)
    if transport == "tcp":
        with socket.create_connection(("8.8.8.8", 53), 50) as sock, sock.makefile("rb") as reader:
            sock.sendall(struct.pack("!H", len(query)) + query)
            reply = reader.read(struct.unpack("!H", reader.read(2))[0])
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(50)
            sock.sendto(query, ("1.1.1.1", 53))
            reply = sock.recv(4096)
    count = struct.unpack("!H", reply[6:8])[0]
    address = f" {socket.inet_ntoa(reply[-4:])}" if count and kind == "1" else ""
    return f"{RCODES[reply[3] & 15]} {count}{address}"


def udp(address: str, port: str) -> str:
    with socket.socket(family(address), socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        sock.connect((address, int(port)))
        sock.send(b"x")
        sock.recv(1)
    return "answered"


def datagram(address: str, port: int) -> bytes:
    data = struct.pack("!HHHH", 4444, port, 9, 0) + b"x"
    source = socket.inet_aton("10.0.2.15")
    return (
        struct.pack("!BBHHHBBH4s4s", 0x45, 0, 29, 1, 0, 64, 17, 0, source, socket.inet_aton(address)) + data
    )


def raw(address: str, port: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(datagram(address, int(port)), (address, 0))
    return "sent"


def packet(address: str, port: str) -> str:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("lo", 0x0800))
        sock.send(bytes(12) + b"\x08\x00" + datagram(address, int(port)))
    return "sent"


def interfaces() -> str:
    return " ".join(name for _, name in socket.if_nameindex())


def vsock() -> str:
    socket.socket(40, socket.SOCK_STREAM).close()
    return "opened"


def abstract(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"\0{name}")
    return "connected"


def netlink(protocol: int, messages: bytes) -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(50)
        sock.send(messages)
        code = struct.unpack_from("=i", sock.recv(4096), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
    return "done"


def flush_nft() -> str:
    def message(kind: int, flags: int, body: bytes) -> bytes:
        return struct.pack("=IHHII", 16 + len(body), kind, flags | 1, 0, 0) + body

    begin, end = (message(kind, 0, struct.pack(">BBH", 0, 0, 10)) for kind in (0x10, 0x11))
    delete = message((10 << 8) | 2, 4, struct.pack(">BBH", 2, 0, 0))
    return netlink(12, begin + delete + end)


def add_address() -> str:
    address = struct.pack("=HH4s", 8, 2, socket.inet_aton("192.0.2.1"))
    body = struct.pack("=BBBBI", 2, 32, 0, 0, 1) + address
    return netlink(0, struct.pack("=IHHII", 16 + len(body), 20, 0x405, 1, 0) + body)


def link_down() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14s", b"lo", 0, b""))
    return "done"


def bind(address: str, port: str) -> str:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address, int(port)))
        sock.listen()
    return "bound"


try:
    print(globals()[what.replace("-", "_")](*args))
except OSError as error:
    print("not permitted" if error.errno in (errno.EPERM, errno.EACCES) else "refused")
