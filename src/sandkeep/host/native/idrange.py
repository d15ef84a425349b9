"""Ranges of 65,536 ids, one per session of root, exclusive on the whole machine.

A supervisor takes a range by locking its file below ``/run``; the kernel drops the lock when the supervisor
ends, so a crash frees the range and no bookkeeping can disagree with reality. The ranges lie above those that
login users, subordinate ids and other container managers are given.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from sandkeep.errors import LimitReached

SIZE: Final = 65_536
FIRST: Final = 0x7000_0000
COUNT: Final = 32_768
DIRECTORY: Final = "/run/sandkeep/ids"


def take(hint: int) -> tuple[int, int]:
    """Lock a free range, starting the search at ``hint``. Return its first id and the descriptor to keep."""
    os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
    for step in range(COUNT):
        number = (hint + step) % COUNT
        fd = os.open(f"{DIRECTORY}/{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return FIRST + number * SIZE, fd
    raise LimitReached("every id range is in use", limit="sessions", value=COUNT)
