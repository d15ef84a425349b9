"""A process that takes more memory than its sandbox has: killed, and everybody is told why."""

from __future__ import annotations

import pytest

from sandkeep import sync as sandkeep
from sandkeep.errors import ProcessFailed

HOG = "held = [bytearray(b'x') * (64 << 20) for _ in range(56)]"
"""Half as much again as the smallest sandbox has, and no more: where nobody stops it, it ends."""


def test_a_process_that_runs_out_of_memory_is_told_from_one_that_was_killed() -> None:
    with sandkeep.create_sandbox(resources=sandkeep.Resources(cpus=1, memory_mb=2048, exact=False)) as box:
        limit = box.current_session.limits["memory"]
        if limit not in ("enforced", "watched"):
            pytest.skip(f"memory of sessions is {limit} here")
        with pytest.raises(ProcessFailed, match=r"exited with code 137 \(out of memory\)") as hog:
            box.run_process("python3", ["-c", HOG], check=True)
        assert (hog.value.returncode, hog.value.reason) == (137, "out_of_memory")
        killed = box.run_process("sh", ["-c", "kill -KILL $$"])
        assert (killed.returncode, killed.reason) == (137, "killed")
        late = box.run_process("sleep", ["60"], kill_after=0.1)
        assert (late.returncode, late.reason) == (137, "timeout")
        found = box.get_process(hog.value.process)
        assert (found.status, found.reason) == (sandkeep.ProcessStatus.KILLED, "out_of_memory")
        assert found.explanation == "out of memory"
        told = [(event.data["process"], event.data["reason"]) for event in box.events(kind="process.killed")]
        assert told == [(found.id, "out of memory"), (late.process_id, "time limit reached")]
