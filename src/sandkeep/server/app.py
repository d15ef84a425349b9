"""The application: every request goes through here, in one order.

Match the route, see who asks, hand over to the handler, send what it returns. Whatever fails on the way is
answered in one JSON shape. A request that may have changed something is never answered with a status of 500
or more (clients would send it again), unless that is what its contract says.

The whole API is served at ``/`` and below ``/api``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sandkeep.engine.context import ACTOR
from sandkeep.engine.engine import Engine
from sandkeep.errors import InvalidRequest, SandkeepError, StdinStalled
from sandkeep.server.auth import Auth, Caller, Scope
from sandkeep.server.http import ClientGone, Receive, Reply, Request, Send, StreamCut
from sandkeep.server.http import Scope as AsgiScope
from sandkeep.server.router import Endpoint, Router
from sandkeep.server.terminal import Terminals
from sandkeep.wire import errors
from sandkeep.wire.base import Body, convert, decode

T = TypeVar("T")

_PREFIX: Final = "/api"
_UNCLEAR: Final = 409
"""Instead of a 5xx after which something may or may not have happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the server, not the engine, needs to be told."""

    max_json_bytes: int = 8 << 20
    max_upload_bytes: int = 64 << 30
    max_path_bytes: int = 8192
    public_url: str | None = None
    """How clients reach this server, when a proxy stands before it."""
    embedded: bool = False
    stdin_seconds: float = 30.0
    """How long input may make no progress before the client is told so."""


class Call:
    """A request with everything a handler needs to answer it."""

    __slots__ = ("app", "caller", "config", "engine", "params", "request")

    def __init__(self, app: App, request: Request, params: dict[str, str]) -> None:
        self.app = app
        self.engine = app.engine
        self.config = app.config
        self.request = request
        self.params = params
        self.caller = Caller()

    async def body(self, kind: type[T]) -> T:
        return decode(kind, await self.request.body(self.config.max_json_bytes))

    def query(self, kind: type[T]) -> T:
        return convert(kind, self.request.query)

    def upload(self) -> Any:
        """The body as it arrives."""
        return self.request.stream(self.config.max_upload_bytes)

    def scope(self, *, project: str | None = None, make: bool = False) -> Scope:
        return self.app.auth.scope(self.caller, self.request.query, project=project, make=make)

    def session(self) -> tuple[Scope, str]:
        """The session the path names, and the project it must be in."""
        session = self.params["session"]
        return self.app.auth.session_scope(self.caller, self.request.query, session), session

    def snapshot(self) -> tuple[Scope, str]:
        snapshot = self.params["snapshot"]
        return self.app.auth.snapshot_scope(self.caller, self.request.query, snapshot), snapshot

    def origin(self) -> str:
        """Scheme and authority the client used, for URLs it will follow."""
        if self.config.public_url is not None:
            return self.config.public_url.rstrip("/")
        host = self.request.header(b"host") or b"localhost"
        return f"{self.request.scope.get('scheme', 'http')}://{host.decode('latin-1')}"


class App:
    """The ASGI application. `close_streams` ends what would otherwise keep a shutdown waiting."""

    def __init__(
        self,
        engine: Engine,
        auth: Auth,
        config: Config,
        endpoints: list[Endpoint],
        log: Callable[..., None],
    ) -> None:
        self.engine = engine
        self.auth = auth
        self.config = config
        self.endpoints = endpoints
        self.log = log
        self.terminals = Terminals(engine, auth, log)
        self.retire: Callable[[], None] | None = None
        """Ends the server; set by whoever runs it, when clients may ask for that."""
        self._router = Router(endpoints)
        self._streams: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Request(scope, receive), send)
        elif scope["type"] == "websocket":
            await self.terminals.serve(scope, receive, send)
        else:
            raise RuntimeError(f"unexpected scope {scope['type']}")

    async def _http(self, request: Request, send: Send) -> None:
        began = time.perf_counter()
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        endpoint: Endpoint | None = None
        try:
            found = self._match(request)
            if isinstance(found, Reply):
                await found.send(request, watched)
                return
            endpoint, call = found
            await self._answer(endpoint, call, watched)
        except (ClientGone, StreamCut):
            pass
        except Exception as error:
            unexpected = not isinstance(error, SandkeepError) or errors.classify(error)[0] >= 500
            if unexpected and not isinstance(error, StdinStalled):
                self.log(
                    "request failed", level="error", error=error, method=request.method, path=request.path
                )
            if status:
                # Too late for an answer; the connection has been cut.
                return
            await self._refusal(error, endpoint).send(request, watched)
        finally:
            self.log(
                "request",
                level="debug" if status < 400 else "info",
                method=request.method,
                path=request.path,
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 2),
            )

    def _match(self, request: Request) -> Reply | tuple[Endpoint, Call]:
        raw = request.scope.get("raw_path") or b""
        if len(raw) + len(request.scope["query_string"]) > self.config.max_path_bytes:
            raise InvalidRequest(f"the path is longer than {self.config.max_path_bytes} bytes", field="path")
        path = raw.decode("latin-1") if b"%" in raw else request.path
        if path.startswith(_PREFIX + "/"):
            path = path[len(_PREFIX) :]
        found = self._router.find(path)
        if found is None:
            return _reply(errors.plain("not_found", f"there is nothing at {request.path}"))
        methods, params = found
        endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            allowed = sorted({*methods, *({"HEAD"} if "GET" in methods else ()), "OPTIONS"})
            headers = [(b"allow", ", ".join(allowed).encode())]
            if request.method == "OPTIONS":
                return Reply(status=204, headers=headers)
            refused = _reply(errors.plain("method_not_allowed", f"{request.method} is not possible here"))
            refused.headers += headers
            return refused
        return endpoint, Call(self, request, params)

    async def _answer(self, endpoint: Endpoint, call: Call, send: Send) -> None:
        if not endpoint.route.public:
            call.caller = self.auth.identify(call.request)
            ACTOR.set(call.caller.actor)
        if endpoint.changes and endpoint.route.request in (None, Body):
            # Its handler reads no body, and one that turns out to be malformed must not have done anything.
            await call.request.body(self.config.max_json_bytes)
        reply = await endpoint.handler(call)
        if "session" in call.params:
            self.engine.upkeep.touch(call.params["session"])
        if isinstance(reply, Reply):
            await reply.send(call.request, send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            with self.auth.while_accepted(call.caller.token, task.cancel):
                await reply.send(call.request, send)
        finally:
            self._streams.discard(task)

    def _refusal(self, error: Exception, endpoint: Endpoint | None) -> Reply:
        reply = _reply(errors.answer(error))
        if reply.status == 401:
            reply.headers.append((b"www-authenticate", b"Bearer"))
        changed = endpoint is not None and endpoint.changes and not isinstance(error, StdinStalled)
        if reply.status >= 500 and changed:
            reply.status = _UNCLEAR
        return reply

    async def close_streams(self) -> None:
        """End every answer that is still being made; clients see a connection that was cut."""
        for task in list(self._streams):
            task.cancel()
        await self.terminals.close()


def _reply(answer: errors.Answer) -> Reply:
    reply = Reply(answer.body, status=answer.status)
    reply.headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    return reply


def create_app(
    engine: Engine, auth: Auth, config: Config | None = None, *, log: Callable[..., None] | None = None
) -> App:
    """The API over an engine."""
    from sandkeep.server.routes import all_endpoints

    return App(engine, auth, config or Config(), all_endpoints(), log or _silent)


def _silent(message: str, **facts: Any) -> None:
    del message, facts
