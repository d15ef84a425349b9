"""Resources as responses show them.

Fields without a default are required by some client. Optional ones are left out if unknown, never null; only
``exitCode`` and ``pagination.next`` are always present, and may be null. Identifiers are ``sbx_…`` for
sessions, ``cmd_…`` for processes and ``snap_…`` for snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

from msgspec import UNSET, Struct, UnsetType

from sandkeep.checks import milliseconds
from sandkeep.policy import NetworkPolicy
from sandkeep.policy_json import PolicyObject, shown
from sandkeep.spec import (
    OPTIONS,
    HostPort,
    Mount,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    in_vendor_words,
    vcpus_of,
)
from sandkeep.states import (
    EndReason,
    MountMode,
    ProcessStatus,
    SessionStatus,
    SnapshotMethod,
    SnapshotStatus,
    Tier,
)
from sandkeep.wire.base import Milliseconds, Object, known


class Pagination(Object, kw_only=True, frozen=True):
    count: int
    """Items in this page."""
    next: str | None
    """Value for the ``cursor`` of the next request; null on the last page."""


class MountObject(Object, kw_only=True, frozen=True):
    drive: str
    mode: MountMode


class HostPortObject(Object, kw_only=True, frozen=True):
    port: int
    name: str


class RetentionObject(Object, kw_only=True, frozen=True):
    count: int
    expiration: int | UnsetType = UNSET
    delete_evicted: bool


class TransferObject(Object, kw_only=True, frozen=True):
    ingress: int
    egress: int


class RouteObject(Object, kw_only=True, frozen=True):
    url: str
    subdomain: str
    port: int
    system: bool | UnsetType = UNSET
    token: str | UnsetType = UNSET
    """Token that a request must send, if the operator protects routes."""
    address: str | UnsetType = UNSET
    """Address and port to connect to, with the URL's host as ``Host``, if the URL has a name that few
    resolvers know."""


class LimitsObject(Object, kw_only=True, frozen=True):
    """Limits that were asked for by name, each independent of the others."""

    cpus: float | UnsetType = UNSET
    memory_mb: int | UnsetType = UNSET
    disk_mb: int | UnsetType = UNSET
    pids: int | UnsetType = UNSET


class SandboxSettings(Struct, rename="camel", kw_only=True, frozen=True):
    """The options of a sandbox that requests and responses spell alike."""

    timeout: Milliseconds | UnsetType = UNSET
    idle_timeout: Milliseconds | UnsetType = UNSET
    """Zero in a request, and absent in a response: never. Official clients do not know it."""
    destroy_on_stop: bool | UnsetType = UNSET
    """Official clients do not know this one and the next."""
    delete_after: Milliseconds | UnsetType = UNSET
    """Zero in a request, and absent in a response: never."""
    tags: dict[str, str] | UnsetType = UNSET
    snapshot_expiration: Milliseconds | UnsetType = UNSET
    region: str | UnsetType = UNSET
    failover_regions: list[str] | UnsetType = UNSET


class SandboxObject(SandboxSettings, Object, kw_only=True, frozen=True):
    name: str
    current_session_id: str
    status: SessionStatus
    persistent: bool
    created_at: int
    updated_at: int
    status_updated_at: int | UnsetType = UNSET
    project_id: str | UnsetType = UNSET
    """As the caller spelled it: clients compare it with their own spelling."""
    vcpus: int | UnsetType = UNSET
    """Processors, rounded up to a whole number."""
    memory: int | UnsetType = UNSET
    resources: LimitsObject | UnsetType = UNSET
    """What was asked for, if that is more than ``vcpus`` and ``memory`` can say; official clients do not know
    it."""
    exact_resources: bool | UnsetType = UNSET
    """Sessions start only where the host enforces or watches these limits; absent: they are best effort."""
    image: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    delete_at: int | UnsetType = UNSET
    """When the server destroys it, if it has a ``delete_after``."""
    cwd: str | UnsetType = UNSET
    network_policy: PolicyObject | UnsetType = UNSET
    network_id: str | UnsetType = UNSET
    host_ports: list[HostPortObject] | UnsetType = UNSET
    """Ports of the server's machine that it may reach by a name; absent: none. Official clients do not know
    it."""
    current_snapshot_id: str | UnsetType = UNSET
    keep_last_snapshots: RetentionObject | UnsetType = UNSET
    mounts: dict[str, MountObject] | UnsetType = UNSET
    total_egress_bytes: int | UnsetType = UNSET
    total_ingress_bytes: int | UnsetType = UNSET
    total_active_cpu_duration_ms: int | UnsetType = UNSET
    total_duration_ms: int | UnsetType = UNSET
    tier: Tier | UnsetType = UNSET
    damage: str | UnsetType = UNSET
    """Why it cannot be resumed, if its files are damaged."""


class SessionObject(Object, kw_only=True, frozen=True):
    id: str
    status: SessionStatus
    memory: int
    vcpus: int
    resources: LimitsObject | UnsetType = UNSET
    """As that of the sandbox."""
    timeout: int
    """Grows when the session is extended."""
    idle_timeout: int | UnsetType = UNSET
    """How long it may be unused before the server stops it. Absent: for ever."""
    region: str
    cwd: str
    runtime: str
    """Always present: older clients refuse a session without it."""
    requested_at: int
    created_at: int
    updated_at: int
    source_sandbox_name: str | UnsetType = UNSET
    project_id: str | UnsetType = UNSET
    started_at: int | UnsetType = UNSET
    requested_stop_at: int | UnsetType = UNSET
    stopped_at: int | UnsetType = UNSET
    aborted_at: int | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    """Why it ended; ``idle`` after its idle timeout."""
    snapshotted_at: int | UnsetType = UNSET
    duration: int | UnsetType = UNSET
    source_snapshot_id: str | UnsetType = UNSET
    interactive_port: int | UnsetType = UNSET
    network_policy: PolicyObject | UnsetType = UNSET
    network_id: str | UnsetType = UNSET
    active_cpu_duration_ms: int | UnsetType = UNSET
    network_transfer: TransferObject | UnsetType = UNSET
    tier: Tier | UnsetType = UNSET
    barriers: dict[str, str] | UnsetType = UNSET
    """Names of the barriers between the session and the host."""
    limits: dict[str, str] | UnsetType = UNSET
    """Which resource limits are enforced, watched or missing."""


class CommandObject(Object, kw_only=True, frozen=True):
    id: str
    name: str
    args: list[str]
    cwd: str
    session_id: str
    started_at: int
    exit_code: int | None
    """Null while the process runs."""
    duration_ms: int | UnsetType = UNSET
    status: ProcessStatus | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    """Why a process is ``failed``, ``killed`` or ``lost``, in words."""
    end_reason: EndReason | UnsetType = UNSET
    """How it ended; absent while it runs. Official clients do not know it."""
    attach_stdin: bool | UnsetType = UNSET
    """Present if it was started with a standard input that clients write to."""
    terminal: bool | UnsetType = UNSET
    """Present if it runs on a terminal."""
    metadata: dict[str, str] | UnsetType = UNSET
    """The keys and values it was started with; absent if there are none."""


class SnapshotObject(Object, kw_only=True, frozen=True):
    id: str
    source_session_id: str
    region: str
    status: SnapshotStatus
    size_bytes: int
    created_at: int
    updated_at: int
    regions: list[str] | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    """Absent: never."""
    last_used_at: int | UnsetType = UNSET
    creation_method: SnapshotMethod | UnsetType = UNSET
    parent_id: str | UnsetType = UNSET
    synced_at: int | UnsetType = UNSET
    """Since when it survives a power failure."""
    comment: str | UnsetType = UNSET
    """What the caller who had it taken says of it."""


class TreeNode(Object, kw_only=True, frozen=True):
    snapshot: SnapshotObject
    siblings: list[SnapshotObject]
    count: str
    """Number of the node and its siblings; ends with ``+`` if there are more."""


class DriveObject(Object, kw_only=True, frozen=True):
    id: str
    name: str
    project_id: str
    region: str
    max_size_bytes: int
    created_at: int
    updated_at: int
    current_session_id: str | UnsetType = UNSET
    current_sandbox_name: str | UnsetType = UNSET
    parent_drive_id: str | UnsetType = UNSET
    root_drive_id: str | UnsetType = UNSET


def spec_fields(spec: SandboxSpec) -> dict[str, Any]:
    """Return the part of a :class:`SandboxObject` that its configuration decides.

    The environment and the ports stay out, and the sandbox's name and image, which its row decides.
    """
    found: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name not in _OF_THE_ROW:
            value = _shown(getattr(spec, name))
            if name in _SHOWN_IF_TRUE:
                value = value or None
            found |= zip(option.shown, value if isinstance(value, tuple) else (value,), strict=True)
    return known(**found)


_SHOWN_IF_TRUE = frozenset({"destroy_on_stop"})
"""Options that official clients do not know, and do not see unless they are set."""
_OF_THE_ROW = frozenset({"name", "image", *(name for name, option in OPTIONS.items() if not option.shown)})


def _shown(value: Any) -> Any:
    """Return a field of a specification as responses show it; a tuple for several fields of the object."""
    match value:
        case timedelta():
            return milliseconds(value)
        case Resources():
            return (
                vcpus_of(value),
                value.memory_mb,
                limits_object(value),
                (value.exact and bool(value.asked)) or None,
            )
        case NetworkPolicy():
            return shown(value)
        case SnapshotRetention():
            return retention_object(value)
        case tuple():
            return [host_port_object(item) if isinstance(item, HostPort) else item for item in value] or None
        case Mapping():
            return {
                key: mount_object(item) if isinstance(item, Mount) else item for key, item in value.items()
            }
    return value


def limits_object(resources: Resources) -> LimitsObject | None:
    """Return the limits that were asked for, unless the fields of official clients say all about them."""
    return None if in_vendor_words(resources) else LimitsObject(**cast("dict[str, Any]", resources.asked))


def retention_object(retention: SnapshotRetention) -> RetentionObject:
    expiration = retention.expiration
    return RetentionObject(
        count=retention.count,
        expiration=UNSET if expiration is None else milliseconds(expiration),
        delete_evicted=retention.delete_evicted,
    )


def host_port_object(granted: HostPort) -> HostPortObject:
    return HostPortObject(port=granted.port, name=granted.name)


def mount_object(mount: Mount) -> MountObject:
    return MountObject(drive=mount.drive, mode=mount.mode)


def tree_node(snapshot: SnapshotObject, siblings: list[SnapshotObject], *, more: bool = False) -> TreeNode:
    """Return a node of the snapshot tree; ``more``: further siblings were left out."""
    return TreeNode(snapshot=snapshot, siblings=siblings, count=f"{1 + len(siblings)}{'+' if more else ''}")
