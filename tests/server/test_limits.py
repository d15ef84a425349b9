"""Requests that are too large, malformed or misdirected get a clear 4xx in one JSON shape."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import httpx
import pytest
import uvicorn

from sandkeep.server import listen
from sandkeep.server.app import Config
from sandkeep.server.http import Receive, Reply, Request, Scope, Send
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess, running_server
from tests.server.test_sandboxes import refused


def raw(server: ServerProcess, request: bytes) -> tuple[int, dict[str, object]]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    data = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        try:
            sock.sendall(request)
        except ConnectionError:
            pass  # refused before all of it was sent
        try:
            while piece := sock.recv(65536):
                data += piece
        except ConnectionResetError:
            pass  # how its end is told when the server has not read all of it
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_an_unknown_path_and_a_wrong_method_are_json(api: httpx.Client) -> None:
    assert refused(api.get("/v2/nothing")) == (404, "not_found")
    assert refused(api.get("/")) == (404, "not_found")
    wrong = api.put("/v2/sandboxes")
    assert refused(wrong) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    options = api.options("/v2/sandboxes")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
    head = api.head("/health")
    assert (head.status_code, head.content) == (200, b"") and head.headers["content-length"] == "15"


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"\xff", b'{"command": 3}', b'{"command": ""}', b"[" * 100_000]
)
def test_a_body_that_is_not_what_it_should_be_is_a_bad_request(box: Box, body: bytes) -> None:
    assert refused(box.api.post(f"{box.path}/cmd", content=body)) == (400, "bad_request")


def test_bodies_paths_and_heads_have_limits(server: ServerProcess, box: Box) -> None:
    for path, limit in (
        ("/v3/sandboxes", Config().max_json_bytes),
        (f"{box.path}/cmd", Config().max_command_bytes),
    ):
        large = b'{"command": "' + b"x" * limit + b'"}'
        assert refused(box.api.post(path, content=large)) == (413, "payload_too_large")
        streamed = box.api.post(path, content=iter([large[:5_000_000], large[5_000_000:]]))
        assert refused(streamed) == (413, "payload_too_large")
    assert box.api.get("/health").status_code == 200
    assert refused(box.api.get("/v2/sandboxes/" + "x" * 9000)) == (400, "bad_request")
    assert refused(box.api.get("/v2/sandboxes", params=scoped(limit=101))) == (400, "bad_request")
    assert refused(box.api.get("/v2/sandboxes", params=scoped(cursor="nonsense"))) == (400, "bad_request")
    status, body = raw(server, b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
    assert status == 400 and "65536 bytes" in str(body)
    status, body = raw(server, b"nonsense\r\n\r\n")
    assert status == 400 and body["error"]["code"] == "bad_request"  # type: ignore[index]


def test_a_body_that_says_it_is_too_large_is_not_read(server: ServerProcess) -> None:
    head = b"POST /v3/sandboxes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % server.token.encode()
    status, body = raw(server, head + b"content-length: 99999999999\r\n\r\n")
    assert (status, body["error"]["code"]) == (413, "payload_too_large")  # type: ignore[index]


def test_unknown_keys_and_parameters_are_ignored(box: Box) -> None:
    body = {"command": "true", "wait": True, "__future": {"x": 1}, "unknown": None}
    answer = box.api.post(f"{box.path}/cmd", params={"__flag": "1", "wait": "true"}, json=body)
    assert answer.status_code == 200


def test_names_are_one_percent_encoded_segment(api: httpx.Client) -> None:
    created = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "name": "enc-1"})
    assert created.status_code == 200
    assert api.get("/v2/sandboxes/%65nc-1", params=scoped()).status_code == 200
    assert refused(api.get("/v2/sandboxes/a%2Fb", params=scoped())) == (404, "not_found")
    api.delete("/v2/sandboxes/enc-1", params=scoped())


def test_the_document_describes_every_route(api: httpx.Client) -> None:
    document = api.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    operations = [method for path in document["paths"].values() for method in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) > 50
    assert {"/v3/sandboxes", "/v2/sandboxes/sessions/{session}/cmd", "/v1/events"} <= document["paths"].keys()


def exchange(server: ServerProcess, *pieces: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    data = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.05)
        while piece := sock.recv(65536):
            data += piece
    return data


def head(server: ServerProcess, line: str, *fields: str) -> bytes:
    always = ("host: x", f"authorization: Bearer {server.token}")
    return "\r\n".join([f"{line} HTTP/1.1", *always, *fields, "", ""]).encode()


def test_a_request_that_turns_out_to_be_malformed_has_done_nothing(server: ServerProcess, box: Box) -> None:
    for line in (f"POST {box.path}/stop", f"DELETE /v2/sandboxes/{box.name}"):
        answer = exchange(server, head(server, line, "transfer-encoding: xchunked"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        answer = exchange(server, head(server, line, "transfer-encoding: chunked"), b"nonsense\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert box.run("true").status_code == 200


def test_a_wish_for_another_protocol_is_not_granted_and_costs_nothing(
    server: ServerProcess, box: Box
) -> None:
    """As HTTP/2 clients that were given a plain URL send it, with whatever they send first."""
    body = b'{"command": "echo", "args": ["hi"], "wait": true, "logs": true}'
    run = f"POST {box.path}/cmd"
    wishes = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
    last = head(server, "GET /health", "connection: close")
    sized = head(server, run, *wishes, f"content-length: {len(body)}")
    chunked = head(server, run, *wishes, "transfer-encoding: chunked") + b"%x\r\n" % len(body)
    for pieces in (
        (sized + body + last,),
        (sized[:50], sized[50:], body[:20], body[20:], last),
        (chunked + body + b"\r\n0\r\n\r\n", last),
    ):
        answer = exchange(server, *pieces)
        assert answer.count(b"HTTP/1.1 200 ") == 2 and b'"data":"hi\\n"' in answer
        assert answer.endswith(b'{"status":"ok"}')
    websocket = ("connection: Upgrade", "upgrade: websocket", f"content-length: {len(body)}")
    answer = exchange(server, head(server, run, *websocket) + body + last)
    assert b'"data":"hi\\n"' in answer


def test_a_client_that_does_not_finish_its_head_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_SECONDS", 0.1)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await Reply(b"{}").send(Request(scope, receive), send)

    async def ends(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    async def check() -> None:
        config = uvicorn.Config(application, http=listen.Protocol, lifespan="off", log_config=None)
        config.load()
        listener = uvicorn.Server(config)
        protocol = partial(listen.Protocol, config=config, server_state=listener.server_state, app_state={})
        serving = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        port = serving.sockets[0].getsockname()[1]
        assert await ends(port, b"") == b""
        assert await ends(port, b"GET / HTTP/1.1\r\nhost:") == b""
        # Not while an answer is being made.
        answer = await ends(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP")
        assert answer.endswith(b"{}")
        serving.close()

    asyncio.run(check())


def test_unfinished_requests_without_a_token_keep_nobody_out(server: ServerProcess, box: Box) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as held, server.client() as before:
        assert before.get(f"/v2/sandboxes/{box.name}").status_code == 200
        begun = head(server, "GET /health")[:30]
        halves = []
        for _ in range(listen.MAX_STRANGERS + 100):
            half = held.enter_context(socket.create_connection((host, int(port)), 60))
            half.sendall(begun)
            halves.append(half)
        # Somebody new gets in, and the oldest of those without a token have left room for that.
        with server.client() as after:
            assert after.get(f"/v2/sandboxes/{box.name}").status_code == 200
        with suppress(ConnectionResetError):
            assert halves[0].recv(1) == b""
        # Who has shown one stays, however old the connection.
        assert before.get(f"/v2/sandboxes/{box.name}").status_code == 200
        with server.local() as local:
            assert local.get("/health").status_code == 200


def test_the_server_may_open_as_many_files_as_allowed_and_sandboxes_as_many_as_usual(able: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        with running_server() as server, server.client() as api:
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
            box = create(api)
            told = [json.loads(line) for line in box.run("sh", "-c", "ulimit -Sn").text.splitlines()]
            assert told[1]["data"] == "300\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_allowed_is_a_limit_and_not_a_bug(able: None) -> None:
    def ask(number: int) -> tuple[int, str]:
        with httpx.Client(transport=httpx.HTTPTransport(uds=server.socket), timeout=120) as client:
            body = {"projectId": PROJECT, "name": f"many-{number}"}
            try:
                answer = client.post("http://sandkeep/v3/sandboxes", json=body)
            except httpx.HTTPError:
                return 0, "not even connected"
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

    with running_server() as server:
        with server.local() as warm:
            warm.post("/v3/sandboxes", json={"projectId": PROJECT, "name": "first"})
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        refusals = 0
        for more in (10, 40, 60, 70, 90, 120):  # wherever on the way of a create they end
            used = len(os.listdir(f"/proc/{server.pid}/fd"))
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + more, before[1]))
            with ThreadPoolExecutor(3) as pool:
                told = set(pool.map(ask, range(100 * more, 100 * more + 3)))
            assert told <= {(200, ""), (400, "limit_reached"), (0, "not even connected")}
            refusals += (400, "limit_reached") in told
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        assert refusals
        assert ask(1) == (200, "")
