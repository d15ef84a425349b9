"""``sandkeep sync``: two directories are made alike, and the summary says what happened."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cli.program import Program


def test_only_what_differs_is_copied_there_and_back(cli: Program, box: str, tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    (here / "deep").mkdir(parents=True)
    (here / "deep" / "a.txt").write_text("a")
    (here / "odd\n").write_text("n")
    (here / os.fsdecode(b"\xff")).write_text("odd")
    (here / "skip.pyc").write_text("no")
    patterns = tmp_path / "patterns"
    patterns.write_text("# not these\n*.pyc\n")

    options = ["--ignore-from", str(patterns), "--ignore", ".git/"]
    wet = cli("sync", "--dry-run", *options, str(here), f"{box}:made")
    assert b"+ deep/a.txt\n+ odd\\n\n" in wet.out and "4 would be copied" in wet.err
    cli.fails("cat", f"{box}:made/deep/a.txt")
    done = cli("sync", "--json", *options, str(here), f"{box}:made").json
    assert len(done["copied"]) == 4 and done["bytes"] == 5 and done["deleted"] == []
    assert "0 copied, 0 B, 0 removed, 4 unchanged" in cli("sync", *options, str(here), f"{box}:made").err

    (here / "odd\n").unlink()
    (here / "deep" / "a.txt").write_text("changed")
    done = cli("sync", "--json", "--delete", *options, str(here), f"{box}:made").json
    assert (done["copied"], done["deleted"], done["dryRun"]) == (["deep/a.txt"], ["odd\n"], False)
    assert "3 copied" in cli("sync", f"{box}:made", str(back)).err
    assert (back / "deep" / "a.txt").read_text() == "changed" and not (back / "skip.pyc").exists()
    assert "0 copied" in cli("sync", "--checksum", f"{box}:made", str(back)).err


def test_mistakes_are_said(cli: Program, box: str, tmp_path: Path) -> None:
    for pair in (["a", "b"], [f"{box}:a", f"{box}:b"], ["", f"{box}:b"]):
        cli.fails("sync", *pair, status=2)
    assert "none" in cli.fails("sync", str(tmp_path / "none"), f"{box}:made")
    wrong = cli.fails("sync", "--ignore", "[a", str(tmp_path), f"{box}:made", status=2)
    assert "--ignore: has a [ without its ]" in wrong
    cli.fails("sync", f"{box}:nothing", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
