"""Interactive sessions: a process on a terminal, over a WebSocket.

A caller that may run processes in a session can get a ticket: a token that opens one connection, once, soon.
The connection needs no other credentials. Output is sent as binary frames, the exit as the last text frame;
so is the reason if nothing can be started. When the client that started a program disconnects, the program is
hung up, unless it is detachable. Any number of clients can attach to a terminal by its process: each gets the
output, from the durable log, and each one's keystrokes go in. While a connection is open the server extends
the session's timeout, if the ticket asks for that.
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
    InvalidRequest,
    NotFound,
    SandkeepError,
    StdinStalled,
    StdinUnavailable,
    TimeoutInvalid,
)
from sandkeep.server.auth import Auth
from sandkeep.server.http import Receive, Scope, Send, new_request_id
from sandkeep.shared import clock
from sandkeep.shared.outputlog import Chunk
from sandkeep.store.rows import Process, ProcessKind, ProcessStatus
from sandkeep.wire.terminal import (
    MAX_FRAME,
    NOT_EXECUTABLE,
    NOT_FOUND,
    Attach,
    Resize,
    Start,
    attached_message,
    exit_message,
    read_message,
)

PATH: Final = "/v2/interactive/"
TICKET_SECONDS: Final = 300.0
HANG_UP_SECONDS: Final = 5.0
STALLED_SECONDS: Final = 30.0
"""How long keystrokes wait for a process that does not read."""
LAST_KEYS_SECONDS: Final = 1.0
"""How long the last keystrokes of a client that disconnects may take to arrive."""
LITTLE_SECONDS: Final = 120
EXTENSION_SECONDS: Final = 300
LOOK_SECONDS: Final = 30.0
"""Interval at which the deadline is read again, because other requests may move it."""
_MOST_TICKETS: Final = 10_000

_UNEXPECTED, _REFUSED, _GOING_AWAY = 1011, 1008, 1001


class _Ticket(NamedTuple):
    project: str
    session: str
    user: str | None
    until: float
    actor: str | None
    token: str | None
    extend: bool


class Terminals:
    def __init__(self, engine: Engine, auth: Auth, log: Callable[..., None]) -> None:
        self._engine = engine
        self._auth = auth
        self._log = log
        self._tickets: dict[str, _Ticket] = {}
        self._open: set[asyncio.Task[Any]] = set()
        self._hang_ups: set[asyncio.Task[None]] = set()

    def issue(
        self, project: str, session: str, user: str | None, *, token: str | None, extend: bool = False
    ) -> str:
        """Return a ticket for one terminal of a session, for one of its users.

        The ticket and the terminal become invalid with the ``token`` that they were requested with.
        """
        now = asyncio.get_running_loop().time()
        for ticket, issued in list(self._tickets.items()):
            if issued.until > now and len(self._tickets) < _MOST_TICKETS:
                break  # sorted by the time they were issued
            del self._tickets[ticket]
        ticket = secrets.token_urlsafe(32)
        until = now + TICKET_SECONDS
        self._tickets[ticket] = _Ticket(project, session, user, until, ACTOR.get(), token, extend)
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
        """Serve one connection, from the handshake to its end."""
        await receive()
        redeemed = self._redeem(scope)
        if redeemed is None:
            self._log(
                "request",
                request=new_request_id(),
                method="GET",
                path=scope["path"],
                status=403,
                reason="the ticket for the terminal is unknown, used or expired, or its token is invalid",
            )
            await send({"type": "websocket.close", "code": _REFUSED})
            return
        ACTOR.set(redeemed.actor)
        await send({"type": "websocket.accept"})
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            attached = self._engine.activity.attached(redeemed.session)
            with attached, self._auth.while_accepted(redeemed.token, task.cancel):
                await self._session(redeemed, receive, send)
        except asyncio.CancelledError:
            task.uncancel()
            revoked = redeemed.token is not None and not self._auth.accepts(redeemed.token)
            await send({"type": "websocket.close", "code": _REFUSED if revoked else _GOING_AWAY})
        except SandkeepError as error:
            # A close frame holds at most 123 bytes.
            reason = error.message.encode()[:120].decode(errors="ignore")
            await send({"type": "websocket.close", "code": _UNEXPECTED, "reason": reason})
        finally:
            self._open.discard(task)

    async def _session(self, ticket: _Ticket, receive: Receive, send: Send) -> None:
        first = await _read_first(receive)
        if first is None:
            await send({"type": "websocket.close", "code": _REFUSED, "reason": "start must come first"})
            return
        offset = 0
        try:
            if isinstance(first, Attach):
                process, offset = await self._attach(ticket, first)
            else:
                process = await self._engine.processes.start(
                    ticket.project, ticket.session, first.options(ticket.user), kind=ProcessKind.INTERACTIVE
                )
        except SandkeepError as error:
            await _not_started(error, send, printed=isinstance(first, Start) and not first.reads_errors)
            return
        try:
            if isinstance(first, Attach) or first.reads_attached:
                await send({"type": "websocket.send", "text": attached_message(process.id)})
            await self._relay(ticket, process, offset, receive, send)
        finally:
            if isinstance(first, Start) and not first.detachable:
                self._hang_up(process)

    async def _attach(self, ticket: _Ticket, asked: Attach) -> tuple[Process, int]:
        """Return a process that runs or ran on a terminal, and where in its output to begin."""
        where = (ticket.project, ticket.session, asked.process)
        process = self._engine.processes.get(*where)
        if process.kind is not ProcessKind.INTERACTIVE:
            raise InvalidRequest(f"process {process.id} has no terminal", field="process")
        offset = 0
        if asked.scrollback is not None:
            offset = max(0, await self._engine.processes.output_length(*where) - asked.scrollback)
        if asked.rows is not None and asked.cols is not None:
            # The terminal of a process that has ended is closed.
            with suppress(NotFound, InvalidRequest):
                await self._engine.processes.resize(*where, rows=asked.rows, columns=asked.cols)
        return process, offset

    async def _relay(
        self, ticket: _Ticket, process: Process, offset: int, receive: Receive, send: Send
    ) -> None:
        """Pass on output and keystrokes until the program ends or the client disconnects."""
        showing = asyncio.create_task(self._show(process, offset, send), name=f"show {process.id}")
        hearing = asyncio.create_task(self._receive_input(process, receive), name=f"hear {process.id}")
        tasks = [showing, hearing]
        if ticket.extend:
            tasks.append(asyncio.create_task(self._extend(ticket), name=f"extend {process.id}"))
        try:
            await asyncio.wait((showing, hearing), return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                showing.result()
            elif hearing.done():
                hearing.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _extend(self, ticket: _Ticket) -> None:
        """Extend the session's time limit whenever little is left."""
        while True:
            session = self._engine.sessions.get(ticket.project, ticket.session)
            if session.deadline_ms is None:
                return
            left = (session.deadline_ms - clock.wall_ms()) / 1000
            if left < LITTLE_SECONDS:
                try:
                    await self._engine.sessions.extend(
                        ticket.project, ticket.session, by_ms=EXTENSION_SECONDS * 1000
                    )
                    continue
                except TimeoutInvalid:
                    return  # the longest lifetime of a session is reached
            await asyncio.sleep(min(max(left - LITTLE_SECONDS, 1.0), LOOK_SECONDS))

    async def _show(self, process: Process, offset: int, send: Send) -> None:
        where = (process.project, process.session, process.id)
        async for item in self._engine.processes.output(*where, offset=offset):
            if isinstance(item, Chunk):
                for start in range(0, len(item.data), MAX_FRAME):
                    piece = item.data[start : start + MAX_FRAME]
                    await send({"type": "websocket.send", "bytes": piece})
        ended = await self._engine.processes.wait(*where)
        code = ended.exit_code if ended.exit_code is not None else 128 + signal.SIGKILL
        await send({"type": "websocket.send", "text": exit_message(code)})
        await send({"type": "websocket.close", "code": 1000})

    async def _receive_input(self, process: Process, receive: Receive) -> None:
        """Pass on keystrokes and sizes until the client disconnects.

        A disconnect must be noticed even while the process reads nothing, and only reading notices it. So a
        client that types waits for a while, and after that its keystrokes are lost.
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
                    typing = asyncio.create_task(self._write_keys(where, message["bytes"]))
                elif message.get("text"):
                    request = read_message(message["text"])
                    if isinstance(request, Resize):
                        with suppress(NotFound, InvalidRequest):  # it has ended
                            await self._engine.processes.resize(
                                *where, rows=request.rows, columns=request.cols
                            )
            if typing is not None:
                await asyncio.wait((typing,), timeout=LAST_KEYS_SECONDS)
        finally:
            if typing is not None:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)

    async def _write_keys(self, where: tuple[str, str, str], keys: bytes) -> None:
        try:
            await self._engine.processes.write_stdin(*where, keys)
        except (NotFound, StdinUnavailable, StdinStalled):
            pass  # it has ended, which the other task reports; or it does not read its input

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


async def _read_first(receive: Receive) -> Start | Attach | None:
    message = await receive()
    if message["type"] != "websocket.receive" or not message.get("text"):
        return None
    first = read_message(message["text"])
    return None if isinstance(first, Resize) else first


async def _not_started(error: SandkeepError, send: Send, *, printed: bool) -> None:
    """Report the error as a shell would: clients show output and use the exit code, and nothing else."""
    text = f"{error.message}\n{error.hint}\n" if error.hint else f"{error.message}\n"
    code = NOT_FOUND if isinstance(error, ExecutableNotFound) else NOT_EXECUTABLE
    if printed:
        await send({"type": "websocket.send", "bytes": text.replace("\n", "\r\n").encode()})
    await send({"type": "websocket.send", "text": exit_message(code, error)})
    await send({"type": "websocket.close", "code": 1000})
