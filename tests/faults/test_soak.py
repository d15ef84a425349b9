"""The soak of ``benchmarks/soak``, for less than a minute. Who is killed differs each time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IS_ROOT, User

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own: it becomes the parent of every orphan, and kills what it finds below itself.
SOAK = ["-m", "benchmarks.soak", "--minutes", "0.6", "--actors", "4", "--names", "8"]
SECONDS = 600


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert ", 0 violations\n" in done.stdout and "kills: none" not in done.stdout, done.stdout


def test_nothing_is_lost_and_nothing_left_while_everything_is_killed() -> None:
    if not IS_ROOT:
        pytest.skip("for ordinary users there is a test of its own")
    check(subprocess.run([sys.executable, *SOAK], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS))


def test_neither_as_an_ordinary_user(ordinary_user: User) -> None:
    own = ordinary_user.home / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", own, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        check(ordinary_user.run([ordinary_user.interpreter, *SOAK], timeout=SECONDS))
    finally:
        shutil.rmtree(own)
