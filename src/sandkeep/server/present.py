"""Rows of the store as the objects of responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET

from sandkeep.engine import configuration, policies
from sandkeep.engine.engine import Engine
from sandkeep.engine.files import FileStat, TreeEntry
from sandkeep.engine.sessions import Usage
from sandkeep.policy_json import shown as shown_policy
from sandkeep.shared.processrecord import OUT_OF_MEMORY, TIME_LIMIT
from sandkeep.spec import OPTIONS
from sandkeep.states import EndReason, FileKind, Tier
from sandkeep.store import Page
from sandkeep.store.rows import (
    Drive,
    Event,
    Process,
    ProcessKind,
    ProcessStatus,
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
)
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
    limits_object,
    spec_fields,
)
from sandkeep.wire.v1 import EventObject, FileObject, ProcessObject, TreeEntryObject, UsageObject

KILLED_EXIT_CODE: Final = 137
"""Exit code of a process that ended with its session: it is unknown, but clients need a number."""


_COPIES: Final = tuple(
    (shown, column)
    for option in OPTIONS.values()
    for shown, column in zip(option.shown, option.session_columns, strict=False)
    if shown in SessionObject.__struct_fields__ and shown not in ("runtime", "network_policy", "resources")
)
"""The fields of a session that show its own copies of its sandbox's options, and their columns."""


def sandbox(engine: Engine, row: Sandbox, *, project: str, session: Session | None = None) -> SandboxObject:
    """``session``: the current one, if the caller has it."""
    if session is None and row.current_session is not None:
        session = engine.store.sessions.find(row.current_session)
    damaged = engine.damage.of(row)
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
            delete_at=row.delete_at_ms,
            current_snapshot_id=row.current_snapshot,
            tier=Tier(session.driver) if session is not None else None,
            damage=None if damaged is None else damaged.why,
        ),
        **spec_fields(engine.sandboxes.spec_of(row, shown=True)),
    )


def session(row: Session, *, project: str) -> SessionObject:
    ended = row.status in (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)
    return SessionObject(
        id=row.id,
        status=row.status,
        cwd=row.cwd,
        runtime=row.runtime or row.image,
        requested_at=row.requested_ms,
        created_at=row.created_ms,
        updated_at=row.updated_ms,
        source_sandbox_name=row.sandbox_name,
        project_id=project,
        network_policy=shown_policy(policies.shown(row.network_policy)),
        tier=Tier(row.driver),
        **known(
            started_at=row.started_ms,
            requested_stop_at=row.requested_stop_ms,
            stopped_at=row.stopped_ms,
            aborted_at=row.aborted_ms,
            stop_reason=row.stop_reason,
            snapshotted_at=row.snapshotted_ms,
            duration=row.duration_ms if ended else None,
            source_snapshot_id=row.source_snapshot,
            interactive_port=row.interactive_port,
            active_cpu_duration_ms=row.active_cpu_ms if ended else None,
            network_transfer=TransferObject(ingress=row.ingress_bytes, egress=row.egress_bytes)
            if ended
            else None,
            barriers=_barriers(row.barriers.get("barriers")),
            limits=_states(row.barriers.get("limits")),
            resources=limits_object(configuration.resources(row)),
            **{shown: getattr(row, column) for shown, column in _COPIES},
        ),
    )


def _barriers(reported: Mapping[str, Mapping[str, Any]] | None) -> dict[str, str] | None:
    """Return the state of each barrier, and how it is built if there are several ways."""
    states = _states(reported)
    for name, how in (reported or {}).items():
        if states is not None and "how" in how:
            states[name] += f": {how['how']}"
    return states


def _states(reported: Mapping[str, Mapping[str, Any]] | None) -> dict[str, str] | None:
    return None if reported is None else {name: str(how["state"]) for name, how in reported.items()}


def routes(engine: Engine, sandbox: Sandbox | None) -> list[RouteObject]:
    """Return the URLs of a sandbox's ports; none for a deleted sandbox."""
    if sandbox is None:
        return []
    return [
        RouteObject(
            url=route.url,
            subdomain=route.subdomain,
            port=route.port,
            token=route.token or UNSET,
            address=route.connect_to or UNSET,
        )
        for route in engine.network.routes(sandbox)
    ]


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
        **known(
            duration_ms=row.duration_ms,
            reason=row.reason,
            end_reason=end_reason(row),
            attach_stdin=row.stdin or None,
            terminal=(row.kind is ProcessKind.INTERACTIVE) or None,
            metadata=dict(row.metadata) or None,
        ),
    }


_ENDS: Final = {
    ProcessStatus.EXITED: EndReason.EXITED,
    ProcessStatus.FAILED: EndReason.FAILED,
    ProcessStatus.KILLED: EndReason.KILLED,
    ProcessStatus.LOST: EndReason.LOST,
}
_CAUSES: Final = {OUT_OF_MEMORY: EndReason.OUT_OF_MEMORY, TIME_LIMIT: EndReason.TIMEOUT}


def end_reason(row: Process) -> EndReason | None:
    """Return how a process ended; ``None`` while it runs. The cause that a supervisor recorded goes first."""
    if row.status in (ProcessStatus.EXITED, ProcessStatus.KILLED) and row.reason in _CAUSES:
        return _CAUSES[row.reason]
    return _ENDS.get(row.status)


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
            comment=row.comment,
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


def file(entry: FileStat) -> FileObject:
    return FileObject(
        name=entry.name,
        kind=FileKind(entry.kind),
        size=entry.size,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        ino=entry.ino,
        nlink=entry.nlink,
        target=UNSET if entry.target is None else entry.target,
    )


def tree_entry(entry: TreeEntry) -> TreeEntryObject:
    return TreeEntryObject(
        path=entry.path,
        kind=FileKind(entry.kind),
        size=entry.size,
        mode=entry.mode,
        mtime_ns=entry.mtime_ns,
        **known(target=entry.target, digest=entry.digest, unreadable=entry.unreadable or None),
    )


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


def usage(row: Session, live: Usage) -> UsageObject:
    """``live`` is what the host says of a session that runs."""
    return UsageObject(
        active_cpu_duration_ms=live.cpu_ms or row.active_cpu_ms,
        duration_ms=live.duration_ms or row.duration_ms,
        ingress_bytes=row.ingress_bytes,
        egress_bytes=row.egress_bytes,
        **_now(live),
    )


def total_usage(row: Sandbox, live: Usage) -> UsageObject:
    return UsageObject(
        active_cpu_duration_ms=row.total_active_cpu_ms + (live.cpu_ms or 0),
        duration_ms=row.total_duration_ms + (live.duration_ms or 0),
        ingress_bytes=row.total_ingress_bytes,
        egress_bytes=row.total_egress_bytes,
        **_now(live),
    )


def _now(live: Usage) -> dict[str, Any]:
    return known(
        memory_bytes=live.memory_bytes,
        memory_peak_bytes=live.memory_peak_bytes,
        pids=live.pids,
        oom_kills=live.oom_kills,
    )
