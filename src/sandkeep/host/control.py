"""Talking to a supervisor from an event loop.

``Control`` keeps one multiplexed connection per session for small requests and opens one per file operation,
which has its connection to itself. A supervisor that is gone is told apart from one that ended its session
by the ``state.json`` it leaves.

The content of large files need not come through here: ``Download`` and ``Upload`` let the supervisor send and
receive it on a socket that it is handed for the purpose.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, cast

from sandkeep.errors import NotFound, SandkeepError, SessionStopped, TransportError, from_json
from sandkeep.linux import sockets
from sandkeep.supervisor import protocol

DIRECT_BYTES: Final = 256 << 10
"""From here on a socket is handed over; below, that costs as much as it saves."""
_PIECE: Final = 1 << 20


@contextmanager
def _reaching(directory: str) -> Iterator[str]:
    """Where to connect to the supervisor of a session directory, however long that path is."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        name = os.path.basename(directory)
        raise NotFound(f"no session {name} on this host", kind="session", name=name) from None
    try:
        yield f"/proc/self/fd/{fd}/supervisor.sock"
    except (FileNotFoundError, ConnectionError):
        # Also reset: it ended with us in its queue.
        raise gone(directory) from None
    finally:
        os.close(fd)


async def connect(directory: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a supervisor for one file operation."""
    with _reaching(directory) as path:
        return await asyncio.open_unix_connection(path, limit=1 << 20)


def read_state(directory: str) -> dict[str, Any]:
    """What the supervisor last wrote about its session; empty when it never got that far."""
    try:
        with open(f"{directory}/state.json", encoding="ascii") as handle:
            state: dict[str, Any] = json.load(handle)
            return state
    except FileNotFoundError:
        return {}


def gone(directory: str) -> SandkeepError:
    """Why nobody answers for a session."""
    state, name = read_state(directory), os.path.basename(directory)
    if state.get("status") == "stopped":
        reason = state.get("reason") or "stopped"
        return SessionStopped(f"session {name} has stopped: {reason}", session=name, reason=reason)
    return SessionStopped(f"the supervisor of session {name} is gone", session=name, reason="supervisor died")


async def read_frame(reader: asyncio.StreamReader) -> protocol.Frame:
    json_length, blob_length = protocol.decode_header(await reader.readexactly(protocol.HEADER.size))
    body = protocol.decode_json(await reader.readexactly(json_length)) if json_length else None
    blob = await reader.readexactly(blob_length) if blob_length else b""
    return body, blob


class Announced(NamedTuple):
    """What a supervisor says of a process without being asked again."""

    more: asyncio.Future[dict[str, Any]]
    """As the answer to ``process.output`` from offset 0."""
    end: asyncio.Future[dict[str, Any]]
    """As the answer to ``process.wait``."""


class _Answers(asyncio.Protocol):
    """The connection for small requests, answers matched to whoever waits.

    Not a stream: an answer is a frame or two, and the machinery of streams would cost more than decoding it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._decoder = protocol.FrameDecoder()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body, _ in self._decoder.feed(data):
                self._take(body or {})
        except protocol.ProtocolError:
            self.drop(gone(self._directory))

    def _take(self, body: dict[str, Any]) -> None:
        future = self._waiting.pop(body.get("id", 0), None)
        if future is None or future.done():
            return
        if "error" in body:
            future.set_exception(from_json(body["error"]))
        else:
            future.set_result(body["ok"])

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self.open:
            self.drop(gone(self._directory))

    def drop(self, error: SandkeepError) -> None:
        """Close the connection and tell everybody who waits why."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def ask(self, body: dict[str, Any], blob: bytes, *numbers: int) -> list[asyncio.Future[dict[str, Any]]]:
        """Send a request; what comes back under each of the numbers."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in numbers]
        self._waiting.update(zip(numbers, futures, strict=True))
        try:
            assert self._transport is not None
            self._transport.write(protocol.encode(body, blob))
        except (RuntimeError, OSError):
            # uvloop says so at once when the other end is gone; asyncio is told later.
            self.drop(gone(self._directory))
        return futures

    def forget(self, *numbers: int) -> None:
        """Nobody waits for these any more."""
        for number in numbers:
            self._waiting.pop(number, None)


class Control:
    """One session's supervisor, as seen from here. Connects when first used."""

    def __init__(self, directory: str, generation: int) -> None:
        self._directory = directory
        self._generation = generation
        self._answers: _Answers | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._next = 0

    async def close(self, why: SandkeepError | None = None) -> None:
        """Let go; what is under way fails, and says ``why``."""
        if self._answers is not None:
            self._answers.drop(why or TransportError("closed"))

    # --- small requests ----------------------------------------------------------------------------------

    async def request(self, op: str, blob: bytes = b"", **body: Any) -> dict[str, Any]:
        answers = await self._connected()
        self._next += 1
        request = {"id": self._next, "op": op, "generation": self._generation, **body}
        number = self._next
        [answer] = answers.ask(request, blob, number)
        try:
            return await answer
        finally:
            answers.forget(number)

    async def start(self, **body: Any) -> tuple[dict[str, Any], Announced | None]:
        """Start a process; its record, and what is yet to come.

        The latter is ``None`` from supervisors that have to be asked for it.
        """
        answers = await self._connected()
        self._next += 3
        number, more, end = self._next - 2, self._next - 1, self._next
        request = {"id": number, "op": "process.start", "generation": self._generation, **body}
        started, *later = answers.ask({**request, "more": more, "end": end}, b"", number, more, end)
        try:
            answer = await started
            known = answer.get("end") == end
        except BaseException:
            answers.forget(number, more, end)
            for future in later:
                if not future.cancel():
                    future.exception()  # the same news as ours: nobody else is going to ask for it
            raise
        if not known:
            answers.forget(more, end)
        return answer, Announced(*later) if known else None

    async def _connected(self) -> _Answers:
        async with self._connecting:
            if self._answers is None or not self._answers.open:
                with _reaching(self._directory) as path:
                    loop = asyncio.get_running_loop()
                    make = partial(_Answers, self._directory)
                    _, self._answers = await loop.create_unix_connection(make, path)
            return self._answers

    # --- file operations ---------------------------------------------------------------------------------

    async def files(
        self, operation: str, *, data: AsyncIterable[bytes] | None = None, **body: Any
    ) -> tuple[dict[str, Any], bytes]:
        """A file operation whose result is small; returns its answer and the data that came with it."""
        parts: list[bytes] = []
        answer: dict[str, Any] = {}
        async for item in self._exchange(operation, data, body):
            if isinstance(item, bytes):
                parts.append(item)
            else:
                answer = item
        return answer, b"".join(parts)

    async def read(self, operation: str, **body: Any) -> AsyncIterator[bytes]:
        """A file operation that yields content as it comes."""
        async for item in self._exchange(operation, None, body):
            if isinstance(item, bytes):
                yield item

    async def open_read(self, *, direct: bool, **body: Any) -> Download:
        """Open a file; ``direct`` if there is a socket to send it to, should it be large."""
        if direct:
            body["direct"] = DIRECT_BYTES
        exchange = await self._open("read", body)
        try:
            return Download(exchange, await exchange.frame())
        except BaseException:
            exchange.close()
            raise

    async def open_write(self, **body: Any) -> Upload | None:
        """Open a file for content on a socket; ``None`` if the supervisor is too old for that."""
        if read_state(self._directory).get("protocol", 0) < protocol.DIRECT:
            return None
        exchange = await self._open("write", {"direct": True, **body})
        try:
            await exchange.frame()
            return Upload(exchange)
        except BaseException:
            exchange.close()
            raise

    async def _open(self, operation: str, body: dict[str, Any]) -> _Exchange:
        reader, writer = await connect(self._directory)
        request = {"id": 1, "op": f"fs.{operation}", "generation": self._generation, **body}
        writer.write(protocol.encode(request))
        return _Exchange(self._directory, reader, writer)

    async def _exchange(
        self, operation: str, data: AsyncIterable[bytes] | None, body: dict[str, Any]
    ) -> AsyncIterator[bytes | dict[str, Any]]:
        reader, writer = await connect(self._directory)
        feeder: asyncio.Task[None] | None = None
        try:
            request = {"id": 1, "op": f"fs.{operation}", "generation": self._generation, **body}
            writer.write(protocol.encode(request))
            if data is not None:
                feeder = asyncio.create_task(self._feed(writer, data), name="feed fs.{operation}")
            while True:
                answer, blob = await read_frame(reader)
                if answer is None:
                    yield blob
                elif "error" in answer:
                    raise from_json(answer["error"])
                else:
                    yield answer["ok"]
                    break
            if feeder is not None:
                await feeder
        except (asyncio.IncompleteReadError, ConnectionError):
            if feeder is not None and feeder.done() and not feeder.cancelled():
                failure = feeder.exception()
                if failure is not None and not isinstance(failure, ConnectionError):
                    raise failure from None  # the source failed, and with it the operation
            raise gone(self._directory) from None
        finally:
            if feeder is not None:
                feeder.cancel()
            writer.close()

    async def _feed(self, writer: asyncio.StreamWriter, data: AsyncIterable[bytes]) -> None:
        try:
            async for piece in data:
                view = memoryview(piece)
                while view:
                    await _write(writer, protocol.HEADER.pack(0, min(len(view), _PIECE)), view[:_PIECE])
                    view = view[_PIECE:]
            await _write(writer, protocol.encode({"end": True}))
        except Exception:
            # The source failed: cut the connection, so that what was sent never becomes a file.
            writer.transport.abort()
            raise


class _Exchange:
    """A file operation under way, on a connection of its own."""

    def __init__(self, directory: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._directory = directory
        self._reader = reader
        self._writer = writer
        self.answered = False

    async def frame(self) -> protocol.Frame:
        """What the supervisor says next; refusals are raised."""
        try:
            body, blob = await read_frame(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise gone(self._directory) from None
        self.answered = body is not None and ("ok" in body or "error" in body)
        if body is not None and "error" in body:
            raise from_json(body["error"])
        return body, blob

    def hand_over(self, fd: int, *, left: int, first: bytes) -> None:
        """Give a socket away. The supervisor has asked for it, so nothing else is on its way there."""
        said = json.dumps({"left": left}).encode()
        own = self._writer.get_extra_info("socket").fileno()
        try:
            with socket.socket(fileno=os.dup(own)) as sock:
                sockets.send(sock, protocol.HEADER.pack(len(said), len(first)) + said, [fd])
            self._writer.write(first)
        except (OSError, RuntimeError):
            raise gone(self._directory) from None

    def close(self) -> None:
        self._writer.close()


class Download:
    """A file that was opened: its content comes in pieces, or is sent elsewhere if it has a ``length``."""

    def __init__(self, exchange: _Exchange, first: protocol.Frame) -> None:
        self._exchange = exchange
        self._first = first
        offer = (first[0] or {}).get("direct")
        self.length: int | None = offer["length"] if offer else None

    async def pieces(self) -> AsyncIterator[bytes]:
        """What a file holds that nobody offered to send elsewhere."""
        body, blob = self._first
        size = 0
        while body is None:
            size += len(blob)
            yield blob
            body, blob = await self._exchange.frame()
        if size != body["ok"]["sent"]:
            raise shrank()

    async def send_to(self, fd: int) -> None:
        """Have all of it sent on a socket."""
        self._exchange.hand_over(fd, left=0, first=b"")
        body, _ = await self._exchange.frame()
        if body is None or body["ok"]["sent"] != self.length:
            raise shrank()

    async def aclose(self) -> None:
        self._exchange.close()


class Upload:
    """A file that was opened and takes its content from a socket. Closed before that, it never was."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    @property
    def answered(self) -> bool:
        """Whether the supervisor has told how it went, and so has read everything it was to read."""
        return self._exchange.answered

    async def receive_from(self, fd: int, *, left: int, first: bytes) -> dict[str, Any]:
        """Have ``first`` and then ``left`` bytes of a socket written."""
        self._exchange.hand_over(fd, left=left, first=first)
        body, _ = await self._exchange.frame()
        answer: dict[str, Any] = (body or {})["ok"]
        return answer

    def close(self) -> None:
        self._exchange.close()


def shrank() -> TransportError:
    return TransportError("the file became shorter while it was read")


async def _write(writer: asyncio.StreamWriter, *pieces: bytes | memoryview) -> None:
    try:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
    except RuntimeError as error:
        raise ConnectionResetError(str(error)) from error  # uvloop's word for a closed transport
