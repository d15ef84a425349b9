"""Patterns of files to leave out mean what they mean to git."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sandkeep.errors import InvalidRequest
from sandkeep.shared.ignoring import Ignore

CASES: dict[str, dict[str, bool]] = {
    "*.pyc": {"a.pyc": True, "d/a.pyc": True, "a.pyc/x": True, "a.py": False, ".pyc": True},
    "build/": {"build": False, "build/x": True, "d/build/x": True, "rebuild/x": False},
    "/top": {"top": True, "d/top": False, "top/x": True},
    "a/b": {"a/b": True, "x/a/b": False, "a/b/c": True},
    "**/deep": {"deep": True, "a/deep": True, "a/b/deep/x": True, "adeep": False},
    "a/**": {"a/x": True, "a/b/c": True, "b/a/x": False},
    "a/**/z": {"a/z": True, "a/b/z": True, "a/b/c/z": True, "az": False, "b/a/z": False},
    "f?o": {"foo": True, "fo": False, "f/o": False},
    "[a-c]x[!0-9]": {"axz": True, "dxz": False, "ax1": False},
    "[]-]x": {"]x": True, "-x": True, "ax": False},
    "*a*b*c?": {"xaybzcd": True, "abcd": True, "abc": False},
    r"\#x": {"#x": True},
    r"\!x": {"!x": True},
    r"st\*r": {"st*r": True, "star": False},
    "tail  ": {"tail": True, "tail  ": False},
    "tail\\ ": {"tail ": True, "tail": False},
    "# comment": {"# comment": False},
    "*\n!keep\n": {"x": True, "keep": False, "d/keep": True},
    "*.log\n!/d/\n!important.log\nd/important.log": {
        "a.log": True,
        "important.log": False,
        "d/important.log": True,
    },
    "**": {"a": True, "a/b": True},
    "a**b": {"axyb": True, "ax/yb": False},
}


def left_out(patterns: str, path: str) -> bool:
    """Walk down to a path as a listing does."""
    ignore = Ignore(patterns.split("\n"))
    parts = path.split("/")
    return any(
        ignore("/".join(parts[: count + 1]), directory=count + 1 < len(parts)) for count in range(len(parts))
    )


@pytest.mark.parametrize("patterns", CASES)
def test_each_pattern_leaves_out_what_it_says(patterns: str) -> None:
    assert {path: left_out(patterns, path) for path in CASES[patterns]} == CASES[patterns]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_agrees(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for patterns, paths in CASES.items():
        (tmp_path / ".git" / "info" / "exclude").write_text(patterns + "\n")
        asked = "\0".join(paths).encode()
        argv = ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "-z", "--stdin"]
        said = subprocess.run(argv, input=asked, capture_output=True, check=False).stdout
        found = set(said.decode().split("\0")) - {""}
        assert found == {path for path, ignored in paths.items() if ignored}, patterns


def test_what_is_not_supported_is_refused_by_its_number() -> None:
    for pattern in ("[a", "a\\", "[[:alpha:]]"):
        with pytest.raises(InvalidRequest) as refused:
            Ignore(["fine", pattern])
        assert refused.value.field == "ignore[1]"


def test_no_pattern_takes_exponential_time() -> None:
    """Which would not end."""
    ignore = Ignore(["*a" * 40 + "[b]", "/".join(["**", "a"] * 40 + ["b"])])
    assert not ignore("a" * 255, directory=False)
    assert not ignore("/".join(["a"] * 250), directory=False)
