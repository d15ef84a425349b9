"""Interactive terminals: a program on a pseudo-terminal, over one connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import msgspec

from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    SandkeepError,
    StreamClosed,
    TransportError,
)
from sandkeep.sdk._async.streams import input_bytes
from sandkeep.sdk._async.transport import Transport, read
from sandkeep.sdk.bodies import check_size
from sandkeep.sdk.concurrent import Lock, shielded
from sandkeep.sdk.websocket import Closed, Frames, Handshake
from sandkeep.wire.base import encode
from sandkeep.wire.responses import TerminalOpened
from sandkeep.wire.terminal import NOT_EXECUTABLE, NOT_FOUND

_READ = 1 << 16
_SECONDS = 60.0


class Terminal:
    """A program on a terminal of its own. Reading and writing may happen at the same time.

    ``async with`` hangs up on exit, which ends the program. Nobody can attach to it again.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held = AsyncExitStack()
        self._network: Any = None
        self._frames = Frames()
        self._sending = Lock()
        self._buffer = bytearray()
        self._closed = False
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """How the program ended; ``None`` while it runs."""
        return self._returncode

    async def open(self, session: str, start: dict[str, Any], *, user: str | None) -> None:
        """Connect and start the program; called by whoever makes the terminal."""
        path = f"/v2/sandboxes/sessions/{session}/interactive"
        body = {} if user is None else {"user": user}
        opened = read(TerminalOpened, await self._transport.request("POST", path, json=body))
        # Through our own way to the server: what it calls itself may not be how we reach it.
        below = "/" + opened.url.partition("://")[2].partition("/")[2].removeprefix("api/")
        handshake = Handshake()
        try:
            stream = self._transport.upgrade(below, {"token": opened.token}, handshake.headers())
            answer = await self._held.enter_async_context(stream)
            handshake.check(answer.status, answer.headers.get("sec-websocket-accept", ""))
            self._network = answer.network
            await self._send_text(start)
        except BaseException:
            await self._held.aclose()
            raise

    async def read(self, size: int = _READ) -> bytes:
        """What the program printed: up to ``size`` bytes, at least one; nothing when it has ended.

        Raises:
            ExecutableNotFound: there is no such program.
            ExecutableRefused: it is there and cannot be run.
            StreamClosed: the connection or the session ended before the program.
        """
        while not self._buffer and not self._closed:
            await self._receive()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What the program prints, in pieces as they come."""
        while data := await self.read():
            yield data

    async def write(self, data: bytes | str) -> None:
        """Type something; text is sent as UTF-8."""
        view = input_bytes(data)
        while view:
            self._frames.binary(bytes(view[: 1 << 15]))
            view = view[1 << 15 :]
            await self._flush()

    async def resize(self, *, columns: int, rows: int) -> None:
        """Tell the program that its terminal has another size."""
        check_size(columns, rows)
        await self._send_text({"type": "resize", "cols": columns, "rows": rows})

    async def wait(self) -> int:
        """Read and throw away what is still printed; returns how the program ended."""
        while await self.read():
            pass
        if self._returncode is None:
            raise StreamClosed("the terminal was closed before the program ended")
        return self._returncode

    async def aclose(self) -> None:
        """Hang up. Can be repeated."""
        await shielded(self._hang_up, 10.0)

    async def _hang_up(self) -> None:
        network, self._network = self._network, None
        self._closed = True
        if network is not None:
            try:
                self._frames.close()
                await network.write(self._frames.to_send(), timeout=5.0)
            except Exception:
                pass  # it is gone, which is what was wanted
            await network.aclose()
        await self._held.aclose()

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _receive(self) -> None:
        if self._network is None:
            raise StreamClosed("the terminal is closed")
        try:
            data = await self._network.read(_READ, timeout=None)
        except Exception as error:
            raise TransportError(f"the connection to the terminal was lost: {error}") from error
        for message in self._frames.feed(data):
            if isinstance(message, bytes):
                self._buffer += message
            elif isinstance(message, Closed):
                self._closed = True
                if self._returncode is None:
                    raise _refusal(message)
            else:
                self._returncode = int(msgspec.json.decode(message).get("code", 0))
                self._closed = True
        if not self._closed:
            await self._flush()

    async def _send_text(self, message: dict[str, Any]) -> None:
        self._frames.text(encode(message).decode())
        await self._flush()

    async def _flush(self) -> None:
        # Whoever reads answers pings, so two may have something to send; frames must not get into each other.
        async with self._sending:
            data = self._frames.to_send()
            if data:
                if self._network is None:
                    raise StreamClosed("the terminal is closed")
                await self._network.write(data, timeout=_SECONDS)


def _refusal(closed: Closed) -> SandkeepError:
    if closed.code == NOT_FOUND:
        return ExecutableNotFound(closed.reason)
    if closed.code == NOT_EXECUTABLE:
        return ExecutableRefused(closed.reason)
    return StreamClosed(f"the terminal was closed: {closed.reason or closed.code}")
