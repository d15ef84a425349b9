"""Processes do not depend on whoever started them, nor on the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sandkeep import sync
from tests.server.server_process import ServerProcess, running_server

START = """
import json, sys, time
from sandkeep import sync
box = sync.create_sandbox()
process = box.create_process("sh", ["-c", sys.argv[1]])
print(json.dumps([box.name, process.id]), flush=True)
for chunk in process.output():
    print(json.dumps([chunk.end, chunk.data.decode("latin-1")]), flush=True)
"""
# Every byte there is, slowly enough that readers come and go meanwhile.
WORK = r"""for i in 1 2 3 4 5 6 7 8; do printf "$i:"; printf '\377\000\200\n'; sleep 0.25; done; exit 9"""
PRINTED = b"".join(b"%d:\xff\x00\x80\n" % number for number in range(1, 9))


@pytest.fixture
def own_server(able: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    with running_server() as server:
        monkeypatch.setenv("SANDKEEP_URL", f"unix://{server.socket}")
        yield server


def killed_starter() -> tuple[str, str, int, bytes]:
    """Another interpreter starts something, reads a little and is killed."""
    with subprocess.Popen([sys.executable, "-c", START, WORK], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        name, process = json.loads(starter.stdout.readline())
        read, end = b"", 0
        while len(read) < 2:
            end, text = json.loads(starter.stdout.readline())
            read += text.encode("latin-1")
        os.kill(starter.pid, signal.SIGKILL)
    return name, process, end, read


def test_a_process_is_found_again_after_the_program_that_started_it_was_killed() -> None:
    name, process_id, end, read = killed_starter()
    with sync.Client() as client:
        box = client.get_sandbox(name)
        process = box.get_process(process_id)
        rest = b"".join(c.data for c in process.output(offset=end) if isinstance(c, sync.OutputChunk))
        assert read + rest == PRINTED
        assert process.wait() == 9
        assert process.stdout.read() == PRINTED
        box.destroy()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_and_after_the_server_was_restarted(own_server: ServerProcess, how: signal.Signals) -> None:
    name, process_id, end, read = killed_starter()
    own_server.stop(how)
    time.sleep(0.3)
    own_server.start()
    with sync.Client() as client:
        box = client.get_sandbox(name)
        process = box.get_process(process_id)
        rest = b"".join(c.data for c in process.output(offset=end) if isinstance(c, sync.OutputChunk))
        assert read + rest == PRINTED
        assert process.wait() == 9
        box.destroy()


WRITE = """
import json, sys
from sandkeep import sync
box = sync.create_sandbox()
process = box.create_process("sh", ["-c", sys.argv[1]], stdin=True, metadata={"step": "3"})
print(json.dumps([box.name, process.id]), flush=True)
sent = b"".join(b"%d," % number for number in range(400_000))
while sent:
    process.stdin.write(sent[:9973])
    sent = sent[9973:]
    print(".", flush=True)
"""
ALL_INPUT = b"".join(b"%d," % number for number in range(400_000))


def killed_writer(script: str) -> tuple[str, str]:
    """Another interpreter writes input and is killed in the middle of that."""
    with subprocess.Popen([sys.executable, "-c", WRITE, script], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        name, process = json.loads(starter.stdout.readline())
        for _ in range(20):
            assert starter.stdout.readline() == b".\n"
        os.kill(starter.pid, signal.SIGKILL)
    return name, process


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_input_goes_on_exactly_where_a_killed_client_and_a_killed_server_left_it(
    own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "tcp":
        monkeypatch.setenv("SANDKEEP_URL", own_server.url)
        monkeypatch.setenv("SANDKEEP_TOKEN", own_server.token)
    name, process_id = killed_writer("cksum")
    own_server.stop(signal.SIGKILL)
    own_server.start()
    with sync.Client() as client:
        box = client.get_sandbox(name)
        process = box.get_process(process_id)
        assert process.metadata == {"step": "3"}
        assert process.stdin is not None and process.stdin.offset is None
        arrived = process.stdin.tell()
        assert 20 * 9973 <= arrived < len(ALL_INPUT)
        process.stdin.write(ALL_INPUT[arrived - 5000 :], offset=arrived - 5000)
        process.stdin.close()
        assert process.wait() == 0
        expected = subprocess.run(["cksum"], input=ALL_INPUT, capture_output=True, check=True).stdout
        assert process.stdout.read() == expected
        box.destroy()


TERMINAL = """
import json, sys
from sandkeep import sync
box = sync.create_sandbox()
with box.open_interactive("sh", env={"PS1": "> "}, detachable=True, metadata={"step": "3"}) as terminal:
    terminal.write("word=kept; echo begun-$((1+1))\\n")
    seen = b""
    while b"begun-2" not in seen:
        seen += terminal.read()
    print(json.dumps([box.name, terminal.process_id]), flush=True)
    terminal.wait()
"""


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_a_terminal_is_attached_to_after_its_client_and_the_server_were_killed(
    own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "tcp":
        monkeypatch.setenv("SANDKEEP_URL", own_server.url)
        monkeypatch.setenv("SANDKEEP_TOKEN", own_server.token)
    with subprocess.Popen([sys.executable, "-c", TERMINAL], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        name, process_id = json.loads(starter.stdout.readline())
        os.kill(starter.pid, signal.SIGKILL)
    own_server.stop(signal.SIGKILL)
    own_server.start()
    with sync.Client() as client:
        box = client.get_sandbox(name)
        process = box.get_process(process_id)
        assert process.terminal and process.stdin is None and process.metadata == {"step": "3"}
        with box.attach_terminal(process_id) as terminal:
            assert terminal.process_id == process_id
            terminal.write("echo $word; exit 6\n")
            seen = b"".join(iter(terminal.read, b""))
            assert b"begun-2" in seen and b"kept" in seen.partition(b"begun-2")[2]
            assert terminal.returncode == 6
        box.destroy()


def test_a_reader_does_not_notice_that_the_server_is_restarted(own_server: ServerProcess) -> None:
    with sync.Client() as client, client.create_sandbox() as box:
        process = box.create_process("sh", ["-c", WORK])
        found = b""
        restarted = False
        for chunk in process.output():
            assert isinstance(chunk, sync.OutputChunk)
            found += chunk.data
            if not restarted:
                own_server.stop(signal.SIGKILL)
                own_server.start()
                restarted = True
        assert found == PRINTED and process.wait() == 9
