"""HTTP/1.1 on both sides of a proxy, parsed by h11.

Stricter than h11 where servers are known to disagree with each other: a message with both a length and a
transfer coding, several Host headers, or a target naming another host is refused, not repaired.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import h11

from sandkeep.net import http
from sandkeep.net.http import BadMessage, HeaderList, Request, RequestHead, Response, SendRequest, Stream
from sandkeep.net.turns import Pace

_MOST_INFORMED: Final = 32
"""Interim (1xx) responses before the response."""


async def serve(stream: Stream, respond: SendRequest, *, scheme: bytes) -> None:
    """Answer requests until either side ends. Does not close the stream."""
    server = _Server(stream, scheme)
    while await server.exchange(respond):
        pass


class _Server:
    def __init__(self, stream: Stream, scheme: bytes) -> None:
        self._stream = stream
        self._scheme = scheme
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=http.MOST_HEAD)

    async def exchange(self, respond: SendRequest) -> bool:
        """Serve one request; return whether another may follow."""
        try:
            event = await self._event(http.HEAD_SECONDS)
            if not isinstance(event, h11.Request):
                return False
            request = self._request(event)
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
            return False
        except BadMessage as error:
            await self._refuse(error.status)
            return False
        response = await respond(request)
        try:
            if response.upgraded is not None:
                await self._upgrade(response)
                return False
            await self._send(request, response)
        finally:
            response.done()
        if request.length == 0 and self._connection.their_state is h11.SEND_BODY:
            self._connection.next_event()  # the end of an empty body, which was not read
        if self._connection.our_state is not h11.DONE or self._connection.their_state is not h11.DONE:
            return False
        self._connection.start_next_cycle()
        return True

    async def _event(self, seconds: float) -> Any:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            event = self._connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                await self._stream.write(self._connection.send(go_on) or b"")
            left = deadline - asyncio.get_running_loop().time()
            self._connection.receive_data(await self._stream.read(max(left, 0)))

    def _request(self, event: h11.Request) -> Request:
        headers: HeaderList = [(bytes(name), bytes(value)) for name, value in event.headers]
        names = {name for name, _ in headers}
        if b"host" not in names:
            raise BadMessage("no Host")
        scheme, authority, target = _split_target(bytes(event.target))
        upgrade = http.header(headers, b"upgrade")
        options = b",".join(value for name, value in headers if name == b"connection")
        asked = {part.strip().lower() for part in options.split(b",")}
        head = RequestHead(
            bytes(event.method),
            target,
            headers,
            scheme=scheme,
            authority=authority,
            bodiless=not names & {b"content-length", b"transfer-encoding"},
            upgrade=upgrade if b"upgrade" in asked else None,
        )
        return http.checked_request(head, self._body(), scheme=self._scheme)

    async def _body(self) -> AsyncIterator[bytes]:
        pace = Pace()
        while True:
            event = await self._event(http.STALL_SECONDS)
            if not isinstance(event, h11.Data):
                return
            data, after = _gathered(event, self._connection.next_event, pace)
            yield data
            if after is not None and after is not h11.NEED_DATA:
                return
            await pace.rest()

    async def _send(self, request: Request, response: Response) -> None:
        headers = http.end_to_end(response.headers)
        bodiless = request.method == b"HEAD" or response.status in (204, 304)
        if self._connection.their_state is h11.SEND_BODY and request.length != 0:
            headers = [*headers, (b"connection", b"close")]
        head = h11.Response(status_code=response.status, headers=headers)
        await self._stream.write(self._connection.send(head) or b"")
        if not bodiless:
            async for piece in response.body:
                await self._stream.write(self._connection.send(h11.Data(data=piece)) or b"")
        end = h11.EndOfMessage(headers=response.trailers if self._is_chunked(headers) else [])
        await self._stream.write(self._connection.send(end) or b"")

    def _is_chunked(self, headers: HeaderList) -> bool:
        newer = (self._connection.their_http_version or b"") >= b"1.1"
        return newer and http.header(headers, b"content-length") is None

    async def _upgrade(self, response: Response) -> None:
        assert response.upgraded is not None
        head = h11.InformationalResponse(status_code=101, headers=response.headers)
        await self._stream.write(self._connection.send(head) or b"")
        early, _ = self._connection.trailing_data
        if early:
            await response.upgraded.write(early)
            response.count(len(early), 0)
        await http.join(self._stream, response.upgraded, response.count)

    async def _refuse(self, status: int) -> None:
        if self._connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        data = self._connection.send(h11.Response(status_code=status, headers=headers)) or b""
        await self._stream.write(data + (self._connection.send(h11.EndOfMessage()) or b""))


def _split_target(target: bytes) -> tuple[bytes | None, bytes | None, bytes]:
    """Split a target into scheme, authority and path; only the absolute form has the first two."""
    scheme, separator, rest = target.partition(b"://")
    if target.startswith(b"/") or not separator:
        return None, None, target
    host, slash, path = rest.partition(b"/")
    return scheme.lower(), host, slash + path or b"/"


# --- client --------------------------------------------------------------------------------------------


class ServerConnection:
    """A connection to a server. ``idle`` gets it back after an exchange that leaves it usable."""

    def __init__(self, stream: Stream, idle: Callable[[ServerConnection], None] | None = None) -> None:
        self._stream = stream
        self._idle = idle
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=http.MOST_HEAD)
        self._feeding: asyncio.Task[None] | None = None
        self.used = False
        """Whether it was used before: then the server may have closed it since."""

    def close(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        self._stream.close()

    def _done(self) -> None:
        states = (self._connection.our_state, self._connection.their_state)
        if self._idle is not None and states == (h11.DONE, h11.DONE):
            self._connection.start_next_cycle()
            self.used = True
            self._idle(self)
        else:
            self.close()

    async def send(self, request: Request) -> Response:
        """Pass a request on. The response's ``done`` must be called, also when it is not passed on."""
        try:
            return await self._send(request)
        except BaseException:
            self.close()
            raise

    async def _send(self, request: Request) -> Response:
        headers = [(b"host", request.authority), *request.headers]
        if request.upgrade is not None:
            headers += [(b"connection", b"upgrade"), (b"upgrade", request.upgrade)]
        elif self._idle is None:
            headers.append((b"connection", b"close"))
        if request.length is None and http.header(headers, b"content-length") is None:
            headers.append((b"transfer-encoding", b"chunked"))
        elif request.length and http.header(headers, b"content-length") is None:
            # Connection named it, so the client's own was between us and it only. The body goes on.
            headers.append((b"content-length", str(request.length).encode()))
        try:
            head = h11.Request(method=request.method, target=request.target, headers=headers)
            data = self._connection.send(head) or b""
        except h11.LocalProtocolError:
            # From HTTP/2, where a method or path may have bytes that would end it here. The error does not
            # quote them: the values of secrets are among the headers.
            raise BadMessage("the request cannot be said in HTTP/1.1") from None
        await self._stream.write(data)
        self._feeding = asyncio.create_task(self._feed(request), name="request body")
        event = await self._event()
        for _ in range(_MOST_INFORMED):
            if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                break
            event = await self._event()
        if isinstance(event, h11.InformationalResponse):
            rest, _ = self._connection.trailing_data
            if rest:
                _unread(self._stream, rest)
            fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            return Response(101, fields, upgraded=self._stream, done=self.close)
        if not isinstance(event, h11.Response):
            raise BadMessage("no response", 502)
        fields = [(bytes(name), bytes(value)) for name, value in event.headers]
        if http.header(fields, b"transfer-encoding") is not None:
            # It was read as chunked; a length besides could be read as another end by the client.
            fields = [item for item in fields if item[0] != b"content-length"]
        response = Response(event.status_code, http.end_to_end(fields), done=self._done)
        response.body = self._body(response)
        return response

    async def _feed(self, request: Request) -> None:
        try:
            async for piece in request.body:
                await self._stream.write(self._connection.send(h11.Data(data=piece)) or b"")
            await self._stream.write(self._connection.send(h11.EndOfMessage()) or b"")
        except (OSError, TimeoutError, h11.ProtocolError):
            # A server may respond and close before it has read everything; its response says how it went.
            pass

    def _next(self) -> Any:
        try:
            return self._connection.next_event()
        except h11.RemoteProtocolError:
            # Its text quotes the server, which may repeat what it was sent: secrets too.
            raise BadMessage("the server's answer cannot be read", 502) from None

    async def _event(self) -> Any:
        while (event := self._next()) is h11.NEED_DATA:
            self._connection.receive_data(await self._stream.read())
        return event

    async def _body(self, response: Response) -> AsyncIterator[bytes]:
        pace = Pace()
        event: Any = None
        while True:
            if event is None or event is h11.NEED_DATA:
                event = await self._event()
            if isinstance(event, h11.Data):
                data, event = _gathered(event, self._next, pace)
                yield data
                await pace.rest()
            elif isinstance(event, h11.EndOfMessage):
                response.trailers += [(bytes(name), bytes(value)) for name, value in event.headers]
                return
            else:
                raise BadMessage("the response ended early", 502)


def _gathered(first: h11.Data, next_event: Callable[[], Any], pace: Pace) -> tuple[bytes, Any]:
    """Join the chunks of a body received so far; also return the event that ended them, if any."""
    pieces, size = [bytes(first.data)], len(first.data)
    while size < http.PIECE and not pace.is_over():
        event = next_event()
        if not isinstance(event, h11.Data):
            return b"".join(pieces), event
        pieces.append(bytes(event.data))
        size += len(event.data)
    return b"".join(pieces), None


def _unread(stream: Stream, data: bytes) -> None:
    """Put back bytes read beyond the head of an upgraded connection."""
    buffered = bytes(stream.reader._buffer)  # type: ignore[attr-defined]
    stream.reader._buffer[:] = data + buffered  # type: ignore[attr-defined]
