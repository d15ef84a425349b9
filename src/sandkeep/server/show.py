"""Rows of the store as the objects clients see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET

from sandkeep.engine import policies
from sandkeep.engine.engine import Engine
from sandkeep.store import Page
from sandkeep.store.rows import (
    Drive,
    Event,
    Process,
    ProcessStatus,
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
)
from sandkeep.types import FileKind, Tier
from sandkeep.wire.additions import EventObject, FileObject, ProcessObject, UsageObject
from sandkeep.wire.base import known
from sandkeep.wire.objects import (
    CommandObject,
    DriveObject,
    Pagination,
    RouteObject,
    SandboxObject,
    SessionObject,
    SnapshotObject,
    TransferObject,
    spec_fields,
)
from sandkeep.wire.policies import shown as shown_policy

KILLED_EXIT_CODE: Final = 137
"""Of a process that ended with its session: nobody saw its exit, but clients need a number."""


def sandbox(engine: Engine, row: Sandbox, *, project: str, session: Session | None = None) -> SandboxObject:
    """``session``: the current one, where it is at hand."""
    if session is None and row.current_session is not None:
        session = engine.store.sessions.find(row.current_session)
    deadline = session.deadline_ms if session is not None and row.status is SessionStatus.RUNNING else None
    return SandboxObject(
        name=row.name,
        current_session_id=row.current_session or "",
        status=row.status,
        created_at=row.created_ms,
        updated_at=row.updated_ms,
        status_updated_at=row.status_updated_ms,
        project_id=project,
        image=session.image if session is not None else row.image,
        cwd=row.cwd,
        total_egress_bytes=row.total_egress_bytes,
        total_ingress_bytes=row.total_ingress_bytes,
        total_active_cpu_duration_ms=row.total_active_cpu_ms,
        total_duration_ms=row.total_duration_ms,
        **known(
            expires_at=deadline,
            current_snapshot_id=row.current_snapshot,
            tier=Tier(session.driver) if session is not None else None,
        ),
        **spec_fields(engine.sandboxes.spec_of(row)),
    )


def session(row: Session, *, project: str) -> SessionObject:
    ended = row.status in (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)
    return SessionObject(
        id=row.id,
        status=row.status,
        memory=row.memory_mb,
        vcpus=row.vcpus,
        timeout=row.timeout_ms,
        region=row.region,
        cwd=row.cwd,
        runtime=row.runtime or row.image,
        requested_at=row.requested_ms,
        created_at=row.created_ms,
        updated_at=row.updated_ms,
        source_sandbox_name=row.sandbox_name,
        project_id=project,
        network_policy=shown_policy(policies.from_stored(row.network_policy)),
        tier=Tier(row.driver),
        **known(
            started_at=row.started_ms,
            requested_stop_at=row.requested_stop_ms,
            stopped_at=row.stopped_ms,
            aborted_at=row.aborted_ms,
            snapshotted_at=row.snapshotted_ms,
            duration=row.duration_ms if ended else None,
            source_snapshot_id=row.source_snapshot,
            interactive_port=row.interactive_port,
            network_id=row.network_id,
            active_cpu_duration_ms=row.active_cpu_ms if ended else None,
            network_transfer=TransferObject(ingress=row.ingress_bytes, egress=row.egress_bytes)
            if ended
            else None,
            barriers=_states(row.barriers.get("barriers")),
            limits=_states(row.barriers.get("limits")),
        ),
    )


def _states(reported: Mapping[str, Mapping[str, Any]] | None) -> dict[str, str] | None:
    return None if reported is None else {name: str(how["state"]) for name, how in reported.items()}


def routes(engine: Engine, sandbox: Sandbox | None) -> list[RouteObject]:
    """Where the ports of a sandbox are reached; of one that is gone, nowhere."""
    if sandbox is None:
        return []
    found = engine.network.routes(sandbox)
    return [RouteObject(url=route.url, subdomain=route.subdomain, port=route.port) for route in found]


def command(row: Process) -> CommandObject:
    return CommandObject(**_command_fields(row))


def process(row: Process) -> ProcessObject:
    return ProcessObject(
        kind=row.kind.value,
        **known(user=row.username, finished_at=row.finished_ms),
        **_command_fields(row),
    )


def _command_fields(row: Process) -> dict[str, Any]:
    code = row.exit_code
    if code is None and row.status is not ProcessStatus.RUNNING:
        code = KILLED_EXIT_CODE
    return {
        "id": row.id,
        "name": row.name,
        "args": list(row.args),
        "cwd": row.cwd,
        "session_id": row.session,
        "started_at": row.started_ms,
        "exit_code": code,
        "status": row.status,
        **known(duration_ms=row.duration_ms, reason=row.reason),
    }


def snapshot(row: Snapshot) -> SnapshotObject:
    return SnapshotObject(
        id=row.id,
        source_session_id=row.source_session,
        region=row.region,
        regions=[row.region],
        status=row.status,
        size_bytes=row.size_bytes,
        created_at=row.created_ms,
        updated_at=row.updated_ms,
        creation_method=row.method,
        **known(
            expires_at=row.expires_ms,
            last_used_at=row.last_used_ms,
            parent_id=row.parent,
            synced_at=row.synced_ms,
        ),
    )


def drive(row: Drive, *, project: str, sandbox_name: str | None) -> DriveObject:
    return DriveObject(
        id=row.id,
        name=row.name,
        project_id=project,
        region=row.region,
        max_size_bytes=row.max_size_bytes,
        created_at=row.created_ms,
        updated_at=row.updated_ms,
        current_session_id=row.current_session or UNSET,
        current_sandbox_name=sandbox_name or UNSET,
        parent_drive_id=row.parent or UNSET,
        root_drive_id=row.root or UNSET,
    )


def pagination(page: Page[object]) -> Pagination:
    return Pagination(count=len(page.items), next=page.next)


def file(entry: Mapping[str, Any]) -> FileObject:
    target = entry.get("target")
    fields = {
        name: entry[name] for name in ("name", "size", "mode", "uid", "gid", "mtime_ns", "ino", "nlink")
    }
    return FileObject(kind=FileKind(entry["kind"]), target=UNSET if target is None else target, **fields)


def event(row: Event) -> EventObject:
    return EventObject(
        id=row.id,
        sequence=row.sequence,
        time=row.time_ms,
        kind=row.kind,
        actor=row.actor or UNSET,
        sandbox_name=row.sandbox_name or UNSET,
        session_id=row.session or UNSET,
        data=dict(row.data),
    )


def usage(row: Session, live: Mapping[str, Any]) -> UsageObject:
    """``live``: what the host says of a session that runs."""
    return UsageObject(
        active_cpu_duration_ms=live.get("cpu_ms") or row.active_cpu_ms,
        duration_ms=live.get("duration_ms") or row.duration_ms,
        ingress_bytes=row.ingress_bytes,
        egress_bytes=row.egress_bytes,
        **_now(live),
    )


def total_usage(row: Sandbox, live: Mapping[str, Any]) -> UsageObject:
    return UsageObject(
        active_cpu_duration_ms=row.total_active_cpu_ms + (live.get("cpu_ms") or 0),
        duration_ms=row.total_duration_ms + (live.get("duration_ms") or 0),
        ingress_bytes=row.total_ingress_bytes,
        egress_bytes=row.total_egress_bytes,
        **_now(live),
    )


def _now(live: Mapping[str, Any]) -> dict[str, Any]:
    names = ("memory_bytes", "memory_peak_bytes", "pids", "oom_kills")
    return known(**{name: live.get(name) for name in names})
