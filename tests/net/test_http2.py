"""HTTP/2 requests as they are judged and passed on: nothing in them means something else in HTTP/1.1."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from typing import NamedTuple

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, ResponseReceived, StreamEnded, StreamReset

from sandkeep.net import http, http1, http2
from sandkeep.net.http import BadMessage, HeaderList, Request, Response
from tests.polling import ENOUGH

HEAD = {b":method": b"GET", b":scheme": b"http", b":authority": b"one.test", b":path": b"/x"}


class Seen(NamedTuple):
    status: int | None
    """None: the client was cut off instead."""
    passed: list[bytes]
    """What the server behind received, request by request."""


async def exchange(fields: HeaderList, body: bytes | None) -> Seen:
    """Send one request, all of it in one piece, through a proxy to a server that answers anything."""
    passed: list[bytes] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            passed.append(await reader.readuntil(b"\r\n\r\n"))
            if b"transfer-encoding: chunked" in passed[-1]:
                passed[-1] += await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        except asyncio.IncompleteReadError:
            pass  # a request that was not passed on
        finally:
            writer.close()

    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    place = listening.sockets[0].getsockname()

    async def respond(request: Request) -> Response:
        sock = socket.create_connection(place)
        sock.setblocking(False)
        try:
            return await http1.ServerConnection(await http.connected(sock)).send(request)
        except BadMessage as error:
            return http.plain(error.status)

    near, far = socket.socketpair()
    near.setblocking(False)
    stream = await http.accepted(near)
    serving = asyncio.create_task(http2.serve(stream, respond, scheme=b"http"))
    config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    client = H2Connection(config)
    client.initiate_connection()
    client.send_headers(1, fields, end_stream=body is None)
    if body is not None:
        client.send_data(1, body, end_stream=True)
    reader, writer = await asyncio.open_connection(sock=far)
    writer.write(client.data_to_send())
    status: int | None = None
    try:
        async with asyncio.timeout(ENOUGH):
            ended = False
            while not ended and (data := await reader.read(65_536)):
                for event in client.receive_data(data):
                    if isinstance(event, ResponseReceived):
                        status = int(dict(event.headers)[b":status"])
                    ended = ended or isinstance(event, StreamEnded | StreamReset | ConnectionTerminated)
    finally:
        writer.close()
        await asyncio.gather(serving, return_exceptions=True)
        stream.close()
        listening.close()
        await asyncio.sleep(0.01)  # for the transports to be gone
    return Seen(status, passed)


def ask(changes: dict[bytes, bytes] | None = None, body: bytes | None = None, **more: bytes) -> Seen:
    fields = {**HEAD, **(changes or {})}
    extra = [(name.replace("_", "-").encode(), value) for name, value in more.items()]
    return asyncio.run(exchange([*fields.items(), *extra], body))


@pytest.mark.parametrize(
    "changed",
    [
        {b":path": b"http://evil.test/admin"},
        {b":path": b"admin"},
        {b":path": b"*"},
        {b":path": b"/a b"},
        {b":path": b"/a HTTP/1.1"},
        {b":path": b"/\xe9"},
        {b":method": b"GET /admin"},
        {b":method": b"G\x01T"},
    ],
)
def test_what_would_be_another_request_in_http1_is_answered_and_not_passed_on(
    changed: dict[bytes, bytes],
) -> None:
    assert ask(changed) == Seen(400, [])


def test_a_length_without_a_body_and_a_head_too_large_are_refused() -> None:
    assert ask(content_length=b"5") == Seen(400, [])
    assert ask(x_large=b"x" * 33_000) == Seen(431, [])


def test_a_body_that_comes_in_one_piece_with_its_head_is_passed_on() -> None:
    seen = ask({b":method": b"POST"}, b"hello")
    assert seen.status == 200
    assert seen.passed[0].startswith(b"POST /x HTTP/1.1\r\n") and b"hello" in seen.passed[0]
    assert ask().passed[0].startswith(b"GET /x HTTP/1.1\r\n")
    assert ask({b":method": b"OPTIONS", b":path": b"*"}).passed[0].startswith(b"OPTIONS * HTTP/1.1\r\n")


async def in_crumbs(count: int, *, narrow: bool) -> tuple[int, int]:
    """Send a body byte by byte to a proxy that cannot pass it on: the memory that takes, the window left."""
    asked = asyncio.Event()

    async def respond(request: Request) -> Response:
        asked.set()
        await asyncio.sleep(ENOUGH)
        return http.plain(504)

    near, far = socket.socketpair()
    near.setblocking(False)
    stream = await http.accepted(near)
    serving = asyncio.create_task(http2.serve(stream, respond, scheme=b"http", narrow=narrow))
    client = H2Connection()
    client.initiate_connection()
    client.send_headers(1, [*HEAD.items()])
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        async with asyncio.timeout(ENOUGH):
            writer.write(client.data_to_send())
            await asked.wait()
            client.receive_data(await reader.read(65_536))
            window = client.outbound_flow_control_window
            tracemalloc.start()
            writer.write(b"\0\0\1\0\0\0\0\0\1x" * count + b"\0\0\x08\x06\0\0\0\0\0" + b"answered")
            while b"answered" not in await reader.read(65_536):
                pass
            kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        writer.close()
        stream.close()
        await asyncio.sleep(0.01)  # for the transports to be gone
    return kept, window


@pytest.mark.parametrize(("narrow", "window"), [(False, 4 << 20), (True, 65_535)])
def test_a_body_in_crumbs_takes_no_more_memory_than_its_size(narrow: bool, window: int) -> None:
    kept, given = asyncio.run(in_crumbs(20_000, narrow=narrow))
    assert kept < 1_000_000
    assert given == window
