"""Sandboxes with a network, and servers for them to reach, without an event loop in sight.

``Net`` owns an engine on a data directory and servers on loopback, all on one loop that runs while a call
waits. Names ending in ``.test`` are the operator's own and lead to loopback, which it allows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from sandkeep.engine.engine import Engine
from sandkeep.engine.settings import NetworkSettings, Settings
from sandkeep.net import dns
from sandkeep.policy import NetworkPolicy
from sandkeep.process_options import ProcessOptions
from sandkeep.spec import SandboxSpec
from sandkeep.store.pages import PageRequest
from sandkeep.store.rows import Event, Session
from tests.driver_lab import Lab
from tests.polling import ENOUGH

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

NAMES = {
    name: ["127.0.0.1"]
    for name in ("one.test", "two.test", "deep.one.test", "very.deep.one.test", "evil.test", "inner.test")
}
OPERATOR = NetworkSettings(
    names={**NAMES, "six.test": ["::1"], "metadata.test": ["169.254.169.254"], "private.test": ["10.1.2.3"]},
    allowed=("127.0.0.0/8", "::1/128"),
)


class Box:
    """A sandbox under test."""

    def __init__(self, net: Net, name: str, session: Session) -> None:
        self.net = net
        self.name = name
        self.session = session

    def sh(self, script: str, **options: Any) -> str:
        """Everything a shell script prints, standard error too."""
        return self.net.do(self._sh(script, options))

    async def _sh(self, script: str, options: dict[str, Any]) -> str:
        timeout = options.pop("timeout", ENOUGH)
        process = await self.start(script, **options)
        return await asyncio.wait_for(self.output(process), timeout)

    async def start(self, script: str, **options: Any) -> str:
        engine = self.net.engine
        started = await engine.processes.start(
            self.session.project,
            self.session.id,
            ProcessOptions(command="bash", args=("-c", f"exec 2>&1\n{script}"), **options),
        )
        return started.id

    async def output(self, process: str) -> str:
        ref = self.net.engine._context.ref(self.session)
        pieces = [getattr(item, "data", b"") async for item in self.net.engine.driver.output(ref, process)]
        return b"".join(pieces).decode(errors="replace").strip()

    def policy(self, policy: NetworkPolicy) -> None:
        sandboxes = self.net.engine.sandboxes
        self.net.do(sandboxes.set_policy(self.session.project, self.session.id, policy))

    def events(self, kind: str | None = None, **facts: Any) -> list[Event]:
        """Network events with these facts, oldest first; waits a moment for the first of them."""
        deadline = time.monotonic() + 30
        while True:
            rows = self._event_rows(f"network.{kind}" if kind else None)
            found = [
                event
                for event in rows
                if event.kind.startswith("network.") and facts.items() <= dict(event.data).items()
            ]
            if found or time.monotonic() > deadline:
                return found
            self.net.wait(0.02)

    def _event_rows(self, kind: str | None) -> list[Event]:
        rows: list[Event] = []
        cursor: str | None = None
        while True:
            request = PageRequest(limit=100, cursor=cursor, order="asc")
            events = self.net.engine.store.events
            page = events.page(self.session.project, request, session=self.session.id, kind=kind)
            rows += page.items
            cursor = page.next
            if cursor is None:
                return rows

    def row(self) -> Session:
        return self.net.engine.sessions.get(self.session.project, self.session.id)


class Net:
    def __init__(self, data_dir: str, settings: NetworkSettings = OPERATOR) -> None:
        self._runner = asyncio.Runner()
        self.data_dir = data_dir
        self.settings = Settings(network=settings)
        self.log: list[tuple[str, dict[str, Any]]] = []
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._boxes: list[Box] = []
        self._count = 0
        self.engine: Engine = self.do(self._open())
        self.project = self.engine.project(team="team", name="project").id

    async def _open(self) -> Engine:
        return await Engine.open(
            self.data_dir, settings=self.settings, log=lambda text, **facts: self.log.append((text, facts))
        )

    def do(self, work: Awaitable[T]) -> T:
        async def wrap() -> T:
            return await work

        return self._runner.run(wrap())

    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    def until(self, true: Callable[[], Any], *, seconds: float = ENOUGH) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "it never came true"
            self.wait(0.01)

    def box(self, policy: NetworkPolicy | None = None, **options: Any) -> Box:
        self._count += 1
        name = options.pop("name", f"box{self._count}")
        spec = SandboxSpec(name=name, persistent=options.pop("persistent", False), **options)
        if policy is not None:
            spec = replace(spec, network_policy=policy)
        started = self.do(self.engine.sandboxes.create(self.project, spec, operator=True))
        box = Box(self, name, started.session)
        self._boxes.append(box)
        return box

    def serve(self, handler: Handler, host: str = "127.0.0.1", **options: Any) -> int:
        """A TCP server on loopback; returns its port."""

        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # clients are cut off here on purpose
            finally:
                self._writers.discard(writer)
                writer.close()

        async def start() -> asyncio.Server:
            return await asyncio.start_server(guarded, host, 0, **options)

        server = self.do(start())
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def reopen(self) -> None:
        """As a server does that is restarted."""
        self.do(self.engine.close())
        self.engine = self.do(self._open())

    def close(self) -> None:
        for box in self._boxes:
            self.do(self.engine.sandboxes.destroy(self.project, box.name))
        for server in self._servers:
            server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self.wait(0.05)
        self.do(self.engine.close())
        self._runner.close()


@contextmanager
def network(lab: Lab, settings: NetworkSettings = OPERATOR) -> Iterator[Net]:
    """A network in the mode of a lab, on a data directory beside it."""
    net = Net(f"{lab.data_dir}-net", settings)
    try:
        yield net
    finally:
        net.close()


# --- servers -------------------------------------------------------------------------------------------


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An HTTP server that says which Host it was asked for."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        host = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"host:"))
        body = b"hello from " + host[5:].strip().split(b":")[0] + b"\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Whatever comes goes back; greets first, as servers of some protocols do."""
    writer.write(b"220 ready\n")
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


# --- TLS -----------------------------------------------------------------------------------------------


class Authority:
    """A certificate authority for test servers: not the one sessions trust, the one netd does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test servers")])
        self._certificate = self._sign(self._name, self._key, ca=True, names=())
        self.path = directory / "servers.pem"
        self.path.write_bytes(self._certificate.public_bytes(Encoding.PEM))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool, names: Sequence[str]
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def server(self, *names: str) -> ssl.SSLContext:
        """What a server with these names listens with."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([]), key, ca=False, names=names)
        path = self._directory / f"{names[0]}.pem"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(certificate.public_bytes(Encoding.PEM) + private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


@contextmanager
def inspecting(lab: Lab, **settings: Any) -> Iterator[tuple[Net, Authority]]:
    """A network whose netd trusts the servers of an authority of the test's."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(lab.data_dir)) as directory:
        authority = Authority(Path(directory))
        with network(lab, replace(OPERATOR, trusted=(str(authority.path),), **settings)) as net:
            yield net, authority


class Recorder:
    """An HTTP/1.1 server that remembers requests: first line, headers, length of the body."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], int]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            size = await self._body(reader, headers)
            self.requests.append((head[0], headers, size))
            body = f"{head[0]} {headers['host']}\n".encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nx-server: real\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await writer.drain()

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> int:
        if "chunked" in headers.get("transfer-encoding", ""):
            size = 0
            while part := int((await reader.readline()).strip(), 16):
                size += len(await reader.readexactly(part))
                await reader.readexactly(2)
            await reader.readexactly(2)
            return size
        left = size = int(headers.get("content-length", 0))
        while left:
            left -= len(await reader.read(min(left, 1 << 16)))
        return size


# --- DNS -----------------------------------------------------------------------------------------------


class NameServer(asyncio.DatagramProtocol):
    """A real name server for a few names; remembers every question it is asked."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.asked: list[tuple[str, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asked = dns.question(data)
        self.asked.append((asked.name, asked.kind))
        found = [ip_address(text) for text in self.addresses.get(asked.name, [])]
        kind = 4 if asked.kind == dns.A else 6
        answers = tuple(address for address in found if address.version == kind)
        rcode = dns.OK if asked.name in self.addresses else dns.NO_SUCH_NAME
        self._transport.sendto(dns.reply(asked, rcode, addresses=answers, ttl=0), addr)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def resolving(lab: Lab, **settings: Any) -> Iterator[tuple[Net, NameServer]]:
    """A network whose names, apart from the operator's own, come from a name server of the test's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        place = f"127.0.0.1#{sock.getsockname()[1]}"
        with network(lab, replace(OPERATOR, name_servers=(place,), **settings)) as net:
            server = NameServer()

            async def start() -> None:
                await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, sock=sock)

            net.do(start())
            try:
                yield net, server
            finally:
                server.close()
                net.wait(0)
