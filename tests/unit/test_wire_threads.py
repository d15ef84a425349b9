"""Bodies read by many threads at once, the first time ever."""

from __future__ import annotations

import subprocess
import sys

FIRST_TOGETHER = """
import sys, threading
from sandkeep.wire.base import decoder
from sandkeep.wire.responses import SandboxStarted

sys.setswitchinterval(1e-6)
together = threading.Barrier(16)

def read():
    together.wait()
    try:
        decoder(SandboxStarted).decode(b'{"sandbox": {"name": "a"}, "session": {}, "routes": []}')
    except ValueError:
        pass

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_read_the_first_answer_at_the_same_moment() -> None:
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", FIRST_TOGETHER], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
