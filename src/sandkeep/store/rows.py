"""The rows of the store, as frozen values. Field names are column names.

Times are milliseconds since the epoch. Fields ending in ``_ms`` are either a time or a duration, by their
name; sizes say their unit too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from sandkeep.states import ProcessStatus as ProcessStatus
from sandkeep.states import SessionStatus as SessionStatus
from sandkeep.states import SnapshotMethod as SnapshotMethod
from sandkeep.states import SnapshotStatus as SnapshotStatus
from sandkeep.store.tables import BOOL, JSON, TUPLE, Codec

ACTIVE = frozenset(
    {SessionStatus.PENDING, SessionStatus.RUNNING, SessionStatus.STOPPING, SessionStatus.SNAPSHOTTING}
)
"""A sandbox has at most one session in these; the schema enforces it."""
TERMINAL = frozenset(SessionStatus) - ACTIVE
ACTIVE_SQL = ", ".join(f"'{status}'" for status in sorted(ACTIVE))
"""For ``status IN (…)``, spelled the same in every query so that the partial indexes are used."""


class ProcessKind(StrEnum):
    RUN = "run"
    OBSERVED = "observed"
    INTERACTIVE = "interactive"


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Retention by number: the newest ``count`` snapshots are kept."""

    count: int
    expiration_ms: int | None = None
    """Lifetime of the kept ones, from their creation. 0 is forever, ``None`` keeps each one's own expiry."""
    delete_evicted: bool = True
    """Delete older snapshots at once, instead of leaving them until they expire."""


@dataclass(frozen=True, slots=True)
class StoredMount:
    """A drive mounted at a path of the sandbox."""

    drive: str
    mode: str
    """``read-write`` or ``snapshot``."""


@dataclass(frozen=True, slots=True)
class StoredHostPort:
    """A port of the server's machine that a sandbox reaches by a name."""

    port: int
    name: str


@dataclass(frozen=True, slots=True)
class Removal:
    """How a sandbox is being destroyed: recorded before the first step is taken."""

    delete_orphan_snapshots: bool
    actor: str | None = None
    """The caller that asked, for the event that reports completion."""
    reason: str | None = None
    """The reason, when no caller asked."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session is to end: recorded before the first step is taken."""

    keep: bool
    """Whether its files become a snapshot; otherwise they are discarded."""
    method: str
    """The `SnapshotMethod` of that snapshot."""
    lifetime_ms: int | None = None
    """The expiry that the caller asked for that snapshot."""
    reason: str | None = None
    """The reason, when no caller asked."""
    comment: str | None = None
    """What the caller says of that snapshot."""


def _decode_mounts(text: str) -> dict[str, StoredMount]:
    return {path: StoredMount(**mount) for path, mount in JSON.decode(text).items()}


_KEEP_LAST = Codec(lambda keep: JSON.encode(asdict(keep)), lambda text: KeepLast(**JSON.decode(text)))
_MOUNTS = Codec(lambda mounts: JSON.encode({p: asdict(m) for p, m in mounts.items()}), _decode_mounts)
_HOST_PORTS = Codec(
    lambda granted: JSON.encode([asdict(each) for each in granted]),
    lambda text: tuple(StoredHostPort(**each) for each in JSON.decode(text)),
)
_REMOVAL = Codec(lambda removal: JSON.encode(asdict(removal)), lambda text: Removal(**JSON.decode(text)))
_ENDING = Codec(lambda ending: JSON.encode(asdict(ending)), lambda text: Ending(**JSON.decode(text)))
_SESSION_STATUS = Codec(str, SessionStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A scope of names. Two teams may use the same project name; they stay separate."""

    id: str
    """The internal id, which every other row refers to."""
    team: str
    name: str
    """The project as its users spell it (an id or a name of theirs), echoed verbatim."""
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A credential that acts in one project. Only a digest of its text is kept."""

    id: str
    digest: bytes
    project: str
    name: str
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    last_used_ms: int | None = None
    """Accurate to a minute, so that not every use of a token is a write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    id: str
    """Internal and never reused, unlike the name: records that outlive a sandbox match no later namesake."""
    project: str
    name: str
    status: SessionStatus = field(metadata=_SESSION_STATUS.column)
    """Status of the current session, kept equal to it by `sandkeep.store.sessions`."""
    status_updated_ms: int
    created_ms: int
    updated_ms: int
    current_session: str | None = None
    current_snapshot: str | None = None
    image: str
    runtime: str | None = None
    cwd: str
    vcpus: int
    memory_mb: int
    timeout_ms: int
    idle_timeout_ms: int | None = None
    persistent: bool = field(default=True, metadata=BOOL.column)
    env: Mapping[str, str] = field(default_factory=dict, metadata=JSON.column)
    tags: Mapping[str, str] = field(default_factory=dict, metadata=JSON.column)
    ports: tuple[int, ...] = field(default=(), metadata=TUPLE.column)
    network_policy: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)
    network_id: str | None = None
    mounts: Mapping[str, StoredMount] = field(default_factory=dict, metadata=_MOUNTS.column)
    snapshot_expiration_ms: int | None = None
    """Lifetime of new snapshots; 0 is forever, ``None`` the server's default."""
    keep_last_snapshots: KeepLast | None = field(default=None, metadata=_KEEP_LAST.column)
    region: str
    failover_regions: tuple[str, ...] = field(default=(), metadata=TUPLE.column)
    total_active_cpu_ms: int = 0
    """Totals cover ended sessions; the current session has its own counters."""
    total_duration_ms: int = 0
    total_ingress_bytes: int = 0
    total_egress_bytes: int = 0
    destroying: Removal | None = field(default=None, metadata=_REMOVAL.column)
    """Set while it is being destroyed. Callers no longer see it, but its name is not free yet."""
    source: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)
    """The source of its files, without credentials; ``None`` for its image alone."""
    exact_resources: bool = field(default=False, metadata=BOOL.column)
    """Its sessions start only where the host enforces or watches the limits on CPU and memory."""
    destroy_on_stop: bool = field(default=False, metadata=BOOL.column)
    delete_after_ms: int | None = None
    delete_at_ms: int | None = None
    """When the server destroys it: ``delete_after_ms`` after its creation, or after a change of that."""
    asked_limits: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)
    """The limits that the caller named, by field of `Resources`. ``None``, in rows of earlier versions: those
    of ``vcpus`` and ``memory_mb``, which otherwise show them to official clients."""
    batch: str | None = None
    """The batch that it is being made in; it goes if that does not come to its end."""
    host_ports: tuple[StoredHostPort, ...] = field(default=(), metadata=_HOST_PORTS.column)


class SandboxChanges(TypedDict, total=False):
    """The columns of a sandbox that may change after creation."""

    image: str
    runtime: str | None
    vcpus: int
    memory_mb: int
    asked_limits: Mapping[str, Any] | None
    exact_resources: bool
    timeout_ms: int
    idle_timeout_ms: int | None
    persistent: bool
    env: Mapping[str, str]
    tags: Mapping[str, str]
    ports: tuple[int, ...]
    network_policy: Mapping[str, Any] | None
    network_id: str | None
    host_ports: tuple[StoredHostPort, ...]
    mounts: Mapping[str, StoredMount]
    snapshot_expiration_ms: int | None
    keep_last_snapshots: KeepLast | None
    destroy_on_stop: bool
    delete_after_ms: int | None
    delete_at_ms: int | None
    current_snapshot: str | None
    region: str
    failover_regions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    id: str
    project: str
    sandbox: str | None
    """``None`` once the sandbox is destroyed; its history and usage stay with the project."""
    sandbox_name: str
    status: SessionStatus = field(metadata=_SESSION_STATUS.column)
    host: str
    generation: int = 1
    """Incremented when another host takes over, so that late messages of the former are recognised."""
    requested_ms: int
    created_ms: int
    updated_ms: int
    started_ms: int | None = None
    requested_stop_ms: int | None = None
    stopped_ms: int | None = None
    aborted_ms: int | None = None
    snapshotted_ms: int | None = None
    timeout_ms: int
    idle_timeout_ms: int | None = None
    deadline_ms: int | None = None
    source_snapshot: str | None = None
    layer_base: str | None = None
    """Topmost layer below the private upper; ``None`` when the session started from the image alone."""
    image: str
    runtime: str | None = None
    region: str
    cwd: str
    vcpus: int
    memory_mb: int
    ports: tuple[int, ...] = field(default=(), metadata=TUPLE.column)
    network_policy: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)
    network_id: str | None = None
    mounts: Mapping[str, StoredMount] = field(default_factory=dict, metadata=_MOUNTS.column)
    interactive_port: int | None = None
    driver: str
    barriers: Mapping[str, Any] = field(default_factory=dict, metadata=JSON.column)
    """Isolation barriers and enforced limits, as the host reported them."""
    stop_reason: str | None = None
    active_cpu_ms: int = 0
    duration_ms: int = 0
    ingress_bytes: int = 0
    egress_bytes: int = 0
    ending: Ending | None = field(default=None, metadata=_ENDING.column)
    """Set as soon as the session begins to end."""
    persistent: bool = field(default=False, metadata=BOOL.column)
    """Whether its sandbox was persistent when it started."""
    rolled_back: bool = field(default=False, metadata=BOOL.column)
    """A caller chose the current snapshot while it ran: the snapshot of its end does not become current."""
    asked_limits: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    id: str
    session: str
    project: str
    kind: ProcessKind = field(default=ProcessKind.RUN, metadata=Codec(str, ProcessKind).column)
    name: str
    args: tuple[str, ...] = field(default=(), metadata=TUPLE.column)
    cwd: str
    username: str | None = None
    """The user it runs as, if not the sandbox's default user."""
    status: ProcessStatus = field(default=ProcessStatus.RUNNING, metadata=Codec(str, ProcessStatus).column)
    exit_code: int | None = None
    started_ms: int
    finished_ms: int | None = None
    duration_ms: int | None = None
    reason: str | None = None
    """Why it failed, was killed or was lost."""
    stdin: bool = field(default=False, metadata=BOOL.column)
    """Its standard input is a pipe that clients write to."""
    metadata: Mapping[str, str] = field(default_factory=dict, metadata=JSON.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    id: str
    project: str
    sandbox: str | None
    """``None`` once the sandbox that made it is destroyed."""
    source_session: str
    parent: str | None = None
    layer: str
    image: str
    host_key: str | None = None
    region: str
    status: SnapshotStatus = field(default=SnapshotStatus.CREATED, metadata=Codec(str, SnapshotStatus).column)
    size_bytes: int = 0
    created_ms: int
    updated_ms: int
    expires_ms: int | None = None
    expiry_asked: bool = field(default=False, metadata=BOOL.column)
    """The caller chose this expiry for this snapshot, so retention rules leave it alone."""
    last_used_ms: int | None = None
    synced_ms: int | None = None
    """When it was synced, so that it survives loss of power."""
    method: SnapshotMethod = field(metadata=Codec(str, SnapshotMethod).column)
    unwanted: bool = field(default=False, metadata=BOOL.column)
    """Its sandbox was deleted with its snapshots while others used it. It is deleted with the last user."""
    runtime: str | None = None
    cwd: str | None = None
    """Both are of the session that made it; ``None`` where unknown."""
    comment: str | None = None
    """What the caller who had it taken says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    id: str
    project: str
    name: str
    region: str
    max_size_bytes: int
    layer: str | None = None
    """Topmost layer of its content; ``None`` until a session has written to it."""
    parent: str | None = None
    root: str | None = None
    current_session: str | None = None
    """The active session that mounts it read-write."""
    created_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, for people and for audit; ``sequence`` is the order of recording."""

    sequence: int
    id: str
    time_ms: int
    project: str
    sandbox: str | None
    session: str | None
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict, metadata=JSON.column)
    actor: str | None = None
    """Who caused it: ``token:`` and its id, or ``user:`` and a number; ``None`` for the server itself."""
    sandbox_name: str | None = None
    """The name of the sandbox at that time; the sandbox may be gone by now."""
