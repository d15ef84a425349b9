"""``kill -9`` of the server, of the worker, and of both, at every step of every operation; see `steps.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_ROOT, User
from tests.engine.steps import OPERATIONS, enumerate_steps

_ROOT = Path(__file__).parent.parent.parent
_HERE = (
    "import json, sys; from tests.engine.steps import enumerate_steps;"
    " print(json.dumps(enumerate_steps(*json.loads(sys.argv[1]))))"
)
_LONGEST = 1800


def _enumerate(data_dir: str, operations: list[str], sample: int | None) -> dict[str, Any]:
    """In a process of its own, whose every child is a fork that finds everything imported."""
    arguments = json.dumps([data_dir, operations, sample])
    done = subprocess.run(
        [sys.executable, "-c", _HERE, arguments], capture_output=True, text=True, cwd=_ROOT, timeout=_LONGEST
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_two_lanes(area: Path, operations: list[str]) -> dict[str, Any]:
    """All steps, half of the operations beside the other half."""
    with ThreadPoolExecutor(2) as lanes:
        halves = lanes.map(
            lambda half: _enumerate(str(area / f"data{half}"), operations[half::2], None), (0, 1)
        )
        first, second = halves
    return {key: _joined(first[key], second[key]) for key in first}


def _joined(first: Any, second: Any) -> Any:
    return first + second if isinstance(first, list) else first | second


def _judge(report: dict[str, Any], operations: list[str]) -> None:
    for failure in report["failures"]:
        print(f"--- after {failure['before']}, in {failure['plan']}\n{failure['failure']}")
    total = {"server": 0, "both": 0, "worker": 0}
    for name, found in report["operations"].items():
        kills = {kind: found[kind] for kind in total}
        of = {kind: len(steps) for kind, steps in found["steps"].items()}
        print(f"{name}: steps {of}, kills {kills}, {report['seconds'][name]} s")
        for kind, count in kills.items():
            total[kind] += count
    print(f"kills at enumerated steps: {total}, violations: {len(report['failures'])}")
    assert not report["failures"], f"{len(report['failures'])} violations"
    assert set(report["operations"]) == set(operations)
    assert all(found["server"] for found in report["operations"].values())


@pytest.mark.skipif(not IS_ROOT, reason="needs real root")
@pytest.mark.parametrize("operation", ["destroy", "stop without keeping"])
def test_killed_at_some_steps_of(operation: str, tmp_path: Path) -> None:
    """An everyday sample; all of them below."""
    _judge(_enumerate(str(tmp_path / "data"), [operation], 1), [operation])


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="needs real root")
def test_killed_at_every_step_of_every_operation(tmp_path: Path) -> None:
    _judge(_in_two_lanes(tmp_path, list(OPERATIONS)), list(OPERATIONS))


@pytest.mark.slow
def test_killed_at_some_steps_of_every_operation_as_an_ordinary_user(ordinary_user: User) -> None:
    operations = list(OPERATIONS)
    data_dir = os.path.join(ordinary_user.home, "steps")
    report = ordinary_user.call(enumerate_steps, data_dir, operations, 2, timeout=_LONGEST)
    _judge(report, operations)
