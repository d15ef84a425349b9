"""Room kept for a full disk: taken, given back part by part, taken again."""

from __future__ import annotations

import os
from pathlib import Path

from sandkeep.engine.reserve import BYTES, PARTS, SMALL_FILES, Reserve


def _files(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "reserve").iterdir())


def test_the_reserve_really_holds_what_it_says(tmp_path: Path) -> None:
    reserve = Reserve(str(tmp_path))
    assert not reserve.complete and not reserve.spend()
    assert reserve.fill() and reserve.complete
    files = _files(tmp_path)
    assert len(files) == PARTS * (SMALL_FILES + 1)
    assert sum(os.stat(file).st_blocks * 512 for file in files) >= BYTES


def test_the_reserve_is_spent_in_parts_and_taken_back(tmp_path: Path) -> None:
    reserve = Reserve(str(tmp_path))
    reserve.fill()
    for part in range(PARTS):
        assert reserve.spend() and not reserve.complete
        assert len(_files(tmp_path)) == (PARTS - part - 1) * (SMALL_FILES + 1)
    assert not reserve.spend(), "there was nothing left to give"
    assert reserve.fill() and reserve.complete


def test_a_file_that_cannot_be_deleted_keeps_nobody_from_the_rest(tmp_path: Path) -> None:
    reserve = Reserve(str(tmp_path))
    reserve.fill()
    stuck = _files(tmp_path)[0]
    stuck.unlink()
    stuck.mkdir()
    assert [reserve.spend() for _ in range(PARTS + 1)] == [True] * PARTS + [False]
    assert _files(tmp_path) == [stuck]


def test_a_part_of_the_reserve_is_completed(tmp_path: Path) -> None:
    reserve = Reserve(str(tmp_path))
    reserve.fill()
    (tmp_path / "reserve" / "3-small-03").unlink()
    os.truncate(tmp_path / "reserve" / "2-bytes", 1 << 10)
    assert not reserve.complete
    assert reserve.fill() and len(_files(tmp_path)) == PARTS * (SMALL_FILES + 1)
