"""Requests from outside to ports of sessions: HTTP by host name, WebSockets and endless streams included.

Each request is routed by its own Host, not by the connection it came on: a proxy in front of us may send
requests for many sandboxes over one connection. The first label names the route, and only names under our own
domains count; a session is reached only by a route that the engine published for it.

The session's port is reached over a socket made inside its network, so nothing has to listen for it on this
machine. The session's response is parsed and written anew.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from sandkeep.errors import HostCannot, SandkeepError
from sandkeep.net import http, http1
from sandkeep.net.egress import Egress
from sandkeep.net.http import BadMessage, Request, Response
from sandkeep.net.relay import keep_alive
from sandkeep.net.sniff import host_name

_MOST_CONNECTIONS: Final = 2048
_MOST_PER_SESSION: Final = 256
_POOL_SIZE: Final = 8
_CONNECT_SECONDS: Final = 5.0
_TOKEN: Final = b"x-sandkeep-token"
_PARAMETER: Final = "sandkeep_token"
_COOKIE: Final = b"sandkeep_token"
_LOOPBACK: Final = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

GetSockets = Callable[[str, int, int], Awaitable[list[int]]]
"""Session, family and number to sockets made in its network."""


class PublishedPort(NamedTuple):
    """A session's port that requests from outside may reach."""

    session: str
    port: int
    token: str | None
    """The token that a request must have, if the route is protected."""


class _Pool:
    """Sockets inside one session's network, of one address family, not connected yet."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.lock = asyncio.Lock()
        """Held while the supervisor is asked for more: requests that come together share what it gives."""


class Ingress:
    def __init__(self, find: Callable[[str], Egress | None], get_sockets: GetSockets) -> None:
        self._find = find
        self._get_sockets = get_sockets
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._domains: tuple[str, ...] = ()
        self._routes: dict[str, PublishedPort] = {}
        self._pools: dict[tuple[str, int], _Pool] = {}
        self._busy: dict[str, int] = {}
        self._open: dict[PublishedPort, set[http.Stream]] = {}
        """Connections into sessions, by the route that led there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._used: set[str] = set()

    # --- requests of the engine ---------------------------------------------------------------------------

    @property
    def address(self) -> list[Any] | None:
        return list(self._listener.getsockname()[:2]) if self._listener is not None else None

    def listen(self, sock: socket.socket, domains: list[str]) -> None:
        self.close_listener()
        self._domains = tuple(domain.lower().strip(".") for domain in domains)
        sock.setblocking(False)
        self._listener = sock
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def publish(self, session: str, routes: dict[str, tuple[int, str | None]]) -> None:
        """Make these the routes of a session, and no others."""
        self._routes = {name: route for name, route in self._routes.items() if route.session != session}
        for name, (port, token) in routes.items():
            self._routes[name] = PublishedPort(session, port, token)
        kept = set(self._routes.values())
        for route, streams in self._open.items():
            if route not in kept:
                # A WebSocket or an endless response would stay open otherwise.
                for stream in streams:
                    stream.abort()

    def forget(self, session: str) -> None:
        self.publish(session, {})
        for family in _LOOPBACK:
            pool = self._pools.pop((session, family), None)
            for fd in pool.fds if pool is not None else ():
                os.close(fd)

    def close(self) -> None:
        self.close_listener()
        for task in self._tasks:
            task.cancel()

    # --- requests ----------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, peer = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of descriptors or memory: connections wait in the kernel's queue until the retry.
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(0.2, self._resume, listener)
            return
        if len(self._tasks) >= _MOST_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        task = asyncio.create_task(self._serve(client, peer[0]), name="ingress")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def _serve(self, client: socket.socket, peer: str) -> None:
        keep_alive(client)
        stream = await http.accepted(client)
        try:
            await http1.serve(stream, lambda request: self._respond(request, peer), scheme=b"http")
        except (OSError, TimeoutError, BadMessage):
            pass  # the client went away, or the session broke off in the middle of its response
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "h11":
                raise
        finally:
            stream.close()

    def _route(self, authority: bytes) -> PublishedPort | None:
        name = host_name(authority) or ""
        if name.startswith("127."):
            return self._routes.get(name)  # labels have no dots
        for domain in self._domains:
            label = name.removesuffix(f".{domain}")
            if label != name and "." not in label:
                return self._routes.get(label)
        return None

    def _is_secure(self, request: Request) -> bool:
        """Whether the client uses TLS to the proxy in front: below the operator's domain it does."""
        name = host_name(request.authority) or ""
        if name.endswith(".localhost") or name.startswith("127."):
            return False
        return http.header(request.headers, b"x-forwarded-proto") != b"http"

    async def _respond(self, request: Request, peer: str) -> Response:
        route = self._route(request.authority)
        egress = self._find(route.session) if route is not None else None
        if route is None or egress is None:
            return _page(404, "No such sandbox port", "Nothing is published under this name.")
        egress.account.charge_this_task()
        if route.token is not None:
            refused = self._check_token(request, route, secure=self._is_secure(request))
            if refused is not None:
                return refused
        if self._busy.get(route.session, 0) >= _MOST_PER_SESSION:
            return _page(503, "Too many requests", "This sandbox has too many open requests.")
        self._busy[route.session] = self._busy.get(route.session, 0) + 1
        self._used.add(route.session)
        started = time.monotonic()
        try:
            response = await self._ask(request, route, peer, egress)
        except BaseException:
            self._leave(route.session)
            raise
        finish, path = response.done, request.target.split(b"?")[0].decode("latin-1")

        def done() -> None:
            finish()
            self._leave(route.session)
            egress.audit.record(
                "network.ingress",
                port=route.port,
                method=request.method.decode("latin-1"),
                path=path[:512],
                status=response.status,
                milliseconds=round((time.monotonic() - started) * 1000),
            )

        response.done = done
        return response

    def take_used(self) -> list[str]:
        """Return the sessions with requests through their ports: open ones, or since this was last asked."""
        used, self._used = self._used, set()
        return sorted(used.union(self._busy))

    def _leave(self, session: str) -> None:
        self._used.add(session)
        self._busy[session] -= 1
        if not self._busy[session]:
            del self._busy[session]

    async def _ask(self, request: Request, route: PublishedPort, peer: str, egress: Egress) -> Response:
        try:
            sock = await self._dial(route)
        except HostCannot:
            return _page(503, "Sandbox too old", "Stop and resume this sandbox to reach its ports again.")
        except (OSError, TimeoutError, SandkeepError):
            why = f"Nothing is listening on port {route.port} in this sandbox."
            return _page(502, "Port not answering", why)
        forwarded = [
            (b"x-forwarded-for", peer.encode()),
            (b"x-forwarded-host", request.authority),
            (b"x-forwarded-proto", http.header(request.headers, b"x-forwarded-proto") or b"http"),
        ]
        mine = [name for name, _ in forwarded]
        request.headers = http.without(request.headers, [*mine, _TOKEN]) + forwarded
        request.body = egress.counted(request.body, into=True)
        try:
            stream = await http.connected(sock)
            self._open.setdefault(route, set()).add(stream)
            try:
                if route not in self._routes.values():
                    raise ConnectionResetError("the port is no longer published")
                response = await http1.ServerConnection(stream).send(request)
            except BaseException:
                self._ended(route, stream)
                raise
        except (OSError, TimeoutError, BadMessage):
            return _page(502, "Bad answer", f"What listens on port {route.port} did not answer with HTTP.")
        response.headers = _host_only(response.headers)
        response.body = egress.counted(response.body, into=False)
        response.count = lambda out, into: egress.count(into, out)
        finish = response.done

        def done() -> None:
            finish()
            self._ended(route, stream)

        response.done = done
        return response

    def _ended(self, route: PublishedPort, stream: http.Stream) -> None:
        stream.close()
        streams = self._open.get(route, set())
        streams.discard(stream)
        if not streams:
            self._open.pop(route, None)

    async def _dial(self, route: PublishedPort) -> socket.socket:
        """Connect to the port inside, at the loopback address that its server listens on."""
        failure: Exception = ConnectionRefusedError()
        for family in _LOOPBACK:
            sock = await self._socket(route.session, family)
            try:
                address = (_LOOPBACK[family], route.port)
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await self._loop.sock_connect(sock, address)
            except (OSError, TimeoutError) as error:
                sock.close()
                failure = error
                continue
            except BaseException:
                sock.close()
                raise
            return sock
        raise failure

    async def _socket(self, session: str, family: int) -> socket.socket:
        pool = self._pools.setdefault((session, family), _Pool())
        async with pool.lock:
            if not pool.fds:
                made = await self._get_sockets(session, family, _POOL_SIZE)
                if self._pools.get((session, family)) is not pool:
                    for fd in made:
                        os.close(fd)
                    raise ConnectionRefusedError("the session has ended")
                pool.fds += made
            return socket.socket(fileno=pool.fds.pop())

    # --- protected routes --------------------------------------------------------------------------------

    def _check_token(self, request: Request, route: PublishedPort, *, secure: bool) -> Response | None:
        """Return a refusal, or ``None`` for a request with the token, which is then removed from it."""
        assert route.token is not None
        path, mark, query = request.target.decode("latin-1").partition("?")
        pairs = parse_qsl(query, keep_blank_values=True) if mark else []
        shown = [value for name, value in pairs if _is_parameter(name)]
        others = [pair for pair in pairs if not _is_parameter(pair[0]) and route.token not in pair[1]]
        if len(others) < len(pairs):
            query = urlencode(others)
            request.target = (f"{path}?{query}" if query else path).encode("latin-1")
        if shown and _same(shown[0], route.token):
            # Keep it in a cookie of this name only, so that pages can load what they refer to. Two slashes at
            # the beginning of a path would be another host to a browser, and so would a backslash.
            rest = request.target.decode("latin-1").lstrip("/\\")
            cookie = f"{_COOKIE.decode()}={route.token}; Path=/; HttpOnly; SameSite=Lax"
            cookie += "; Secure" if secure else ""
            headers = [(b"location", f"/{rest}".encode("latin-1")), (b"set-cookie", cookie.encode())]
            return Response(302, [*headers, (b"content-length", b"0")])
        given = self._take_cookies(request)
        given += [value for name, value in request.headers if name == _TOKEN]
        if not any(_same(one.decode("latin-1"), route.token) for one in given):
            return _page(401, "Token required", "This sandbox port is protected.")
        request.headers = [item for item in request.headers if not _reveals(item[1], route.token)]
        return None

    def _take_cookies(self, request: Request) -> list[bytes]:
        """Remove and return all tokens in cookies: a page of another sandbox may have set one too."""
        found: list[bytes] = []
        headers: http.HeaderList = []
        for name, value in request.headers:
            if name != b"cookie":
                headers.append((name, value))
                continue
            kept = []
            for part in value.split(b";"):
                key, _, content = part.strip().partition(b"=")
                if key.strip().lower() == _COOKIE:
                    found.append(content.strip().strip(b'"'))
                else:
                    kept.append(part.strip())
            if kept:
                headers.append((name, b"; ".join(kept)))
        request.headers = headers
        return found


def _is_parameter(name: str) -> bool:
    return name.strip().lower() == _PARAMETER


def _reveals(value: bytes, token: str) -> bool:
    """Whether a header contains the token, or a link with one, as a Referer may."""
    text = unquote(value.decode("latin-1")).lower()
    return token in text or _PARAMETER in text


def _host_only(headers: http.HeaderList) -> http.HeaderList:
    """Restrict cookies to the host that sets them: one for the domain would reach every other sandbox."""
    return [
        (
            name,
            b";".join(
                part for part in value.split(b";") if part.partition(b"=")[0].strip().lower() != b"domain"
            ),
        )
        if name == b"set-cookie"
        else (name, value)
        for name, value in headers
    ]


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("latin-1", "replace"), other.encode("latin-1", "replace"))


def _page(status: int, title: str, text: str) -> Response:
    body = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<body style="font-family: sans-serif; margin: 4em auto; max-width: 36em">'
        f"<h1>{escape(title)}</h1><p>{escape(text)}</p></body></html>\n"
    ).encode()
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    return Response(status, [*headers, (b"cache-control", b"no-store")], http.just(body))
