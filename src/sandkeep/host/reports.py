"""What a driver reports of sessions, processes and files: frozen values, made from JSON in one place.

A supervisor of another version may send fewer fields or more: `from_json` ignores those it does not know, and
missing ones have defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from sandkeep.shared.processrecord import LOST

Status = Literal["running", "stopping", "stopped", "aborted"]
ENDED: Final = frozenset({"stopped", "aborted"})


def _known(kind: type[Any], body: Mapping[str, Any]) -> dict[str, Any]:
    return {part.name: body[part.name] for part in fields(kind) if part.name in body}


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The state of one barrier or one limit of a session."""

    state: str
    """``in force``, ``enforced``, ``watched``, ``per user``, ``shared``, ``unlimited`` or ``absent``."""
    how: str | None = None
    """The mechanism that enforces it, where there are several."""
    why: str | None = None
    """Why it is not fully in force."""
    value: float | None = None
    """The limit."""
    asked: float | None = None
    """The limit that the caller asked for and that is absent."""

    @classmethod
    def all_from_json(cls, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Enforcement]:
        return {name: cls(**_known(cls, body)) for name, body in bodies.items()}

    def to_json(self) -> dict[str, Any]:
        found = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class DriveOrigin:
    """A drive that was mounted when a session started."""

    target: str
    """Its mount point inside."""
    read_only: bool
    layer_id: str | None
    """The topmost layer of its content; ``None`` for a drive that was never written to."""


@dataclass(frozen=True, slots=True)
class SessionOrigin:
    """What a session was started with, as its host recorded it."""

    image: str
    layer_id: str | None
    cwd: str | None
    deadline_ms: int | None
    drives: tuple[DriveOrigin, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources a session has used. ``None`` where the host cannot measure one."""

    cpu_ms: int | None = None
    duration_ms: int | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    pids: int | None = None
    oom_kills: int | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Usage:
        return cls(**_known(cls, body))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """A session as its driver sees it, or as it was when it ended."""

    status: Status
    """``aborted``: the session ended, and no process was left to record why."""
    reason: str | None = None
    generation: int = 1
    tier: str | None = None
    mode: str | None = None
    started_ms: int | None = None
    stopped_ms: int | None = None
    deadline_ms: int | None = None
    """When the session ends, by the wall clock."""
    remaining_ms: int | None = None
    """Time left, by a clock that cannot be set; ``None`` without a deadline."""
    age_ms: int = 0
    """Time for which the session has run."""
    barriers: Mapping[str, Enforcement] = field(default_factory=dict)
    limits: Mapping[str, Enforcement] = field(default_factory=dict)
    usage: Usage | None = None
    """For an ended session, its total usage."""

    @property
    def running(self) -> bool:
        return self.status == "running"

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def state_fields(kind: type[SessionState], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``kind`` from the JSON that a supervisor sends and writes to disk."""
    found = _known(kind, body)
    for name in ("barriers", "limits"):
        found[name] = Enforcement.all_from_json(body.get(name) or {})
    found["usage"] = Usage.from_json(body["usage"]) if body.get("usage") else None
    return found


@dataclass(frozen=True, slots=True)
class InputReport:
    """What clients have sent to the standard input of a process."""

    received: int
    """Bytes in total, whether or not the process has read them."""
    open: bool
    """Whether more can follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process of a session: its command, and how it ended if it has."""

    id: str
    status: str
    """``running``, ``exited``, ``killed``, or ``lost`` when its end was not observed."""
    argv: tuple[str, ...] = ()
    """Empty if the record is damaged."""
    cwd: str = "/"
    user: str | None = None
    pty: bool = False
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    reason: str | None = None
    started_ms: int = 0
    finished_ms: int | None = None
    duration_ms: int = 0
    cpu_ms: int | None = None
    output_bytes: int = 0
    dropped_bytes: int = 0
    stdin: InputReport | None = None
    """``None`` without a pipe, or if its supervisor is of an earlier version."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> ProcessRecord:
        found = _known(cls, body)
        stdin = found.get("stdin")
        return cls(
            **found
            | {
                "argv": tuple(found["argv"]),
                "pty": bool(found["pty"]),
                "stdin": None if stdin is None else InputReport(**_known(InputReport, stdin)),
            }
        )

    @classmethod
    def damaged(cls, process_id: str) -> ProcessRecord:
        """Return the record of a process of an ended session whose own record is unreadable."""
        return cls(id=process_id, status=LOST, reason="its record is damaged")


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a checkpoint copied, and how long the session was paused for it."""

    copied_files: int
    copied_bytes: int
    passes: int
    pause_ms: float

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> CheckpointReport:
        return cls(**_known(cls, body))


@dataclass(frozen=True, slots=True)
class FileStat:
    """One directory entry; ids as the sandbox sees them."""

    name: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ino: int
    nlink: int
    target: str | None = None
    """Target of a symbolic link, as written in it."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> FileStat:
        return cls(**_known(cls, body))


@dataclass(frozen=True, slots=True)
class FileLines:
    """A range of lines of a file."""

    data: bytes
    lines: int
    more: bool
    """Whether the file continues after them."""
    cut: bool
    """Whether the only line exceeds the limit of bytes, so that its end is missing."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One entry of a tree that a client compares with its own."""

    path: str
    """Relative to the tree."""
    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: str | None = None
    digest: str | None = None
    """BLAKE2b of a file's content, 32 bytes in hexadecimal, if asked for and the file can be read."""
    unreadable: bool = False
    """What is below this directory is not known."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One change below a watched directory."""

    kind: str
    """``created``, ``modified``, ``removed``; ``overflow`` when some were missed."""
    path: str
    directory: bool = False

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> FileChange:
        return cls(**_known(cls, body))
