"""What the store holds, as frozen values. Field names are column names.

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
"""For ``status IN (…)``, spelled the same in every query so that the partial indexes serve it."""


class ProcessKind(StrEnum):
    RUN = "run"
    OBSERVED = "observed"
    INTERACTIVE = "interactive"


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Retention by number: the newest ``count`` snapshots stay."""

    count: int
    expiration_ms: int | None = None
    """Lifetime of the kept ones, from their creation. 0 is for ever, ``None`` leaves each its own expiry."""
    delete_evicted: bool = True
    """Delete what falls out of the newest at once, instead of leaving it until it expires."""


@dataclass(frozen=True, slots=True)
class StoredMount:
    """A drive shown at a path of the sandbox."""

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
    """That a sandbox is being destroyed, and how: written down before anything is done about it."""

    delete_orphan_snapshots: bool
    actor: str | None = None
    """Who asked, for the event that says it is done."""
    reason: str | None = None
    """Why, when no caller asked."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session is to end: written down before anything is done about it."""

    keep: bool
    """Whether its files become a snapshot; else they are thrown away."""
    method: str
    """The `SnapshotMethod` of that snapshot."""
    lifetime_ms: int | None = None
    """What the caller asked for that snapshot."""
    reason: str | None = None
    """Why, when it was not asked for."""


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
    """A scope of names. Two teams may use the same project name and never meet."""

    id: str
    """Ours, and what every other row refers to."""
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
    """Accurate to a minute, so that using a token is not a write each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    id: str
    """Internal and never reused, unlike the name: what outlives a sandbox is not taken for its namesake's."""
    project: str
    name: str
    status: SessionStatus = field(metadata=_SESSION_STATUS.column)
    """That of the current session, kept equal to it by `sandkeep.store.sessions`."""
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
    """Lifetime given to new snapshots; 0 is for ever, ``None`` the server's default."""
    keep_last_snapshots: KeepLast | None = field(default=None, metadata=_KEEP_LAST.column)
    region: str
    failover_regions: tuple[str, ...] = field(default=(), metadata=TUPLE.column)
    total_active_cpu_ms: int = 0
    """Totals cover ended sessions; the current one has its own."""
    total_duration_ms: int = 0
    total_ingress_bytes: int = 0
    total_egress_bytes: int = 0
    destroying: Removal | None = field(default=None, metadata=_REMOVAL.column)
    """Set while it is being destroyed. To callers it is gone from then on, but its name is not free yet."""
    source: Mapping[str, Any] | None = field(default=None, metadata=JSON.column)
    """What its files started with, without credentials; ``None`` for its image alone."""
    exact_resources: bool = field(default=False, metadata=BOOL.column)
    """Its sessions start only where the host enforces or watches the limits of processors and memory."""
    destroy_on_stop: bool = field(default=False, metadata=BOOL.column)
    delete_after_ms: int | None = None
    delete_at_ms: int | None = None
    """When the server destroys it: ``delete_after_ms`` after its creation, or after a change of that."""
    host_ports: tuple[StoredHostPort, ...] = field(default=(), metadata=_HOST_PORTS.column)


class SandboxChanges(TypedDict, total=False):
    """The columns of a sandbox that may change after creation."""

    image: str
    runtime: str | None
    vcpus: int
    memory_mb: int
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
    """Raised when another host takes the session over, so that late messages of the former are known."""
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
    """Topmost layer below the private upper; ``None`` when the session started from the bare image."""
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
    """What isolates it and which limits are enforced, as the host reported."""
    stop_reason: str | None = None
    active_cpu_ms: int = 0
    duration_ms: int = 0
    ingress_bytes: int = 0
    egress_bytes: int = 0
    ending: Ending | None = field(default=None, metadata=_ENDING.column)
    """Set from the moment it begins to end."""
    persistent: bool = field(default=False, metadata=BOOL.column)
    """Whether its sandbox was persistent when it started."""
    rolled_back: bool = field(default=False, metadata=BOOL.column)
    """A caller chose the current snapshot while it ran: the snapshot of its end does not become current."""


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
    """Who it runs as, when not the sandbox's own user."""
    status: ProcessStatus = field(default=ProcessStatus.RUNNING, metadata=Codec(str, ProcessStatus).column)
    exit_code: int | None = None
    started_ms: int
    finished_ms: int | None = None
    duration_ms: int | None = None
    reason: str | None = None
    """Why it failed, was killed or was lost."""


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
    """When it became safe from loss of power."""
    method: SnapshotMethod = field(metadata=Codec(str, SnapshotMethod).column)
    unwanted: bool = field(default=False, metadata=BOOL.column)
    """It was to go with its sandbox and others used it. It goes with the last of those."""
    runtime: str | None = None
    cwd: str | None = None
    """Both of the session that made it; ``None`` where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    id: str
    project: str
    name: str
    region: str
    max_size_bytes: int
    layer: str | None = None
    """Topmost layer of its content; ``None`` until a session has written it."""
    parent: str | None = None
    root: str | None = None
    current_session: str | None = None
    """The active session that has it mounted read-write."""
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
    """What the sandbox was called, which may be gone by now."""
