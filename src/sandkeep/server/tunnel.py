"""TunnelServer: the bytes of one TCP connection into a session, over a WebSocket.

The handshake is a request like any other: it has the caller's credentials. The messages are those of
`sandkeep.wire.tunnel`. A tunnel ends with either connection, with its session, and with its caller's token.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from sandkeep.engine.context import ACTOR
from sandkeep.engine.engine import Engine
from sandkeep.errors import LimitReached, SandkeepError
from sandkeep.server.auth import Auth
from sandkeep.server.http import Receive, Request, Scope, Send
from sandkeep.wire import tunnel
from sandkeep.wire.tunnel import MAX_FRAME, TunnelEnd

_MOST: Final = 256
"""Open at once, per session."""

_UNEXPECTED, _REFUSED, _GOING_AWAY, _DONE = 1011, 1008, 1001, 1000


class TunnelServer:
    def __init__(self, engine: Engine, auth: Auth, log: Callable[..., None]) -> None:
        self._engine = engine
        self._auth = auth
        self._log = log
        self._open: dict[asyncio.Task[Any], str] = {}

    async def serve(self, to: TunnelEnd, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, from the handshake to its end."""
        await receive()
        request = Request({**scope, "method": "GET"}, receive)
        try:
            caller = self._auth.identify(request)
            project = self._auth.scope(caller, request.query).project
        except SandkeepError as error:
            self._log(
                "request",
                request=request.id,
                method="GET",
                path=scope["path"],
                status=403,
                **{"reason": error.message, **request.facts},
            )
            await send({"type": "websocket.close", "code": _REFUSED})
            return
        ACTOR.set(caller.actor)
        await send({"type": "websocket.accept"})
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = to.session
        try:
            attached = self._engine.activity.attached(to.session)
            with attached, self._auth.while_accepted(caller.token, task.cancel):
                await self._connect(project, to, receive, send)
            await send({"type": "websocket.close", "code": _DONE})
        except asyncio.CancelledError:
            task.uncancel()
            revoked = caller.token is not None and not self._auth.accepts(caller.token)
            await send({"type": "websocket.close", "code": _REFUSED if revoked else _GOING_AWAY})
        except SandkeepError as error:
            await send({"type": "websocket.send", "text": tunnel.failure(error)})
            await send({"type": "websocket.close", "code": _UNEXPECTED})
        finally:
            del self._open[task]

    async def _connect(self, project: str, to: TunnelEnd, receive: Receive, send: Send) -> None:
        if list(self._open.values()).count(to.session) > _MOST:
            raise LimitReached(f"the session has {_MOST} tunnels", limit="tunnels", value=_MOST)
        with await self._engine.tunnels.connect(project, to.session, to.port) as sock:
            await send({"type": "websocket.send", "text": tunnel.OPEN})
            await _relay(sock, receive, send)

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _relay(sock: socket.socket, receive: Receive, send: Send) -> None:
    """Pass bytes both ways until the client is gone, or both sides have ended."""
    ended = asyncio.Event()
    inward = asyncio.create_task(_inward(sock, receive, ended), name="tunnel in")
    outward = asyncio.create_task(_outward(sock, send), name="tunnel out")
    both = asyncio.create_task(_both(outward, ended), name="tunnel")
    tasks = (inward, outward, both)
    try:
        await asyncio.wait((inward, both), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _both(outward: asyncio.Task[None], ended: asyncio.Event) -> None:
    await asyncio.wait((outward,))
    await ended.wait()


async def _inward(sock: socket.socket, receive: Receive, ended: asyncio.Event) -> None:
    """Pass on what the client sends; return when it is gone, or the program inside does not want more."""
    loop = asyncio.get_running_loop()
    while (message := await receive())["type"] == "websocket.receive":
        try:
            if message.get("bytes") and not ended.is_set():
                await loop.sock_sendall(sock, message["bytes"])
            elif message.get("text") and isinstance(tunnel.read_message(message["text"]), tunnel.EndOfBytes):
                sock.shutdown(socket.SHUT_WR)
                ended.set()
        except OSError:
            # It has closed; what it sent before that must still arrive.
            ended.set()
        except msgspec.MsgspecError:
            return


async def _outward(sock: socket.socket, send: Send) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(sock, MAX_FRAME):
            await send({"type": "websocket.send", "bytes": data})
    await send({"type": "websocket.send", "text": tunnel.END})
