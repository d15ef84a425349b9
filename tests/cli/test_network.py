"""Secrets go in and are never printed; what a sandbox's network did is shown, for people and programs."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.cli.program import Program
from tests.server.server_process import running_server

SETTINGS = {"network": {"names": {"host.test": ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"]}}
VALUE = "do-not-print-me"
GET = """
import http.client, socket, sys
connection = http.client.HTTPConnection("host.test", int(sys.argv[1]), timeout=60)
connection.request("GET", "/?query")
assert connection.getresponse().read() == b"hello"
connection.close()
try:
    socket.getaddrinfo("elsewhere.test", 80)
except OSError:
    pass
"""


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """The test says what it saw."""


@pytest.fixture(scope="module")
def cli(able: None) -> Iterator[Program]:
    """A server whose operator lets sandboxes reach one name, which is this machine."""
    with running_server(settings=SETTINGS) as server:
        yield Program({"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": server.token})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_secrets_are_set_listed_and_removed_and_never_printed(cli: Program) -> None:
    pytest.importorskip("cryptography", reason="secrets need sandkeep[net]")
    assert "secret set NAME" in cli("secret", "ls").err
    runs = [
        cli("secret", "set", "piped", input=f"{VALUE}\n".encode()),
        cli("secret", "set", "given", "--value", VALUE, "--json"),
        cli("secret", "ls"),
        cli("secret", "list", "--json"),
        cli("secret", "rm", "piped", "given"),
    ]
    assert runs[0].text == "piped\n" and runs[1].json["name"] == "given"
    assert "piped" in runs[2].text and [each["name"] for each in runs[3].json] == ["given", "piped"]
    assert set(runs[3].json[0]) == {"name", "createdAt", "updatedAt"}
    assert runs[4].text == "piped\ngiven\n"
    assert not any(VALUE in run.text + run.err for run in runs)
    assert "sandkeep secret ls" in cli.fails("secret", "rm", "piped")
    refused = cli("secret", "set", "two", input=f"{VALUE}\0".encode(), status=2)
    assert "without NUL" in refused.err and VALUE not in refused.err
    assert "not text" in cli("secret", "set", "binary", input=b"\xff", status=2).err


def test_network_activity_is_shown_with_verdict_address_bytes_and_rule(
    cli: Program, name: str, port: int
) -> None:
    cli("create", "--name", name, "--allowed-domain", "host.test")
    assert "no network activity" in cli("net", name).err
    following = cli.start("net", "-f", "--json", name)
    assert following.stdout is not None and following.stderr is not None
    try:
        cli("exec", name, "--", "python3", "-c", GET, str(port))
        events = []
        for line in following.stdout:
            events.append(json.loads(line))
            kinds = {event["kind"] for event in events}
            if "closed" in kinds and any(event["name"] == "elsewhere.test" for event in events):
                break
        following.send_signal(signal.SIGINT)
        assert following.wait(60) == 130
    finally:
        following.kill()
        following.wait()
        following.stdout.close()
        following.stderr.close()
    allowed = next(event for event in events if event["kind"] == "connection")
    assert (allowed["verdict"], allowed["name"], allowed["port"]) == ("allow", "host.test", port)
    closed = next(event for event in events if event["kind"] == "closed")
    assert closed["receivedBytes"] > 5 and closed["sentBytes"] > 5
    assert cli("net", "--json", name).lines[: len(events)] == events
    lines = cli("net", name).text.splitlines()
    shown = next(line for line in lines if " connection " in line)
    assert f"allow  host.test:{port}" in shown and shown.endswith(f"rule {allowed['rule']}")
    assert any(" closed " in line and " in, " in line for line in lines)
    assert any(" deny " in line and "elsewhere.test" in line for line in lines)
    cli("rm", "--delete-orphan-snapshots", name)
    assert "no sandbox" in cli.fails("net", name)


def test_ports_of_the_host_are_given_and_shown(able: None, port: int) -> None:
    with running_server() as server:
        cli = Program({"SANDKEEP_URL": f"unix://{server.socket}"})
        cli("create", "--name", "reaches", "--host-port", f"{port}=host.test", "--network-policy", "deny-all")
        look = ["python3", "-c", GET, str(port)]
        cli("exec", "reaches", *look)
        assert f"{port} as host.test" in cli("config", "list", "reaches").text
        [shown] = cli("config", "host-ports", "reaches", "--host-port", "1=other", "--json").json["hostPorts"]
        assert shown == {"port": 1, "name": "other"}
        assert cli("config", "host-ports", "reaches", "--json").json["hostPorts"] == []
        cli("exec", "reaches", *look, status=1)
        assert "PORT=NAME" in cli.fails("create", "--host-port", "8000", status=2)


def test_a_secret_is_a_variable_of_a_command(cli: Program) -> None:
    pytest.importorskip("cryptography", reason="secrets need sandkeep[net]")
    cli("secret", "set", "deploy", input=f"{VALUE}\nsecond line\n".encode())
    cli("create", "--name", "uses")
    shown = cli("exec", "--secret", "KEY=deploy", "uses", "--", "printenv", "KEY")
    assert shown.text == f"{VALUE}\nsecond line\n"
    ran = cli("run", "--name", "uses", "--secret", "KEY=deploy", "--", "sh", "-c", 'test -n "$KEY"')
    assert VALUE not in ran.err
    cli("exec", "uses", "--", "printenv", "KEY", status=1)
    assert "no secret named absent" in cli.fails("exec", "--secret", "KEY=absent", "uses", "true", status=125)
    cli("rm", "uses")
    cli("secret", "rm", "deploy")
