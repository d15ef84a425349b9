"""Resources as responses show them.

Fields without a default are required by some client. Optional ones are left out when unknown, never null;
``exitCode`` and ``pagination.next`` alone are always there, null when there is nothing to say. Identifiers
are ``sbx_…`` for sessions, ``cmd_…`` for processes and ``snap_…`` for snapshots.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from sandkeep.types import (
    Mount,
    MountMode,
    ProcessStatus,
    SandboxSpec,
    SessionStatus,
    SnapshotMethod,
    SnapshotRetention,
    SnapshotStatus,
    Tier,
    milliseconds,
)
from sandkeep.wire.base import Object, known
from sandkeep.wire.policies import PolicyObject, shown


class Pagination(Object, kw_only=True, frozen=True):
    count: int
    """Items in this page."""
    next: str | None
    """Comes back as ``cursor``; null on the last page."""


class MountObject(Object, kw_only=True, frozen=True):
    drive: str
    mode: MountMode


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


class SandboxObject(Object, kw_only=True, frozen=True):
    name: str
    current_session_id: str
    status: SessionStatus
    persistent: bool
    created_at: int
    updated_at: int
    status_updated_at: int | UnsetType = UNSET
    project_id: str | UnsetType = UNSET
    """As the caller spelled it: clients compare it with their own."""
    region: str | UnsetType = UNSET
    failover_regions: list[str] | UnsetType = UNSET
    vcpus: int | UnsetType = UNSET
    memory: int | UnsetType = UNSET
    image: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    timeout: int | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    cwd: str | UnsetType = UNSET
    network_policy: PolicyObject | UnsetType = UNSET
    network_id: str | UnsetType = UNSET
    current_snapshot_id: str | UnsetType = UNSET
    snapshot_expiration: int | UnsetType = UNSET
    keep_last_snapshots: RetentionObject | UnsetType = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    mounts: dict[str, MountObject] | UnsetType = UNSET
    total_egress_bytes: int | UnsetType = UNSET
    total_ingress_bytes: int | UnsetType = UNSET
    total_active_cpu_duration_ms: int | UnsetType = UNSET
    total_duration_ms: int | UnsetType = UNSET
    tier: Tier | UnsetType = UNSET


class SessionObject(Object, kw_only=True, frozen=True):
    id: str
    status: SessionStatus
    memory: int
    vcpus: int
    timeout: int
    """Grows when the session is extended."""
    region: str
    cwd: str
    runtime: str
    """Always there: older clients refuse a session without it."""
    requested_at: int
    created_at: int
    updated_at: int
    source_sandbox_name: str | UnsetType = UNSET
    project_id: str | UnsetType = UNSET
    started_at: int | UnsetType = UNSET
    requested_stop_at: int | UnsetType = UNSET
    stopped_at: int | UnsetType = UNSET
    aborted_at: int | UnsetType = UNSET
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
    """What stands between the session and the host, by name."""
    limits: dict[str, str] | UnsetType = UNSET
    """Which resource limits are enforced, watched or absent."""


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
    """Why a process is ``failed``, ``killed`` or ``lost``."""


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
    """Since when it would survive a power failure."""


class TreeNode(Object, kw_only=True, frozen=True):
    snapshot: SnapshotObject
    siblings: list[SnapshotObject]
    count: str
    """The node and its siblings; a ``+`` at the end when there are more."""


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
    """The part of a :class:`SandboxObject` that its configuration decides; environment values stay out."""
    expiration = spec.snapshot_expiration
    return known(
        persistent=spec.persistent,
        region=spec.region,
        failover_regions=list(spec.failover_regions) or None,
        vcpus=spec.resources.vcpus,
        memory=spec.resources.memory_mb,
        timeout=milliseconds(spec.timeout),
        runtime=spec.runtime,
        network_policy=shown(spec.network_policy),
        network_id=spec.network_id,
        snapshot_expiration=None if expiration is None else milliseconds(expiration),
        keep_last_snapshots=None if spec.retention is None else retention_object(spec.retention),
        tags=dict(spec.tags),
        mounts={path: mount_object(mount) for path, mount in spec.mounts.items()},
    )


def retention_object(retention: SnapshotRetention) -> RetentionObject:
    expiration = retention.expiration
    return RetentionObject(
        count=retention.count,
        expiration=UNSET if expiration is None else milliseconds(expiration),
        delete_evicted=retention.delete_evicted,
    )


def mount_object(mount: Mount) -> MountObject:
    return MountObject(drive=mount.drive, mode=mount.mode)


def tree_node(snapshot: SnapshotObject, siblings: list[SnapshotObject], *, more: bool = False) -> TreeNode:
    """A node of the snapshot tree; ``more`` says that siblings were left out."""
    return TreeNode(snapshot=snapshot, siblings=siblings, count=f"{1 + len(siblings)}{'+' if more else ''}")
