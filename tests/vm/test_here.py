"""The scenario of the machines, on this one: it can be trusted to fail only for what a machine does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandkeep.host import doctor
from tests.conftest import remove_tree

SCENARIO = Path(__file__).parent / "guest/scenario.py"


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_every_operation_works(over: str, tmp_path: Path) -> None:
    if not doctor.probe(str(tmp_path)).can_run:
        pytest.skip("sessions cannot run here; doctor says why")
    data = tmp_path / "data"
    argv = [sys.executable, str(SCENARIO), "--data", str(data), "--over", over]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert {name: part["failed"] for name, part in report.items() if "failed" in part} == {}
    finally:
        remove_tree(data)
