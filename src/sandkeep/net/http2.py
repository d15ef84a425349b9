"""HTTP/2 towards a session, framed by h2.

The memory that a hostile client can use is bounded: credit for received data is given back only once the
server has taken it, so a stream holds at most its window; responses wait for the client's credit before they
are read; streams, header sizes, and frames that cost netd more than the client are limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from sandkeep.net import frames, http
from sandkeep.net.audit import Bucket
from sandkeep.net.http import BadMessage, HeaderList, Request, RequestHead, Response, SendRequest, Stream
from sandkeep.net.turns import Pace

_STREAMS: Final = 64
_STREAM_WINDOW: Final = 256 << 10
_LEAST_WINDOW: Final = 65_535
"""The window every connection starts with."""
_CONNECTION_WINDOW: Final = 4 << 20
_UPDATES: Final = 4
"""Window updates allowed per data frame; usual are two, one of them for the connection."""
_MOST_UPDATES: Final = 4096
_UPGRADES: Final = frozenset(
    {b"connection", b"upgrade", b"keep-alive", b"proxy-connection", b"transfer-encoding"}
)


async def serve(stream: Stream, respond: SendRequest, *, scheme: bytes, narrow: bool = False) -> None:
    """Answer requests until either side ends. Does not close the stream.

    ``narrow`` takes no more from the client ahead of the server than the protocol demands.
    """
    server = _Server(stream, respond, scheme, _LEAST_WINDOW if narrow else _CONNECTION_WINDOW)
    try:
        await server.run()
    finally:
        await server.close()


class _Exchange:
    """One request under way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received = bytearray()
        """In one buffer: small chunks kept apart would cost many times their size."""
        self.credit = 0
        """Credit to give back for it, padding included."""
        self.bodiless = False
        """Ended by its head. ``ended`` may also be true, by the time it is read, of a request with a body."""
        self.ended = False
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class _Server:
    def __init__(self, stream: Stream, respond: SendRequest, scheme: bytes, window: int) -> None:
        self._window = window
        self._stream = stream
        self._respond = respond
        self._scheme = scheme
        self._connection = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        # Assigned, not updated: changes made before the preface would never be sent.
        self._connection.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: _STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: http.MOST_HEAD,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self._exchanges: dict[int, _Exchange] = {}
        self._credit = asyncio.Event()
        self._frames = frames.FrameSplitter()
        self._waste = Bucket(burst=200, rate=20)
        self._updates = 0
        """Window updates that are expected and have not come yet."""
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        self._connection.initiate_connection()
        if self._window > _LEAST_WINDOW:
            self._connection.increment_flow_control_window(self._window - _LEAST_WINDOW)
        await self._flush()
        patience, pace = http.HEAD_SECONDS, Pace()
        while True:
            data = await self._stream.read(patience if not self._exchanges else http.STALL_SECONDS)
            if not data:
                return
            patience = http.IDLE_SECONDS
            self._frames.add(data)
            while True:
                try:
                    piece, kinds = self._frames.take()
                    self._count(kinds)
                    events = self._connection.receive_data(piece) if piece else []
                    for event in events:
                        self._take(event)
                except (ProtocolError, BadMessage, frames.TooLong):
                    self._send_goaway(ErrorCodes.ENHANCE_YOUR_CALM)
                    await self._flush()
                    return
                if not piece:
                    break
                await self._flush()
                if any(isinstance(event, ConnectionTerminated) for event in events):
                    return
                await pace.rest()

    async def close(self) -> None:
        tasks = [found.task for found in self._exchanges.values() if found.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_goaway(self, code: ErrorCodes) -> None:
        try:
            self._connection.close_connection(code)
        except ProtocolError:
            pass  # it is closed already

    async def _flush(self) -> None:
        async with self._writing:
            data = self._connection.data_to_send()
            if data:
                await self._stream.write(data)

    # --- events of the client ----------------------------------------------------------------------------

    def _count(self, kinds: list[int]) -> None:
        for kind in kinds:
            if kind == frames.WINDOW_UPDATE and self._updates:
                self._updates -= 1
            elif kind == frames.HEADERS:
                self._updates += 1
            elif kind not in (frames.DATA, frames.CONTINUATION):
                self._spend()

    def _take(self, event: Any) -> None:
        if isinstance(event, RequestReceived):
            exchange = _Exchange(event.stream_id)
            self._exchanges[event.stream_id] = exchange
            exchange.ended = exchange.bodiless = event.stream_ended is not None
            work = self._serve(exchange, list(event.headers))
            exchange.task = asyncio.create_task(work, name="http2 exchange")
        elif isinstance(event, DataReceived):
            found = self._exchanges.get(event.stream_id)
            if found is None:
                self._give_back(event.flow_controlled_length, event.stream_id)
                return
            if not event.data:
                self._spend()
            found.received += event.data
            found.credit += event.flow_controlled_length
            found.news.set()
        elif isinstance(event, StreamEnded):
            found = self._exchanges.get(event.stream_id)
            if found is not None:
                found.ended = True
                found.news.set()
        elif isinstance(event, StreamReset):
            found = self._exchanges.get(event.stream_id)
            if found is not None and found.task is not None:
                found.task.cancel()
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._credit.set()

    def _spend(self) -> None:
        """Count a frame that costs the client nothing; refuse too many."""
        if not self._waste.take():
            raise BadMessage("too many no-op frames")

    def _give_back(self, count: int, number: int) -> None:
        if count:
            try:
                self._connection.acknowledge_received_data(count, number)
            except ProtocolError:
                pass  # the connection is over

    # --- one exchange ------------------------------------------------------------------------------------

    async def _serve(self, exchange: _Exchange, headers: HeaderList) -> None:
        response: Response | None = None
        try:
            try:
                request = self._request(exchange, headers)
            except BadMessage as error:
                response = http.plain(error.status)
                request = Request(b"GET", b"/", b"", [])
            else:
                response = await self._respond(request)
            await self._send(exchange, request, response)
        except (OSError, TimeoutError, ProtocolError, BadMessage):
            self._reset(exchange)
        except asyncio.CancelledError:
            self._reset(exchange)
            raise
        finally:
            if response is not None:
                response.done()
            self._exchanges.pop(exchange.number, None)
            self._give_back(exchange.credit, exchange.number)
            try:
                await self._flush()
            except (OSError, TimeoutError):
                pass

    def _reset(self, exchange: _Exchange) -> None:
        try:
            self._connection.reset_stream(exchange.number, ErrorCodes.CANCEL)
        except ProtocolError:
            pass

    def _request(self, exchange: _Exchange, headers: HeaderList) -> Request:
        pseudo = {bytes(name): bytes(value) for name, value in headers if name.startswith(b":")}
        head = RequestHead(
            pseudo.get(b":method", b""),
            pseudo.get(b":path", b"/"),
            [(bytes(name), bytes(value)) for name, value in headers if not name.startswith(b":")],
            scheme=pseudo.get(b":scheme"),
            authority=pseudo.get(b":authority"),
            bodiless=exchange.bodiless,
        )
        return http.checked_request(head, self._body(exchange), scheme=self._scheme)

    async def _body(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        while True:
            while exchange.credit:
                data, credit = bytes(exchange.received), exchange.credit
                exchange.received.clear()
                if data:
                    yield data
                # Only now: the consumer has passed this chunk on when it asks for the next.
                exchange.credit -= credit
                self._give_back(credit, exchange.number)
                await self._flush()
            if exchange.ended:
                return
            exchange.news.clear()
            async with asyncio.timeout(http.STALL_SECONDS):
                await exchange.news.wait()

    async def _send(self, exchange: _Exchange, request: Request, response: Response) -> None:
        number = exchange.number
        fields = [
            (name.lower(), value)
            for name, value in http.end_to_end(response.headers)
            if name.lower() not in _UPGRADES
        ]
        head = [(b":status", str(response.status).encode()), *fields]
        bodiless = request.method == b"HEAD" or response.status in (204, 304)
        self._connection.send_headers(number, head, end_stream=bodiless)
        await self._flush()
        if not bodiless:
            async for piece in response.body:
                await self._send_data(number, piece)
            if response.trailers:
                self._connection.send_headers(number, response.trailers, end_stream=True)
            else:
                self._connection.end_stream(number)
            await self._flush()
        if not exchange.ended:
            self._connection.reset_stream(number, ErrorCodes.NO_ERROR)

    async def _send_data(self, number: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = min(
                self._connection.local_flow_control_window(number), self._connection.max_outbound_frame_size
            )
            if room <= 0:
                self._credit.clear()
                async with asyncio.timeout(http.STALL_SECONDS):
                    await self._credit.wait()
                continue
            self._connection.send_data(number, bytes(view[:room]))
            self._updates = min(self._updates + _UPDATES, _MOST_UPDATES)
            view = view[room:]
            await self._flush()
