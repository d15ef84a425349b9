"""Requests to one server: connections kept, failures told apart, repeated where that is safe.

This is the only module that knows the HTTP library. Connections belong to the event loop (or process) they
were made in; using a transport from another one is refused instead of failing in odd ways.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from sandkeep import __version__
from sandkeep.errors import (
    InvalidRequest,
    RequestTimeout,
    SandkeepError,
    ServerUnreachable,
    StdinStalled,
    TransportError,
)
from sandkeep.sdk import retry
from sandkeep.sdk._async.plain import Answer, NotConnected, PlainPool
from sandkeep.sdk.address import Address, distrusted
from sandkeep.sdk.concurrent import Lock, Pool, current_token, in_thread, open_pool, pieces_of, sleep
from sandkeep.sdk.content import FileBody
from sandkeep.sdk.target import Target
from sandkeep.types import byte_length, expect, refuse
from sandkeep.wire import errors
from sandkeep.wire.base import encode, parse

T = TypeVar("T")

Body = bytes | FileBody | Callable[[], AsyncIterator[bytes]]
"""What a request carries: bytes, a local file, or what makes a new stream of bytes for each attempt."""

CONNECTIONS = 256
CONNECT_SECONDS = 10.0
QUIET_SECONDS = 60.0
"""Of a stream that goes on: the server gives a sign of life more often than this."""
USER_AGENT = f"sandkeep/{__version__}".encode()


def segment(text: str, field_path: str = "name") -> str:
    """A name as one segment of a path."""
    expect(field_path, text, str, "text")
    if not text:
        refuse(field_path, "must not be empty")
    byte_length(field_path, text)
    return quote(text, safe="", errors="surrogateescape")


def read(kind: type[T], data: bytes) -> T:
    """The body of an answer."""
    try:
        return parse(kind, data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"the server's answer cannot be read: {error}") from error


async def records(kind: type[T], answer: Answer) -> AsyncGenerator[T, None]:
    """The lines of an answer as they come; empty ones are signs of life."""
    waiting = b""
    async for piece in answer.pieces:
        *lines, waiting = (waiting + piece).split(b"\n")
        for line in filter(None, lines):
            yield read(kind, line)


class Transport:
    """Sends requests to one server. Opens nothing before the first, and nothing after :meth:`aclose`."""

    def __init__(self, target: Target, *, timeout: float) -> None:
        self.target = target
        self._timeout = timeout
        self._pool: Pool | None = None
        self._plain: PlainPool | None = None
        self._address: Address | None = None
        self._belongs_to: object = None
        self._starting = Lock()
        # Never waited for long: threads that make the first request at the same time share what one makes.
        self._making = threading.Lock()
        self._closed = False

    async def aclose(self) -> None:
        """Close every connection. Can be repeated."""
        self._closed = True
        pool, self._pool = self._pool, None
        plain, self._plain = self._plain, None
        if plain is not None:
            plain.disconnect()
        if pool is not None:
            await pool.aclose()
        if self._address is not None:
            self._address.close()
            self._address = None

    # --- whole answers -----------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Body = b"",
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        replay: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """The body of a successful answer.

        Args:
            method: GET and HEAD are always repeated when they fail on the way.
            path: what follows the server's URL, with names already quoted.
            query: parameters besides the project's.
            body: what to send.
            json: what to send as JSON, instead of ``body``.
            headers: besides the usual ones.
            replay: sending it twice is the same as once.
            timeout: seconds to wait for each piece of the answer, other than usual.

        Raises:
            SandkeepError: as the server answered.
            RequestTimeout: there was no answer in time.
            TransportError: there was none at all.
        """
        if json is not None:
            body = encode(json)
        replay = replay or method in ("GET", "HEAD")
        await self._first_contact()
        attempt = recovered = 0
        while True:
            attempt += 1
            try:
                async with self._exchange(method, path, query, body, headers, timeout) as answer:
                    data = b"".join([piece async for piece in answer.pieces])
            except ServerUnreachable as error:
                # Counted by itself: the server may have ended under an earlier attempt.
                recovered += 1
                await self._recover(recovered, error)
                continue
            except RequestTimeout:
                raise
            except TransportError:
                delay = retry.after_failure(attempt, sent=True, replay=replay)
                if delay is None:
                    raise
                await sleep(delay)
                continue
            if answer.status < 300:
                return data
            refusal = _refusal(answer.status, data)
            delay = retry.after_status(attempt, answer.status, answer.headers, replay=replay)
            # What a stalled process has taken matters to the writer, who goes on from there.
            if delay is None or isinstance(refusal, StdinStalled):
                raise refusal
            await sleep(delay)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Answer]:
        """An answer to be read as it comes; the connection is given back on exit.

        What fails before the first byte is told as by :meth:`request`; the server is started when it is
        embedded and not there, nothing else is repeated.
        """
        body = b"" if json is None else encode(json)
        await self._first_contact()
        attempt = 0
        async with AsyncExitStack() as held:
            while True:
                attempt += 1
                try:
                    exchange = self._exchange(method, path, query, body, headers, timeout)
                    answer = await held.enter_async_context(exchange)
                    break
                except ServerUnreachable as error:
                    await self._recover(attempt, error)
            if answer.status >= 300:
                raise _refusal(answer.status, b"".join([piece async for piece in answer.pieces]))
            yield answer

    @asynccontextmanager
    async def upgrade(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """A connection that becomes something else; its answer has a ``network`` to read and write."""
        async with self._exchange("GET", path, query, b"", headers, None) as answer:
            yield answer

    # --- one exchange ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Body,
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> AsyncIterator[Answer]:
        parameters = {**self.target.scope, **(query or {})}
        target = path + (f"?{urlencode(parameters, errors='surrogateescape')}" if parameters else "")
        seconds = self._timeout if timeout is None else timeout
        sent = self._headers(headers, body)
        if self.target.socket is not None and not (headers and "Upgrade" in headers):
            try:
                async with self._plain_pool().exchange(method, target, sent, body, seconds=seconds) as answer:
                    yield answer
            except NotConnected as error:
                raise _unreachable(self.target, error) from error
            return
        limits = {"connect": CONNECT_SECONDS, "pool": seconds, "write": seconds, "read": seconds}
        with _translated(self.target):
            async with (
                self._library_pool().stream(
                    method,
                    f"{self.target.url}{target}",
                    headers=sent,
                    content=_content(body),
                    extensions={"timeout": limits},
                ) as response,
                pieces_of(response) as pieces,
            ):
                yield Answer(
                    response.status,
                    {
                        name.decode("latin-1").lower(): value.decode("latin-1")
                        for name, value in response.headers
                    },
                    pieces,
                    response.extensions.get("network_stream"),
                )

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

    def _plain_pool(self) -> PlainPool:
        with self._making:
            self._see_where()
            if self._plain is None:
                path = self._socket_path()
                assert path is not None
                self._plain = PlainPool(path, connections=CONNECTIONS)
            return self._plain

    def _library_pool(self) -> Pool:
        """For what goes over TCP, and connections that become something else."""
        with self._making:
            self._see_where()
            if self._pool is None:
                tls = self.target.url.startswith("https:")
                self._pool = open_pool(socket=self._socket_path(), tls=tls, connections=CONNECTIONS)
            return self._pool

    def _see_where(self) -> None:
        """Connections are used only where they were made."""
        if self._closed:
            raise InvalidRequest("this client is closed")
        here = current_token()
        if self._pool is None and self._plain is None:
            self._belongs_to = here
        elif self._belongs_to != here:
            raise InvalidRequest(
                "this client belongs to another event loop or process",
                hint="make one client for each, or use the functions of the module",
            )

    def _socket_path(self) -> str | None:
        if self.target.socket is not None and self._address is None:
            try:
                self._address = Address(self.target.socket)
            except FileNotFoundError as error:
                raise _unreachable(self.target, error) from error
        return None if self._address is None else self._address.path

    # --- the embedded server -----------------------------------------------------------------------------

    async def _first_contact(self) -> None:
        untried = self._pool is None and self._plain is None
        if untried and self.target.embedded is not None and not self._closed:
            await self._start_server()

    async def _recover(self, attempt: int, error: ServerUnreachable) -> None:
        """Start the server when it is an embedded one, once; otherwise raise what was found."""
        if attempt > 1 or self.target.embedded is None:
            raise error
        await self._start_server()

    async def _start_server(self) -> None:
        """See that the embedded server answers and speaks our version, starting one when there is none."""
        from sandkeep.server.embedded import ensure_server

        assert self.target.embedded is not None
        async with self._starting:
            await in_thread(ensure_server, self.target.embedded)


def _content(body: Body) -> bytes | AsyncIterator[bytes]:
    if isinstance(body, bytes):
        return body
    return each(body.pieces()) if isinstance(body, FileBody) else body()


async def each(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What local code yields, as a request body."""
    for piece in pieces:
        yield piece


@contextmanager
def _translated(target: Target) -> Iterator[None]:
    """Failures of the HTTP library as ours."""
    import httpcore2

    try:
        yield
    except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
        raise _unreachable(target, error) from error
    except (httpcore2.ReadTimeout, httpcore2.WriteTimeout, httpcore2.PoolTimeout) as error:
        raise RequestTimeout("the server did not answer in time") from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise TransportError(f"the connection to the server was lost: {error}".rstrip(": ")) from error


def _unreachable(target: Target, error: Exception) -> ServerUnreachable:
    where = target.socket or target.url
    if distrusted(error):
        return ServerUnreachable(
            f"the certificate of {where} is not trusted: {error}",
            hint="name the file of the authority that signed it in SSL_CERT_FILE; use the name it is for",
            url=where,
        )
    return ServerUnreachable(f"no server answers at {where}: {error}".rstrip(": "), url=where)


def _refusal(status: int, data: bytes) -> SandkeepError:
    error = errors.exception(status, data)
    error.http_status = status
    return error


def _host(url: str) -> bytes:
    return url.partition("://")[2].partition("/")[0].encode()
