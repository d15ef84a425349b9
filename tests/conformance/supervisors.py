"""What happens to a session on a machine in trouble."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_supervisor(session: str) -> None:
    """End the process that owns a session, as a machine out of memory might."""
    wanted = f"sandkeep-supervisor {session}".encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if entry.read_bytes().split(b"\0")[0] == wanted:
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
    raise AssertionError(f"no supervisor of {session}")
