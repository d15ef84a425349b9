"""Interactive sessions: a process on a terminal, over a WebSocket.

Whoever may run something in a session can have a ticket: a token that opens one connection, once, soon. The
connection has no other credentials. Output goes out as binary frames, the exit as the last text frame. When
the client goes away the terminal is hung up; nobody can attach to it again.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from sandkeep.engine.context import ACTOR
from sandkeep.engine.engine import Engine
from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    NotFound,
    SandkeepError,
    StdinStalled,
    StdinUnavailable,
)
from sandkeep.server.auth import Auth
from sandkeep.server.http import Receive, Scope, Send
from sandkeep.store.rows import Process, ProcessKind, ProcessStatus
from sandkeep.supervisor.outputlog import Chunk
from sandkeep.wire.terminal import (
    MAX_FRAME,
    NOT_EXECUTABLE,
    NOT_FOUND,
    Resize,
    Start,
    exit_message,
    read_message,
)

PATH: Final = "/v2/interactive/"
TICKET_SECONDS: Final = 300.0
HANG_UP_SECONDS: Final = 5.0
STALLED_SECONDS: Final = 30.0
"""How long keystrokes wait for a process that reads none."""
_MOST_TICKETS: Final = 10_000

_UNEXPECTED, _REFUSED, _GOING_AWAY = 1011, 1008, 1001


class _Ticket(NamedTuple):
    project: str
    session: str
    user: str | None
    until: float
    actor: str | None
    token: str | None


class Terminals:
    def __init__(self, engine: Engine, auth: Auth, log: Callable[..., None]) -> None:
        self._engine = engine
        self._auth = auth
        self._log = log
        self._tickets: dict[str, _Ticket] = {}
        self._open: set[asyncio.Task[Any]] = set()
        self._hang_ups: set[asyncio.Task[None]] = set()

    def issue(self, project: str, session: str, user: str | None, *, token: str | None) -> str:
        """A ticket for one terminal of a session, used by one of its users.

        It, and the terminal, last no longer than the ``token`` they were had with.
        """
        now = asyncio.get_running_loop().time()
        for ticket, issued in list(self._tickets.items()):
            if issued.until > now and len(self._tickets) < _MOST_TICKETS:
                break  # they are in the order they were issued
            del self._tickets[ticket]
        ticket = secrets.token_urlsafe(32)
        self._tickets[ticket] = _Ticket(project, session, user, now + TICKET_SECONDS, ACTOR.get(), token)
        return ticket

    def _redeem(self, scope: Scope) -> _Ticket | None:
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        found = self._tickets.pop(tokens[0], None)
        if found is None:
            return None
        path: str = scope["path"].removeprefix("/api")
        if path != PATH + found.session or found.until < asyncio.get_running_loop().time():
            return None
        if found.token is not None and not self._auth.accepts(found.token):
            return None
        return found

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, from the handshake to its end."""
        await receive()
        redeemed = self._redeem(scope)
        if redeemed is None:
            await send({"type": "websocket.close", "code": _REFUSED})
            return
        ACTOR.set(redeemed.actor)
        await send({"type": "websocket.accept"})
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with self._auth.while_accepted(redeemed.token, task.cancel):
                await self._session(redeemed, receive, send)
        except asyncio.CancelledError:
            task.uncancel()
            revoked = redeemed.token is not None and not self._auth.accepts(redeemed.token)
            await send({"type": "websocket.close", "code": _REFUSED if revoked else _GOING_AWAY})
        except SandkeepError as error:
            # A close frame has room for 123 bytes.
            reason = error.message.encode()[:120].decode(errors="ignore")
            await send({"type": "websocket.close", "code": _code(error), "reason": reason})
        finally:
            self._open.discard(task)

    async def _session(self, ticket: _Ticket, receive: Receive, send: Send) -> None:
        start = await _read_start(receive)
        if start is None:
            await send({"type": "websocket.close", "code": _REFUSED, "reason": "start comes first"})
            return
        process = await self._engine.processes.start(
            ticket.project,
            ticket.session,
            user=ticket.user,
            command=start.command,
            args=start.args,
            cwd=start.cwd,
            env=start.environment(),
            pty=(start.rows, start.cols),
            kind=ProcessKind.INTERACTIVE,
        )
        showing = asyncio.create_task(self._show(process, send), name=f"show {process.id}")
        hearing = asyncio.create_task(self._hear(process, receive), name=f"hear {process.id}")
        try:
            await asyncio.wait((showing, hearing), return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                showing.result()
            elif hearing.done():
                hearing.result()
        finally:
            for task in (showing, hearing):
                task.cancel()
            await asyncio.gather(showing, hearing, return_exceptions=True)
            self._hang_up(process)

    async def _show(self, process: Process, send: Send) -> None:
        where = (process.project, process.session, process.id)
        async for item in self._engine.processes.output(*where):
            if isinstance(item, Chunk):
                for start in range(0, len(item.data), MAX_FRAME):
                    piece = item.data[start : start + MAX_FRAME]
                    await send({"type": "websocket.send", "bytes": piece})
        ended = await self._engine.processes.wait(*where)
        code = ended.exit_code if ended.exit_code is not None else 128 + signal.SIGKILL
        await send({"type": "websocket.send", "text": exit_message(code)})
        await send({"type": "websocket.close", "code": 1000})

    async def _hear(self, process: Process, receive: Receive) -> None:
        """Keystrokes and sizes, until the client goes away.

        That has to be heard also while the process reads nothing, and can only be heard by reading on. So
        a client that types is made to wait for a while, and then what it types is lost.
        """
        where = (process.project, process.session, process.id)
        typing: asyncio.Task[None] | None = None
        patience = STALLED_SECONDS
        try:
            while (message := await receive())["type"] == "websocket.receive":
                if message.get("bytes"):
                    if typing is not None:
                        await asyncio.wait((typing,), timeout=patience)
                        if not typing.done():
                            patience = 0.0
                            continue
                        typing.result()
                    patience = STALLED_SECONDS
                    typing = asyncio.create_task(self._type(where, message["bytes"]))
                elif message.get("text"):
                    request = read_message(message["text"])
                    if isinstance(request, Resize):
                        with suppress(NotFound):
                            await self._engine.processes.resize(
                                *where, rows=request.rows, columns=request.cols
                            )
        finally:
            if typing is not None:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)

    async def _type(self, where: tuple[str, str, str], keys: bytes) -> None:
        try:
            await self._engine.processes.write_stdin(*where, keys)
        except (NotFound, StdinUnavailable, StdinStalled):
            pass  # it has ended, which the other task tells; or it does not read, as nobody does

    def _hang_up(self, process: Process) -> None:
        found = self._engine.processes.get(process.project, process.session, process.id)
        if found.status is ProcessStatus.RUNNING:
            task = asyncio.create_task(self._end(process), name=f"hang up {process.id}")
            self._hang_ups.add(task)
            task.add_done_callback(self._hang_ups.discard)

    async def _end(self, process: Process) -> None:
        where = (process.project, process.session, process.id)
        try:
            await self._engine.processes.signal(*where, signal.SIGHUP)
            await self._engine.processes.signal(*where, signal.SIGCONT)
            try:
                await asyncio.wait_for(self._engine.processes.wait(*where), HANG_UP_SECONDS)
            except TimeoutError:
                await self._engine.processes.signal(*where, signal.SIGKILL)
        except SandkeepError as error:
            self._log("hang up failed", process=process.id, error=str(error))

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, *self._hang_ups, return_exceptions=True)


async def _read_start(receive: Receive) -> Start | None:
    message = await receive()
    if message["type"] != "websocket.receive" or not message.get("text"):
        return None
    start = read_message(message["text"])
    return start if isinstance(start, Start) else None


def _code(error: SandkeepError) -> int:
    if isinstance(error, ExecutableNotFound):
        return NOT_FOUND
    return NOT_EXECUTABLE if isinstance(error, ExecutableRefused) else _UNEXPECTED
