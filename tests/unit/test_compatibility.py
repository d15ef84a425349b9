"""The page on compatibility has every row of the checklist, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conformance.clients import NODE_CLI, NODE_CLIENTS, PYTHON_CLIENT
from tests.conformance.expectations import NODE, NODE_3_ONLY, PYTHON, SHAPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text()
CONFORMANCE = ROOT / "tests/conformance"

FEATURES = [
    "Create default / image",
    "Create legacy runtime; all 2.x creates",
    "Create from git / tarball / snapshot",
    "Duplicate name → 400",
    "`__interactive` ⇒ interactivePort",
    "Pending-then-running polling",
    "Get without side effect; 404 when deleted",
    "Resume, `resumed` flag, concurrent resume single session",
    "Auto-resume on 410 / 422 stopping / 422 snapshotting",
    "Get-or-create incl. `snapshot_not_found`",
    "List: newest-first, limit=1 paging, prefix, tag",
    "Update tags/ports(routes)/timeout/resources/policy/retention null/mounts {}",
    "Delete, orphan snapshots",
    "Fork inherits env and config, overrides replace",
    "Run waited, stdout/stderr split, unicode, NUL, > 64 KB output",
    "Run detached, wait, logs twice, logs after exit",
    "2.0.x wait without logs",
    "Missing executable",
    "Signals 130/143, timeout 137",
    "sudo env contract",
    "Default env + per-command env",
    "Interrupted run recovered via logs + wait",
    "Stdin pipe, `input=`, offsets, close, errors",
    "List commands",
    "Write/read/mkdir, modes, big, empty, missing, invalid path",
    "fs helpers (stat, readdir, rename…)",
    "Users, groups, isolation",
    "PTY: start, resize, exit code, 64 KiB frames, disconnect",
    "Stop idempotent; auto snapshot when persistent",
    "Timeout expiry behaves as stop; extend; over-limit 400",
    "Manual snapshot twice in a row; expiration; 0",
    "Snapshot list/get/delete/tombstone",
    "Snapshot tree both directions",
    "Retention eviction",
    "Sessions list (2 after stop+resume) / get",
    "Network policy: 3 request forms, redacted readback, live update",
    "Policy enforcement: domain, CIDR, header injection, match, response, forward",
    "Port routes reachable via `routes[].url`",
    "Drives CRUD, 201/200, fork, mounts, attach conflicts",
    "429 with Retry-After; 5xx replay safety",
    "Scope inference / JWT credential",
    "Region in its own failover list → 400",
    "Session lost during a run",
    "Error record within a stream",
]


def functions(file: str) -> set[str]:
    """The tests a file defines."""
    tree = ast.parse((CONFORMANCE / file).read_text())
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def table() -> dict[str, list[str]]:
    lines = PAGE.partition("## Row by row")[2].splitlines()
    found = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines if line.startswith("| ")]
    return {feature: cells for feature, *cells in found[2:]}


# What each column may name: its scenarios or functions, and what stands for it in the file of shapes.
COLUMNS = {
    "Python, async": set(PYTHON),
    "Python, sync": set(PYTHON),
    "TypeScript 3.5": set(NODE),
    "TypeScript 2.9": set(NODE) - NODE_3_ONLY,
    "command line 4.5": functions("test_cli.py"),
}
IN_SHAPES = functions("test_shapes.py") | set(SHAPES)


def named(column: str) -> set[str]:
    """What a column names, with the mark of what is in the file of shapes."""
    at = list(COLUMNS).index(column)
    return {match for cells in table().values() for match in re.findall(r"`([^`]+`°?)", cells[at])}


def test_every_row_of_the_checklist_is_there_and_filled_in() -> None:
    rows = table()
    assert list(rows) == FEATURES
    for feature, cells in rows.items():
        assert len(cells) == len(COLUMNS), feature
        for cell in cells:
            assert re.match(r"(yes|partly)\b.*`\w+`|–", cell), f"{feature}: {cell}"


@pytest.mark.parametrize("column", COLUMNS)
def test_every_test_a_column_names_exists(column: str) -> None:
    for name in named(column):
        place = IN_SHAPES if name.endswith("°") else COLUMNS[column]
        assert name.rstrip("°`") in place, name


@pytest.mark.parametrize("column", COLUMNS)
def test_every_scenario_is_named_by_the_clients_that_run_it(column: str) -> None:
    assert COLUMNS[column] <= {name.rstrip("`") for name in named(column)}


def test_every_shape_made_for_the_purpose_is_named() -> None:
    assert set(SHAPES) <= {name.rstrip("°`") for name in named("Python, async") if name.endswith("°")}


def test_the_versions_named_are_those_tested() -> None:
    package, _, version = PYTHON_CLIENT.partition("==")
    assert f"| `{package}` | {version} |" in PAGE
    assert f"| `@vercel/sandbox` | {' and '.join(sorted(NODE_CLIENTS, reverse=True))} |" in PAGE
    package, _, version = NODE_CLI.partition("@")
    assert f"| `{package}` | {version} |" in PAGE


def test_files_named_on_the_page_exist() -> None:
    for name in re.findall(r"`(tests/[\w./]+)`", PAGE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)[:`]", PAGE):
        assert (CONFORMANCE / name).exists(), name
