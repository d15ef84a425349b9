"""Sandboxes, which callers name: create, get, resume, fork, change, destroy.

Each operation is one critical section under the sandbox's lock, so concurrent callers see some order of whole
operations: one creates and the others get `NameTaken`, one resumes and the others get its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from sandkeep.checks import milliseconds, refuse
from sandkeep.engine import configuration, limits, matching, policies, sources
from sandkeep.engine.context import Context, with_room
from sandkeep.engine.garbage import collect_soon
from sandkeep.engine.lifecycle import ACTIVE, Operation, Verdict
from sandkeep.engine.names import check_name, keyed_id, keyed_name, new_id, new_name
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.settings import MANAGED_IMAGES
from sandkeep.engine.snapshots import Snapshots
from sandkeep.errors import (
    HostCannot,
    InvalidRequest,
    LimitReached,
    NameTaken,
    NotFound,
    SandkeepError,
    SessionSnapshotting,
    SessionStopped,
    SessionStopping,
    SnapshotGone,
    TimeoutInvalid,
    WrongState,
)
from sandkeep.host.rootfs import VENDOR_WORK, WORK
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import GitSource, SandboxSpec, SnapshotSource, TarballSource
from sandkeep.states import Paths
from sandkeep.store import PageRequest
from sandkeep.store.rows import (
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
    SnapshotStatus,
)

_HOST = "host"
_AT_ONCE = 16
"""Number of sandboxes that upkeep destroys at the same time."""


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox with its current session. ``resumed``: this call started the session of an existing one."""

    sandbox: Sandbox
    session: Session
    resumed: bool
    left_out: str | None = None
    """For a fork: the running session of its source, whose changes it does not have."""


class Sandboxes:
    def __init__(self, context: Context, sessions: Sessions, snapshots: Snapshots) -> None:
        self._context = context
        self._sessions = sessions
        self._snapshots = snapshots
        self._store = context.store
        context.remove_soon = self._remove_soon

    # --- create ------------------------------------------------------------------------------------------

    async def create(
        self,
        project: str,
        spec: SandboxSpec,
        *,
        key: str | None = None,
        exact: bool = False,
        batch: str | None = None,
        operator: bool = False,
    ) -> Started:
        """Create a sandbox and start its first session. If that fails there is no sandbox.

        Of any number of calls with the same ``key`` one creates it and the others return it. ``exact``: a
        runtime means that version and no other. One of a ``batch`` stays only if the whole batch is made.
        ``operator``: the local user of the machine asks.
        """
        if spec.name is not None:
            name = check_name(spec.name)
        else:
            name = keyed_name(project, key) if key else new_name()
        async with self._context.lock(project, name):
            made = self.made(project, name, key)
            if made is not None:
                return made
            self._context.network.check_host_ports(spec.host_ports, operator=operator)
            return await self._create_locked(project, name, spec, key, exact=exact, batch=batch)

    def made(self, project: str, name: str, key: str | None) -> Started | None:
        """Return what an earlier call with the same key has created."""
        if key is None:
            return None
        found = self._store.sandboxes.find(project, name)
        return None if found is None or found.id != keyed_id("box", project, key) else self.get(project, name)

    async def _create_locked(
        self,
        project: str,
        name: str,
        spec: SandboxSpec,
        key: str | None = None,
        *,
        exact: bool = False,
        batch: str | None = None,
    ) -> Started:
        left = self._store.sandboxes.condemned(project, name)
        if left is not None:
            await self._remove_locked(left)
        self._check_timeout(spec.timeout)
        self._context.network.check(project, spec.network_policy)
        limits.check_allowed(self._context.settings, spec.resources)
        limits.check(self._context, spec.resources)
        self._check_room(project, name)
        source = self._source_snapshot(project, spec)
        if source is not None:
            image = source.image
            if exact and spec.runtime not in (None, source.runtime):
                refuse("runtime", f"is that of the snapshot, {source.runtime or 'which has none'}")
            spec = replace(spec, image=None, runtime=spec.runtime or source.runtime)
        else:
            image = await self._exact_image(spec) if exact and spec.runtime else self._image(spec)
        self._check_mounts(project, spec)
        cwd = await self._working_directory(project, spec, image, source)
        sandbox = replace(self.row(project, name, spec, image, source, cwd=cwd), batch=batch)
        if key is not None:
            sandbox = replace(sandbox, id=keyed_id("box", project, key))
        with self._store.transaction():
            self._store.sandboxes.add(sandbox)
            self._context.record(
                "sandbox.created",
                project,
                sandbox=(sandbox.id, name),
                image=image,
                runtime=spec.runtime,
                source=_origin(spec),
            )
            session = self._sessions.starting.record_locked(
                sandbox, source=source, interactive=spec.interactive, first=True
            )
        filling = isinstance(spec.source, GitSource | TarballSource)
        fill = partial(sources.fill, self._context, spec=spec) if filling else None
        try:
            session = await self._sessions.starting.boot_locked(sandbox, session, fill)
        except BaseException as error:
            await self._undo_create(sandbox)
            if isinstance(error, NotFound) and image != spec.image and source is None:
                raise self._not_configured(spec, image, error) from error
            raise
        return Started(
            self._store.sandboxes.get(project, name), self._sessions.get(project, session.id), False
        )

    def _not_configured(self, spec: SandboxSpec, image: str, error: NotFound) -> SandkeepError:
        """Return the error for a configured image that is missing: it is the operator's mistake."""
        if error.details.get("image") != image:
            return error
        asked = spec.image or spec.runtime
        setting = "default_image" if asked is None else f'images["{asked}"]'
        return HostCannot(
            f"the server's settings name an image that is not there: {setting} is {image}",
            part="image",
            why=error.message,
            hint=f"the operator can fetch it with 'sandkeep images pull {image}', or change settings.json",
        )

    async def _undo_create(self, sandbox: Sandbox) -> None:
        """Remove a sandbox whose first session did not start. Upkeep does what fails now."""
        try:
            await self._remove_locked(await self._condemn_locked(sandbox))
        except Exception as error:
            self._context.log("removing a sandbox failed", sandbox=sandbox.id, error=repr(error))

    def _check_room(self, project: str, name: str) -> None:
        if self._store.sandboxes.find(project, name) is not None:
            raise NameTaken(f"a sandbox named {name} exists", name=name)
        most = self._context.settings.max_sandboxes
        if self._store.sandboxes.count(project) >= most:
            raise LimitReached(f"the project has {most} sandboxes", limit="sandboxes", value=most)
        self._sessions.starting.check_room(project)

    def _check_timeout(self, timeout: timedelta) -> None:
        most = self._context.settings.max_timeout_ms
        if milliseconds(timeout) > most:
            raise TimeoutInvalid(f"a session lives {most} ms at most", field="timeout", maximum_ms=most)

    def _source_snapshot(self, project: str, spec: SandboxSpec) -> Snapshot | None:
        if not isinstance(spec.source, SnapshotSource):
            return None
        return self.live_snapshot(project, spec.source.snapshot_id)

    def live_snapshot(self, project: str, snapshot: str) -> Snapshot:
        """Return a snapshot of the project that a session can start from."""
        found = self._store.snapshots.find(snapshot)
        if found is None or found.project != project:
            raise NotFound(f"no snapshot {snapshot}", kind="snapshot", name=snapshot)
        if found.status is not SnapshotStatus.CREATED:
            raise SnapshotGone(f"snapshot {snapshot} is {found.status}", kind="snapshot", name=snapshot)
        return found

    def _image(self, spec: SandboxSpec) -> str:
        """Return the local image for a runtime or image name; unknown names fail when it is looked up.

        Runtimes that official clients name mean the machine's own programs, of any version.
        """
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

    async def _exact_image(self, spec: SandboxSpec) -> str:
        """Return the image with the requested runtime: one that the operator gave its name, or ``host``."""
        images = self._context.settings.images
        named = {
            name: image for name, image in images.items() if image != _HOST and name not in MANAGED_IMAGES
        }
        assert spec.runtime is not None
        if spec.runtime in named:
            return named[spec.runtime]
        host = await self._context.storage.get_image(_HOST)
        if spec.runtime in host.runtimes:
            return _HOST
        there = ", ".join(sorted({*named, *host.runtimes})) or "none"
        raise InvalidRequest(
            f"no runtime {spec.runtime} here; there is: {there}",
            field="runtime",
            hint="name an image that has it, such as one of a registry, or leave it out",
        )

    async def _working_directory(
        self, project: str, spec: SandboxSpec, image: str, source: Snapshot | None
    ) -> str:
        """Return where processes start: as in the snapshot, else by the image or the kind of client."""
        if source is not None and source.cwd is not None:
            return source.cwd
        vendors = spec.paths is not Paths.SANDKEEP
        if image == _HOST or (vendors and spec.runtime is not None):
            return VENDOR_WORK if vendors else WORK
        try:
            # Its names belong to the project; a snapshot's image is found without a name.
            owner = project if source is None else None
            found = await self._context.storage.get_image(image, project_id=owner)
        except NotFound:
            return VENDOR_WORK if vendors else WORK  # the start of the session will report it
        # An image that an earlier version added lacks sandkeep's directory, and its record says so.
        return VENDOR_WORK if vendors and not found.defaults.own_cwd else found.defaults.cwd

    def _check_mounts(self, project: str, spec: SandboxSpec) -> None:
        for path, mount in spec.mounts.items():
            if self._store.drives.find(project, mount.drive) is None:
                raise NotFound(
                    f"no drive named {mount.drive} to mount at {path}", kind="drive", name=mount.drive
                )

    def row(
        self,
        project: str,
        name: str,
        spec: SandboxSpec,
        image: str,
        source: Snapshot | None,
        *,
        cwd: str,
    ) -> Sandbox:
        """Return the row of a sandbox that is not stored yet."""
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
            cwd=cwd,
            source=matching.origin_of(spec.source),
            network_policy=self._context.policies.stored(project, spec.network_policy),
            delete_at_ms=_moment_after(now, spec.delete_after),
            **configuration.columns(spec),
        )

    # --- look and resume ---------------------------------------------------------------------------------

    def get(self, project: str, name: str) -> Started:
        """Return the sandbox unchanged; never start a session."""
        sandbox = self._store.sandboxes.get(project, name)
        if sandbox.current_session is None:
            raise NotFound(f"no sandbox named {name}", kind="sandbox", name=name)
        return Started(sandbox, self._sessions.get(project, sandbox.current_session), False)

    async def resume(self, project: str, name: str, *, asked: Mapping[str, Any] | None = None) -> Started:
        """Return the sandbox with a running session; start one from its current snapshot if there is none.

        With ``asked``, arguments of a `SandboxSpec`, only if it is configured that way.
        """
        self._store.sandboxes.get(project, name)
        async with self._context.lock(project, name):
            found = self.get(project, name)
            session, verdict = await self._sessions.ask_locked(Operation.RESUME, found.session)
            if verdict is Verdict.DONE:
                # The row says that it runs; only its supervisor knows whether that is still true.
                session = await self._sessions.refresh_locked(session)
                session, verdict = await self._sessions.ask_locked(Operation.RESUME, session)
            if asked:
                image = self._image(SandboxSpec(image=asked.get("image"), runtime=asked.get("runtime")))
                spec = self.spec_of(found.sandbox)
                stored = self._context.policies
                matching.require(found.sandbox, session, spec, asked, image=image, policies=stored)
            asked_resources = (asked or {}).get("resources")
            if verdict is Verdict.DONE:
                if asked_resources is not None:
                    limits.check_running(session, asked_resources)
                self._context.activity.touch(session.id)
                return Started(found.sandbox, session, False)
            sandbox = self._store.sandboxes.get(project, name)
            limits.check(self._context, configuration.resources(sandbox))
            if asked_resources is not None:
                limits.check(self._context, asked_resources)
            source = self._sessions.starting.source_of(sandbox)
            self._sessions.starting.check_room(project)
            interactive = session.interactive_port is not None
            fresh = self._sessions.starting.record_locked(sandbox, source=source, interactive=interactive)
            fresh = await self._sessions.starting.boot_locked(sandbox, fresh)
            return Started(self._store.sandboxes.get(project, name), fresh, True)

    # --- fork --------------------------------------------------------------------------------------------

    async def fork(
        self,
        project: str,
        source: str,
        changes: Mapping[str, Any],
        *,
        live: bool = False,
        key: str | None = None,
        operator: bool = False,
    ) -> Started:
        """Create a sandbox with the source's configuration, starting from its current snapshot.

        Values in ``changes`` replace inherited ones entirely. With ``live`` it starts from the current files
        of a running session of the source, by a checkpoint. ``key`` and ``operator`` are as for ``create``:
        ports of the host that it would inherit are refused to a caller who may not give them.
        """
        if live and key is not None:
            made = self.made(project, changes.get("name") or keyed_name(project, key), key)
            if made is not None:
                return made  # without another checkpoint
        spec, left_out = await self.forked(project, source, changes, live=live, key=key, operator=operator)
        return replace(await self.create(project, spec, key=key, operator=operator), left_out=left_out)

    async def forked(
        self,
        project: str,
        source: str,
        changes: Mapping[str, Any],
        *,
        live: bool = False,
        key: str | None = None,
        operator: bool = False,
    ) -> tuple[SandboxSpec, str | None]:
        """Return what a fork is made from, and the running session whose changes are not in it.

        With ``live`` this takes a checkpoint, unless the caller may not give the ports of the host that the
        fork would inherit.
        """
        if live and "image" in changes:
            refuse("live", "is of no use with an image, which the files would be of")
        async with self._context.lock(project, source):
            # A session that was ending makes a snapshot: fork from that one.
            session, _ = await self._sessions.ask_locked(Operation.FORK, self.get(project, source).session)
            running = session if session.status in ACTIVE else None
            origin = self._store.sandboxes.get(project, source)
        granted = changes.get("host_ports", self.spec_of(origin, shown=True).host_ports)
        self._context.network.check_host_ports(granted, operator=operator)
        checkpoint: Snapshot | None = None
        if live and running is not None:
            try:
                _, checkpoint = await self._sessions.checkpoint(project, running.id, key=key)
            except (SessionStopped, SessionStopping, SessionSnapshotting):
                async with self._context.lock(project, source):
                    origin = self._store.sandboxes.get(project, source)
        if "image" in changes:
            changes = {"runtime": None, **changes}  # a runtime is a name for an image
        paths = Paths.VERCEL if origin.cwd == VENDOR_WORK else Paths.SANDKEEP
        spec = replace(self.spec_of(origin), **{"source": None, "paths": paths, **changes})
        snapshot = checkpoint or self._sessions.starting.source_of(origin)
        if snapshot is not None and "image" not in changes:
            spec = replace(spec, source=SnapshotSource(snapshot.id), image=None, runtime=origin.runtime)
        missing = running is not None and not live and "image" not in changes
        return spec, running.id if running is not None and missing else None

    def spec_of(self, sandbox: Sandbox, *, shown: bool = False) -> SandboxSpec:
        """Return the configuration of a sandbox as a specification.

        With ``shown``, header values of its policy are not opened.
        """
        stored = sandbox.network_policy
        policy = policies.shown(stored) if shown else self._context.policies.policy(sandbox.project, stored)
        return SandboxSpec(
            name=sandbox.name,
            image=None if sandbox.runtime else sandbox.image,
            network_policy=policy,
            **configuration.fields(sandbox),
        )

    # --- change ------------------------------------------------------------------------------------------

    async def update(
        self,
        project: str,
        name: str,
        changes: Mapping[str, Any],
        *,
        current_snapshot: str | None = None,
        operator: bool = False,
    ) -> Sandbox:
        """Change the configuration, for sessions from the next one on; all of it or nothing.

        The next session starts from ``current_snapshot`` even if one is running now: the snapshot of that one
        is kept in addition. ``operator``: the local user of the machine asks.
        """
        async with self._context.lock(project, name):
            operation = Operation.UPDATE if current_snapshot is None else Operation.ROLL_BACK
            await self._sessions.ask_locked(operation, self.get(project, name).session)
            before = self._store.sandboxes.get(project, name)
            had = self.spec_of(before, shown=True)
            spec = replace(had, **changes)
            more = [each for each in spec.host_ports if each not in had.host_ports]
            self._context.network.check_host_ports(more, operator=operator)
            self._check_timeout(spec.timeout)
            if "resources" in changes:
                limits.check_allowed(self._context.settings, spec.resources)
                limits.check(self._context, spec.resources)
            self._context.network.check(project, spec.network_policy)
            self._check_mounts(project, spec)
            named = configuration.columns_of(changes)
            wanted = {key: value for key, value in configuration.columns(spec).items() if key in named}
            if "network_policy" in changes:
                wanted["network_policy"] = self._context.policies.stored(project, spec.network_policy)
            if "delete_after" in changes:
                wanted["delete_at_ms"] = _moment_after(self._context.now_ms(), spec.delete_after)
            if "runtime" in changes:
                wanted["image"] = self._image(replace(spec, image=None))
            if current_snapshot is not None:
                wanted["current_snapshot"] = self.live_snapshot(project, current_snapshot).id
            with self._store.transaction():
                updated = self._store.sandboxes.update(project, name, now_ms=self._context.now_ms(), **wanted)
                if current_snapshot is not None:
                    self._roll_back(updated)
                self._context.record(
                    "sandbox.updated", project, sandbox=(updated.id, name), fields=sorted(wanted)
                )
            if "retention" in changes or "snapshot_expiration" in changes:
                await self._snapshots.apply_retention(updated)
            if "ports" in changes:
                await self._publish_ports(updated)
        if "host_ports" in changes:
            await self._grant_host_ports(updated)
        return updated

    def _roll_back(self, sandbox: Sandbox) -> None:
        """Make the choice of the current snapshot outlast the running session."""
        active = self._store.sessions.active(sandbox.project, sandbox.id)
        if active is not None:
            now = self._context.now_ms()
            self._store.sessions.update(sandbox.project, active.id, now_ms=now, rolled_back=True)

    async def _publish_ports(self, sandbox: Sandbox) -> None:
        """Publish the sandbox's ports, which can change while a session runs."""
        active = self._store.sessions.active(sandbox.project, sandbox.id)
        if active is not None and active.status is SessionStatus.RUNNING:
            await self._context.network.publish(active)

    async def _grant_host_ports(self, sandbox: Sandbox) -> None:
        """Put ports of the host in force for a running session, and cut connections to those taken away.

        Without the lock: this may wait for a netd that is starting, and puts in force what the row says.
        """
        active = self._store.sessions.active(sandbox.project, sandbox.id)
        if active is not None and active.status is SessionStatus.RUNNING:
            await self._context.network.set_policy(active)

    async def set_policy(self, project: str, session_id: str, policy: NetworkPolicy) -> Session:
        """Change which hosts the running session may reach."""
        self._context.network.check(project, policy)
        session = await self._sessions.require(project, session_id, Operation.SET_POLICY)
        async with self._context.lock(project, session.sandbox_name):
            session = self._sessions.get(project, session_id)
            session, _ = await self._sessions.ask_locked(Operation.SET_POLICY, session)
            with self._store.transaction():
                updated = self._store.sessions.update(
                    project,
                    session_id,
                    now_ms=self._context.now_ms(),
                    network_policy=self._context.policies.stored(project, policy),
                )
                self._context.event("session.policy-changed", updated)
        # Without the lock: this may wait for a netd that is starting, and it enforces the policy in the row.
        await self._context.network.set_policy(updated)
        return updated

    # --- destroy -----------------------------------------------------------------------------------------

    @with_room
    async def destroy(
        self,
        project: str,
        name: str,
        *,
        delete_orphan_snapshots: bool = False,
        session: str | None = None,
        only_stopped: bool = False,
    ) -> Sandbox:
        """End and delete a sandbox in any state; its name is free afterwards.

        Its snapshots stay unless asked otherwise; those in use elsewhere stay in any case. ``session``
        selects the sandbox that had this session, and no later one of the same name. With
        ``only_stopped`` it is refused while there is an active session.
        """
        self._present(project, name)
        async with self._context.lock(project, name):
            sandbox = self._present(project, name)
            if session is not None and not self._owned(sandbox, session):
                raise NotFound(f"no sandbox named {name} with session {session}", kind="sandbox", name=name)
            current = self._current_session(sandbox)
            if only_stopped and current is not None and current.status in ACTIVE:
                raise WrongState(f"{name} is {current.status}", session=current.id, status=current.status)
            condemned = await self._condemn_locked(sandbox, delete_orphan_snapshots=delete_orphan_snapshots)
            return await self._remove_locked(condemned)

    def _present(self, project: str, name: str) -> Sandbox:
        """Return the sandbox, also while it is being destroyed."""
        left = self._store.sandboxes.condemned(project, name)
        return left or self._store.sandboxes.get(project, name)

    def _current_session(self, sandbox: Sandbox) -> Session | None:
        row = self._store.sandboxes.find_by_id(sandbox.project, sandbox.id)
        return (
            None
            if row is None or row.current_session is None
            else self._store.sessions.find(row.current_session)
        )

    async def _condemn_locked(
        self, sandbox: Sandbox, *, delete_orphan_snapshots: bool = False, reason: str | None = None
    ) -> Sandbox:
        """Record that a sandbox is to be destroyed and its session to end without a snapshot."""
        ending: Session | None = None
        current = self._current_session(sandbox)
        if current is not None:
            session, verdict = await self._sessions.ask_locked(Operation.DESTROY, current)
            ending = session if verdict is Verdict.PROCEED else None
        with self._store.transaction():
            if ending is not None:
                self._sessions.endings.intend(ending, discard=True)
            return self._context.condemn(
                sandbox, delete_orphan_snapshots=delete_orphan_snapshots, reason=reason
            )

    @with_room
    async def _remove_locked(self, sandbox: Sandbox) -> Sandbox:
        """Remove a condemned sandbox as its row says. Safe to repeat after a crash at any point.

        The row is deleted last, in one transaction with its snapshots: until then its mark says what remains
        to be done. Files that remain afterwards are unknown to the store, and removed when a server starts.
        """
        current = self._current_session(sandbox)
        if current is not None:
            await self._sessions.destroy_locked(current)
        ended = [row.id for row in self._all_sessions(sandbox.project, sandbox)]
        sandbox = self._store.sandboxes.find_by_id(sandbox.project, sandbox.id) or sandbox
        with self._store.transaction():
            deleted = self._forget(sandbox)
        self._context.spawn(self._clear(ended, deleted), f"clear away {sandbox.id}", finish=True)
        return sandbox

    def _owned(self, sandbox: Sandbox, session: str) -> bool:
        found = self._store.sessions.find(session)
        return found is not None and found.sandbox == sandbox.id

    def _forget(self, sandbox: Sandbox) -> list[Snapshot]:
        """Delete the row of a sandbox and those of the snapshots deleted with it; events stay."""
        project, removal = sandbox.project, sandbox.destroying
        deleted: list[Snapshot] = []
        if removal is not None and removal.delete_orphan_snapshots:
            deleted = self._store.snapshots.orphans(project, sandbox.id)
            doomed = {snapshot.id for snapshot in deleted}
            for snapshot in self._store.snapshots.live_of(project, sandbox.id):
                if snapshot.id not in doomed:
                    self._store.snapshots.mark_unwanted(project, snapshot.id, now_ms=self._context.now_ms())
        for snapshot in deleted:
            self._snapshots.mark_deleted(snapshot)
        self._store.sandboxes.delete(project, sandbox.name)
        self._context.record(
            "sandbox.destroyed",
            project,
            sandbox=(sandbox.id, sandbox.name),
            actor=removal.actor if removal is not None else None,
            **({"reason": removal.reason} if removal is not None and removal.reason is not None else {}),
        )
        unused = self._store.snapshots.unwanted(project)
        for snapshot in unused:
            self._snapshots.mark_deleted(snapshot)
        return deleted + unused

    async def _clear(self, sessions: list[str], snapshots: list[Snapshot]) -> None:
        """Delete a destroyed sandbox's files, in the background: no caller waits for it."""
        if snapshots:
            await self._snapshots.release_layers(snapshots)
        for session in sessions:
            try:
                await self._context.remove_session(session)
            except Exception as error:
                # The others are removed all the same; a later start removes this one.
                self._context.log("removing a session failed", session=session, error=repr(error))
        collect_soon(self._context)

    async def remove_of_batch(self, sandbox: Sandbox) -> None:
        """Destroy a sandbox of a batch that did not come to its end, if it is still there."""
        async with self._context.lock(sandbox.project, sandbox.name):
            found = self._store.sandboxes.find_by_id(sandbox.project, sandbox.id)
            if found is not None and found.batch is not None:
                reason = "others of its batch could not be made"
                if found.destroying is None:
                    found = await self._condemn_locked(found, delete_orphan_snapshots=True, reason=reason)
                await self._remove_locked(found)

    async def finish_removals(self) -> None:
        """Destroy the condemned sandboxes that a crash or a failure left."""
        for sandbox in self._store.sandboxes.condemned_everywhere():
            if not self._context.locked(sandbox.project, sandbox.name):  # else another task is destroying it
                await self._finish_removal(sandbox)

    def _remove_soon(self, sandbox: Sandbox) -> None:
        """Remove a condemned sandbox in the background: the task that condemned it still holds its lock."""
        self._context.spawn(self._finish_removal(sandbox), f"remove {sandbox.id}", finish=True)

    async def _finish_removal(self, sandbox: Sandbox) -> None:
        async with self._context.lock(sandbox.project, sandbox.name):
            left = self._store.sandboxes.condemned(sandbox.project, sandbox.name)
            try:
                if left is not None and left.id == sandbox.id:
                    await self._remove_locked(left)
            except Exception as error:
                self._context.log("removing a sandbox failed", sandbox=sandbox.id, error=repr(error))

    async def destroy_overdue(self) -> None:
        """Destroy the sandboxes whose lifetime has ended, several at a time: some have a session to stop."""
        now = self._context.expiry_ms()
        overdue = self._store.sandboxes.overdue_everywhere(now_ms=now)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def destroy(sandbox: Sandbox) -> None:
            async with turns:
                try:
                    await self._destroy_if_overdue(sandbox, now)
                except Exception as error:  # upkeep tries again
                    self._context.log("destroying a sandbox failed", sandbox=sandbox.id, error=repr(error))

        await asyncio.gather(*(destroy(sandbox) for sandbox in overdue))

    @with_room
    async def _destroy_if_overdue(self, sandbox: Sandbox, now_ms: int) -> None:
        async with self._context.lock(sandbox.project, sandbox.name):
            found = self._store.sandboxes.find(sandbox.project, sandbox.name)
            if found is None or found.id != sandbox.id:
                return
            if found.delete_at_ms is None or found.delete_at_ms > now_ms:
                return  # a caller has given it more time
            condemned = await self._condemn_locked(
                found, delete_orphan_snapshots=True, reason="its lifetime ended"
            )
            await self._remove_locked(condemned)

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


def _moment_after(now_ms: int, lifetime: timedelta | None) -> int | None:
    return None if lifetime is None else now_ms + milliseconds(lifetime)


def _origin(spec: SandboxSpec) -> str | None:
    """Return the source of the sandbox's files, as text for people."""
    match spec.source:
        case SnapshotSource(snapshot_id):
            return snapshot_id
        case GitSource():
            return "git"
        case TarballSource():
            return "tarball"
    return None
