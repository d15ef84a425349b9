"""Requests on a bad day: repeated where that is safe, told apart where it is not."""

from __future__ import annotations

import time

import pytest

import sandkeep
from sandkeep.errors import (
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    ServerUnreachable,
    StreamClosed,
    TransportError,
)
from tests.polling import ENOUGH
from tests.sdk.scripted_server import DROP, HANG, Scripted, answer, json_answer, refusal

pytestmark = pytest.mark.anyio

EMPTY_PAGE = json_answer({"sandboxes": [], "pagination": {"count": 0, "next": None}})


async def test_questions_are_asked_again_after_failures_on_the_way() -> None:
    with Scripted(refusal(503, "bad_gateway"), DROP, EMPTY_PAGE) as server:
        async with sandkeep.Client(server.url) as client:
            assert (await client.query_sandboxes().page()).items == ()
        assert [request.method for request in server.seen] == ["GET"] * 3


async def test_a_server_that_says_when_is_asked_then() -> None:
    with Scripted(refusal(429, "rate_limited", ("Retry-After", "1")), EMPTY_PAGE) as server:
        async with sandkeep.Client(server.url) as client:
            began = time.monotonic()
            await client.query_sandboxes().page()
            assert 0.9 < time.monotonic() - began < ENOUGH


async def test_a_server_that_wants_too_much_patience_is_an_error() -> None:
    with Scripted(refusal(429, "rate_limited", ("Retry-After", "600"))) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(RateLimited) as refused:
                await client.create_sandbox("a")
            assert refused.value.http_status == 429


async def test_what_may_have_been_done_is_not_done_again() -> None:
    with Scripted(DROP, refusal(500, "internal_error")) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(TransportError) as unclear:
                await client.fork_drive("a", "b")
            assert "check before" in (unclear.value.hint or "")
            with pytest.raises(sandkeep.SandkeepError) as refused:
                await client.fork_drive("a", "b")
            assert refused.value.http_status == 500
        assert [request.method for request in server.seen] == ["POST", "POST"]


async def test_what_has_a_key_is_sent_again_with_it() -> None:
    with Scripted(DROP, refusal(400, "bad_request")) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(InvalidRequest):
                await client.create_sandbox("a")
        first, second = [request.headers["idempotency-key"] for request in server.seen]
        assert first == second


async def test_a_proxy_without_a_server_behind_it_is_asked_again() -> None:
    away = answer(b"<html>Bad Gateway</html>", status=502)
    with Scripted(away, away, away, away, away, EMPTY_PAGE) as server:
        async with sandkeep.Client(server.url) as client:
            await client.query_sandboxes().page()
        assert len(server.seen) == 6


async def test_what_the_server_did_not_look_at_is_sent_again_even_then() -> None:
    with Scripted(refusal(425, "too_early"), refusal(400, "bad_request")) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(InvalidRequest):
                await client.create_sandbox("a")
        assert len(server.seen) == 2


async def test_giving_up_says_what_happened_last() -> None:
    with Scripted(*[refusal(503, "bad_gateway")] * 3) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(TransportError) as refused:
                await client.get_snapshot("snap_1")
            assert refused.value.http_status == 503
        assert len(server.seen) == 3


async def test_no_answer_in_time_is_an_error_of_its_own() -> None:
    with Scripted(HANG, HANG) as server:
        async with sandkeep.Client(server.url, timeout=0.3) as client:
            began = time.monotonic()
            with pytest.raises(RequestTimeout) as late:
                await client.query_sandboxes().page()
            assert late.value.hint is None, "it only reads"
            with pytest.raises(RequestTimeout) as unclear:
                await client.fork_drive("a", "b")
            assert "check before" in (unclear.value.hint or "")
            assert time.monotonic() - began < ENOUGH


async def test_nobody_there_is_an_error_of_its_own() -> None:
    async with sandkeep.Client("http://127.0.0.1:1") as client:
        with pytest.raises(ServerUnreachable) as missing:
            await client.query_sandboxes().page()
        assert missing.value.url == "http://127.0.0.1:1"
    async with sandkeep.Client("unix:///nonexistent/server.sock") as client:
        with pytest.raises(ServerUnreachable):
            await client.query_sandboxes().page()


async def test_who_asks_and_where_goes_with_every_request() -> None:
    with Scripted(EMPTY_PAGE) as server:
        async with sandkeep.Client(server.url + "/api", token="secret", project="blue") as client:
            await client.query_sandboxes().page()
        [request] = server.seen
        assert request.headers["authorization"] == "Bearer secret"
        assert request.path.startswith("/api/v2/sandboxes?") and "project=blue" in request.path
        assert request.headers["user-agent"].startswith("sandkeep/")


async def test_something_else_than_a_server_is_recognised() -> None:
    with Scripted(json_answer({"what": "else"}), json_answer({}, status=418)) as server:
        async with sandkeep.Client(server.url) as client:
            with pytest.raises(TransportError):
                await client.query_sandboxes().page()
            with pytest.raises(TransportError) as refused:
                await client.query_sandboxes().page()
            assert refused.value.http_status == 418


async def test_connections_are_used_again() -> None:
    with Scripted(*[EMPTY_PAGE] * 5) as server:
        async with sandkeep.Client(server.url) as client:
            for _ in range(5):
                await client.query_sandboxes().page()
        assert server.connections == 1


@pytest.mark.slow
async def test_a_log_that_keeps_breaking_off_is_an_error_in_the_end() -> None:
    shown = {
        "id": "cmd_1",
        "name": "x",
        "args": [],
        "cwd": "/",
        "sessionId": "sbx_1",
        "startedAt": 1,
        "exitCode": None,
    }
    from sandkeep.sdk._async.process import Process
    from sandkeep.sdk._async.transport import Transport
    from sandkeep.sdk.target import resolve
    from sandkeep.wire.base import decode, encode
    from sandkeep.wire.objects import CommandObject

    with Scripted(*[json_answer({})] * 20) as server:
        transport = Transport(resolve(server.url, None, None, None), timeout=ENOUGH)
        process = Process(transport, decode(CommandObject, encode(shown)))
        with pytest.raises(StreamClosed):
            await process.stdout.read()
        await transport.aclose()
        assert 2 < len(server.seen) < 10
