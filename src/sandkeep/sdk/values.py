"""What handles and queries return: frozen values, the same in both colours.

Times are aware datetimes in UTC, durations are :class:`~datetime.timedelta`, sizes are bytes and memory is
megabytes. ``None`` is "not known" or "not yet".
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from msgspec import UnsetType

from sandkeep.types import (
    FileKind,
    Mount,
    OutputStream,
    PolicyMode,
    ProcessStatus,
    Resources,
    SessionStatus,
    SnapshotMethod,
    SnapshotRetention,
    SnapshotStatus,
    Tier,
)

if TYPE_CHECKING:
    from sandkeep.wire.objects import (
        CommandObject,
        DriveObject,
        RetentionObject,
        RouteObject,
        SandboxObject,
        SessionObject,
        SnapshotObject,
        TreeNode,
    )
    from sandkeep.wire.policies import PolicyObject

T = TypeVar("T")

TAIL = 4096
"""Bytes of output an error carries."""


def given(value: T | UnsetType) -> T | None:
    """A field that may have been left out."""
    return None if isinstance(value, UnsetType) else value


def moment(value: int | UnsetType | None) -> datetime | None:
    """A time in milliseconds since the epoch."""
    if value is None or isinstance(value, UnsetType):
        return None
    return datetime.fromtimestamp(value / 1000, UTC)


def _at(value: int) -> datetime:
    return datetime.fromtimestamp(value / 1000, UTC)


def span(value: int | UnsetType | None) -> timedelta | None:
    """A duration in milliseconds."""
    return None if value is None or isinstance(value, UnsetType) else timedelta(milliseconds=value)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a session, or all sessions of a sandbox, used."""

    cpu: timedelta
    """Time processors were busy."""
    duration: timedelta
    """Time sessions were there."""
    ingress_bytes: int
    egress_bytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """Where a port of a sandbox is reached."""

    port: int
    url: str

    @classmethod
    def of(cls, shown: RouteObject) -> Route:
        return cls(port=shown.port, url=shown.url)


@dataclass(frozen=True, slots=True)
class ShownPolicy:
    """A network policy as the server shows it: what may be reached, without the values rules inject."""

    mode: PolicyMode
    domains: tuple[str, ...] = ()
    allow_subnets: tuple[str, ...] = ()
    deny_subnets: tuple[str, ...] = ()
    injected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the headers set on requests, by domain."""

    @classmethod
    def of(cls, shown: PolicyObject) -> ShownPolicy:
        injected: dict[str, tuple[str, ...]] = {}
        for rule in given(shown.injection_rules) or []:
            names = (*injected.get(rule.domain, ()), *(given(rule.header_names) or ()))
            injected[rule.domain] = tuple(dict.fromkeys(names))
        return cls(
            mode=PolicyMode(shown.mode),
            domains=tuple(given(shown.allowed_domains) or ()),
            allow_subnets=tuple(given(shown.allowed_cidrs) or ()),
            deny_subnets=tuple(given(shown.denied_cidrs) or ()),
            injected=MappingProxyType(injected),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One execution of a sandbox, running or over."""

    id: str
    sandbox: str
    """The name of the sandbox it belongs to."""
    status: SessionStatus
    resources: Resources
    execution_time_limit: timedelta
    cwd: str
    created_at: datetime
    started_at: datetime | None
    stopped_at: datetime | None
    source_snapshot_id: str | None
    """The snapshot its files started from."""
    network_policy: ShownPolicy | None
    usage: Usage | None
    """Known once it has ended."""
    tier: Tier | None
    barriers: Mapping[str, str]
    """What stands between it and the host, by name."""
    limits: Mapping[str, str]
    """Which resource limits are enforced, watched or absent."""

    @property
    def is_running(self) -> bool:
        """Whether it was running when this was asked."""
        return self.status is SessionStatus.RUNNING

    @classmethod
    def of(cls, shown: SessionObject) -> Session:
        transfer = given(shown.network_transfer)
        usage = None
        if transfer is not None:
            usage = Usage(
                cpu=span(shown.active_cpu_duration_ms) or timedelta(),
                duration=span(shown.duration) or timedelta(),
                ingress_bytes=transfer.ingress,
                egress_bytes=transfer.egress,
            )
        return cls(
            id=shown.id,
            sandbox=given(shown.source_sandbox_name) or "",
            status=shown.status,
            resources=Resources(shown.vcpus, shown.memory),
            execution_time_limit=timedelta(milliseconds=shown.timeout),
            cwd=shown.cwd,
            created_at=_at(shown.created_at),
            started_at=moment(shown.started_at),
            stopped_at=moment(shown.stopped_at) or moment(shown.aborted_at),
            source_snapshot_id=given(shown.source_snapshot_id),
            network_policy=None
            if isinstance(shown.network_policy, UnsetType)
            else ShownPolicy.of(shown.network_policy),
            usage=usage,
            tier=given(shown.tier),
            barriers=MappingProxyType(given(shown.barriers) or {}),
            limits=MappingProxyType(given(shown.limits) or {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A sandbox as the server last described it."""

    name: str
    status: SessionStatus
    current_session_id: str
    persistent: bool
    image: str | None
    runtime: str | None
    resources: Resources
    execution_time_limit: timedelta
    """Of each new session."""
    expires_at: datetime | None
    """When the running session will be stopped."""
    cwd: str
    tags: Mapping[str, str]
    mounts: Mapping[str, Mount]
    network_policy: ShownPolicy | None
    current_snapshot_id: str | None
    snapshot_expiration: timedelta | None
    snapshot_retention: SnapshotRetention | None
    created_at: datetime
    updated_at: datetime
    usage: Usage
    """Of all its sessions that have ended."""
    tier: Tier | None

    @classmethod
    def of(cls, shown: SandboxObject) -> SandboxInfo:
        mounts = given(shown.mounts) or {}
        return cls(
            name=shown.name,
            status=shown.status,
            current_session_id=shown.current_session_id,
            persistent=shown.persistent,
            image=given(shown.image),
            runtime=given(shown.runtime),
            resources=Resources(given(shown.vcpus), given(shown.memory)),
            execution_time_limit=span(shown.timeout) or timedelta(),
            expires_at=moment(shown.expires_at),
            cwd=given(shown.cwd) or "/",
            tags=MappingProxyType(given(shown.tags) or {}),
            mounts=MappingProxyType({path: Mount(m.drive, m.mode) for path, m in mounts.items()}),
            network_policy=None
            if isinstance(shown.network_policy, UnsetType)
            else ShownPolicy.of(shown.network_policy),
            current_snapshot_id=given(shown.current_snapshot_id),
            snapshot_expiration=span(shown.snapshot_expiration),
            snapshot_retention=_retention(shown.keep_last_snapshots),
            created_at=_at(shown.created_at),
            updated_at=_at(shown.updated_at),
            usage=Usage(
                cpu=span(shown.total_active_cpu_duration_ms) or timedelta(),
                duration=span(shown.total_duration_ms) or timedelta(),
                ingress_bytes=given(shown.total_ingress_bytes) or 0,
                egress_bytes=given(shown.total_egress_bytes) or 0,
            ),
            tier=given(shown.tier),
        )


def _retention(shown: RetentionObject | UnsetType) -> SnapshotRetention | None:
    if isinstance(shown, UnsetType):
        return None
    return SnapshotRetention(shown.count, span(shown.expiration), shown.delete_evicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable filesystem state that sessions can start from."""

    id: str
    session_id: str
    """The session it was taken of."""
    status: SnapshotStatus
    method: SnapshotMethod | None
    parent_id: str | None
    size_bytes: int
    """What it takes on disk by itself, without those it stands on. Measured in moments; 0 until then."""
    created_at: datetime
    expires_at: datetime | None
    """``None``: never. One that a sandbox would start from is kept beyond it, until that changes."""
    last_used_at: datetime | None
    synced_at: datetime | None
    """Since when it survives a power failure; before that it survives the end of every process."""

    @classmethod
    def of(cls, shown: SnapshotObject) -> Snapshot:
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
        )


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """A snapshot in the tree, with the other children of its parent."""

    snapshot: Snapshot
    siblings: tuple[Snapshot, ...]

    @classmethod
    def of(cls, shown: TreeNode) -> SnapshotNode:
        return cls(Snapshot.of(shown.snapshot), tuple(Snapshot.of(other) for other in shown.siblings))


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a stop left: the session as it ended, and the snapshot of a persistent sandbox."""

    session: Session
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A named filesystem of its own, mounted into sandboxes."""

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
    """A process's record as the server last described it."""

    id: str
    session_id: str
    command: str
    args: tuple[str, ...]
    cwd: str
    status: ProcessStatus
    returncode: int | None
    """128 + n for a process ended by signal n."""
    started_at: datetime
    duration: timedelta | None
    reason: str | None
    """Why it is failed, killed or lost."""

    @classmethod
    def of(cls, shown: CommandObject) -> ProcessInfo:
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
            duration=span(shown.duration_ms),
            reason=given(shown.reason),
        )


@dataclass(frozen=True, slots=True)
class CompletedProcess:
    """How a process ended. Output is there when it was captured."""

    command: str
    args: tuple[str, ...]
    returncode: int
    stdout: bytes | None
    stderr: bytes | None
    process_id: str
    session_id: str

    @property
    def stdout_text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return (self.stdout or b"").decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return (self.stderr or b"").decode("utf-8", "replace")

    def check_returncode(self) -> None:
        """Raise :class:`~sandkeep.errors.ProcessFailed` unless the process ended with 0."""
        if self.returncode:
            raise failed(self)


def failed(done: CompletedProcess) -> Exception:
    """The error of a process that ended with another code than 0, with the end of what it printed."""
    from sandkeep.errors import ProcessFailed

    stdout, stderr = (done.stdout or b"")[-TAIL:], (done.stderr or b"")[-TAIL:]
    said = (stderr or stdout).decode("utf-8", "replace").strip()
    message = f"{done.command} ended with {done.returncode}"
    if said:
        message += f": {said.splitlines()[-1][:200]}"
    return ProcessFailed(
        message,
        command=done.command,
        arguments=done.args,
        returncode=done.returncode,
        stdout=stdout,
        stderr=stderr,
        process=done.process_id,
        session=done.session_id,
    )


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes a process printed, at their place in its output log."""

    offset: int
    """Counts the bytes of both streams together, in the order they were read."""
    time: datetime
    stream: OutputStream
    data: bytes

    @property
    def end(self) -> int:
        """The offset after it, to go on from."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class OutputGap:
    """A range of the log that was dropped because the process printed more than is kept."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset after it, to go on from."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """A directory entry, with ids as the sandbox sees them."""

    path: str
    kind: FileKind
    size: int
    mode: int
    """Permission bits."""
    uid: int
    gid: int
    modified_at: datetime
    target: str | None
    """Where a symbolic link points, as written in it."""

    @property
    def name(self) -> str:
        """The last part of its path."""
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
    """``created``, ``changed`` or ``removed``; ``overflow`` when some were missed."""
    is_dir: bool = False
    """Whether it is, or was, a directory."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """How far an upload or download has come: what a progress callback is given, and the final count."""

    path: str
    """The entry under way; empty in the final count."""
    files: int
    bytes: int
