"""The public surface as a second type checker sees it: fully known, and pleasant in the strictest mode."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "sandkeep.sdk.",
    "sandkeep.sync.",
    "sandkeep.errors.",
    "sandkeep.spec.",
    "sandkeep.states.",
    "sandkeep.policy.",
    "sandkeep.wire.",
)

pytestmark = pytest.mark.skipif(
    find_spec("basedpyright") is None, reason="basedpyright, the second type checker, is not installed"
)


def checker(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "basedpyright", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def check(area: Path, mode: str, *paths: str) -> None:
    config = {
        "include": [str(ROOT / path) for path in paths],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "typeCheckingMode": mode,
        "pythonVersion": "3.11",
    }
    (area / "pyrightconfig.json").write_text(json.dumps(config))
    done = checker("--pythonpath", sys.executable, "-p", str(area))
    assert done.returncode == 0, done.stdout


def test_a_second_type_checker_agrees(tmp_path: Path) -> None:
    sources = ["src/sandkeep/__init__.py", "src/sandkeep/sdk", "src/sandkeep/sync", "tests/sdk/_async"]
    check(tmp_path, "standard", *sources)


def test_what_users_write_is_understood_in_strict_mode(tmp_path: Path) -> None:
    check(tmp_path, "strict", "examples", "tests/sdk/user_code.py")


ONE_TEXT = """
from sandkeep import Sandbox, sync

async def wrong(box: Sandbox, other: sync.Sandbox) -> None:
    await box.run_process("ls", "-l")
    await box.create_process("ls", "-l")
    other.run_process("ls", "-l")
    await box.fs.sync_to(".", "src", ignore="*.pyc")

async def right(box: Sandbox, words: tuple[str, ...]) -> None:
    await box.run_process("ls", ["-l"])
    await box.run_process("ls", words)
    await box.fs.sync_to(".", "src", ignore=[*words])
"""


def test_one_text_in_place_of_a_list_of_arguments_is_an_error_for_type_checkers(tmp_path: Path) -> None:
    program = tmp_path / "one_text.py"
    program.write_text(ONE_TEXT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    done = checker("--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path))
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"]
    assert errors == [5, 6, 7, 8], done.stdout
    argv = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    said = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path).stdout
    lines = [line for line in said.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in lines] == ["5", "6", "7", "8"], said
    assert all("[arg-type]" in line for line in lines)


def test_every_public_type_is_known_to_those_who_install_it(tmp_path: Path) -> None:
    installed = tmp_path / "venv"
    argv = [sys.executable, "-m", "venv", "--without-pip", str(installed)]
    subprocess.run(argv, check=True, capture_output=True)
    inside = {"base": str(installed), "platbase": str(installed)}
    site = Path(sysconfig.get_path("purelib", "venv", inside))
    shutil.copytree(ROOT / "src/sandkeep", site / "sandkeep", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = checker(
        "--ignoreexternal", "--outputjson", "--verifytypes", "sandkeep", VIRTUAL_ENV=str(installed), PATH=path
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    ours = [
        symbol for symbol in symbols if symbol["name"].startswith(PUBLIC) or symbol["name"].count(".") == 1
    ]
    assert len(ours) > 1000
    unknown = [symbol["name"] for symbol in ours if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]]
    assert not unknown
