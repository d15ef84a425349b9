"""Interactive terminals: a program on a pseudo-terminal, over one connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from sandkeep.errors import RequestTimeout, SandkeepError, StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.streams import input_bytes
from sandkeep.sdk._async.transport import Transport, decode, translated
from sandkeep.sdk._compat_async import Lock, OwnWith, shielded, sleep
from sandkeep.sdk.bodies import check_size
from sandkeep.sdk.websocket import Closed, Frames, Handshake
from sandkeep.wire.base import encode
from sandkeep.wire.responses import TerminalOpened
from sandkeep.wire.terminal import Attached, read_news

_READ = 1 << 16
_SECONDS = 60.0
_HUNG_UP = "the program got SIGHUP; open another terminal"
SCROLLBACK = 64 << 10
"""Bytes of earlier output that a client gets when it attaches."""


class Terminal(OwnWith):
    """A program on a terminal of its own. Reading and writing may happen at the same time.

    ``async with`` closes the connection on exit. That hangs up a program that this terminal was opened for,
    which ends it, unless it is detachable. Other clients attach by :meth:`Sandbox.attach_terminal`.
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
        self._process_id: str | None = None
        self._refused: Exception | None = None
        self._keeps_on = False

    @property
    def process_id(self) -> str | None:
        """Id of its process, for :meth:`Sandbox.attach_terminal`; ``None`` if it could not be started."""
        return self._process_id

    @property
    def returncode(self) -> int | None:
        """Exit code of the program; ``None`` while it runs."""
        return self._returncode

    async def _open(self, session: str, first: dict[str, Any], *, user: str | None, extend: bool) -> None:
        """Connect, and start the program or attach to it.

        If the connection is lost before the program was requested, this reconnects: nothing has been started.
        """
        attaches = first["type"] == "attach"
        self._keeps_on = attaches or bool(first.get("detachable"))
        again = retry.Reconnecting()
        while True:
            try:
                await self._connect(session, user, extend)
                break
            except RequestTimeout:
                raise
            except TransportError as error:
                await self._held.aclose()
                await sleep(again.after(error))
            except BaseException:
                await self._held.aclose()
                raise
        try:
            await self._send_text(first)
            while self._process_id is None and self._refused is None:
                try:
                    await self._receive()
                except SandkeepError as error:
                    if attaches or not self._closed or isinstance(error, TransportError):
                        raise
                    self._refused = error  # which ``read`` raises
        except BaseException:
            await self._held.aclose()
            raise

    async def _connect(self, session: str, user: str | None, extend: bool) -> None:
        path = f"/v2/sandboxes/sessions/{session}/interactive"
        body: dict[str, Any] = {"extendTimeout": extend} | ({} if user is None else {"user": user})
        opened = decode(TerminalOpened, await self._transport.request("POST", path, json=body, replay=True))
        # Use our own address of the server: the one it knows itself may not be reachable from here.
        below = "/" + opened.url.partition("://")[2].partition("/")[2].removeprefix("api/")
        handshake = Handshake()
        stream = self._transport.upgrade(below, {"token": opened.token}, handshake.headers())
        response = await self._held.enter_async_context(stream)
        refused = StreamClosed("the server did not accept the terminal's token")
        handshake.check(response.status, response.headers.get("sec-websocket-accept", ""), refused=refused)
        self._network = response.network

    async def read(self, size: int = _READ) -> bytes:
        """Return output of the program: up to ``size`` bytes, at least one; nothing when it has ended.

        Raises:
            ExecutableNotFound: there is no such program.
            ExecutableRefused: the kernel refuses to run the program.
            StreamClosed: the connection or the session ended before the program.
        """
        if self._refused is not None:
            raise self._refused
        while not self._buffer and not self._closed:
            await self._receive()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield output of the program in chunks."""
        while data := await self.read():
            yield data

    async def write(self, data: bytes | str) -> None:
        """Send input; text is sent as UTF-8.

        Raises:
            StreamClosed: the program or the connection has ended.
        """
        view = input_bytes(data)
        while view:
            self._require_open()
            self._frames.binary(bytes(view[: 1 << 15]))
            view = view[1 << 15 :]
            await self._flush()

    async def resize(self, *, columns: int, rows: int) -> None:
        """Change the size of the terminal; the program gets ``SIGWINCH``."""
        check_size(columns, rows)
        self._require_open()
        await self._send_text({"type": "resize", "cols": columns, "rows": rows})

    async def wait(self) -> int:
        """Discard output until the program ends; return its exit code."""
        while await self.read():
            pass
        if self._returncode is None:
            raise StreamClosed("the terminal was closed before the program ended")
        return self._returncode

    async def aclose(self) -> None:
        """Close the connection, which hangs up unless the program is detachable. Can be repeated."""
        await shielded(self._hang_up, 10.0)

    async def _hang_up(self) -> None:
        network, self._network = self._network, None
        self._closed = True
        if network is not None:
            try:
                self._frames.close()
                await network.write(self._frames.to_send(), timeout=5.0)
            except Exception:
                pass  # already closed
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
            raise TransportError(
                f"the connection to the terminal was lost: {error}",
                hint=self._hint(),
                process=self._process_id,
            ) from error
        for message in self._frames.feed(data):
            if isinstance(message, bytes):
                self._buffer += message
            elif isinstance(message, Closed):
                self._closed = True
                if self._returncode is None:
                    raise StreamClosed(
                        f"the terminal was closed: {message.reason or message.code}",
                        hint=self._hint(),
                        process=self._process_id,
                    )
            else:
                self._learn(message)
        if not self._closed:
            await self._flush()

    def _learn(self, message: str) -> None:
        news = read_news(message)
        if isinstance(news, Attached):
            self._process_id = news.process
            return
        self._closed = True
        code, refused = news
        if refused is not None:
            raise refused
        self._returncode = code

    def _hint(self) -> str:
        if self._keeps_on and self._process_id is not None:
            return f"the program goes on; attach_terminal({self._process_id!r}) attaches to it again"
        return _HUNG_UP

    def _require_open(self) -> None:
        if self._closed or self._network is None:
            raise StreamClosed("the terminal is closed")

    async def _send_text(self, message: dict[str, Any]) -> None:
        self._frames.text(encode(message).decode())
        await self._flush()

    async def _flush(self) -> None:
        # The reader sends pongs, so two tasks may send at a time; their frames must not mix.
        async with self._sending:
            data = self._frames.to_send()
            if data:
                if self._network is None:
                    raise StreamClosed("the terminal is closed")
                with translated(self._transport.target):
                    await self._network.write(data, timeout=_SECONDS)
