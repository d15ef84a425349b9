"""Interactive sessions over WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from socket import SHUT_RDWR

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from sandkeep.server.terminal import STALLED_SECONDS
from tests.polling import ENOUGH, until
from tests.server.conftest import Box


@contextmanager
def open_terminal(box: Box, *command: str, cwd: str | None = None, **more: int) -> Iterator[ClientConnection]:
    opened = box.api.post(f"{box.path}/interactive", json={}).json()
    assert "?" not in opened["url"] and opened["url"].startswith("ws://")
    start = {"type": "start", "command": command[0], "args": list(command[1:]), "env": ["TERM=xterm"], **more}
    with connect(f"{opened['url']}?token={opened['token']}", max_size=65_536) as socket:
        socket.send(json.dumps({**start, "cwd": cwd}))
        yield socket


def to_the_end(socket: ClientConnection) -> tuple[bytes, int]:
    """All output, and the exit code."""
    out = b""
    while True:
        message = socket.recv(timeout=ENOUGH)
        if isinstance(message, str):
            code = json.loads(message)["code"]
            break
        out += message
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=ENOUGH)
    return out, code


def test_a_terminal_has_the_size_asked_for_and_reports_its_exit(box: Box) -> None:
    with open_terminal(box, "sh", "-c", "stty size; exit 9", cols=100, rows=30) as socket:
        out, code = to_the_end(socket)
    assert b"30 100" in out and code == 9


def test_keystrokes_go_in_and_the_size_changes(box: Box) -> None:
    with open_terminal(box, "sh") as socket:
        socket.send(json.dumps({"type": "resize", "cols": 120, "rows": 40}))
        socket.send(b"stty size; exit 3\n")
        out, code = to_the_end(socket)
    assert b"40 120" in out and code == 3


def test_output_larger_than_a_frame_comes_in_pieces(box: Box) -> None:
    with open_terminal(box, "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x") as socket:
        out, _ = to_the_end(socket)
    assert out.count(b"x") == 300_000


def test_a_ticket_opens_one_connection_only(box: Box) -> None:
    opened = box.api.post(f"{box.path}/interactive").json()
    url = f"{opened['url']}?token={opened['token']}"
    with connect(url):
        pass
    for refused in (url, f"{opened['url']}?token=guess", opened["url"]):
        with pytest.raises(InvalidStatus) as caught, connect(refused):
            pass
        assert caught.value.response.status_code == 403


def test_a_client_that_goes_away_hangs_up(box: Box) -> None:
    script = "trap 'echo hup > /tmp/hup; exit' HUP; echo ready; while :; do sleep 0.1; done"
    with open_terminal(box, "sh", "-c", script) as socket:
        assert b"ready" in socket.recv(timeout=ENOUGH, decode=False)

    def status() -> str:
        rows = box.api.get(f"{box.own}/processes").json()["processes"]
        [process] = [row for row in rows if row["kind"] == "interactive"]
        return str(process["status"])

    until(lambda: status() != "running")
    read = box.api.post(f"{box.path}/fs/read", json={"path": "/tmp/hup"})
    assert (read.status_code, read.text) == (200, "hup\n")


@pytest.mark.slow
@contextmanager
def attach(box: Box, process: str, **how: int) -> Iterator[ClientConnection]:
    opened = box.api.post(f"{box.path}/interactive", json={}).json()
    with connect(f"{opened['url']}?token={opened['token']}", max_size=65_536) as socket:
        socket.send(json.dumps({"type": "attach", "process": process, **how}))
        yield socket


def first_message(socket: ClientConnection) -> dict[str, str]:
    return dict(json.loads(socket.recv(timeout=ENOUGH, decode=True)))


def read_until(socket: ClientConnection, wanted: bytes) -> bytes:
    out = b""
    while wanted not in out:
        out += socket.recv(timeout=ENOUGH, decode=False)
    return out


def test_several_clients_attach_to_one_terminal(box: Box) -> None:
    with open_terminal(box, "sh", readsAttached=True, detachable=True) as socket:
        news = first_message(socket)
        process = news["process"]
        assert news == {"type": "attached", "process": process}
        socket.send(b"echo first-$((40+2))\n")
        read_until(socket, b"first-42")
    shown = box.api.get(f"{box.own}/processes/{process}").json()["process"]
    assert (shown["status"], shown["terminal"]) == ("running", True)
    with attach(box, process, cols=90, rows=20) as one, attach(box, process, cols=70, rows=10) as two:
        for socket in (one, two):
            assert first_message(socket) == news
            read_until(socket, b"first-42")
        one.send(b"echo from-$((1+0))\n")
        two.send(b"echo from-$((1+1))\n")
        for socket in (one, two):
            read_until(socket, b"from-2")
        one.send(json.dumps({"type": "resize", "cols": 60, "rows": 15}))
        one.send(b"stty size\n")
        read_until(two, b"15 60")
        two.send(b"exit 5\n")
        assert (to_the_end(one)[1], to_the_end(two)[1]) == (5, 5)
    with attach(box, process) as late:
        assert first_message(late) == news
        out, code = to_the_end(late)
        assert b"first-42" in out and b"15 60" in out and code == 5
    with attach(box, process, scrollback=len(out) - 1) as late:
        first_message(late)
        assert to_the_end(late)[0] == out[1:]


def test_only_the_client_that_started_a_program_hangs_it_up(box: Box) -> None:
    with open_terminal(box, "cat", readsAttached=True) as starter:
        process = first_message(starter)["process"]
        with attach(box, process) as guest:
            first_message(guest)
        starter.send(b"still\n")
        read_until(starter, b"still")
        with attach(box, process) as guest:
            first_message(guest)
            starter.close()
            assert to_the_end(guest)[1] == 129


def test_what_is_not_on_a_terminal_cannot_be_attached_to(box: Box) -> None:
    command = box.start("sleep", "60")
    for process, kind in ((command["id"], "invalid_request"), ("cmd_none", "not_found")):
        with attach(box, process) as socket:
            message = first_message(socket)
            assert (message["type"], message["kind"]) == ("exit", kind)


@pytest.mark.slow
def test_a_client_that_typed_for_nobody_hangs_up_too(box: Box) -> None:
    with open_terminal(box, "sh", "-c", "stty raw -echo; echo ready; exec sleep 1000") as socket:
        assert b"ready" in socket.recv(timeout=ENOUGH, decode=False)
        for _ in range(20):
            socket.send(b"x" * 60_000)  # more than the terminal takes, less than the connection does
        socket.socket.shutdown(SHUT_RDWR)

    def gone() -> bool:
        return box.api.get(f"{box.path}/cmd").json()["commands"][0]["exitCode"] is not None

    until(gone, seconds=STALLED_SECONDS + ENOUGH)


@pytest.mark.parametrize(
    ("command", "cwd", "exit_code", "kind"),
    [
        ("no-such-program", None, 127, "executable_not_found"),
        ("/etc/passwd", None, 126, "executable_refused"),
        ("true", "/no/such/directory", 126, "path_not_found"),
    ],
)
def test_a_command_that_cannot_start_says_why_and_ends_as_in_a_shell(
    box: Box, command: str, cwd: str | None, exit_code: int, kind: str
) -> None:
    """Clients show output and take the exit code; without them they would take it for a success."""
    with open_terminal(box, command, cwd=cwd) as socket:
        said = socket.recv(timeout=ENOUGH, decode=False)
        ended = json.loads(socket.recv(timeout=ENOUGH))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=ENOUGH)
    assert (cwd or command).encode() in said and said.endswith(b"\r\n")
    assert (ended["type"], ended["code"], ended["kind"]) == ("exit", exit_code, kind)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1000
