"""Requests to one server: pooled connections, typed failures, retries where they are safe.

This is the only module that knows the HTTP library. Connections belong to the event loop (or process) they
were made in; using a transport from another one is refused, because it would fail in unpredictable ways.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec

from sandkeep.checks import byte_length, expect, refuse
from sandkeep.errors import (
    InvalidRequest,
    RequestTimeout,
    SandkeepError,
    ServerUnreachable,
    StdinStalled,
    TransportError,
)
from sandkeep.sdk import retry
from sandkeep.sdk._async.unix_http import NotConnected, Response, UnixPool
from sandkeep.sdk._compat_async import Lock, Pool, chunks_of, current_token, in_thread, open_pool, sleep
from sandkeep.sdk.address import SocketPath, distrusted
from sandkeep.sdk.content import FileBody
from sandkeep.sdk.preparing import watched
from sandkeep.sdk.target import Target
from sandkeep.version import __version__
from sandkeep.wire import errors
from sandkeep.wire.base import encode, parse

T = TypeVar("T")

Body = bytes | FileBody | Callable[[], AsyncIterator[bytes]]
"""Body of a request: bytes, a local file, or a function that returns a new stream for each attempt."""

CONNECTIONS = 256
CONNECT_SECONDS = 10.0
QUIET_SECONDS = 60.0
"""Longest silence of an open stream: the server sends heartbeats more often than this."""
BOOT_SECONDS = 600.0
"""Longest wait for the start of a session, which may wait for an image or a running stop."""
KEY_HEADER = "Idempotency-Key"
USER_AGENT = f"sandkeep/{__version__}".encode()
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~")
"""Characters that a URL holds as they are: most names need no more, and urllib is slow to import."""


def segment(text: str, field_path: str = "name") -> str:
    """Return a name as one segment of a URL path."""
    expect(field_path, text, str, "text")
    if not text:
        refuse(field_path, "must not be empty")
    byte_length(field_path, text)
    if _PLAIN.issuperset(text):
        return text
    from urllib.parse import quote

    return quote(text, safe="", errors="surrogateescape")


QueryParameters = Mapping[str, str | list[str]]
"""A list is a parameter that is repeated."""


def _query_string(parameters: QueryParameters) -> str:
    if not parameters:
        return ""
    from urllib.parse import urlencode

    return f"?{urlencode(parameters, doseq=True, errors='surrogateescape')}"


def new_key() -> str:
    """Return a new idempotency key, sent with every attempt of one request."""
    return os.urandom(16).hex()


def decode(kind: type[T], data: bytes) -> T:
    """Decode the body of a response."""
    try:
        return parse(kind, data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"the server's response cannot be decoded: {error}") from error


async def records(kind: type[T], response: Response) -> AsyncGenerator[T, None]:
    """Yield the lines of a response as they come; empty lines are heartbeats."""
    waiting = b""
    async for chunk in response.chunks:
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in filter(None, lines):
            yield decode(kind, line)


class Transport:
    """Sends requests to one server. Connects at the first request; refuses requests after :meth:`aclose`."""

    def __init__(self, target: Target, *, timeout: float) -> None:
        self.target = target
        self._timeout = timeout
        self._pool: Pool | None = None
        self._unix_pool: UnixPool | None = None
        self._address: SocketPath | None = None
        self._belongs_to: object = None
        self._connected = False
        """A server accepted a connection before, so one that is away may come back."""
        self._starting = Lock()
        # Held only briefly: threads that make the first request at the same time share one pool.
        self._making = threading.Lock()
        self._closed = False

    async def aclose(self) -> None:
        """Close every connection. Can be repeated."""
        self._closed = True
        pool, self._pool = self._pool, None
        unix_pool, self._unix_pool = self._unix_pool, None
        if unix_pool is not None:
            unix_pool.disconnect()
        if pool is not None:
            await pool.aclose()
        if self._address is not None:
            self._address.close()
            self._address = None

    # --- whole responses -----------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: QueryParameters | None = None,
        body: Body = b"",
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        replay: bool = False,
        key: str | None = None,
        done: type[SandkeepError] | None = None,
        timeout: float | None = None,
        within: float | None = None,
    ) -> bytes:
        """Send a request and return the body of a successful response.

        Args:
            method: GET and HEAD are always retried if the connection fails.
            path: what follows the server's URL, with names already quoted.
            query: parameters besides the project's.
            body: what to send.
            json: what to send as JSON, instead of ``body``.
            headers: besides the usual ones.
            replay: carrying it out twice is the same as once.
            key: idempotency key, so that the server carries the request out only once.
            done: after an attempt whose response was lost, a refusal of this class means that the attempt was
                carried out; returns an empty body then.
            timeout: seconds to wait for each chunk of the response, instead of the default.
            within: seconds in which it may be sent again.

        Raises:
            SandkeepError: the server's error.
            RequestTimeout: the server did not respond in time.
            TransportError: there was no response.
        """
        if json is not None:
            body = encode(json)
        if key is not None:
            headers = {**(headers or {}), KEY_HEADER: key}
        changes = method not in ("GET", "HEAD")
        replay = replay or key is not None or done is not None or not changes
        await self._first_contact()
        patience = retry.Patience(within)
        attempt = 0
        lost = False
        while True:
            attempt += 1
            patience.attempt()
            try:
                async with self._exchange(method, path, query, body, headers, timeout) as response:
                    data = b"".join([chunk async for chunk in response.chunks])
            except ServerUnreachable as error:
                await self._await_server(patience, error)
                continue
            except RequestTimeout as error:
                if changes and error.hint is None:
                    error.hint = retry.UNCLEAR
                raise
            except TransportError as error:
                if isinstance(body, FileBody) and body.shrunk:
                    raise
                if not replay:
                    error.hint = retry.UNCLEAR
                    raise
                lost, patience.unclear = True, changes
                await sleep(patience.after(error, self._outage_seconds()))
                continue
            if response.status < 300:
                return data
            refusal = _refusal(response, data)
            if lost and done is not None and isinstance(refusal, done):
                return b""
            if isinstance(refusal, TransportError) and retry.server_away(response.status, refusal):
                if not replay:
                    refusal.hint = retry.UNCLEAR
                    raise refusal
                lost, patience.unclear = True, changes
                await sleep(patience.after(refusal, self._outage_seconds()))
                continue
            delay = retry.after_status(attempt, response.status, response.headers, replay=replay)
            # The writer continues after the bytes that a stalled process has read, so it must get the error.
            if delay is None or isinstance(refusal, StdinStalled):
                raise refusal
            await sleep(delay)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: QueryParameters | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Response]:
        """Send a request and yield the response to be read in chunks; releases the connection on exit.

        Failures before the first byte are raised as by :meth:`request`. The request is retried only if it
        never arrived.
        """
        body = b"" if json is None else encode(json)
        await self._first_contact()
        async with AsyncExitStack() as held:
            response = await self._reached(held, method, path, query, body, headers, timeout)
            if response.status >= 300:
                raise _refusal(response, b"".join([chunk async for chunk in response.chunks]))
            yield response

    async def _reached(
        self,
        held: AsyncExitStack,
        method: str,
        path: str,
        query: QueryParameters | None,
        body: bytes,
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> Response:
        """Return the response of an exchange that ``held`` ends; waits for a server that is away."""
        patience = retry.Patience()
        while True:
            patience.attempt()
            try:
                exchange = self._exchange(method, path, query, body, headers, timeout)
                return await held.enter_async_context(exchange)
            except ServerUnreachable as error:
                await self._await_server(patience, error)

    async def start(self, method: str, path: str, **options: Any) -> bytes:
        """As `request`, for a start of a session: it may take long, and logs what it waits for."""
        with watched(self.target):
            return await self.request(method, path, timeout=BOOT_SECONDS, **options)

    @asynccontextmanager
    async def upgrade(
        self, path: str, query: QueryParameters, headers: Mapping[str, str]
    ) -> AsyncIterator[Response]:
        """Yield the response of an upgraded connection; its ``network`` can be read and written."""
        async with AsyncExitStack() as held:
            yield await self._reached(held, "GET", path, query, b"", headers, None)

    # --- one exchange ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        path: str,
        query: QueryParameters | None,
        body: Body,
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> AsyncIterator[Response]:
        target = path + _query_string({**self.target.scope, **(query or {})})
        seconds = self._timeout if timeout is None else timeout
        sent = self._headers(headers, body)
        if self.target.socket is not None and not (headers and "Upgrade" in headers):
            try:
                async with self._get_unix_pool().exchange(
                    method, target, sent, body, seconds=seconds
                ) as response:
                    self._connected = True
                    yield response
            except NotConnected as error:
                raise _unreachable(self.target, error) from error
            except TransportError:
                self._connected = True
                raise
            return
        limits = {"connect": CONNECT_SECONDS, "pool": seconds, "write": seconds, "read": seconds}
        with self._translated():
            async with (
                self._get_library_pool().stream(
                    method,
                    f"{self.target.url}{target}",
                    headers=sent,
                    content=_content(body),
                    extensions={"timeout": limits},
                ) as received,
                chunks_of(received) as raw,
                aclosing(self._chunks(raw)) as chunks,
            ):
                self._connected = True
                yield Response(
                    received.status,
                    {
                        name.decode("latin-1").lower(): value.decode("latin-1")
                        for name, value in received.headers
                    },
                    chunks,
                    received.extensions.get("network_stream"),
                )

    async def _chunks(self, raw: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a response; errors of the library are translated in the reader too."""
        with self._translated():
            async for chunk in raw:
                yield chunk

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise failures of the HTTP library as ours."""
        try:
            with translated(self.target):
                yield
        except ServerUnreachable:
            raise
        except TransportError:
            self._connected = True
            raise

    def _headers(self, extra: Mapping[str, str] | None, body: Body) -> list[tuple[bytes, bytes]]:
        headers = [(b"Host", _host(self.target.url)), (b"User-Agent", USER_AGENT)]
        if self.target.token is not None:
            headers.append((b"Authorization", f"Bearer {self.target.token}".encode("latin-1")))
        names = {name.lower() for name in extra or {}}
        if isinstance(body, bytes):
            if body or "upgrade" not in names:
                headers.append((b"Content-Length", b"%d" % len(body)))
        elif "content-length" not in names:
            headers.append((b"Transfer-Encoding", b"chunked"))
        headers += [(name.encode(), value.encode()) for name, value in (extra or {}).items()]
        return headers

    def _get_unix_pool(self) -> UnixPool:
        with self._making:
            self._see_where()
            if self._unix_pool is None:
                path = self._socket_path()
                assert path is not None
                self._unix_pool = UnixPool(path, connections=CONNECTIONS)
            return self._unix_pool

    def _get_library_pool(self) -> Pool:
        """Return the pool for TCP and for upgraded connections."""
        with self._making:
            self._see_where()
            if self._pool is None:
                tls = self.target.url.startswith("https:")
                self._pool = open_pool(socket=self._socket_path(), tls=tls, connections=CONNECTIONS)
            return self._pool

    def _see_where(self) -> None:
        """Refuse to use connections in another event loop or process than they were made in."""
        here = current_token()
        if self._closed:
            if self._belongs_to in (None, here):
                raise InvalidRequest("this client is closed", hint="make a new Client")
            raise InvalidRequest(
                "this handle belongs to an event loop or process that has ended",
                hint="get a new handle here, with get_sandbox()",
            )
        if self._pool is None and self._unix_pool is None:
            self._belongs_to = here
        elif self._belongs_to != here:
            raise InvalidRequest(
                "this client belongs to another event loop or process",
                hint="make one Client for each, or use the functions of the module",
            )

    def _socket_path(self) -> str | None:
        if self.target.socket is not None and self._address is None:
            try:
                self._address = SocketPath(self.target.socket)
            except FileNotFoundError as error:
                raise _unreachable(self.target, error) from error
        return None if self._address is None else self._address.path

    # --- the embedded server -----------------------------------------------------------------------------

    async def _first_contact(self) -> None:
        untried = self._pool is None and self._unix_pool is None
        if untried and self.target.embedded is not None and not self._closed:
            await self._start_server()

    async def _await_server(self, patience: retry.Patience, error: ServerUnreachable) -> None:
        """Wait a little for a server that is away; start it if it is an embedded one.

        Waits only for a server that this client has reached before: a wrong address fails at once.
        """
        if distrusted(error):
            raise error
        if self.target.embedded is None:
            await sleep(patience.after(error, self._outage_seconds()))
            return
        patience.after(error, retry.OUTAGE_SECONDS)
        await self._start_server()

    def _outage_seconds(self) -> float:
        return min(retry.OUTAGE_SECONDS, self._timeout) if self._connected else 0.0

    async def _start_server(self) -> None:
        """Make sure that an embedded server of our version runs, starting one if needed."""
        from sandkeep.embedded import ensure_server

        assert self.target.embedded is not None
        async with self._starting:
            await in_thread(ensure_server, self.target.embedded)


def _content(body: Body) -> bytes | AsyncIterator[bytes]:
    if isinstance(body, bytes):
        return body
    return each(body.chunks()) if isinstance(body, FileBody) else body()


async def each(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks of a blocking iterator as a request body."""
    for chunk in chunks:
        yield chunk


@contextmanager
def translated(target: Target) -> Iterator[None]:
    """Raise failures of the HTTP library as ours."""
    import ssl

    import httpcore2

    try:
        yield
    except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
        raise _unreachable(target, error) from error
    except (httpcore2.ReadTimeout, httpcore2.WriteTimeout, httpcore2.PoolTimeout) as error:
        raise RequestTimeout("the server did not respond in time") from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, ssl.SSLError) as error:
        raise TransportError(f"the connection to the server was lost: {error}".rstrip(": ")) from error


def _unreachable(target: Target, error: Exception) -> ServerUnreachable:
    where = target.socket or target.url
    if distrusted(error):
        return ServerUnreachable(
            f"the certificate of {where} is not trusted: {error}",
            hint="set SSL_CERT_FILE to its authority's certificate, and use the name it was issued for",
            url=where,
        )
    return ServerUnreachable(
        f"no server answers at {where}: {error}".rstrip(": "), hint=retry.SEE_SERVER, url=where
    )


def _refusal(response: Response, data: bytes) -> SandkeepError:
    error = errors.exception(response.status, data)
    error.http_status = response.status
    error.request_id = response.headers.get("x-request-id")
    return error


def _host(url: str) -> bytes:
    return url.partition("://")[2].partition("/")[0].encode()
