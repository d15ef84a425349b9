"""Talk to a supervisor from an event loop.

``Control`` keeps one multiplexed connection per session for small requests and opens a separate one for each
file operation. When a supervisor is gone, the ``state.json`` it left shows whether it had ended its session.

The content of large files need not pass through this process: ``Download`` and ``Upload`` let the supervisor
send and receive it directly on a client's socket, which is passed to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from sandkeep.errors import HostCannot, NotFound, SandkeepError, SessionStopped, TransportError, from_json
from sandkeep.host.channel import Channel, ResponseFuture
from sandkeep.linux import sockets
from sandkeep.shared import protocol
from sandkeep.shared.sealed import read_sealed

DIRECT_BYTES: Final = 256 << 10
"""Files of at least this size go through a passed socket; below it, passing one costs as much as it saves."""
_PIECE: Final = 1 << 20


@contextmanager
def _reaching(directory: str) -> Iterator[str]:
    """Yield where to connect to the supervisor of a session directory, however long that path is."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        name = os.path.basename(directory)
        raise NotFound(f"no session {name} on this host", kind="session", name=name) from None
    try:
        yield f"/proc/self/fd/{fd}/supervisor.sock"
    except (FileNotFoundError, ConnectionError):
        # Also on reset: the supervisor ended while this connection was in its queue.
        raise gone(directory) from None
    finally:
        os.close(fd)


async def connect(directory: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a supervisor for one file operation."""
    with _reaching(directory) as path:
        return await asyncio.open_unix_connection(path, limit=1 << 20)


def read_state(directory: str) -> dict[str, Any]:
    """Return what the supervisor last wrote about its session; empty when it wrote nothing yet.

    A damaged record counts as none: the supervisor that holds the session's lock knows the state, and if no
    process holds the lock the session is over.
    """
    try:
        return read_sealed(f"{directory}/state.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


def gone(directory: str) -> SandkeepError:
    """Return the error that says why a session has no supervisor."""
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


class ProcessFutures(NamedTuple):
    """What a supervisor announces about a process without a further request."""

    more: ResponseFuture
    """Has the form of a response to ``process.output`` from offset 0."""
    end: ResponseFuture
    """Has the form of a response to ``process.wait``."""


class Control:
    """The client of one session's supervisor. Connects on first use."""

    def __init__(self, directory: str, generation: int) -> None:
        self._directory = directory
        self._generation = generation
        self._channel: Channel | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._protocol: int | None = None
        """The newest protocol of the supervisor, once ``check`` has found that this version supports it."""

    async def close(self, why: SandkeepError | None = None) -> None:
        """Disconnect; pending requests fail with ``why``."""
        if self._channel is not None:
            self._channel.drop(why or TransportError("closed"))

    # --- the supervisor's version ------------------------------------------------------------------------

    async def check(self) -> int:
        """Return the supervisor's protocol; called before every request, so that none is sent in another.

        Raises:
            HostCannot: this version does not speak the supervisor's protocol.
        """
        if self._protocol is None:
            said = read_state(self._directory)
            if "protocol" not in said:
                said = await self._hello()
            if (why := protocol.unsupported(said)) is not None:
                name = os.path.basename(self._directory)
                raise HostCannot(
                    f"session {name} cannot be used by this version: {why}",
                    part="supervisor protocol",
                    why=why,
                    session=name,
                    hint="stop or destroy its sandbox, or use the version of sandkeep that started it",
                )
            self._protocol = said["protocol"]
        return self._protocol

    async def _hello(self) -> dict[str, Any]:
        """Ask a supervisor whose ``state.json`` is missing or damaged which protocols it speaks."""
        reader, writer = await connect(self._directory)
        try:
            writer.write(protocol.encode({"id": 1, "op": "hello"}))
            body, _ = await read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise gone(self._directory) from None
        except protocol.ProtocolError:
            return {}
        finally:
            writer.close()
        said = (body or {}).get("ok")
        return said if isinstance(said, dict) else {}

    # --- small requests ----------------------------------------------------------------------------------

    async def request(self, op: str, blob: bytes = b"", **body: Any) -> dict[str, Any]:
        channel = await self._connected()
        answer: dict[str, Any] = await channel.request(
            {"op": op, "generation": self._generation, **body}, blob=blob
        )
        return answer

    async def start(self, **body: Any) -> tuple[dict[str, Any], ProcessFutures | None]:
        """Start a process; return the response, and the announcements that will follow.

        The latter are ``None`` from supervisors of earlier versions, which must be asked instead.
        """
        channel = await self._connected()
        number, more, end = channel.numbers(3)
        request = {"id": number, "op": "process.start", "generation": self._generation, **body}
        started, *later = channel.send({**request, "more": more, "end": end}, number, more, end)
        try:
            answer = await started
            known = answer.get("end") == end
        except BaseException:
            channel.forget(number, more, end)
            for future in later:
                if not future.cancel():
                    future.exception()  # same error as the request's own: no other code retrieves it
            raise
        if not known:
            channel.forget(more, end)
        return answer, ProcessFutures(*later) if known else None

    async def _connected(self) -> Channel:
        async with self._connecting:
            await self.check()
            if self._channel is None or not self._channel.open:
                with _reaching(self._directory) as path:
                    loop = asyncio.get_running_loop()
                    make = partial(Channel, partial(gone, self._directory))
                    _, self._channel = await loop.create_unix_connection(make, path)
            return self._channel

    # --- file operations ---------------------------------------------------------------------------------

    async def files(
        self, operation: str, *, data: AsyncIterable[bytes] | None = None, **body: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Do a file operation with a small result; return its response and the data that came with it."""
        parts: list[bytes] = []
        answer: dict[str, Any] = {}
        async for item in self._exchange(operation, data, body):
            if isinstance(item, bytes):
                parts.append(item)
            else:
                answer = item
        return answer, b"".join(parts)

    async def read(self, operation: str, **body: Any) -> AsyncIterator[bytes]:
        """Do a file operation that yields content as it arrives."""
        async for item in self._exchange(operation, None, body):
            if isinstance(item, bytes):
                yield item

    async def open_read(self, *, direct: bool, **body: Any) -> Download:
        """Open a file; ``direct`` if a large one can be sent to a socket."""
        if direct:
            body["direct"] = DIRECT_BYTES
        exchange = await self._open("read", body)
        try:
            return Download(exchange, await exchange.frame())
        except BaseException:
            exchange.close()
            raise

    async def open_write(self, **body: Any) -> Upload | None:
        """Open a file for content from a socket; ``None`` if the supervisor is too old for that."""
        if await self.check() < protocol.DIRECT:
            return None
        exchange = await self._open("write", {"direct": True, **body})
        try:
            await exchange.frame()
            return Upload(exchange)
        except BaseException:
            exchange.close()
            raise

    async def _open(self, operation: str, body: dict[str, Any]) -> _Exchange:
        await self.check()
        reader, writer = await connect(self._directory)
        request = {"id": 1, "op": f"fs.{operation}", "generation": self._generation, **body}
        writer.write(protocol.encode(request))
        return _Exchange(self._directory, reader, writer)

    async def _exchange(
        self, operation: str, data: AsyncIterable[bytes] | None, body: dict[str, Any]
    ) -> AsyncIterator[bytes | dict[str, Any]]:
        await self.check()
        reader, writer = await connect(self._directory)
        feeder: asyncio.Task[None] | None = None
        try:
            request = {"id": 1, "op": f"fs.{operation}", "generation": self._generation, **body}
            writer.write(protocol.encode(request))
            if data is not None:
                feeder = asyncio.create_task(self._feed(writer, data), name=f"feed fs.{operation}")
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
                    raise failure from None  # the source of the data failed, and with it the operation
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
            # The source failed: close the connection, so that the data sent so far never becomes a file.
            writer.transport.abort()
            raise


class _Exchange:
    """A file operation in progress, on a connection of its own."""

    def __init__(self, directory: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._directory = directory
        self._reader = reader
        self._writer = writer
        self.answered = False

    async def frame(self) -> protocol.Frame:
        """Return the supervisor's next frame; raise a refusal."""
        try:
            body, blob = await read_frame(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise gone(self._directory) from None
        self.answered = body is not None and ("ok" in body or "error" in body)
        if body is not None and "error" in body:
            raise from_json(body["error"])
        return body, blob

    def hand_over(self, fd: int, *, left: int, first: bytes) -> None:
        """Pass a socket to the supervisor. It has asked for it, so no other data is in transit."""
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
    """An open file: its content is read in chunks, or sent to a socket if it has a ``length``."""

    def __init__(self, exchange: _Exchange, first: protocol.Frame) -> None:
        self._exchange = exchange
        self._first = first
        offer = (first[0] or {}).get("direct")
        self.length: int | None = offer["length"] if offer else None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the content of a file that is not sent to a socket."""
        body, blob = self._first
        size = 0
        while body is None:
            size += len(blob)
            yield blob
            body, blob = await self._exchange.frame()
        if size != body["ok"]["sent"]:
            raise shrank()

    async def send_to(self, fd: int) -> None:
        """Let the supervisor send the whole content to a socket."""
        self._exchange.hand_over(fd, left=0, first=b"")
        body, _ = await self._exchange.frame()
        if body is None or body["ok"]["sent"] != self.length:
            raise shrank()

    async def aclose(self) -> None:
        self._exchange.close()


class Upload:
    """An open file that gets its content from a socket. If closed before it has all, no file appears."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    @property
    def answered(self) -> bool:
        """Whether the supervisor has responded, and so has read all of the content."""
        return self._exchange.answered

    async def receive_from(self, fd: int, *, left: int, first: bytes) -> int:
        """Let the supervisor write ``first`` and then ``left`` bytes of a socket; return the total."""
        self._exchange.hand_over(fd, left=left, first=first)
        body, _ = await self._exchange.frame()
        return int((body or {})["ok"]["bytes_written"])

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
