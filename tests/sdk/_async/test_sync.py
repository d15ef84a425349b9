"""A local directory and one of a sandbox are made alike, by moving only what differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sandkeep

pytestmark = pytest.mark.anyio

Shape = dict[str, tuple[str, int, object]]


def shape(root: Path) -> Shape:
    """Everything below a directory: kind, permissions, and content with its time, or target."""
    found: Shape = {}
    for path in root.rglob("*"):
        info = path.lstat()
        mode = info.st_mode & 0o777
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", 0, os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", mode, None)
        else:
            found[name] = ("file", mode, (path.read_bytes(), info.st_mtime_ns))
    return found


def plant(root: Path) -> None:
    """Make a tree with modes, times, links, an empty directory and a name that is not UTF-8."""
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "main.py").write_text("print(1)\n")
    (root / "src" / "deep" / "run.sh").write_text("true\n")
    (root / "src" / "deep" / "run.sh").chmod(0o750)
    (root / "src-other").write_text("sorts between a directory and what is in it")
    (root / "empty").mkdir(mode=0o700)
    (root / "link").symlink_to("src/main.py")
    (root / "outside").symlink_to("/etc")
    (root / os.fsdecode(b"odd-\xff")).write_bytes(b"\xff")
    os.utime(root / "src" / "main.py", ns=(5, 1_600_000_000_123_456_789))


async def test_a_second_sync_moves_nothing_in_either_direction(tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    plant(here)
    async with sandkeep.create_sandbox() as box:
        first = await box.fs.sync_to(here, "work")
        assert set(first.copied) == set(shape(here)) and first.unchanged == 0 and first.deleted == ()
        assert first.bytes == sum(path.stat().st_size for path in here.rglob("*") if path.is_file()) - 9
        again = await box.fs.sync_to(here, "work")
        assert (again.copied, again.bytes, again.unchanged) == ((), 0, len(first.copied))
        assert (await box.fs.sync_to(here, "work", checksum=True)).copied == ()
        fetched = await box.fs.sync_from("work", back)
        assert sorted(fetched.copied) == sorted(first.copied) and shape(back) == shape(here)
        assert (await box.fs.sync_from("work", back)).copied == ()
        assert (await box.fs.sync_from("work", back, checksum=True)).copied == ()
        assert await box.fs.readlink("work/outside") == "/etc"
