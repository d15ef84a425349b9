"""The first start on a machine takes seconds: people and programs are told what it waits for."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.program import Program, command
from tests.conftest import ROOT
from tests.server.server_process import ServerProcess, running_server

TOLD = "building the host image (once, and again after package changes)"

_SDK = """
import logging, sys
from sandkeep.sync import create_sandbox
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
with create_sandbox() as box:
    print("started", flush=True)
"""


@contextmanager
def unfinished(data: Path) -> Iterator[None]:
    """No image can be finished in a data directory: what building waits for is held."""
    (data / "images").mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(data / "images" / "build.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@pytest.fixture
def fresh(able: None) -> Iterator[ServerProcess]:
    """A server on a machine that has no host image yet."""
    with running_server() as server:
        yield server


def test_the_command_line_shows_what_a_first_start_waits_for(fresh: ServerProcess) -> None:
    program = Program({"SANDKEEP_URL": f"unix://{fresh.socket}", "TERM": "xterm"})
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (30, 100))
    output = b""
    with unfinished(fresh.data):
        process = subprocess.Popen(
            [*command(), "run", "--", "echo", "hello"], env=program.env, stdin=its, stdout=its, stderr=its
        )
        os.close(its)
        while TOLD.encode() not in output:
            output += os.read(ours, 1 << 16)
        assert b"Starting a sandbox: " in output and b"hello" not in output
    try:
        while data := os.read(ours, 1 << 16):
            output += data
    except OSError:
        pass  # how the end of a terminal is told
    os.close(ours)
    assert process.wait() == 0 and output.rstrip().endswith(b"hello"), output
    again = program.on_terminal("run", "--", "echo", "hello")
    assert b"host image" not in again


def test_the_sdk_logs_what_a_first_start_waits_for(fresh: ServerProcess) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "src"),
        "SANDKEEP_URL": fresh.url,
        "SANDKEEP_TOKEN": fresh.token,
    }
    with unfinished(fresh.data):
        process = subprocess.Popen(
            [sys.executable, "-c", _SDK], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == f"sandkeep INFO {TOLD}\n"
    assert process.stdout.read() == "started\n"
    process.stdout.close()
    assert process.wait() == 0
