"""A server that cannot start in the background: people and programs are told why, not where to look."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, User

_SDK = """
from sandkeep.errors import SandkeepError
from sandkeep.sync import create_sandbox
try:
    create_sandbox()
except SandkeepError as error:
    print(type(error).__name__, error)
"""


def said(data: Path, **env: str) -> list[str]:
    """What the command line says, and what the SDK raises."""
    paths = os.pathsep.join([env.pop("PYTHONPATH", ""), str(ROOT / "src")]).strip(os.pathsep)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "SANDKEEP_HOME": str(data), **env}
    found = []
    for arguments, status in ((["-m", "sandkeep", "run", "true"], 125), (["-c", _SDK], 0)):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        found.append(done.stdout + done.stderr)
    assert found[1].startswith("HostCannot ")
    return found


def _wrong_name(data: Path) -> None:
    data.mkdir()
    (data / "settings.json").write_text('{"pool": 2, "colour": "red"}')


def _wrong_value(data: Path) -> None:
    data.mkdir()
    (data / "settings.json").write_text('{"network": {"dns_rate": -1}}')


def _a_file(data: Path) -> None:
    data.touch()


def _anothers_store(data: Path) -> None:
    data.mkdir()
    connection = sqlite3.connect(data / "store.db")
    connection.execute("CREATE TABLE accounts (name TEXT)")
    connection.execute("PRAGMA application_id = 7")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_wrong_name, "unknown settings colour"),
        (_wrong_value, "dns_rate"),
        (_a_file, "cannot be used: Not a directory"),
        (_anothers_store, "store.db"),
    ],
)
def test_the_reason_is_told(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    data = tmp_path / "data"
    spoil(data)
    for text in said(data):
        assert words in text and "server.log" not in text, text


def test_a_server_that_dies_without_a_word_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        'import sys\nif "--embedded" in sys.orig_argv:\n    sys.exit("this interpreter is broken")\n'
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "server.log").write_text("the words of an earlier server\n")
    for text in said(tmp_path / "data", PYTHONPATH=str(tmp_path)):
        assert "the server did not start: " in text and "this interpreter is broken" in text


@pytest.mark.root
def test_a_data_directory_of_somebody_else(single_user: User, test_area: Path) -> None:
    closed = test_area / "closed"
    closed.mkdir(mode=0o755)
    theirs = closed / "theirs"
    theirs.mkdir(mode=0o700)
    for data in (closed / "new", theirs):
        env = {"SANDKEEP_HOME": str(data)}
        told = single_user.run([single_user.interpreter, "-m", "sandkeep", "ls"], env=env)
        assert told.returncode == 1
        assert f"{data} cannot be used: Permission denied" in told.stderr and "SANDKEEP_HOME" in told.stderr
        raised = single_user.python(_SDK, env=env)
        assert raised.stdout.startswith("HostCannot") and "Permission denied" in raised.stdout, raised.stderr
    theirs.rmdir()
    closed.rmdir()
