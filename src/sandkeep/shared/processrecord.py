"""The record of a process on disk: sealed lines in one file, of which the last complete one is valid.

The supervisor of the session appends lines; the host reads them, also after the supervisor has died.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Final

from sandkeep.shared.sealed import seal, unseal

RUNNING: Final = "running"
EXITED: Final = "exited"
KILLED: Final = "killed"
LOST: Final = "lost"
KILLED_BY_REQUEST: Final = "killed by request"
"""A client asked to kill the process."""
OUT_OF_MEMORY: Final = "out of memory"
TIME_LIMIT: Final = "time limit reached"

_RECORDS: Final = "record.jsonl"
_FIELDS: Final = frozenset(
    {"id", "argv", "cwd", "status", "exit_code", "reason", "started_ms", "finished_ms", "pty"}
)
"""Fields of every record."""


def add_record(directory: str, body: dict[str, Any]) -> None:
    """Append a record, whole or not at all. Replacing the file would cost two more calls."""
    line = seal(body) + b"\n"
    fd = os.open(f"{directory}/{_RECORDS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        before = os.lseek(fd, 0, os.SEEK_END)
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def last_record(directory: str) -> dict[str, Any]:
    """Return the last record of a process, whose supervisor may have died while writing.

    A damaged record is skipped and the one before is used. Raises ``ValueError`` if all are damaged.
    """
    with open(f"{directory}/{_RECORDS}", "rb") as handle:
        lines = handle.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        raise FileNotFoundError(errno.ENOENT, "no record", directory)
    for line in reversed(whole):
        try:
            record = unseal(line[:-1])
        except ValueError:
            continue
        if record.keys() >= _FIELDS:
            return record
    raise ValueError(f"every record of {directory} is damaged")
