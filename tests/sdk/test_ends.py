"""How processes end that the SDK waits for, seen from two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sandkeep import EndReason, sync
from sandkeep.errors import SessionStopped
from tests.polling import until


def test_a_process_whose_session_ends_raises_with_the_reason_lost_and_its_output() -> None:
    with sync.create_sandbox() as box, ThreadPoolExecutor(1) as others:
        script = ["-c", "echo on; exec sleep 7737"]
        running = others.submit(box.run_process, "sh", script, capture_output=True)
        until(lambda: [next(process.output(), None) for process in box.processes()])
        box.stop()
        with pytest.raises(SessionStopped) as stopped:
            running.result()
        assert (stopped.value.reason, stopped.value.stdout) == (EndReason.LOST, b"on\n")
        assert stopped.value.duration is not None
