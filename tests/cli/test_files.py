"""Copies to and from a sandbox: files and trees, with the names ``cp`` would give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.program import Program


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with files of different modes, a link, an empty directory and something to leave out."""
    root = tmp_path / "tree"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "plain.txt").write_text("plain")
    (root / "deep" / "er" / "data.bin").write_bytes(bytes(range(256)) * 1000)
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("plain.txt")
    (root / "skip.pyc").write_text("no")
    return root


def test_a_file_there_and_back(cli: Program, box: str, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "up").write_bytes(data)
    done = cli("cp", "--json", str(tmp_path / "up"), f"{box}:/tmp/there").json
    assert done == {"target": f"{box}:/tmp/there", "files": 1, "bytes": len(data)}
    assert "1 file, 293 KiB" in cli("cp", f"{box}:/tmp/there", str(tmp_path / "down")).err
    assert (tmp_path / "down").read_bytes() == data


def test_into_a_directory_under_its_own_name(cli: Program, box: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hi")
    for target in ("/tmp", "/tmp/new/", "", "."):
        cli("cp", str(tmp_path / "note.txt"), f"{box}:{target}")
    found = cli("exec", box, "--", "sh", "-c", "ls /tmp/note.txt /tmp/new/note.txt note.txt").text
    assert found.split() == ["/tmp/new/note.txt", "/tmp/note.txt", "note.txt"]
    (tmp_path / "here").mkdir()
    cli("cp", f"{box}:/tmp/note.txt", str(tmp_path / "here"))
    assert (tmp_path / "here" / "note.txt").read_text() == "hi"


def test_a_tree_there_and_back(cli: Program, box: str, tree: Path, tmp_path: Path) -> None:
    done = cli("cp", "--json", "--ignore", "*.pyc", str(tree), f"{box}:/tmp/tree").json
    assert done["files"] == 3
    assert cli("exec", box, "/tmp/tree/run.sh").text == "ran\n"
    cli("cp", f"{box}:/tmp/tree", str(tmp_path / "back"))
    back = tmp_path / "back"
    assert (back / "deep" / "er" / "data.bin").read_bytes() == bytes(range(256)) * 1000
    assert os.readlink(back / "link") == "plain.txt" and (back / "empty").is_dir()
    assert os.access(back / "run.sh", os.X_OK) and not (back / "skip.pyc").exists()


def test_a_stopped_sandbox_is_resumed(cli: Program, box: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    cli("stop", box)
    cli("cp", str(tmp_path / "f"), f"{box}:f")
    assert cli("exec", box, "cat", "f").text == "x"


def test_what_is_not_there_is_told(cli: Program, box: str, tmp_path: Path) -> None:
    assert "none" in cli.fails("cp", f"{box}:none", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert "none" in cli.fails("cp", str(tmp_path / "none"), f"{box}:none")
    assert "no-such-sandbox" in cli.fails("cp", "no-such-sandbox:a", str(tmp_path / "b"))


def test_a_colon_in_a_path_here_needs_a_slash(cli: Program, box: str, tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.write_text("odd")
    cli("cp", str(odd), f"{box}:odd")
    assert cli("exec", box, "cat", "odd").text == "odd"
