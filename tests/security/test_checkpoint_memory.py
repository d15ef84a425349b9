"""A checkpoint's memory is the supervisor's and not the session's, so a session cannot make it much."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import IS_ROOT
from tests.driver_lab import Lab

FILES = 20_000
MAKE = f"""
import os
os.mkdir("/srv/many")
for number in range({FILES}):
    os.mknod(f"/srv/many/file{{number:08}}")
"""


@pytest.fixture
def lab(test_area: Path) -> Iterator[Lab]:
    if not IS_ROOT:
        pytest.skip("nobody else may look at a supervisor's memory")
    with Lab(str(test_area / "lab")) as lab:
        yield lab


def _memory(pid: int, what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def test_a_checkpoint_of_many_files_takes_little_memory_of_the_supervisor(lab: Lab) -> None:
    """All in one directory, which is the worst: of others only what is being looked at is in memory."""
    box = lab.box()
    assert box.run("python3", "-c", MAKE, root=True).code == 0
    supervisor, copy = box.created.supervisor_pid, Path(lab.data_dir, "copy-of-many")
    Path(f"/proc/{supervisor}/clear_refs").write_text("5")  # the peak counts from here on
    before = _memory(supervisor, "VmRSS")
    try:
        report = lab.do(lab.driver.checkpoint(box.ref, str(copy)))
        grown = _memory(supervisor, "VmHWM") - before
        assert report.copied_files >= FILES
        assert len(list(copy.glob("*/srv/many/*"))) == FILES
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    assert grown < FILES * 500, f"{grown / FILES:.0f} bytes for each file"
    box.remove()
