"""Tunnels to ports: whose credentials open them, what ends them, and what the command line makes of them."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from tests.cli.program import Program, command
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, TEAM, ServerProcess, running_server

PORT = 5432
ECHO = """
import socket, threading
def serve(client):
    while data := client.recv(65536):
        client.sendall(data)
    client.close()
listener = socket.create_server(("127.0.0.1", 5432))
open("/tmp/listening", "w").close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""
READY = "until [ -e /tmp/listening ]; do sleep 0.05; done"


@pytest.fixture
def echo(box: Box) -> Iterator[Box]:
    box.start("python3", "-c", ECHO)
    box.run("sh", "-c", READY)
    yield box


def opened(server: ServerProcess, box: Box, token: str, port: int = PORT) -> ClientConnection:
    address = f"{server.url.replace('http', 'ws', 1)}{box.own}/ports/{port}"
    return connect(address, additional_headers={"authorization": f"Bearer {token}"}, proxy=None)


def test_a_token_opens_a_tunnel_to_its_own_project_only(server: ServerProcess, echo: Box) -> None:
    with opened(server, echo, server.token) as tunnel:
        assert tunnel.recv() == '{"type":"open"}'
        tunnel.send(b"hello")
        assert tunnel.recv() == b"hello"
        tunnel.send('{"type":"end"}')
        assert tunnel.recv() == '{"type":"end"}'
        with pytest.raises(ConnectionClosed) as closed:
            tunnel.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
    for token in ("", "wrong"):
        with pytest.raises(InvalidStatus) as refused:
            opened(server, echo, token)
        assert refused.value.response.status_code == 403
    with opened(server, echo, server.make_token(project="another")) as tunnel:
        assert '"code":"not_found"' in str(tunnel.recv())
    with opened(server, echo, server.token, port=1) as tunnel:
        assert "listens on port 1" in str(tunnel.recv())
    assert echo.api.get(f"{echo.own}/ports/{PORT}").status_code == 400


def test_the_local_user_needs_no_token(server: ServerProcess, echo: Box) -> None:
    path = f"ws://localhost{echo.own}/ports/{PORT}?{httpx.QueryParams(scoped())}"
    with unix_connect(server.socket, path) as tunnel:
        assert tunnel.recv() == '{"type":"open"}'
        tunnel.send(b"local")
        assert tunnel.recv() == b"local"


def test_a_tunnel_ends_with_its_token_and_with_its_session(server: ServerProcess, echo: Box) -> None:
    mine = server.token_command("create", "--team", TEAM, "--project", PROJECT)
    with opened(server, echo, mine["token"]) as revoked, opened(server, echo, server.token) as other:
        assert revoked.recv() == other.recv() == '{"type":"open"}'
        server.token_command("revoke", mine["id"], "--team", TEAM)
        with pytest.raises(ConnectionClosed):
            revoked.recv(timeout=30)
        other.send(b"still here")
        assert other.recv() == b"still here"
        echo.api.post(f"{echo.path}/stop", params=scoped(), json={})
        assert other.recv(timeout=30) == '{"type":"end"}'


def test_port_forward_listens_here_until_it_is_interrupted(able: None) -> None:
    with running_server() as server, server.client() as api:
        box = create(api, networkPolicy={"mode": "deny-all"})
        box.start("python3", "-c", ECHO)
        box.run("sh", "-c", READY)
        over_tcp = {"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": server.token}
        scope = {"SANDKEEP_TEAM": TEAM, "SANDKEEP_PROJECT": PROJECT}
        for env in (over_tcp, {"SANDKEEP_URL": f"unix://{server.socket}", **scope}):
            forward(box.name, Program(env).env)
        assert "LOCAL:REMOTE" in Program(over_tcp).fails("port-forward", box.name, "x:1", status=2)


def forward(name: str, env: dict[str, str]) -> None:
    """Use two ports, of which a program inside listens on one, and interrupt that."""
    run = [*command(), "port-forward", name, f"0:{PORT}", ":1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].endswith(f"leads to port {PORT} of {name}\n")
        used, unused = (int(line.split()[0].rpartition(":")[2]) for line in lines)
        assert _echoed(used, b"through") == b"through"
        assert _echoed(unused, b"x") == b""
        with socket.create_connection(("127.0.0.1", used), 30) as kept:
            kept.sendall(b"kept")
            assert kept.recv(10) == b"kept"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert kept.recv(10) == b""
        assert process.returncode == 0, errors
        assert "listens on port 1" in errors and "Traceback" not in errors


def _echoed(port: int, data: bytes) -> bytes:
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 30) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(100):
                received += piece
    except ConnectionError:
        pass
    return received
