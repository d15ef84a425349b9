"""Clients on machines that are no Linux, of a server that is on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandkeep.errors import ArchiveError
from sandkeep.sdk import bodies, local
from tests.polling import ENOUGH
from tests.server.server_process import ServerProcess


def test_a_client_without_anything_of_linux_uses_a_server_over_tcp(server: ServerProcess) -> None:
    program = str(Path(__file__).with_name("no_linux.py"))
    command = [sys.executable, program, server.url, server.token, server.team, server.project]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ENOUGH)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


ON_MACOS = """
import asyncio, sys
import anyio, click, httpcore2, multiprocessing, ssl, subprocess, tempfile  # written for both systems
sys.platform = "darwin"
from sandkeep.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["ls"], "name a server, here or with SANDKEEP_URL: sandboxes run on Linux only"),
        (["serve"], "sandboxes and their server run on Linux only"),
        (["doctor"], "sandboxes and their server run on Linux only"),
        (["--url", "unix:///tmp/server.sock", "ls"], "unix sockets are used on Linux only"),
    ],
)
def test_the_command_line_of_another_system_says_that_a_server_has_to_be_named(
    command: list[str], said: str
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    argv = [sys.executable, "-c", ON_MACOS, *command]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=ENOUGH)
    assert done.returncode != 0 and not done.stdout and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_of_another_system_uses_a_server_over_tcp(server: ServerProcess) -> None:
    argv = [
        sys.executable,
        "-c",
        ON_MACOS,
        "--url",
        server.url,
        "--token",
        server.token,
        "run",
        "--",
        "echo",
        "hi",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDKEEP_")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=ENOUGH)
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_signals_have_the_numbers_sandboxes_know_them_by() -> None:
    for known in signal.Signals:
        assert bodies.signal_number(known) == bodies.signal_number(known.name) == int(known)
    for name in ("SIGIOT", "poll", "Kill"):
        assert bodies.signal_number(name) == int(getattr(signal, f"SIG{name.upper().removeprefix('SIG')}"))


@pytest.mark.parametrize("name", ["..\\..\\x", "C:x", "a/b\\..\\..\\..\\x"])
def test_no_entry_leaves_the_directory_where_other_characters_separate_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(local, "_SEPARATORS", "\\:")
    with pytest.raises(ArchiveError, match="unsafe entry name"):
        local.TreeWriter(str(tmp_path), None)._place(name)
