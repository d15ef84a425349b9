"""Sandboxes with a network, and servers for them to reach, without an event loop in sight.

``Net`` owns an engine on a data directory and servers on loopback, all on one loop that runs while a call
waits. Names ending in ``.test`` are the operator's own and lead to loopback, which it allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from sandkeep.engine.engine import Engine
from sandkeep.engine.settings import NetworkSettings, Settings
from sandkeep.store.pages import PageRequest
from sandkeep.store.rows import Event, Session
from sandkeep.types import NetworkPolicy, SandboxSpec
from tests.lab import Lab

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
        timeout = options.pop("timeout", 60)
        process = await self.start(script, **options)
        return await asyncio.wait_for(self.output(process), timeout)

    async def start(self, script: str, **options: Any) -> str:
        engine = self.net.engine
        started = await engine.processes.start(
            self.session.project,
            self.session.id,
            command="bash",
            args=("-c", f"exec 2>&1\n{script}"),
            **options,
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
        deadline = time.monotonic() + 3
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

    def until(self, true: Callable[[], Any], *, seconds: float = 5) -> None:
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
        started = self.do(self.engine.sandboxes.create(self.project, spec))
        box = Box(self, name, started.session)
        self._boxes.append(box)
        return box

    def serve(self, handler: Handler, host: str = "127.0.0.1", **options: Any) -> int:
        """A TCP server on loopback; returns its port."""

        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # clients are cut off here on purpose
            finally:
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
        self.wait(0)
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
