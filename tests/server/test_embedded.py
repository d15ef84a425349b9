"""Clients find a server or start one: exactly one, detached, and gone when nobody needs it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandkeep import embedded, sync
from sandkeep.errors import Conflict, HostCannot, TransportError
from tests.conftest import IS_ROOT, remove_tree
from tests.polling import ENOUGH
from tests.server.server_process import ServerProcess

ENSURE = """
import json, sys
from sandkeep.embedded import ensure_server
print(json.dumps(ensure_server(sys.argv[1])))
"""


def ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = ENOUGH) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def server_pid(data: Path) -> int:
    return int((data / "server.lock").read_text())


@pytest.fixture
def data(able: None) -> Iterator[Path]:
    """A data directory; a server left on it is ended."""
    directory = Path(tempfile.mkdtemp(prefix="embedded-"))
    yield directory
    if embedded.ask(str(directory), "GET", "/version") is not None:
        pid = server_pid(directory)
        os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: ended(pid))
    remove_tree(directory)


def test_ten_clients_at_once_start_one_server(data: Path) -> None:
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", ENSURE, str(data)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(10)
    ]
    answers = [client.communicate(timeout=60) for client in clients]
    assert all(client.returncode == 0 for client in clients), answers
    assert sum("true" in out for out, _ in answers) == 1
    assert (data / "server.log").read_text().count(" ready ") == 1
    assert os.getsid(server_pid(data)) != os.getsid(0)


def test_a_second_call_finds_the_first_ones_server(data: Path) -> None:
    first, second = embedded.ensure_server(str(data)), embedded.ensure_server(str(data))
    assert (first.started, second.started) == (True, False)
    assert first.socket == second.socket == str(data / "server.sock")
    assert os.stat(first.socket).st_mode & 0o777 == 0o600


def test_a_socket_nobody_listens_on_is_replaced(data: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(data / "server.sock"))
    stale.close()
    assert embedded.ensure_server(str(data)).started


def test_a_data_directory_with_a_long_path_works(data: Path) -> None:
    deep = data / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    found = embedded.ensure_server(str(deep))
    try:
        assert found.started
    finally:
        os.kill(pid := server_pid(deep), signal.SIGTERM)
        assert eventually(lambda: ended(pid))


def test_an_idle_server_of_another_version_makes_room(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.ensure_server(str(data))
    first = server_pid(data)
    monkeypatch.setattr("sandkeep.embedded.__version__", "9.9.9")
    assert embedded.ensure_server(str(data)).started
    assert server_pid(data) != first
    assert eventually(lambda: ended(first))


def test_a_server_run_by_hand_is_used_or_refused_but_never_ended(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandkeep.embedded.__version__", "9.9.9")
    assert not embedded.ensure_server(str(server.data)).started
    monkeypatch.setattr(embedded, "API_VERSION", 2)
    with pytest.raises(Conflict, match=r"cannot use"):
        embedded.ensure_server(str(server.data))
    assert embedded.ask(str(server.data), "GET", "/health") is not None


def test_a_server_that_cannot_start_is_an_error_with_its_log(data: Path) -> None:
    (data / "store.db").write_text("this is no database")
    with pytest.raises(HostCannot) as caught:
        embedded.ensure_server(str(data))
    assert "database" in caught.value.why


def test_a_server_that_takes_long_to_start_is_not_called_one_that_did_not(data: Path) -> None:
    with open(data / "server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HostCannot, match=r"still starting after 0.2 s") as caught:
            embedded.ensure_server(str(data), seconds=0.2)
    assert caught.value.hint is not None and "again" in caught.value.hint


@pytest.mark.slow
def test_something_else_behind_the_socket_is_told_apart(data: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(data / "server.sock"))
        other.listen()
        helper = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import socket; s = socket.socket(fileno=0).accept()[0]; s.recv(9); s.send(b'hi')",
            ],
            stdin=other.fileno(),
        )
        with pytest.raises(TransportError):
            embedded.ensure_server(str(data))
        helper.wait(ENOUGH)


def test_a_server_nobody_uses_ends(data: Path) -> None:
    command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(data), "--idle-exit", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENOUGH)
    assert done.returncode == 0
    assert "why=idle" in done.stderr
    assert not (data / "server.sock").exists() and not (data / "server.json").exists()


def test_a_client_that_waits_for_an_answer_starts_another_server_when_this_one_dies(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SANDKEEP_URL", raising=False)
    monkeypatch.setenv("SANDKEEP_HOME", str(data))
    with sync.Client() as client, client.create_sandbox() as box:
        pid = server_pid(data)
        os.kill(pid, signal.SIGSTOP)  # so that the request has been sent and not answered when it dies
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        assert box.refresh().status == "running"
        timer.join()
        assert server_pid(data) != pid


@pytest.mark.skipif(not IS_ROOT, reason="mounts a small filesystem")
def test_a_server_without_room_to_start_says_so(data: Path) -> None:
    place = data / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        (place / "filling").write_bytes(b"x" * (60 << 10))
        with pytest.raises(HostCannot, match="no space is left"):
            embedded.ensure_server(str(place))
    finally:
        subprocess.run(["umount", place], check=True)
