"""The benchmarks can be run and say what they promise to say. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.rows import RATE, Budget, Row, not_measured, row

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_prints_its_rows_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", "--only", "command-line"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    assert {"when", "kernel", "python", "cores", "rows"} <= answer.keys()
    names = ["sandkeep --help", "import of the SDK", "import of the blocking SDK"]
    assert [found["name"] for found in answer["rows"]] == names
    assert set(answer["rows"][0]) == set(Row.__slots__)
    assert (done.returncode == 0) == all(found["met"] is not False for found in answer["rows"])
    assert list(tmp_path.iterdir()) == []


def test_a_budget_is_for_a_ratio_or_for_the_median_itself() -> None:
    twice = row("a", [0.2, 0.2], reference=("b", [0.1, 0.1]), budget=Budget.at_most(2.5))
    assert twice.ratio == 2 and twice.met is True and twice.median == 200
    assert row("a", [0.2], reference=("b", [0.1]), budget=Budget.at_most(1.5)).met is False
    assert row("a", [50.0], unit=RATE, budget=Budget.no_less(60, ratio=False)).met is False
    assert row("a", [70.0], unit=RATE, budget=Budget.no_less(60, ratio=False)).met is True


def test_a_reference_that_is_not_installed_leaves_the_budget_open_and_says_so() -> None:
    found = row("a", [0.2], reference=("runc", []), budget=Budget.at_most(1))
    assert found.met is None and "runc is not installed" in found.note


def test_the_worst_rate_is_the_lowest() -> None:
    assert row("a", [float(value) for value in range(1, 101)], unit=RATE).p99 == 1


def test_the_table_has_a_line_for_every_row_and_marks_what_is_missed() -> None:
    rows = [row("slow", [0.2], reference=("b", [0.1]), budget=Budget.at_most(1)), not_measured("c", "no net")]
    lines = report.table(rows).splitlines()
    assert len(lines) == 4
    assert "MISSED" in lines[2] and "≤ 1 ×" in lines[2]
    assert "not measured: no net" in lines[3]
    assert len({len(line) for line in lines}) == 1
