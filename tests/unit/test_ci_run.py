"""``.ci/run`` repeats a few failed tests alone, and only those."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = Path(__file__).parents[2] / ".ci" / "run"
_DEV = f'#!/bin/sh\nshift\nexec {sys.executable} -m pytest -c /dev/null --rootdir . -q "$@"\n'

_TESTS = """
import os, pytest

def test_steady():
    pass

def test_unsteady():
    if not os.path.exists("ran"):
        open("ran", "w").close()
        assert False

@pytest.mark.parametrize("number", range({broken}))
def test_broken(number):
    with open("count", "a") as file:
        file.write("x")
    assert False
"""


def run(directory: Path, *, broken: int) -> subprocess.CompletedProcess[str]:
    (directory / ".ci").mkdir()
    shutil.copy(_RUN, directory / ".ci" / "run")
    (directory / "dev").write_text(_DEV)
    (directory / "dev").chmod(0o755)
    (directory / "test_them.py").write_text(_TESTS.format(broken=broken))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [directory / ".ci" / "run"],
        cwd="/",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_test_that_passes_alone_is_green_and_printed_as_unsteady(tmp_path: Path) -> None:
    done = run(tmp_path, broken=0)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(
        "\nUnsteady: failed beside other tests, passed alone:\ntest_them.py::test_unsteady\n"
    )


@pytest.mark.parametrize(
    ("broken", "times"), [(1, 2), (6, 6)], ids=["a few are repeated", "many are not repeated"]
)
def test_a_test_that_fails_alone_too_is_red(tmp_path: Path, broken: int, times: int) -> None:
    done = run(tmp_path, broken=broken)
    assert done.returncode == 1, done.stdout
    assert "Unsteady" not in done.stdout
    assert len((tmp_path / "count").read_text()) == times
