"""Sandboxes: what callers name. Create, look, resume, fork, change, destroy.

Each operation is one critical section under the sandbox's lock, so concurrent callers see some order of
whole operations: one creates and the others learn the name is taken, one resumes and the others get its
session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from sandkeep.engine import policies, sources
from sandkeep.engine.context import Context
from sandkeep.engine.drives import collect
from sandkeep.engine.lifecycle import Answer, Operation, require
from sandkeep.engine.names import check_name, new_id, new_name
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.snapshots import Snapshots
from sandkeep.errors import (
    InvalidRequest,
    LimitReached,
    NameTaken,
    NotFound,
    SandkeepError,
    SnapshotGone,
    TimeoutInvalid,
)
from sandkeep.store import PageRequest
from sandkeep.store.rows import (
    TERMINAL,
    KeepLast,
    Mount,
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
    SnapshotStatus,
)
from sandkeep.types import (
    GitSource,
    MountMode,
    NetworkPolicy,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    TarballSource,
    milliseconds,
)
from sandkeep.types import Mount as MountValue

_DEFAULT_CWD = "/vercel/sandbox"


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox with its current session. ``resumed``: this call started the session of an existing one."""

    sandbox: Sandbox
    session: Session
    resumed: bool


class Sandboxes:
    def __init__(self, context: Context, sessions: Sessions, snapshots: Snapshots) -> None:
        self._context = context
        self._sessions = sessions
        self._snapshots = snapshots
        self._store = context.store

    # --- create ------------------------------------------------------------------------------------------

    async def create(self, project: str, spec: SandboxSpec) -> Started:
        """Make a sandbox and start its first session. When that fails there is no sandbox."""
        name = check_name(spec.name) if spec.name is not None else new_name()
        async with self._context.lock(project, name):
            return await self._create_locked(project, name, spec)

    async def _create_locked(self, project: str, name: str, spec: SandboxSpec) -> Started:
        self._check_timeout(spec.timeout)
        self._context.network.check(project, spec.network_policy)
        self._check_room(project, name)
        source = self._source_snapshot(project, spec)
        image = source.image if source is not None else self._image(spec)
        self._check_mounts(project, spec)
        sandbox = self._row(project, name, spec, image, source)
        with self._store.transaction():
            self._store.sandboxes.add(sandbox)
            self._context.record(
                "sandbox.created", project, sandbox=(sandbox.id, name), image=image, source=_origin(spec)
            )
            session = self._sessions.record_locked(
                sandbox, source=source, interactive=spec.interactive, first=True
            )
        filling = isinstance(spec.source, GitSource | TarballSource)
        fill = partial(sources.fill, self._context, spec=spec) if filling else None
        try:
            session = await self._sessions.boot_locked(sandbox, session, fill)
        except BaseException:
            await self._undo_create(sandbox, session)
            raise
        return Started(
            self._store.sandboxes.get(project, name), self._sessions.get(project, session.id), False
        )

    async def _undo_create(self, sandbox: Sandbox, session: Session) -> None:
        current = self._store.sessions.find(session.id)
        if current is not None and current.status not in TERMINAL:
            await self._sessions.stop_locked(current, keep=False)
        self._context.forget(sandbox)
        self._remove_sessions([session.id])

    def _check_room(self, project: str, name: str) -> None:
        if self._store.sandboxes.find(project, name) is not None:
            raise NameTaken(f"a sandbox named {name} exists", name=name)
        most = self._context.settings.max_sandboxes
        if self._store.sandboxes.count(project) >= most:
            raise LimitReached(f"the project has {most} sandboxes", limit="sandboxes", value=most)
        self._sessions.check_room(project)

    def _check_timeout(self, timeout: timedelta) -> None:
        most = self._context.settings.max_timeout_ms
        if milliseconds(timeout) > most:
            raise TimeoutInvalid(f"a session lives {most} ms at most", field="timeout", maximum_ms=most)

    def _source_snapshot(self, project: str, spec: SandboxSpec) -> Snapshot | None:
        if not isinstance(spec.source, SnapshotSource):
            return None
        return self.live_snapshot(project, spec.source.snapshot_id)

    def live_snapshot(self, project: str, snapshot: str) -> Snapshot:
        """A snapshot of the project that can be started from."""
        found = self._store.snapshots.find(snapshot)
        if found is None or found.project != project:
            raise NotFound(f"no snapshot {snapshot}", kind="snapshot", name=snapshot)
        if found.status is not SnapshotStatus.CREATED:
            raise SnapshotGone(f"snapshot {snapshot} is {found.status}", kind="snapshot", name=snapshot)
        return found

    def _image(self, spec: SandboxSpec) -> str:
        """The local image a runtime or image name stands for; unknown names fail when it is looked up."""
        settings = self._context.settings
        asked = spec.image or spec.runtime
        if asked is None:
            return settings.default_image
        known = settings.images.get(asked) or settings.images.get(asked.removesuffix(":latest"))
        if known is not None:
            return known
        if spec.runtime is not None:
            raise InvalidRequest(
                f"no runtime named {spec.runtime}; known: {', '.join(sorted(settings.images))}",
                field="runtime",
            )
        return asked

    def _check_mounts(self, project: str, spec: SandboxSpec) -> None:
        for path, mount in spec.mounts.items():
            if self._store.drives.find(project, mount.drive) is None:
                raise NotFound(
                    f"no drive named {mount.drive} to mount at {path}", kind="drive", name=mount.drive
                )

    def _row(
        self, project: str, name: str, spec: SandboxSpec, image: str, source: Snapshot | None
    ) -> Sandbox:
        now = self._context.now_ms()
        return Sandbox(
            id=new_id("box", now_ms=now),
            project=project,
            name=name,
            status=SessionStatus.PENDING,
            status_updated_ms=now,
            created_ms=now,
            updated_ms=now,
            current_snapshot=source.id if source is not None else None,
            image=image,
            cwd=_DEFAULT_CWD,
            **columns(spec),
        )

    # --- look and resume ---------------------------------------------------------------------------------

    def get(self, project: str, name: str) -> Started:
        """The sandbox as it is. Never starts anything."""
        sandbox = self._store.sandboxes.get(project, name)
        if sandbox.current_session is None:
            raise NotFound(f"no sandbox named {name}", kind="sandbox", name=name)
        return Started(sandbox, self._sessions.get(project, sandbox.current_session), False)

    async def resume(self, project: str, name: str) -> Started:
        """The sandbox with a running session, started from its current snapshot if there was none."""
        self._store.sandboxes.get(project, name)
        async with self._context.lock(project, name):
            found = self.get(project, name)
            session = await self._sessions.truth_locked(found.session)
            if require(Operation.RESUME, session.status, session=session.id) is Answer.DONE:
                return Started(found.sandbox, session, False)
            sandbox = self._store.sandboxes.get(project, name)
            source = self._sessions.source_of(sandbox)
            self._sessions.check_room(project)
            interactive = session.interactive_port is not None
            fresh = self._sessions.record_locked(sandbox, source=source, interactive=interactive)
            fresh = await self._sessions.boot_locked(sandbox, fresh)
            return Started(self._store.sandboxes.get(project, name), fresh, True)

    # --- fork --------------------------------------------------------------------------------------------

    async def fork(self, project: str, source: str, changes: Mapping[str, Any]) -> Started:
        """A new sandbox with the source's configuration, starting from its current snapshot.

        What ``changes`` holds replaces what would be inherited, entirely.
        """
        async with self._context.lock(project, source):
            # A stop under way makes a snapshot: fork from that one.
            origin = self._store.sandboxes.get(project, source)
        spec = replace(self.spec_of(origin), source=None, **changes)
        snapshot = self._sessions.source_of(origin)
        if snapshot is not None and "image" not in changes:
            spec = replace(spec, source=SnapshotSource(snapshot.id), image=None, runtime=origin.runtime)
        return await self.create(project, spec)

    def spec_of(self, sandbox: Sandbox) -> SandboxSpec:
        """The configuration of a sandbox as the value it was made from."""
        keep = sandbox.keep_last_snapshots
        return SandboxSpec(
            name=sandbox.name,
            runtime=sandbox.runtime,
            image=None if sandbox.runtime else sandbox.image,
            ports=tuple(sandbox.ports),
            timeout=timedelta(milliseconds=sandbox.timeout_ms),
            resources=Resources(sandbox.vcpus, sandbox.memory_mb),
            persistent=sandbox.persistent,
            network_policy=policies.from_stored(sandbox.network_policy),
            network_id=sandbox.network_id,
            env=sandbox.env,
            tags=sandbox.tags,
            mounts={path: MountValue(m.drive, MountMode(m.mode)) for path, m in sandbox.mounts.items()},
            snapshot_expiration=_duration(sandbox.snapshot_expiration_ms),
            retention=None
            if keep is None
            else SnapshotRetention(keep.count, _duration(keep.expiration_ms), keep.delete_evicted),
            region=sandbox.region,
            failover_regions=tuple(sandbox.failover_regions),
        )

    # --- change ------------------------------------------------------------------------------------------

    async def update(
        self,
        project: str,
        name: str,
        changes: Mapping[str, Any],
        *,
        current_snapshot: str | None = None,
    ) -> Sandbox:
        """Change the configuration. It applies to sessions from the next one on; all of it or nothing."""
        async with self._context.lock(project, name):
            before = self._store.sandboxes.get(project, name)
            spec = replace(self.spec_of(before), **changes)
            self._check_timeout(spec.timeout)
            self._context.network.check(project, spec.network_policy)
            self._check_mounts(project, spec)
            wanted = {key: value for key, value in columns(spec).items() if key in _columns_of(changes)}
            if "runtime" in changes:
                wanted["image"] = self._image(replace(spec, image=None))
            if current_snapshot is not None:
                wanted["current_snapshot"] = self.live_snapshot(project, current_snapshot).id
            updated = self._store.sandboxes.update(project, name, now_ms=self._context.now_ms(), **wanted)
            if "retention" in changes or "snapshot_expiration" in changes:
                await self._snapshots.apply_retention(updated)
            if "ports" in changes:
                await self._publish_ports(updated)
            self._context.record(
                "sandbox.updated", project, sandbox=(updated.id, name), fields=sorted(wanted)
            )
            return updated

    async def _publish_ports(self, sandbox: Sandbox) -> None:
        """Ports come and go while a session runs."""
        active = self._store.sessions.active(sandbox.project, sandbox.id)
        if active is not None and active.status is SessionStatus.RUNNING:
            await self._context.network.publish(active)

    async def set_policy(self, project: str, session: str, policy: NetworkPolicy) -> Session:
        """Change what the running session may reach."""
        self._context.network.check(project, policy)
        found = await self._sessions.require(project, session, Operation.SET_POLICY)
        updated = self._store.sessions.update(
            project,
            found.id,
            now_ms=self._context.now_ms(),
            network_policy=policies.to_stored(policy),
        )
        await self._context.network.set_policy(updated)
        self._context.event("session.policy-changed", updated)
        return updated

    # --- destroy -----------------------------------------------------------------------------------------

    async def destroy(self, project: str, name: str, *, delete_orphan_snapshots: bool = False) -> Sandbox:
        """End and forget a sandbox, whatever its state; its name is free afterwards.

        Its snapshots stay unless asked otherwise, and those that something else uses stay in any case.
        """
        self._store.sandboxes.get(project, name)
        async with self._context.lock(project, name):
            sandbox = self._store.sandboxes.get(project, name)
            active = self._store.sessions.active(project, sandbox.id)
            if active is not None:
                await self._sessions.stop_locked(active, keep=False)
            orphans = self._store.snapshots.orphans(project, sandbox.id) if delete_orphan_snapshots else []
            ended = [row.id for row in self._all_sessions(project, sandbox)]
            sandbox = self._store.sandboxes.get(project, name)
            self._context.forget(sandbox)
        for snapshot in orphans:
            await self._snapshots.delete(project, snapshot.id)
        self._remove_sessions(ended)
        self._context.spawn(collect(self._context), "collect layers", finish=True)
        return sandbox

    def _all_sessions(self, project: str, sandbox: Sandbox) -> list[Session]:
        found: list[Session] = []
        cursor: str | None = None
        while True:
            page = self._store.sessions.page(
                project, PageRequest(limit=100, cursor=cursor), sandbox=sandbox.id
            )
            found += page.items
            cursor = page.next
            if cursor is None:
                return found

    def _remove_sessions(self, sessions: list[str]) -> None:
        """Delete what ended sessions left on disk, beside requests: nobody waits for it."""

        async def remove() -> None:
            for session in sessions:
                try:
                    await self._context.remove_session(session)
                except SandkeepError as error:
                    # The others do not have to stay for it; a later start removes this one.
                    self._context.log("removing a session failed", session=session, error=str(error))

        self._context.spawn(remove(), "remove sessions", finish=True)


def columns(spec: SandboxSpec) -> dict[str, Any]:
    """A specification as columns of the store."""
    keep = spec.retention
    return {
        "runtime": spec.runtime,
        "vcpus": spec.resources.vcpus,
        "memory_mb": spec.resources.memory_mb,
        "timeout_ms": milliseconds(spec.timeout),
        "persistent": spec.persistent,
        "env": dict(spec.env),
        "tags": dict(spec.tags),
        "ports": spec.ports,
        "network_policy": policies.to_stored(spec.network_policy),
        "network_id": spec.network_id,
        "mounts": {path: Mount(m.drive, str(m.mode)) for path, m in spec.mounts.items()},
        "snapshot_expiration_ms": _milliseconds(spec.snapshot_expiration),
        "keep_last_snapshots": None
        if keep is None
        else KeepLast(keep.count, _milliseconds(keep.expiration), keep.delete_evicted),
        "region": spec.region,
        "failover_regions": spec.failover_regions,
    }


_SPREAD = {
    "resources": ("vcpus", "memory_mb"),
    "timeout": ("timeout_ms",),
    "snapshot_expiration": ("snapshot_expiration_ms",),
    "retention": ("keep_last_snapshots",),
}


def _columns_of(changes: Mapping[str, Any]) -> set[str]:
    return {column for name in changes for column in _SPREAD.get(name, (name,))}


def _origin(spec: SandboxSpec) -> str | None:
    """What it was filled with, for people."""
    match spec.source:
        case SnapshotSource(snapshot_id):
            return snapshot_id
        case GitSource():
            return "git"
        case TarballSource():
            return "tarball"
    return None


def _duration(value_ms: int | None) -> timedelta | None:
    return None if value_ms is None else timedelta(milliseconds=value_ms)


def _milliseconds(value: timedelta | None) -> int | None:
    return None if value is None else milliseconds(value)
