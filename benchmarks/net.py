"""The network of sandboxes: relaying, connecting, looking up, applying rules, and many policies at once.

Servers are on loopback; each figure stands next to the same work without a sandbox, or through the plainest
relay one could write.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator

from benchmarks import references as ref
from benchmarks.lab import Lab, gather
from benchmarks.rows import MEGABYTES, MEGABYTES_A_SECOND, MILLISECONDS, RATE, Row, Samples, repeat, row
from sandkeep.policy import NetworkPolicy, Rule, Transform

_RELAYED = 256 << 20
_SANDBOXES = 200
_NETWORK = {"names": {"bench.test": ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"]}

_CONNECT = """
import socket, sys, time
times = []
for _ in range(200):
    began = time.perf_counter()
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        connection.recv(1)
    times.append(time.perf_counter() - began)
print(*times)
"""
_LOOK_UP = """
import socket, struct, sys, time
labels = b"".join(bytes([len(x)]) + x.encode() for x in "bench.test".split(".")) + bytes(1)
query = struct.pack("!HHHHHH", 1, 256, 1, 0, 0, 0) + labels + struct.pack("!HH", 1, 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(5)
    sock.connect(("10.0.2.3", 53))
    count, began = 2000, time.perf_counter()
    for _ in range(count):
        sock.send(query)
        sock.recv(512)
print(count / (time.perf_counter() - began))
"""
_REQUESTS = """
import http.client, ssl, sys, time
context = ssl.create_default_context()
if len(sys.argv) > 3:
    context.load_verify_locations(sys.argv[3])
connection = http.client.HTTPSConnection("bench.test", int(sys.argv[2]), context=context)
import socket
connection.sock = context.wrap_socket(
    socket.create_connection((sys.argv[1], int(sys.argv[2]))), server_hostname="bench.test")
count, began = 500, None
for number in range(count + 1):
    connection.request("GET", "/")
    connection.getresponse().read()
    began = began or time.perf_counter()
print(count / (time.perf_counter() - began))
"""


async def net(lab: Lab) -> list[Row]:
    """Every row of this module."""
    return [
        *await relay(lab),
        *await connections(lab),
        *await look_ups(lab),
        *await requests(lab),
        *await policies(lab),
    ]


async def _bare(code: str, *args: str) -> list[float]:
    command = [sys.executable, "-c", code, *args]
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    return [float(text) for text in done.stdout.split()]


async def relay(lab: Lab) -> list[Row]:
    """A big download next to plain loopback, and next to a relay made of asyncio streams."""
    sender = ref.Sender(_RELAYED)
    try:
        async with lab.serving(network={**_NETWORK, "dns_rate": 5000}) as server, server.client() as client:
            policy = NetworkPolicy.custom(["bench.test"])
            async with (
                client.create_sandbox(persistent=False, network_policy=policy) as box,
                _plain_relay(sender.port) as plain,
            ):

                async def step(samples: Samples, number: int) -> None:
                    del number
                    samples.add("loopback", _rate(await _bare(ref.RECEIVE, "127.0.0.1", str(sender.port))))
                    samples.add("streams", _rate(await _bare(ref.RECEIVE, "127.0.0.1", str(plain))))
                    argv = ["-c", ref.RECEIVE, "bench.test", str(sender.port)]
                    done = await box.run_process("python3", argv, check=True, capture_output=True)
                    assert done.stdout is not None
                    samples.add("relayed", _rate([float(text) for text in done.stdout.split()]))

                samples = await repeat(lab.rounds(8, 3), step, warm_up=1)
    finally:
        sender.close()
    relayed = samples["relayed"]
    return [
        row(
            f"relay, next to {what}",
            relayed,
            unit=MEGABYTES_A_SECOND,
            reference=(what, samples[name]),
        )
        for name, what in (("loopback", ref.LOOPBACK), ("streams", "asyncio streams"))
    ]


def _rate(printed: list[float]) -> float:
    size, seconds = printed
    return size / seconds / 1e6


@contextlib.asynccontextmanager
async def _plain_relay(port: int) -> AsyncIterator[int]:
    """The plainest relay: asyncio streams, in a process of its own."""
    code = (
        "import asyncio, sys\n"
        "async def copy(r, w):\n"
        "    while data := await r.read(1 << 18):\n"
        "        w.write(data); await w.drain()\n"
        "    w.close()\n"
        "async def serve(r, w):\n"
        "    r2, w2 = await asyncio.open_connection('127.0.0.1', int(sys.argv[1]), limit=1 << 20)\n"
        "    await asyncio.gather(copy(r, w2), copy(r2, w), return_exceptions=True)\n"
        "async def main():\n"
        "    server = await asyncio.start_server(serve, '127.0.0.1', 0, limit=1 << 20)\n"
        "    print(server.sockets[0].getsockname()[1], flush=True)\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(port), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


async def connections(lab: Lab) -> list[Row]:
    """From asking for a connection to its first byte, name looked up in between."""
    sender = ref.Sender(1)
    try:
        async with lab.serving(network={**_NETWORK, "dns_rate": 5000}) as server, server.client() as client:
            policy = NetworkPolicy.custom(["bench.test"])
            async with client.create_sandbox(persistent=False, network_policy=policy) as box:
                bare = await _bare(_CONNECT, "127.0.0.1", str(sender.port))
                argv = ["-c", _CONNECT, "bench.test", str(sender.port)]
                done = await box.run_process("python3", argv, check=True, capture_output=True)
                assert done.stdout is not None
                inside = [float(text) for text in done.stdout.split()]
    finally:
        sender.close()
    name = "look up, connect, first byte"
    return [row(name, inside, unit=MILLISECONDS, reference=("loopback, no name", bare))]


async def look_ups(lab: Lab) -> list[Row]:
    """One program asking for one name, again and again."""
    rates = []
    async with (
        lab.serving(network={**_NETWORK, "dns_rate": 100_000}) as server,
        server.client() as client,
        client.create_sandbox(persistent=False) as box,
    ):
        for _ in range(lab.rounds(5, 2)):
            done = await box.run_process("python3", ["-c", _LOOK_UP], check=True, capture_output=True)
            assert done.stdout is not None
            rates.append(float(done.stdout))
    return [row("DNS queries, one after the other", rates, unit=RATE)]


async def requests(lab: Lab) -> list[Row]:
    """Requests over one TLS connection, through a rule that sets a header."""
    directory = lab.scratch()
    server_pem, trusted = _certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                await writer.drain()
        writer.close()

    samples = Samples()
    web = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = str(web.sockets[0].getsockname()[1])
    policy = NetworkPolicy.custom({"bench.test": [Rule(Transform((("x-set", "1"),)))]})
    async with (
        web,
        lab.serving(network={**_NETWORK, "trusted": [trusted]}) as server,
        server.client() as client,
        client.create_sandbox(persistent=False, network_policy=policy) as box,
    ):
        for _ in range(lab.rounds(5, 2)):
            samples.add("bare", (await _bare(_REQUESTS, "127.0.0.1", port, trusted))[0])
            argv = ["-c", _REQUESTS, "bench.test", port]
            done = await box.run_process("python3", argv, check=True, capture_output=True)
            assert done.stdout is not None
            samples.add("ruled", float(done.stdout))
    name = "HTTPS requests through a rule, one connection"
    return [row(name, samples["ruled"], unit=RATE, reference=("no sandbox", samples["bare"]))]


def _certificate(directory: str) -> tuple[str, str]:
    """A server certificate for bench.test that vouches for itself: with its key, and alone."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bench.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    paths = (os.path.join(directory, "server.pem"), os.path.join(directory, "trusted.pem"))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, content in zip(paths, (certificate + private, certificate), strict=True):
        with open(path, "wb") as handle:
            handle.write(content)
    return paths


async def policies(lab: Lab) -> list[Row]:
    """Many sandboxes, each with a policy of its own, and what netd needs for them."""
    count = lab.rounds(_SANDBOXES, 20)
    samples = Samples()
    async with lab.serving(network=_NETWORK) as server, server.client() as client:

        async def create(number: int) -> None:
            policy = NetworkPolicy.custom([f"only-{number}.test", "bench.test"])
            await samples.wait("create", client.create_sandbox(persistent=False, network_policy=policy))

        await gather([create(number) for number in range(count)])
        memory = _netd_memory(server.data)
    return [
        row(f"create, {count} sandboxes with a policy each", samples["create"]),
        row(f"memory of netd for {count} sandboxes", [memory], unit=MEGABYTES),
    ]


def _netd_memory(data: str) -> float:
    """Resident memory of the netd that holds the lock of a data directory."""
    held = os.stat(f"{data}/netd.lock").st_ino
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/comm", encoding="ascii") as handle:
                if handle.read().strip() != "sandkeep-netd":
                    continue
            opened = (f"/proc/{entry}/fd/{fd}" for fd in os.listdir(f"/proc/{entry}/fd"))
            if any(os.stat(path).st_ino == held for path in opened):
                with open(f"/proc/{entry}/status", encoding="ascii") as handle:
                    resident = next(line for line in handle if line.startswith("VmRSS"))
                return int(resident.split()[1]) / 1000
        except OSError:
            continue
    raise RuntimeError("netd is not running")
