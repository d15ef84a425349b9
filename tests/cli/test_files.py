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


def test_a_dash_is_standard_input_and_output(cli: Program, box: str, tmp_path: Path) -> None:
    content = os.urandom(600_000)
    cli("cp", "-", f"{box}:made/copy", input=content)
    assert cli("cp", f"{box}:made/copy", "-").out == content
    assert "is a directory" in cli.fails("cp", "-", f"{box}:made", status=2)
    cli.fails("cp", f"{box}:made", "-")
    cli.fails("cp", f"{box}:nothing", "-")
    cli.fails("cp", "--json", f"{box}:made/copy", "-", status=2)
    cli.fails("cp", "-", "-", status=2)
    assert not (Path.cwd() / "-").exists()


def test_cat_prints_a_file_or_a_part_of_it(cli: Program, box: str) -> None:
    content = b"".join(b"%d \xff\n" % number for number in range(1, 301))
    cli("cp", "-", f"{box}:lines", input=content)
    every = content.splitlines(keepends=True)
    assert cli("cat", f"{box}:lines").out == content
    assert cli("cat", "--lines", "10-12", f"{box}:lines").out == b"".join(every[9:12])
    assert cli("cat", "--lines", "299-", f"{box}:lines").out == b"".join(every[298:])
    assert cli("cat", "--lines", "7", f"{box}:lines").out == every[6]
    assert cli("cat", "--offset", "5", "--length", "3", f"{box}:lines").out == content[5:8]
    for wrong in (["--lines", "0-3"], ["--lines", "5-4"], ["--lines", "x"], ["--offset", "-1"]):
        cli.fails("cat", *wrong, f"{box}:lines", status=2)
    cli.fails("cat", "--lines", "1-2", "--offset", "1", f"{box}:lines", status=2)
    cli.fails("cat", "lines", status=2)
    cli.fails("cat", f"{box}:nothing")


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


def test_a_missing_file_is_reported(cli: Program, box: str, tmp_path: Path) -> None:
    assert "none" in cli.fails("cp", f"{box}:none", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert "none" in cli.fails("cp", str(tmp_path / "none"), f"{box}:none")
    assert "no-such-sandbox" in cli.fails("cp", "no-such-sandbox:a", str(tmp_path / "b"))


def test_a_colon_in_a_path_here_needs_a_slash(cli: Program, box: str, tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.write_text("odd")
    cli("cp", str(odd), f"{box}:odd")
    assert cli("exec", box, "cat", "odd").text == "odd"
