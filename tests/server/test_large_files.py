"""Large files, whose content the server neither reads nor writes: what must hold on the connection."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.conftest import IS_ROOT
from tests.running_user import ONE_ID
from tests.server.conftest import Box, scoped
from tests.server.server_process import ServerProcess
from tests.server.test_sandboxes import refused

MIB = 1 << 20


class Wire:
    """A connection on which nothing is done for us."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock = sock
        self._token = token
        self._in = sock.makefile("rb")

    def ask(self, method: str, target: str, length: int = 0, *more: str) -> None:
        scope = "&".join(f"{key}={value}" for key, value in scoped().items())
        target += ("&" if "?" in target else "?") + scope
        lines = [f"{method} {target} HTTP/1.1", "host: x", f"content-length: {length}", *more]
        if self._token:
            lines.append(f"authorization: Bearer {self._token}")
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode())

    def head(self) -> tuple[int, dict[str, str]]:
        status = int(self._in.readline().split()[1])
        headers = {}
        while line := self._in.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name] = value
        return status, headers

    def body(self, headers: dict[str, str]) -> bytes:
        return self._in.read(int(headers["content-length"]))

    def answer(self) -> tuple[int, Any]:
        status, headers = self.head()
        return status, json.loads(self.body(headers))

    def close(self) -> None:
        self._in.close()
        self.sock.close()


@contextmanager
def connected(server: ServerProcess, kind: str = "unix") -> Iterator[Wire]:
    if kind == "unix":
        sock, token = socket.socket(socket.AF_UNIX), ""
        sock.connect(server.socket)
    else:
        host, _, port = server.url.removeprefix("http://").partition(":")
        sock, token = socket.create_connection((host, int(port))), server.token
    sock.settimeout(60)
    wire = Wire(sock, token)
    try:
        yield wire
    finally:
        wire.close()


as_root = pytest.mark.skipif(not IS_ROOT, reason="only root sees the descriptors of a supervisor")


def held_sockets(server: ServerProcess, box: Box) -> int:
    """How many sockets the supervisor of a session has open."""
    state = json.loads((server.data / "sessions" / box.session / "state.json").read_text())
    directory = f"/proc/{state['supervisor_pid']}/fd"
    count = 0
    for name in os.listdir(directory):
        try:
            count += os.readlink(f"{directory}/{name}").startswith("socket:")
        except FileNotFoundError:
            pass
    return count


def until_no_more_than(limit: int, server: ServerProcess, box: Box) -> None:
    deadline = time.monotonic() + 60
    while held_sockets(server, box) > limit:
        assert time.monotonic() < deadline, "the supervisor does not let go of a connection"
        time.sleep(0.02)


def stat(wire: Wire, box: Box, path: str) -> None:
    body = json.dumps({"path": path}).encode()
    wire.ask("POST", f"{box.own}/fs/stat", len(body), "content-type: application/json")
    wire.sock.sendall(body)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("size", [256 << 10, 5 * MIB + 123])
def test_requests_before_between_and_after_share_one_connection(
    box: Box, server: ServerProcess, kind: str, size: int
) -> None:
    content, part = os.urandom(size), min(size, 3 * MIB)
    start = size - part
    with connected(server, kind) as wire:
        stat(wire, box, "/etc/passwd")
        assert wire.answer()[0] == 200
        for _ in range(2):
            # The next request is on its way before the first is answered.
            wire.ask("PUT", f"{box.own}/fs/content?path=big", len(content))
            wire.sock.sendall(content)
            stat(wire, box, "big")
            assert wire.answer() == (200, {"bytesWritten": len(content)})
            assert wire.answer()[1]["file"]["size"] == len(content)
            wire.ask("GET", f"{box.own}/fs/content?path=big&offset={start}&length={part}")
            stat(wire, box, "big")
            status, headers = wire.head()
            assert (status, headers["content-length"]) == (200, str(part))
            assert wire.body(headers) == content[start:]
            assert wire.answer()[0] == 200
    assert hashlib.sha256(content).hexdigest() in box.run("sha256sum", "big").text


def test_a_client_that_waits_for_permission_gets_it_or_a_refusal(box: Box, server: ServerProcess) -> None:
    with connected(server) as wire:
        wire.ask("PUT", f"{box.own}/fs/content?path=asked", 2 * MIB, "expect: 100-continue")
        assert wire.head()[0] == 100
        wire.sock.sendall(b"x" * (2 * MIB))
        assert wire.answer() == (200, {"bytesWritten": 2 * MIB})
        wire.ask("PUT", f"{box.own}/fs/content?path=asked&exclusive=true", 2 * MIB, "expect: 100-continue")
        status, headers = wire.head()
        assert (status, headers["connection"]) == (400, "close")


def test_a_refused_upload_is_read_and_the_connection_goes_on(box: Box, server: ServerProcess) -> None:
    with connected(server) as wire:
        for target in ("/proc/new" if ONE_ID else "/etc/new", "/", "no/parents"):
            wire.ask("PUT", f"{box.own}/fs/content?path={target}", 6 * MIB)
            wire.sock.sendall(b"x" * (6 * MIB))
            assert wire.answer()[0] in (400, 403, 404)
        stat(wire, box, "/etc/new")
        assert wire.answer()[0] == 404


def test_a_full_disk_in_the_middle_is_told_and_leaves_nothing(box: Box, server: ServerProcess) -> None:
    with connected(server) as wire:
        wire.ask("PUT", f"{box.own}/fs/content?path=/dev/shm/big", 100 * MIB)
        for _ in range(100):
            wire.sock.sendall(b"x" * MIB)
        status, answer = wire.answer()
        assert (status, answer["error"]["code"]) == (400, "file_error"), answer
        assert "No space left" in answer["error"]["message"]
        stat(wire, box, "/dev/shm/big")
        assert wire.answer()[0] == 404
    assert "sandkeep" not in box.run("ls", "-A", "/dev/shm").text


def test_appending_much_adds_it_in_place(box: Box) -> None:
    where = {"path": "log"}
    assert box.api.put(f"{box.own}/fs/content", params=where, content=b"a" * 10).status_code == 200
    more = {**where, "append": "true"}
    answer = box.api.put(f"{box.own}/fs/content", params=more, content=b"b" * (2 * MIB))
    assert answer.json() == {"bytesWritten": 2 * MIB}
    read = box.api.get(f"{box.own}/fs/content", params=where)
    assert read.content == b"a" * 10 + b"b" * (2 * MIB)


@as_root
def test_an_upload_that_breaks_off_leaves_nothing_of_itself(box: Box, server: ServerProcess) -> None:
    box.run("true")
    before = held_sockets(server, box)
    for sent in (0, 1000, 3 * MIB):
        with connected(server) as wire:
            wire.ask("PUT", f"{box.own}/fs/content?path=half", 8 * MIB)
            wire.sock.sendall(b"x" * sent)
            time.sleep(0.1)
        until_no_more_than(before, server, box)
    answer = box.api.get(f"{box.own}/fs/content", params={"path": "half"})
    assert refused(answer) == (404, "not_found")
    assert "sandkeep" not in box.run("ls", "-A").text
    assert "request failed" not in server.log()


@as_root
def test_a_client_that_leaves_a_download_is_let_go(box: Box, server: ServerProcess) -> None:
    box.run("truncate", "-s", "200M", "sparse")
    before = held_sockets(server, box)
    with connected(server) as wire:
        wire.ask("GET", f"{box.own}/fs/content?path=sparse")
        status, headers = wire.head()
        assert (status, headers["content-length"]) == (200, str(200 * MIB))
        # It stands still, and everybody else goes on.
        time.sleep(0.1)
        assert box.run("true").status_code == 200
    until_no_more_than(before, server, box)


def test_a_file_that_shrinks_while_it_is_sent_is_no_answer(box: Box, server: ServerProcess) -> None:
    box.run("truncate", "-s", "200M", "shrinking")
    with connected(server) as wire:
        wire.ask("GET", f"{box.own}/fs/content?path=shrinking")
        _, headers = wire.head()
        box.run("truncate", "-s", "1M", "shrinking")
        try:
            assert len(wire.body(headers)) < 200 * MIB
        except ConnectionResetError:
            pass


def test_what_is_no_regular_file_is_refused(box: Box) -> None:
    box.run("mkfifo", "pipe")
    for path in ("pipe", "/dev/zero", "/tmp"):
        read = box.api.get(f"{box.own}/fs/content", params={"path": path})
        assert refused(read) == (400, "file_error")
        wrote = box.api.put(f"{box.own}/fs/content", params={"path": path}, content=b"x" * (2 * MIB))
        assert refused(wrote) == (400, "file_error")


def test_official_clients_read_large_files_too(box: Box) -> None:
    content = os.urandom(3 * MIB)
    box.api.put(f"{box.own}/fs/content", params={"path": "big"}, content=content)
    answer = box.api.post(f"{box.path}/fs/read", json={"path": "big"})
    assert answer.content == content
    head = box.api.head(f"{box.own}/fs/content", params={"path": "big"})
    assert (head.status_code, head.content) == (200, b"")


def test_stopping_in_the_middle_ends_both_ways(box: Box, api: httpx.Client, server: ServerProcess) -> None:
    box.run("truncate", "-s", "200M", "sparse")
    with connected(server) as up, connected(server) as down:
        down.ask("GET", f"{box.own}/fs/content?path=sparse")
        _, headers = down.head()
        up.ask("PUT", f"{box.own}/fs/content?path=half", 8 * MIB)
        up.sock.sendall(b"x" * MIB)
        time.sleep(0.1)
        assert api.post(f"{box.path}/stop").status_code == 200
        status, answer = up.answer()
        assert status >= 400, answer
        try:
            assert len(down.body(headers)) < 200 * MIB
        except ConnectionResetError:
            pass
