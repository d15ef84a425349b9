"""A barrier the machine cannot build is refused by name, unless the operator agreed to do without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, User


def on(case: str, data_dir: Path, *accepted: str) -> dict[str, Any]:
    """What becomes of a session on a restricted machine."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.restricted", case, str(data_dir), ",".join(accepted)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def data_dir(test_area: Path) -> Path:
    return test_area / "lab"


@pytest.mark.root
def test_on_a_whole_machine_nothing_is_refused_or_absent(data_dir: Path) -> None:
    answer = on("everything", data_dir, "seccomp", "sys", "masks")
    assert {barrier["state"] for barrier in answer["barriers"].values()} == {"in force"}
    assert answer["nested"] == {"root": "EPERM", "user": "EPERM"}


@pytest.mark.root
@pytest.mark.parametrize(
    ("case", "part"),
    [("no-filters", "seccomp"), ("no-cgroup-namespace", "cgroup-namespace"), ("covered-sys", "sys")],
)
def test_a_barrier_that_cannot_be_had_is_refused_or_accepted_by_name(
    data_dir: Path, case: str, part: str
) -> None:
    refused = on(case, data_dir)
    assert refused["refused"] == part
    assert refused["why"] and "doctor" in refused["hint"] and refused["sessions"] == []
    # Agreeing to do without something else does not help.
    other = "masks" if part != "masks" else "sys"
    assert on(case, data_dir, other)["refused"] == part
    accepted = on(case, data_dir, part)
    states = {name: barrier["state"] for name, barrier in accepted["barriers"].items()}
    assert states.pop(part) == "absent" and accepted["barriers"][part]["why"]
    assert set(states.values()) == {"in force"}


@pytest.mark.root
def test_namespaces_cannot_be_nested_even_without_a_filter(data_dir: Path) -> None:
    answer = on("no-filters", data_dir, "seccomp")
    assert answer["nested"] == {"root": "ENOSPC", "user": "ENOSPC"}


@pytest.mark.root
def test_what_has_no_substitute_is_refused_whatever_was_agreed(data_dir: Path) -> None:
    assert on("covered-proc", data_dir)["refused"] == "proc"
    assert on("covered-proc", data_dir, "proc")["refused"] == "proc"


def test_without_user_namespaces_an_ordinary_user_is_told_so(single_user: User) -> None:
    code = "import sys; from tests.security.restricted import main; main(*sys.argv[1:])"
    data = str(single_user.home / "data")
    for accepted in ("", "user-namespace"):
        done = single_user.python(code, "no-user-namespaces", data, accepted)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["refused"] == "user-namespace" and "doctor" in answer["hint"]
