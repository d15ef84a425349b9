"""The expected state of each sandbox: updated by the actor that changes it, compared with the real state."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

ABSENT = "absent"

Files = dict[str, frozenset[str]]
"""By path: the digests its content may have. More than one after a write that failed on the way."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Output:
    """What a process that has ended printed."""

    process: str
    session: str
    stdout: str
    stderr: str


@dataclass(slots=True)
class Expected:
    """One name. The actor that works with it holds its lock, so this record is exact."""

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    exists: bool | None = False
    """``None``: an operation failed on the way, and either may be so."""
    doomed: bool = False
    """A destroy failed on the way: its content may be gone, and it can only be destroyed."""
    files: Files = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    checkpoints: dict[str, Files] = field(default_factory=dict)

    def created(self) -> None:
        self.exists, self.doomed = True, False

    def gone(self) -> None:
        """It does not exist; its checkpoints went with it."""
        self.exists, self.doomed = False, False
        self.files, self.outputs, self.checkpoints = {}, [], {}

    def wrote(self, path: str, content: str) -> None:
        self.files[path] = frozenset({content})

    def may_have_written(self, path: str, content: str) -> None:
        self.files[path] = self.files.get(path, frozenset({ABSENT})) | {content}
