"""What a session's network feels of a neighbour that floods netd, the one process that serves both.

The victim looks up a name, connects and asks for a page, again and again, while the flood is stopped by
SIGSTOP and while it runs, a second of each in turn, so that other load hits both alike. Every flood is one
that a sandbox can make with what its own policy allows it. The first rows, neighbours that only compute, say
how much of the others is due to shared processors and not to netd: every flood keeps at least one process
busy, and the flood of TLS handshakes four.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from benchmarks.lab import Lab
from benchmarks.rows import Budget, Row, Samples, row
from sandkeep import Client, Sandbox
from sandkeep.policy import NetworkPolicy, Rule, Transform

_NETWORK = {
    "names": {name: ["127.0.0.1"] for name in ("victim.test", "flood.test", "plain.flood.test")},
    "allowed": ["127.0.0.0/8"],
}
_BUDGET = Budget.at_most(3)
_WINDOW = 1.0
"""Seconds for which the victim asks before the flood is stopped or continued."""
_SETTLE, _DRAIN = 1.0, 0.2
"""Seconds after which a flood is at full speed, and after which netd has read what a stopped one had sent."""
FLOODS = {
    "computing": "nothing: one process computes",
    "four": "nothing: four processes compute",
    "chunks": "one-byte chunks, 2 connections",
    "windows": "HTTP/2 WINDOW_UPDATE",
    "priorities": "HTTP/2 PRIORITY",
    "unknown": "HTTP/2 frames of no known kind",
    "bytes": "HTTP/2 DATA of one byte",
    "requests": "requests as fast as they are answered, 100 connections",
    "handshakes": "TLS handshakes",
    "names": "names not resolved before",
    "queries": "DNS queries",
    "connections": "connections",
    "relays": "downloads, 100 connections",
}
_COMPUTING = ("computing", "four")

_VICTIM = """
import socket, sys, time
times = []
until = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < until:
    began = time.perf_counter()
    with socket.create_connection(("victim.test", int(sys.argv[1])), 60) as connection:
        connection.sendall(b"GET / HTTP/1.1\\r\\nhost: victim.test\\r\\n\\r\\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    times.append(time.perf_counter() - began)
    time.sleep(0.01)
print(*times)
"""

_FLOOD = """
import os, signal, socket, ssl, struct, sys, time
what, port, bulk, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
signal.alarm(seconds)

def connect(port=port, host="flood.test"):
    return socket.create_connection((host, port), 60)

def fork(count):
    for _ in range(count - 1):
        if not os.fork():
            signal.alarm(seconds)
            return

def send(sock, data):
    while True:
        sock.sendall(data)

def computing():
    while True:
        pass

def four():
    fork(4)
    computing()

def chunks():
    fork(2)
    sock = connect()
    sock.sendall(b"POST / HTTP/1.1\\r\\nhost: flood.test\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n")
    send(sock, b"1\\r\\nx\\r\\n" * 5000)

def frame(kind, body, stream=0, flags=0):
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

def http2(flood, head=b""):
    sock = connect()
    sock.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + frame(4, b"") + head)
    send(sock, flood * (65536 // len(flood)))

def windows():
    http2(frame(8, (1).to_bytes(4, "big")))

def priorities():
    http2(frame(2, bytes(4) + bytes([15]), stream=3))

def unknown():
    http2(frame(200, b""))

def bytes_():
    # :method POST, :scheme http, :path /, :authority flood.test
    head = bytes([0x83, 0x86, 0x84, 0x41, 10]) + b"flood.test"
    http2(frame(0, b"x", stream=1), frame(1, head, stream=1, flags=4))

def requests():
    import selectors
    asked = b"GET / HTTP/1.1\\r\\nhost: flood.test\\r\\n\\r\\n"
    poll = selectors.DefaultSelector()
    for _ in range(100):
        sock = connect()
        sock.sendall(asked)
        poll.register(sock, selectors.EVENT_READ)
    while True:
        for key, _ in poll.select():
            if key.fileobj.recv(65536):
                key.fileobj.sendall(asked)
            else:
                poll.unregister(key.fileobj)

def handshakes():
    context = ssl._create_unverified_context()
    fork(4)
    while True:
        with connect() as sock, context.wrap_socket(sock, server_hostname="flood.test"):
            pass

def names():
    queries("n%d.flood.test")

def queries(name="flood.test"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    count = 0
    while True:
        count += 1
        labels = (name % count if "%" in name else name).split(".")
        data = b"".join(bytes([len(x)]) + x.encode() for x in labels) + struct.pack("!B2H", 0, 1, 1)
        try:
            sock.sendto(struct.pack("!6H", 1, 256, 1, 0, 0, 0) + data, ("10.0.2.3", 53))
            sock.recv(512)
        except OSError:
            pass

def connections():
    address = socket.gethostbyname("plain.flood.test")
    while True:
        socks = []
        for _ in range(200):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((address, port))
            socks.append(sock)
        time.sleep(0.01)
        for sock in socks:
            sock.close()

def relays():
    import selectors
    poll = selectors.DefaultSelector()
    for _ in range(100):
        poll.register(connect(bulk, "plain.flood.test"), selectors.EVENT_READ)
    while True:
        for key, _ in poll.select():
            key.fileobj.recv(1 << 20)

while True:
    try:
        globals().get(what + "_" if what == "bytes" else what)()
    except OSError:
        pass
"""


_SERVERS = """
import asyncio

async def page(reader, writer):
    try:
        while b"chunked" not in await reader.readuntil(b"\\r\\n\\r\\n"):
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
            await writer.drain()
        while await reader.read(1 << 16):
            pass
    except (OSError, asyncio.IncompleteReadError):
        pass
    writer.close()

async def endless(reader, writer):
    try:
        while True:
            writer.write(bytes(1 << 18))
            await writer.drain()
    except OSError:
        pass

async def main():
    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in (page, endless)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def neighbours(lab: Lab) -> list[Row]:
    """The victim's latency beside each flood, next to its latency alone."""
    web = await asyncio.start_server(_page, "127.0.0.1", 0)
    port = str(web.sockets[0].getsockname()[1])
    async with (
        web,
        _flooded() as targets,
        lab.serving(network=_NETWORK) as server,
        server.client() as client,
    ):
        return [await _beside(lab, client, flood, port, targets) for flood in FLOODS]


async def _beside(lab: Lab, client: Client, flood: str, port: str, targets: list[str]) -> Row:
    samples = Samples()
    ruled = {"flood.test": [Rule(Transform((("x-set", "1"),)))], "*.flood.test": []}
    async with (
        client.create_sandbox(
            persistent=False, network_policy=NetworkPolicy.custom(["victim.test"])
        ) as victim,
        client.create_sandbox(persistent=False, network_policy=NetworkPolicy.custom(ruled)) as hog,
    ):
        rounds = lab.rounds(8, 1)
        process = await hog.create_process("python3", ["-c", _FLOOD, flood, *targets, str(60 + 10 * rounds)])
        await asyncio.sleep(_SETTLE)
        for _ in range(rounds):
            await process.send_signal("STOP")
            await asyncio.sleep(_DRAIN)
            for seconds in await _ask(victim, port):
                samples.add("alone", seconds)
            await process.send_signal("CONT")
            await asyncio.sleep(_DRAIN)
            for seconds in await _ask(victim, port):
                samples.add("beside", seconds)
        await process.kill()
    return row(
        f"a request beside a flood of {FLOODS[flood]}",
        samples["beside"],
        reference=("no flood", samples["alone"]),
        budget=None if flood in _COMPUTING else _BUDGET,
    )


async def _ask(victim: Sandbox, port: str) -> list[float]:
    done = await victim.run_process(
        "python3", ["-c", _VICTIM, port, str(_WINDOW)], check=True, capture_output=True
    )
    assert done.stdout is not None
    return [float(text) for text in done.stdout.split()]


async def _page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def _flooded() -> AsyncIterator[list[str]]:
    """The servers floods are aimed at, in a process of their own: it is netd's time that is measured."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVERS, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().split()
    finally:
        process.kill()
        await process.wait()
