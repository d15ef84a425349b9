"""Frozen values that handles and queries return.

Times are aware datetimes in UTC, durations are :class:`~datetime.timedelta`, sizes are bytes and memory is
megabytes. ``None`` is "not known" or "not yet".
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from msgspec import UnsetType

from sandkeep.dataclass import dataclass
from sandkeep.frozen import Frozen
from sandkeep.states import (
    EndReason,
    FileKind,
    OutputStream,
    PolicyMode,
    ProcessStatus,
    SnapshotMethod,
    SnapshotStatus,
)

if TYPE_CHECKING:
    from sandkeep.policy_json import PolicyObject
    from sandkeep.wire.objects import (
        CommandObject,
        DriveObject,
        RouteObject,
        SnapshotObject,
        TreeNode,
    )

T = TypeVar("T")

TAIL = 4096
"""Bytes of output an error carries."""


def given(value: T | UnsetType) -> T | None:
    """Return an optional field; ``None`` if the server left it out."""
    return None if isinstance(value, UnsetType) else value


@overload
def moment(value: int) -> datetime: ...


@overload
def moment(value: int | UnsetType | None) -> datetime | None: ...


def moment(value: int | UnsetType | None) -> datetime | None:
    """Return the time for milliseconds since the epoch."""
    if value is None or isinstance(value, UnsetType):
        return None
    return datetime.fromtimestamp(value / 1000, UTC)


def _at(value: int) -> datetime:
    return datetime.fromtimestamp(value / 1000, UTC)


def span(value: int | UnsetType | None) -> timedelta | None:
    """Return the duration for milliseconds."""
    return None if value is None or isinstance(value, UnsetType) else timedelta(milliseconds=value)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used by a session, or by all sessions of a sandbox."""

    cpu: timedelta
    """CPU time."""
    duration: timedelta
    """Time that sessions existed."""
    ingress_bytes: int
    egress_bytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """The URL of a port of a sandbox."""

    port: int
    url: str
    """Public if it is below the operator's domain; with a loopback address, for the server's machine only."""
    token: str | None = field(default=None, repr=False)
    """If the operator protects routes: value of the header ``x-sandkeep-token`` that a request must send."""
    address: str = ""
    """Address and port to connect to. Not those of the URL if that has a name below ``localhost``, which few
    resolvers know: then connect here, and send ``host`` as the header ``Host``."""

    @property
    def host(self) -> str:
        """Host and port of the URL: the value of the header ``Host`` that leads to the port."""
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def link(self) -> str:
        """The URL for a browser: with the token, if there is one, which a cookie keeps from then on."""
        return self.url if self.token is None else f"{self.url}/?sandkeep_token={self.token}"

    @classmethod
    def of(cls, shown: RouteObject) -> Route:
        """Return the value for an object of a response."""
        host = shown.url.partition("://")[2].partition("/")[0]
        return cls(
            port=shown.port,
            url=shown.url,
            token=shown.token or None,
            address=given(shown.address) or (host if ":" in host else f"{host}:443"),
        )


@dataclass(frozen=True, slots=True)
class ShownPolicy:
    """A network policy as the server shows it, without the values that rules inject."""

    mode: PolicyMode
    domains: tuple[str, ...] = ()
    allow_subnets: tuple[str, ...] = ()
    deny_subnets: tuple[str, ...] = ()
    injected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the headers that rules set on requests, by domain."""

    @classmethod
    def of(cls, shown: PolicyObject) -> ShownPolicy:
        """Return the value for an object of a response."""
        injected: dict[str, tuple[str, ...]] = {}
        for rule in given(shown.injection_rules) or []:
            names = (*injected.get(rule.domain, ()), *(given(rule.header_names) or ()))
            injected[rule.domain] = tuple(dict.fromkeys(names))
        return cls(
            mode=PolicyMode(shown.mode),
            domains=tuple(given(shown.allowed_domains) or ()),
            allow_subnets=tuple(given(shown.allowed_cidrs) or ()),
            deny_subnets=tuple(given(shown.denied_cidrs) or ()),
            injected=Frozen(injected),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable filesystem state that sessions can start from."""

    id: str
    session_id: str
    """The session that it was taken of."""
    status: SnapshotStatus
    method: SnapshotMethod | None
    parent_id: str | None
    size_bytes: int
    """Bytes on disk that only this snapshot uses, without its ancestors."""
    created_at: datetime
    expires_at: datetime | None
    """``None``: never. A snapshot that a sandbox would start from is kept even after this time."""
    last_used_at: datetime | None
    synced_at: datetime | None
    """Since when it survives a power failure; before that it survives only the end of every process."""
    comment: str | None
    """What the caller of ``snapshot`` or ``checkpoint`` said of it."""

    @classmethod
    def of(cls, shown: SnapshotObject) -> Snapshot:
        """Return the value for an object of a response."""
        return cls(
            id=shown.id,
            session_id=shown.source_session_id,
            status=shown.status,
            method=given(shown.creation_method),
            parent_id=given(shown.parent_id),
            size_bytes=shown.size_bytes,
            created_at=_at(shown.created_at),
            expires_at=moment(shown.expires_at),
            last_used_at=moment(shown.last_used_at),
            synced_at=moment(shown.synced_at),
            comment=given(shown.comment),
        )


@dataclass(frozen=True, slots=True)
class SandboxGroup:
    """A group of accounts inside a sandbox."""

    name: str
    directory: str
    """A directory shared by the members: files made in it belong to the group."""


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """A snapshot in the tree, with the other children of its parent."""

    snapshot: Snapshot
    siblings: tuple[Snapshot, ...]

    @classmethod
    def of(cls, shown: TreeNode) -> SnapshotNode:
        """Return the value for an object of a response."""
        return cls(Snapshot.of(shown.snapshot), tuple(Snapshot.of(other) for other in shown.siblings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A named filesystem that sandboxes can mount."""

    id: str
    name: str
    max_size_bytes: int
    created_at: datetime
    updated_at: datetime
    session_id: str | None
    """The session that has it mounted read-write."""
    sandbox: str | None
    parent_id: str | None
    """The drive it was forked from."""

    @classmethod
    def of(cls, shown: DriveObject) -> Drive:
        """Return the value for an object of a response."""
        return cls(
            id=shown.id,
            name=shown.name,
            max_size_bytes=shown.max_size_bytes,
            created_at=_at(shown.created_at),
            updated_at=_at(shown.updated_at),
            session_id=given(shown.current_session_id),
            sandbox=given(shown.current_sandbox_name),
            parent_id=given(shown.parent_drive_id),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """The record of a process as the server last described it."""

    id: str
    session_id: str
    command: str
    args: tuple[str, ...]
    cwd: str
    status: ProcessStatus
    returncode: int | None
    """128 + n if signal n ended the process."""
    started_at: datetime
    finished_at: datetime | None
    """``None`` while the process runs."""
    duration: timedelta | None
    reason: EndReason | None
    """How it ended; ``None`` while it runs."""
    explanation: str | None
    """Why the status is failed, killed or lost, in words."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The keys and values it was started with."""
    terminal: bool = False
    """Whether it runs on a terminal."""

    @classmethod
    def of(cls, shown: CommandObject) -> ProcessInfo:
        """Return the value for an object of a response."""
        ended = ProcessStatus.RUNNING if shown.exit_code is None else ProcessStatus.EXITED
        return cls(
            id=shown.id,
            session_id=shown.session_id,
            command=shown.name,
            args=tuple(shown.args),
            cwd=shown.cwd,
            status=ended if isinstance(shown.status, UnsetType) else shown.status,
            returncode=shown.exit_code,
            started_at=_at(shown.started_at),
            finished_at=None
            if isinstance(shown.duration_ms, UnsetType)
            else _at(shown.started_at + shown.duration_ms),
            duration=span(shown.duration_ms),
            reason=given(shown.end_reason),
            explanation=given(shown.reason),
            metadata=given(shown.metadata) or {},
            terminal=given(shown.terminal) or False,
        )


@dataclass(frozen=True, slots=True)
class CompletedProcess:
    """Result of a process. Output is set if it was captured."""

    command: str
    args: tuple[str, ...]
    returncode: int
    stdout: bytes | None
    stderr: bytes | None
    process_id: str
    session_id: str
    reason: EndReason = EndReason.EXITED
    """How it ended."""
    duration: timedelta = timedelta()
    """Run time."""
    omitted_bytes: int = 0
    """Bytes of the captured streams that are not here: beyond ``max_output``, which keeps the first half of
    so many bytes and the last, or dropped by the server, whose log has its own limit."""

    @property
    def truncated(self) -> bool:
        """Whether captured output is incomplete."""
        return self.omitted_bytes > 0

    @property
    def stdout_text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return (self.stdout or b"").decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return (self.stderr or b"").decode("utf-8", "replace")

    def check_returncode(self) -> None:
        """Raise :class:`~sandkeep.errors.ProcessFailed` unless the exit code is 0."""
        if self.returncode:
            raise failed(self)


def failed(done: CompletedProcess) -> Exception:
    """Return the error for an exit code other than 0, with the end of the output."""
    from sandkeep.errors import ProcessFailed

    stdout, stderr = (done.stdout or b"")[-TAIL:], (done.stderr or b"")[-TAIL:]
    said = (stderr or stdout).decode("utf-8", "replace").strip()
    message = f"{done.command} exited with code {done.returncode}"
    if done.reason is not EndReason.EXITED:
        message += f" ({done.reason.replace('_', ' ')})"
    if said:
        message += f": {said.splitlines()[-1][:200]}"
    return ProcessFailed(
        message,
        command=done.command,
        arguments=done.args,
        returncode=done.returncode,
        reason=done.reason,
        duration=done.duration,
        stdout=stdout,
        stderr=stderr,
        omitted_bytes=done.omitted_bytes,
        process=done.process_id,
        session=done.session_id,
    )


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes that a process wrote, with their offset in its output log."""

    offset: int
    """Position in the bytes of both streams together, in the order they were read."""
    time: datetime
    stream: OutputStream
    data: bytes

    @property
    def end(self) -> int:
        """Offset of the byte after it; pass it to continue from here."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class OutputGap:
    """A range of the log that is missing."""

    offset: int
    length: int
    """0 if the log is damaged at its end, so that the missing length is unknown."""
    reason: Literal["dropped", "damaged"] = "dropped"
    """Dropped because the process wrote more than is kept, or damaged on the server's disk."""

    @property
    def end(self) -> int:
        """Offset of the byte after it; pass it to continue from here."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """A directory entry, with user and group ids as the sandbox sees them."""

    path: str
    kind: FileKind
    size: int
    mode: int
    """Permission bits."""
    uid: int
    gid: int
    modified_at: datetime
    target: str | None
    """Target of a symbolic link, unresolved."""

    @property
    def name(self) -> str:
        """The last component of the path."""
        return posixpath.basename(self.path)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind is FileKind.FILE

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.kind is FileKind.DIRECTORY

    @property
    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind is FileKind.SYMLINK


@dataclass(frozen=True, slots=True)
class FileChange:
    """Something that happened to a path being watched."""

    path: str
    kind: str
    """``created``, ``changed`` or ``removed``; ``overflow`` if some changes were missed."""
    is_dir: bool = False
    """Whether it is, or was, a directory."""


@dataclass(frozen=True, slots=True)
class FileLines:
    """A range of lines of a text file."""

    text: str
    """The lines with their line feeds."""
    start: int
    """Number of the first line; lines are counted from 1."""
    count: int
    """Number of lines in ``text``."""
    more: bool
    """Whether the file goes on after them."""
    cut: bool
    """Whether the only line is longer than ``max_bytes`` and its end is missing."""

    @property
    def next_start(self) -> int | None:
        """The line to continue with; ``None`` at the end of the file."""
        return self.start + self.count if self.more else None


@dataclass(frozen=True, slots=True)
class Transferred:
    """Progress of an upload or download, as passed to a progress callback, and its final count."""

    path: str
    """The entry being transferred; empty in the final count."""
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What a sync did, or with ``dry_run`` would do. Paths are relative to the two trees."""

    copied: tuple[str, ...]
    """Files, links and directories that were created, or replaced because they differed."""
    deleted: tuple[str, ...]
    """Entries that the source does not have."""
    unchanged: int
    """Number of entries that were the same already."""
    bytes: int
    """Content of the copied files."""
    left_out: tuple[str, ...] = ()
    """Pipes, sockets and devices of the source, which are not copied."""
