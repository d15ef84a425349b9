"""Ports of a sandbox on this machine: a local listener, and a tunnel for each connection to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import msgspec

from sandkeep.checks import expect, refuse
from sandkeep.errors import AccessDenied, SandkeepError, StreamClosed, TransportError
from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.transport import Transport, translated
from sandkeep.sdk._compat_async import Background, LocalSocket, Lock, shielded, together
from sandkeep.sdk.websocket import Closed, Frames, Handshake, interrupt
from sandkeep.wire.tunnel import END, MAX_FRAME, ROUTE, EndOfBytes, Failure, Open, read_message

_READ = 1 << 16
_OPEN_SECONDS = 60.0


class Tunnel:
    """One connection to a port inside a sandbox. Reading and writing may happen at the same time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held = AsyncExitStack()
        self._network: Any = None
        self._frames = Frames()
        self._sending = Lock()
        self._buffer = bytearray()
        self._opened = False
        self._ended = False
        self._closed = False

    async def open(self, session: str, port: int) -> None:
        """Connect; return when the program inside has accepted."""
        try:
            await self._connect(ROUTE.format(session=session, port=port))
            while not self._opened:
                await self._receive(_OPEN_SECONDS)
        except BaseException:
            await self.aclose()
            raise

    async def _connect(self, path: str) -> None:
        handshake = Handshake()
        stream = self._transport.upgrade(path, {}, handshake.headers())
        response = await self._held.enter_async_context(stream)
        accept = response.headers.get("sec-websocket-accept", "")
        refused = AccessDenied("the server does not let this caller connect to the port")
        handshake.check(response.status, accept, refused=refused)
        self._network = response.network

    async def read(self) -> bytes:
        """Return received bytes; nothing once the program inside will send no more."""
        while not self._buffer and not self._ended and not self._closed:
            await self._receive(None)
        taken = bytes(self._buffer)
        self._buffer.clear()
        return taken

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_FRAME):
            self._frames.binary(data[start : start + MAX_FRAME])
            await self._flush()

    async def end(self) -> None:
        """Tell the program inside that no more bytes will come."""
        self._frames.text(END)
        await self._flush()

    async def wait_closed(self) -> None:
        """Return when the server has closed it: both sides have ended."""
        while not self._closed:
            await self._receive(None)

    async def aclose(self) -> None:
        """Close it, for other tasks and threads too. Can be repeated."""
        network, self._network = self._network, None
        self._closed = True
        if network is not None:
            interrupt(network)
        await shielded(self._held.aclose, 10.0)

    async def _receive(self, seconds: float | None) -> None:
        network = self._network
        if network is None:
            raise StreamClosed("the tunnel is closed")
        try:
            data = await network.read(_READ, timeout=seconds)
        except Exception as error:
            raise TransportError(f"the connection to the server was lost: {error}") from error
        for message in self._frames.feed(data):
            if isinstance(message, bytes):
                self._buffer += message
            elif isinstance(message, Closed):
                self._closed = True
                if not self._opened:
                    raise StreamClosed(f"the tunnel was closed: {message.reason or message.code}")
            else:
                self._handle_text(message)
        if not self._closed:
            await self._flush()

    def _handle_text(self, text: str) -> None:
        try:
            message = read_message(text)
        except msgspec.MsgspecError as error:
            raise TransportError(
                f"the server sent something else than a tunnel's message: {error}"
            ) from error
        match message:
            case Open():
                self._opened = True
            case EndOfBytes():
                self._ended = True
            case Failure():
                raise message.error()

    async def _flush(self) -> None:
        # The reader sends pongs, so two tasks may send at a time; their frames must not mix.
        async with self._sending:
            data = self._frames.to_send()
            network = self._network
            if data:
                if network is None:
                    raise StreamClosed("the tunnel is closed")
                with translated(self._transport.target):
                    await network.write(data, timeout=None)


class PortForward:
    """A port of a sandbox, on this machine: while this is entered, connections to it lead there.

    Made by :meth:`Sandbox.forward_port`.
    """

    def __init__(
        self,
        transport: Transport,
        recovery: Recovery,
        remote: int,
        local: int,
        address: str,
        on_failure: Callable[[SandkeepError], object] | None,
    ) -> None:
        _check_port("remote", remote, 1)
        _check_port("local", local, 0)
        self._transport = transport
        self._recovery = recovery
        self._asked = (address, local)
        self._on_failure = on_failure
        self._listener: LocalSocket | None = None
        self._background = Background()
        self._open: set[LocalSocket | Tunnel] = set()
        self._place: tuple[str, int] = (address, local)
        self.remote: int = remote
        """The port inside the sandbox."""

    @property
    def address(self) -> str:
        """The address that it listens on."""
        return self._place[0]

    @property
    def port(self) -> int:
        """The port of this machine that it listens on."""
        return self._place[1]

    async def __aenter__(self) -> PortForward:
        self._listener = LocalSocket(_listen(*self._asked))
        self._place = self._listener.socket.getsockname()[:2]
        await self._background.__aenter__()
        self._background.start(self._accept, self._listener)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the listener and every connection."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for each in list(self._open):
            await _close(each)
        await self._background.__aexit__(None, None, None)

    async def _accept(self, listener: LocalSocket) -> None:
        while True:
            try:
                local = await listener.accept()
            except (OSError, ValueError):
                return  # it was closed
            self._background.start(self._serve, local)

    async def _serve(self, local: LocalSocket) -> None:
        used: set[LocalSocket | Tunnel] = {local}
        self._open.add(local)

        async def connect(session: str) -> Tunnel:
            tunnel = Tunnel(self._transport)
            used.add(tunnel)
            self._open.add(tunnel)
            await tunnel.open(session, self.remote)
            return tunnel

        try:
            tunnel = await self._recovery.run(connect)
            await together(lambda: _outward(local, tunnel), lambda: _inward(tunnel, local))
        except SandkeepError as error:
            if self._on_failure is not None and self._listener is not None:
                self._on_failure(error)
        finally:
            for each in used:
                await _close(each)
            self._open -= used


async def _outward(local: LocalSocket, tunnel: Tunnel) -> None:
    try:
        while data := await local.receive(_READ):
            await tunnel.write(data)
        await tunnel.end()
    except (OSError, SandkeepError):
        await tunnel.aclose()  # which ends the other direction


async def _inward(tunnel: Tunnel, local: LocalSocket) -> None:
    try:
        while data := await tunnel.read():
            await local.send(data)
        local.socket.shutdown(socket.SHUT_WR)
        await tunnel.wait_closed()
    except (OSError, SandkeepError):
        local.close()  # which ends the other direction


async def _close(each: LocalSocket | Tunnel) -> None:
    if isinstance(each, Tunnel):
        await each.aclose()
    else:
        each.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except (OSError, OverflowError) as error:
        refuse("local", f"cannot listen on {address} port {port}: {error}")


def _check_port(name: str, port: int, least: int) -> None:
    expect(name, port, int, "a number")
    if not least <= port <= 65535:
        refuse(name, f"must be between {least} and 65535, not {port}")
