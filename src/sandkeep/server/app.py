"""The application: every request passes through here, in one order.

Match the route, authenticate the caller, call the handler, send its reply. Any failure becomes a response in
one JSON shape. A request that may have changed something never gets a status of 500 or more (clients would
send it again), unless its contract says so.

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
from sandkeep.errors import InvalidRequest, SandkeepError, StdinStalled, files_exhausted
from sandkeep.server.auth import Auth, Caller, Scope
from sandkeep.server.http import ClientGone, Receive, Reply, Request, Send, StreamCut
from sandkeep.server.http import Scope as AsgiScope
from sandkeep.server.router import Endpoint, Router
from sandkeep.server.terminal import Terminals
from sandkeep.server.tunnel import TunnelServer
from sandkeep.wire import errors
from sandkeep.wire.base import Body, convert, decode
from sandkeep.wire.tunnel import target

T = TypeVar("T")

_PREFIX: Final = "/api"
KEY_HEADER: Final = b"idempotency-key"
ID_HEADER: Final = b"x-request-id"
_LONGEST_KEY: Final = 200
_LONGEST_REASON: Final = 300
_UNCLEAR: Final = 409
"""Status used instead of a 5xx when the request may or may not have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the server, as opposed to the engine's."""

    max_json_bytes: int = 8 << 20
    max_command_bytes: int = 48 << 20
    """Of a request that runs a command: as many arguments as the kernel takes, every character escaped."""
    max_upload_bytes: int = 64 << 30
    max_path_bytes: int = 8192
    public_url: str | None = None
    """URL of this server for clients, if a proxy stands before it."""
    embedded: bool = False
    stdin_seconds: float = 30.0
    """How long input may make no progress before the client gets an error."""


class RequestContext:
    """A request with everything its handler needs."""

    __slots__ = ("app", "caller", "config", "engine", "params", "request")

    def __init__(self, app: Application, request: Request, params: dict[str, str]) -> None:
        self.app = app
        self.engine = app.engine
        self.config = app.config
        self.request = request
        self.params = params
        self.caller = Caller()

    async def body(self, kind: type[T], limit: int | None = None) -> T:
        return decode(kind, await self.request.body(limit or self.config.max_json_bytes))

    def query(self, kind: type[T]) -> T:
        return convert(kind, self.request.parameters)

    def upload(self) -> Any:
        """Yield the body as it arrives."""
        return self.request.stream(self.config.max_upload_bytes)

    def key(self) -> str | None:
        """Return the idempotency key of a request that may arrive twice; official clients send none."""
        key = self.request.text_header(KEY_HEADER)
        if key is not None and not 1 <= len(key) <= _LONGEST_KEY:
            name = KEY_HEADER.decode()
            raise InvalidRequest(f"the header {name} must have 1 to {_LONGEST_KEY} characters", field=name)
        return key

    @property
    def is_local(self) -> bool:
        """Whether the caller is the operator, over the unix socket without a token."""
        return self.caller.project is None

    def scope(self, *, project: str | None = None, make: bool = False) -> Scope:
        return self.app.auth.scope(self.caller, self.request.query, project=project, make=make)

    def session(self) -> tuple[Scope, str]:
        """Return the project of the request and the session id in its path."""
        return self.scope(), self.params["session"]

    def snapshot(self) -> tuple[Scope, str]:
        return self.scope(), self.params["snapshot"]

    def origin(self) -> str:
        """Return the scheme and authority that the client used, for URLs it will follow."""
        if self.config.public_url is not None:
            return self.config.public_url.rstrip("/")
        host = self.request.header(b"host") or b"localhost"
        return f"{self.request.scope.get('scheme', 'http')}://{host.decode('latin-1')}"


class Application:
    """The ASGI application. `close_streams` ends open responses, which would delay a shutdown."""

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
        self.tunnels = TunnelServer(engine, auth, log)
        self.retire: Callable[[], None] | None = None
        """Ends the server; set by the server process if clients may retire it."""
        self._router = Router(endpoints)
        self._streams: set[asyncio.Task[Any]] = set()
        self.closing = asyncio.Event()
        """Set when the server shuts down: tasks that only wait for events stop waiting."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Request(scope, receive), send)
        elif scope["type"] == "websocket":
            to = target(scope["path"])
            if to is not None:
                await self.tunnels.serve(to, scope, receive, send)
            else:
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
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, request.id.encode())]
            await send(message)

        endpoint: Endpoint | None = None
        try:
            found = self._match(request)
            if isinstance(found, Reply):
                await found.send(request, watched)
                return
            endpoint, call = found
            await self._respond(endpoint, call, watched)
        except (ClientGone, StreamCut):
            pass
        except Exception as error:
            unexpected = not isinstance(error, SandkeepError) or errors.classify(error)[0] >= 500
            if unexpected and not isinstance(error, StdinStalled):
                self.log(
                    "request failed",
                    level="error",
                    error=error,
                    request=request.id,
                    method=request.method,
                    path=request.path,
                )
            if status:
                # Too late for an error response; the connection has been cut.
                return
            request.facts = {"reason": _reason(error), **request.facts}
            await self._refusal(error, endpoint).send(request, watched)
        finally:
            self.log(
                "request",
                level="debug" if status < 400 else "info",
                request=request.id,
                method=request.method,
                path=request.path,
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 2),
                **request.facts,
            )

    def _match(self, request: Request) -> Reply | tuple[Endpoint, RequestContext]:
        raw = request.scope.get("raw_path") or b""
        if len(raw) + len(request.scope["query_string"]) > self.config.max_path_bytes:
            raise InvalidRequest(f"the path is longer than {self.config.max_path_bytes} bytes", field="path")
        path = raw.decode("latin-1") if b"%" in raw else request.path
        if path.startswith(_PREFIX + "/"):
            path = path[len(_PREFIX) :]
        found = self._router.find(path)
        if found is None:
            request.facts["reason"] = "no such route"
            return _reply(errors.plain("not_found", f"no route {request.path}"))
        methods, params = found
        endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            allowed = sorted({*methods, *({"HEAD"} if "GET" in methods else ()), "OPTIONS"})
            headers = [(b"allow", ", ".join(allowed).encode())]
            if request.method == "OPTIONS":
                return Reply(status=204, headers=headers)
            request.facts["reason"] = "method not allowed on this route"
            problem = f"{request.method} is not allowed on {request.path}"
            refused = _reply(errors.plain("method_not_allowed", problem))
            refused.headers += headers
            return refused
        return endpoint, RequestContext(self, request, params)

    async def _respond(self, endpoint: Endpoint, call: RequestContext, send: Send) -> None:
        if not endpoint.route.public:
            call.caller = self.auth.identify(call.request)
            ACTOR.set(call.caller.actor)
            call.request.facts["actor"] = call.caller.actor
        if endpoint.changes and endpoint.route.request in (None, Body):
            # The handler reads no body, and a request whose body is malformed must not have had an effect.
            await call.request.body(self.config.max_json_bytes)
        session_id = call.params.get("session")
        if session_id is None or not endpoint.uses_session:
            await self._handle(endpoint, call, send)
            return
        with self.engine.activity.attached(session_id):
            await self._handle(endpoint, call, send)

    async def _handle(self, endpoint: Endpoint, call: RequestContext, send: Send) -> None:
        reply = await endpoint.handler(call)
        if isinstance(reply, Reply):
            await reply.send(call.request, send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        if self.closing.is_set():
            task.cancel()  # like the streams that were open before
        try:
            with self.auth.while_accepted(call.caller.token, task.cancel):
                await reply.send(call.request, send)
        finally:
            self._streams.discard(task)

    def _refusal(self, error: Exception, endpoint: Endpoint | None) -> Reply:
        error = files_exhausted(error) or error
        reply = _reply(errors.error_response(error))
        if reply.status == 401:
            reply.headers.append((b"www-authenticate", b"Bearer"))
        changed = endpoint is not None and endpoint.changes and not isinstance(error, StdinStalled)
        if reply.status >= 500 and changed:
            reply.status = _UNCLEAR
        return reply

    async def close_streams(self) -> None:
        """End every response still being sent; clients see a cut connection and reconnect."""
        self.closing.set()
        for task in list(self._streams):
            task.cancel()
        await self.terminals.close()
        await self.tunnels.close()


def _reason(error: Exception) -> str:
    """Return why a request is refused, for the log; an unexpected error has a line of its own."""
    if not isinstance(error, SandkeepError):
        return "internal error"
    return f"{error.code}: {error.message}"[:_LONGEST_REASON]


def _reply(response: errors.ErrorResponse) -> Reply:
    reply = Reply(response.body, status=response.status)
    reply.headers += [(name.encode(), value.encode()) for name, value in response.headers.items()]
    return reply


def create_app(
    engine: Engine, auth: Auth, config: Config | None = None, *, log: Callable[..., None] | None = None
) -> Application:
    """Return the API application over an engine."""
    from sandkeep.server.routes import all_endpoints

    return Application(engine, auth, config or Config(), all_endpoints(), log or _silent)


def _silent(message: str, **facts: Any) -> None:
    del message, facts
