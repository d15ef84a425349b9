"""What a supervisor counts when it watches the disk space of its session."""

from __future__ import annotations

import os
from pathlib import Path

from sandkeep.supervisor.limits import ALERT, DiskWatch

_LIMIT = 8 << 20


def _write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as out:
        out.write(os.urandom(size))
        os.fsync(out.fileno())


def test_drives_do_not_count_for_the_limit_of_the_session(tmp_path: Path) -> None:
    _write(tmp_path / "drive0" / "a", 2 * _LIMIT)
    _write(tmp_path / "root" / "a", _LIMIT // 8)
    assert DiskWatch(str(tmp_path), _LIMIT, {"drive0": ("/data", None)}).check() is None
    full = DiskWatch(str(tmp_path), _LIMIT, {"drive0": ("/data", _LIMIT)}).check()
    assert full is not None and full.startswith("drive full") and "/data" in full
    full = DiskWatch(str(tmp_path), _LIMIT, {}).check()
    assert full is not None and full.startswith("disk full") and f"{_LIMIT} allowed" in full


def test_what_others_delete_does_not_hide_what_the_session_writes(tmp_path: Path) -> None:
    session, other = tmp_path / "fs", tmp_path / "other"
    _write(other / "a", 8 * _LIMIT)
    _write(session / "root" / "a", _LIMIT // 4)
    watch = DiskWatch(str(session), _LIMIT, {})
    assert watch.check() is None
    _write(session / "root" / "b", _LIMIT)
    (other / "a").unlink()
    full = watch.check()
    assert full is not None and full.startswith("disk full")


def test_a_session_that_would_soon_be_over_its_limit_is_looked_at_often(tmp_path: Path) -> None:
    _write(tmp_path / "root" / "a", _LIMIT // 4)
    watch = DiskWatch(str(tmp_path), _LIMIT, {})
    assert watch.check() is None
    _write(tmp_path / "root" / "b", _LIMIT // 2)
    assert watch.check() is None and watch.interval == ALERT
