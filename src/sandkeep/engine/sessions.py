"""Sessions: starting one, ending one, and keeping what it leaves.

Every method that changes a session expects its caller to hold the sandbox's lock; those named ``…_locked``
say so. Whatever ends a session (a stop, a snapshot, its deadline, a crash) goes through ``_conclude``, which
can be repeated from the start after a crash at any point: the ids of what it makes follow from the session's
own, and each step first looks whether it has been done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sandkeep.engine import drives
from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Cause, Operation, State, next_state, require
from sandkeep.engine.names import new_id
from sandkeep.engine.retention import first_expiry
from sandkeep.errors import (
    LimitReached,
    NotFound,
    SandkeepError,
    SessionStopped,
    SnapshotGone,
    TimeoutInvalid,
)
from sandkeep.host.driver import Limits, SessionSpec
from sandkeep.host.rootfs import Rootfs
from sandkeep.store.rows import (
    ACTIVE,
    TERMINAL,
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
    SnapshotMethod,
    SnapshotStatus,
)

Fill = Callable[[Session], Awaitable[None]]
"""Puts something into a new session before anybody uses it."""

_WATCH_AGAIN_SECONDS = 1.0


class Sessions:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    # --- looking -----------------------------------------------------------------------------------------

    def get(self, project: str, session: str) -> Session:
        return self._store.sessions.get(project, session)

    async def require(self, project: str, session: str, operation: Operation) -> Session:
        """The session, in a state that allows the operation; waits for one that is still starting."""
        found = self.get(project, session)
        if found.status is SessionStatus.PENDING:
            async with self._context.lock(project, found.sandbox_name):
                found = self.get(project, session)
        require(operation, found.status, session=session)
        return found

    # --- starting ----------------------------------------------------------------------------------------

    def check_room(self, project: str) -> None:
        most = self._context.settings.max_active_sessions
        if self._store.sessions.count_active(project) >= most:
            raise LimitReached(f"the project has {most} active sessions", limit="sessions", value=most)

    def record_locked(
        self, sandbox: Sandbox, *, source: Snapshot | None, interactive: bool = False, first: bool = False
    ) -> Session:
        """Write down a session about to start. At most one of a sandbox can be active: the store refuses.

        The ``first`` one was requested with its sandbox, which is what tells it from those after it.
        """
        now = sandbox.created_ms if first else self._context.now_ms()
        session = Session(
            id=new_id("sbx", now_ms=now),
            project=sandbox.project,
            sandbox=sandbox.id,
            sandbox_name=sandbox.name,
            status=SessionStatus.PENDING,
            host=self._context.driver.host,
            requested_ms=now,
            created_ms=now,
            updated_ms=now,
            timeout_ms=sandbox.timeout_ms,
            idle_timeout_ms=sandbox.idle_timeout_ms,
            source_snapshot=source.id if source else None,
            layer_base=source.layer if source else None,
            image=source.image if source else sandbox.image,
            runtime=sandbox.runtime,
            region=sandbox.region,
            cwd=sandbox.cwd,
            vcpus=sandbox.vcpus,
            memory_mb=sandbox.memory_mb,
            ports=sandbox.ports,
            network_policy=sandbox.network_policy,
            network_id=sandbox.network_id,
            mounts=sandbox.mounts,
            interactive_port=1 if interactive else None,
            driver=self._context.driver.capabilities().tier,
        )
        self._store.sessions.start(session)
        return session

    async def boot_locked(self, sandbox: Sandbox, session: Session, fill: Fill | None = None) -> Session:
        """Start what ``record_locked`` wrote down. On failure the session is ``failed`` and nothing runs.

        It is ``pending`` for everybody else until ``fill`` is done with it.
        """
        try:
            rootfs, warnings = await self._rootfs(sandbox, session)
            state = await self._context.driver.create(self._spec(sandbox, session, rootfs), network=True)
            await self._equip(session, fill)
        except BaseException as error:
            self._store.sessions.move(
                session.project,
                session.id,
                next_state(session.status, Cause.BOOT_FAILED),
                expected={session.status},
                now_ms=self._context.now_ms(),
                stop_reason=str(error),
            )
            self._context.event("session.failed", session, error=str(error))
            self._context.spawn(
                drives.let_go(self._context, session), f"let go of drives of {session.id}", finish=True
            )
            raise
        now = self._context.now_ms()
        session = self._store.sessions.move(
            session.project,
            session.id,
            next_state(session.status, Cause.BOOTED),
            expected={session.status},
            now_ms=now,
            started_ms=state["started_ms"],
            deadline_ms=state["deadline_ms"],
            barriers={"barriers": state["barriers"], "limits": state["limits"], "mode": state["mode"]},
            image=rootfs.image,
        )
        if session.source_snapshot is not None:
            self._store.snapshots.mark_used(session.project, session.source_snapshot, now_ms=now)
        self._context.event("session.started", session, image=rootfs.image, warnings=warnings)
        self.watch(session)
        return session

    async def _equip(self, session: Session, fill: Fill | None) -> None:
        """Put the session's network policy in force and fill it, or end it: it never runs without."""
        try:
            await self._context.network.attach(session)
            if fill is not None:
                await fill(session)
        except BaseException as error:
            ref = self._context.ref(session)
            await self._context.driver.stop(ref, reason=f"could not be made ready: {error}")
            await self._context.network.detach(session.id)
            await self._context.remove_session(session.id)
            raise

    async def _rootfs(self, sandbox: Sandbox, session: Session) -> tuple[Rootfs, list[str]]:
        rootfs, warnings = await self._context.storage.rootfs(session.image, layer=session.layer_base)
        return await drives.mount(self._context, session, rootfs), warnings

    def _spec(self, sandbox: Sandbox, session: Session, rootfs: Rootfs) -> SessionSpec:
        settings = self._context.settings
        memory = session.memory_mb << 20 if settings.enforce_memory else None
        return SessionSpec(
            session=session.id,
            generation=session.generation,
            rootfs=rootfs,
            layer=session.layer_base,
            limits=Limits(
                memory_bytes=memory,
                cpus=float(session.vcpus),
                pids=settings.pids,
                disk_bytes=settings.disk_bytes,
            ),
            deadline_ms=self._context.now_ms() + session.timeout_ms,
            env=sandbox.env,
            cwd=session.cwd,
            volatile=not sandbox.persistent,
            accept=settings.accept,
            log_cap_bytes=settings.log_cap_bytes,
        )

    def source_of(self, sandbox: Sandbox) -> Snapshot | None:
        """What the next session starts from. A snapshot that is gone is an error, not a fresh start."""
        if sandbox.current_snapshot is None:
            return None
        snapshot = self._store.snapshots.find(sandbox.current_snapshot)
        if snapshot is None or snapshot.status is not SnapshotStatus.CREATED:
            raise SnapshotGone(
                f"the current snapshot of {sandbox.name} is gone",
                kind="snapshot",
                name=sandbox.current_snapshot,
                hint="point the sandbox at another snapshot, or destroy it and create it anew",
            )
        return snapshot

    # --- watching ----------------------------------------------------------------------------------------

    def watch(self, session: Session) -> None:
        """Notice when a session ends by itself: at its deadline, by a crash, for want of disk."""
        self._context.spawn(self._watch(session), f"watch {session.id}")

    async def _watch(self, session: Session) -> None:
        while True:
            try:
                await self._context.driver.wait_stopped(self._context.ref(session))
                break
            except NotFound:
                break
            except (SandkeepError, OSError) as error:
                found = self._store.sessions.find(session.id)
                if found is None or found.status in TERMINAL:
                    return
                # For want of descriptors, say. A session nobody watches would seem to run for ever.
                self._context.log("watching failed", session=session.id, error=repr(error))
                await asyncio.sleep(_WATCH_AGAIN_SECONDS)
        async with self._context.lock(session.project, session.sandbox_name):
            found = self._store.sessions.find(session.id)
            if found is not None and found.status in ACTIVE:
                await self._conclude(found, method=SnapshotMethod.AUTOMATIC)

    async def truth_locked(self, session: Session) -> Session:
        """The session's state with what its supervisor says taken into account.

        Whoever holds the lock and finds a session on its way somewhere finds one left there: by a crash, or
        by an end that failed half-way. It is brought to where it was going.
        """
        if session.status in TERMINAL:
            return session
        if session.status is not SessionStatus.RUNNING:
            await self._reconcile_one(session)
            return self.get(session.project, session.id)
        try:
            state = await self._context.driver.state(self._context.ref(session))
        except NotFound:
            return await self._lose(session)
        if state["status"] == "running":
            return session
        concluded, _ = await self._conclude(session, method=SnapshotMethod.AUTOMATIC)
        return concluded

    # --- ending ------------------------------------------------------------------------------------------

    async def stop(self, project: str, session: str) -> tuple[Session, Snapshot | None]:
        """End a session; when its sandbox is persistent, keep its files. Stopping twice is fine."""
        found = self.get(project, session)
        async with self._context.lock(project, found.sandbox_name):
            return await self.stop_locked(self.get(project, session))

    async def stop_locked(self, session: Session, *, keep: bool = True) -> tuple[Session, Snapshot | None]:
        if session.status in TERMINAL:
            return session, self._snapshot_of(session)
        return await self._conclude(session, method=SnapshotMethod.AUTOMATIC, keep=keep)

    async def snapshot(
        self, project: str, session: str, *, lifetime_ms: int | None = None
    ) -> tuple[Session, Snapshot]:
        """Keep a session's files, which ends it, persistent sandbox or not."""
        found = await self.require(project, session, Operation.SNAPSHOT)
        async with self._context.lock(project, found.sandbox_name):
            found = await self.truth_locked(self.get(project, session))
            require(Operation.SNAPSHOT, found.status, session=session)
            ended, snapshot = await self._conclude(
                found, method=SnapshotMethod.MANUAL, lifetime_ms=lifetime_ms
            )
        if snapshot is None:
            raise SessionStopped(f"session {session} is {ended.status}", session=session, status=ended.status)
        return ended, snapshot

    def _snapshot_of(self, session: Session) -> Snapshot | None:
        return self._store.snapshots.find(_snapshot_id(session))

    async def _conclude(
        self,
        session: Session,
        *,
        method: SnapshotMethod,
        keep: bool = True,
        lifetime_ms: int | None = None,
    ) -> tuple[Session, Snapshot | None]:
        """End what still runs, keep what is to be kept, close the books."""
        sandbox = self._sandbox_of(session)
        # One that is being snapshotted was asked to be kept, also when the asking was cut short.
        wanted = method is SnapshotMethod.MANUAL or session.status is SessionStatus.SNAPSHOTTING
        keep = keep and sandbox is not None and (sandbox.persistent or wanted)
        if session.status in (SessionStatus.PENDING, SessionStatus.RUNNING):
            manual = method is SnapshotMethod.MANUAL
            session = self._move(session, Cause.SNAPSHOT if manual else Cause.STOP)
        ref = self._context.ref(session)
        try:
            state = await self._context.driver.stop(
                ref, reason="stopped by request", grace_ms=self._context.settings.stop_grace_ms
            )
        except NotFound:
            return await self._lose(session), self._snapshot_of(session)
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        snapshot = None
        if keep:
            assert sandbox is not None
            if session.status is SessionStatus.STOPPING:
                session = self._move(session, Cause.SNAPSHOT)
            snapshot = await self._keep(sandbox, session, method, lifetime_ms)
        else:
            await self._context.storage.call("session.discard", session=session.id)
        cause = Cause.LOST if state["status"] == "aborted" else Cause.ENDED
        usage = state.get("usage") or {}
        ended = self._move(
            session,
            cause,
            active_cpu_ms=usage.get("cpu_ms") or 0,
            stop_reason=state.get("reason"),
        )
        self._context.event("session.ended", ended, reason=ended.stop_reason, status=ended.status)
        self._context.spawn(self._context.driver.forget(ref), f"forget {session.id}", finish=True)
        return ended, None if snapshot is None else await self._durable(snapshot)

    async def _lose(self, session: Session) -> Session:
        """Close the books on a session whose directory somebody removed: nothing is left to end or keep."""
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        lost = self._move(session, Cause.LOST, stop_reason="its host has nothing of it")
        self._context.event("session.ended", lost, reason=lost.stop_reason, status=lost.status)
        return lost

    def _sandbox_of(self, session: Session) -> Sandbox | None:
        if session.sandbox is None:
            return None
        return self._store.sandboxes.find_by_id(session.project, session.sandbox)

    def _move(self, session: Session, cause: Cause, **changes: object) -> Session:
        return self._store.sessions.move(
            session.project,
            session.id,
            next_state(session.status, cause),
            expected={session.status},
            now_ms=self._context.now_ms(),
            **changes,  # type: ignore[arg-type]
        )

    async def _keep(
        self, sandbox: Sandbox, session: Session, method: SnapshotMethod, lifetime_ms: int | None
    ) -> Snapshot:
        """Make the ended session's files a snapshot: first the layer, by rename, then the row."""
        snapshot_id, layer = _snapshot_id(session), _layer_id(session)
        published = await self._context.storage.call(
            "layer.publish",
            session=session.id,
            layer=layer,
            parent=session.layer_base,
            image=session.image,
            host_key=None,
            holder=snapshot_id,
        )
        return self.add_snapshot(
            sandbox,
            session,
            snapshot_id,
            published,
            method=method,
            lifetime_ms=lifetime_ms,
            make_current=True,
        )

    async def _durable(self, snapshot: Snapshot) -> Snapshot:
        """Where the operator wants that, return when the snapshot and its row survive a power failure.

        Upkeep writes down that it does, as for any other, and has the rules for old ones act.
        """
        if not self._context.settings.durable:
            return snapshot
        layer = await self._context.storage.call("layer.sync", layer=snapshot.layer)
        self._store.sync()
        return replace(snapshot, synced_ms=layer["synced_ms"])

    def add_snapshot(
        self,
        sandbox: Sandbox,
        session: Session,
        snapshot_id: str,
        layer: dict[str, object],
        *,
        method: SnapshotMethod,
        lifetime_ms: int | None,
        make_current: bool,
    ) -> Snapshot:
        """The row of a published layer, and the sandbox pointing to it."""
        now = self._context.now_ms()
        expires = first_expiry(
            now,
            asked_ms=lifetime_ms,
            sandbox_ms=sandbox.snapshot_expiration_ms,
            server_ms=self._context.settings.snapshot_lifetime_ms,
        )
        snapshot = Snapshot(
            id=snapshot_id,
            project=sandbox.project,
            sandbox=sandbox.id,
            source_session=session.id,
            parent=session.source_snapshot,
            layer=str(layer["id"]),
            image=session.image,
            region=sandbox.region,
            size_bytes=int(str(layer.get("size_bytes") or 0)),
            created_ms=now,
            updated_ms=now,
            expires_ms=expires,
            expiry_asked=lifetime_ms is not None,
            method=method,
        )
        with self._store.transaction():
            if self._store.snapshots.find(snapshot_id) is None:
                self._store.snapshots.add(snapshot)
            if make_current:
                self._store.sandboxes.update(
                    sandbox.project, sandbox.name, now_ms=now, current_snapshot=snapshot_id
                )
        self._context.event("snapshot.created", session, snapshot=snapshot_id, method=method)
        return self._store.snapshots.get(sandbox.project, snapshot_id)

    async def usage(self, session: Session) -> dict[str, Any]:
        """What a running session has used so far."""
        return await self._context.driver.usage(self._context.ref(session))

    # --- while it runs -----------------------------------------------------------------------------------

    async def extend(self, project: str, session: str, *, by_ms: int) -> Session:
        """Give the running session more time. Changes this session only."""
        found = await self.require(project, session, Operation.EXTEND)
        async with self._context.lock(project, found.sandbox_name):
            found = self.get(project, session)
            require(Operation.EXTEND, found.status, session=session)
            most = self._context.settings.max_timeout_ms
            timeout = found.timeout_ms + by_ms
            if timeout > most:
                raise TimeoutInvalid(
                    f"a session lives {most} ms at most; this would make it {timeout}",
                    field="duration",
                    maximum_ms=most,
                )
            deadline = (found.deadline_ms or self._context.now_ms()) + by_ms
            await self._context.driver.set_deadline(self._context.ref(found), deadline)
            extended = self._store.sessions.update(
                project,
                session,
                now_ms=self._context.now_ms(),
                timeout_ms=timeout,
                deadline_ms=deadline,
            )
            self._context.event("session.extended", extended, by_ms=by_ms)
            return extended

    async def checkpoint(
        self, project: str, session: str, *, lifetime_ms: int | None = None
    ) -> tuple[Session, Snapshot]:
        """A snapshot of a session that goes on."""
        # One after the other, and beside the sandbox's own lock: a copy may take long, and who wants to stop
        # the session is not to wait for it.
        async with self._context.lock(session, "checkpoint"):
            return await self._checkpoint(project, session, lifetime_ms)

    async def _checkpoint(
        self, project: str, session: str, lifetime_ms: int | None
    ) -> tuple[Session, Snapshot]:
        found = await self.require(project, session, Operation.CHECKPOINT)
        sandbox = self._sandbox_of(found)
        if sandbox is None:
            raise NotFound("the sandbox is gone", kind="sandbox", name=found.sandbox_name)
        now = self._context.now_ms()
        snapshot_id = new_id("snap", now_ms=now)
        layer = f"lay_{snapshot_id[5:]}"
        copy = await self._context.storage.call("layer.copy-directory", layer=layer)
        try:
            report = await self._context.driver.checkpoint(self._context.ref(found), copy["directory"])
            published = await self._context.storage.call(
                "layer.adopt",
                layer=layer,
                parent=found.layer_base,
                image=found.image,
                holder=snapshot_id,
            )
        except BaseException:
            discard = self._context.storage.call("layer.discard-copy", layer=layer)
            self._context.spawn(discard, f"discard {layer}", finish=True)
            raise
        published["size_bytes"] = published.get("size_bytes") or report.get("copied_bytes")
        async with self._context.lock(project, found.sandbox_name):
            current = self._sandbox_of(found)
            if current is None:
                await self._context.storage.call("layer.release", layer=layer, holder=snapshot_id)
                raise NotFound("the sandbox is gone", kind="sandbox", name=found.sandbox_name)
            snapshot = self.add_snapshot(
                current,
                found,
                snapshot_id,
                published,
                method=SnapshotMethod.CHECKPOINT,
                lifetime_ms=lifetime_ms,
                make_current=False,
            )
            snapshot = await self._durable(snapshot)
        return self.get(project, session), snapshot

    # --- after a restart, and after failures -------------------------------------------------------------

    async def reconcile(self) -> None:
        """Match every session the store calls active with its supervisor, or bring it to its end."""
        for session in self._store.sessions.active_on_host(self._context.driver.host):
            await self._try_to_reconcile(session)

    async def settle(self) -> None:
        """Bring sessions that an earlier failure left between two states to where they were going."""
        for session in self._store.sessions.active_on_host(self._context.driver.host):
            under_way = self._context.locked(session.project, session.sandbox_name)
            if session.status is not SessionStatus.RUNNING and not under_way:
                await self._try_to_reconcile(session)

    async def _try_to_reconcile(self, session: Session) -> None:
        async with self._context.lock(session.project, session.sandbox_name):
            found = self._store.sessions.find(session.id)
            if found is None or found.status in TERMINAL:
                return
            try:
                await self._reconcile_one(found)
            except SandkeepError as error:
                self._context.log("reconcile failed", session=session.id, error=str(error))

    async def _reconcile_one(self, session: Session) -> None:
        if session.status is SessionStatus.PENDING:
            await self._abandon(session)
            return
        try:
            state = await self._context.driver.state(self._context.ref(session))
        except NotFound:
            await self._lose(session)
            return
        if state["status"] == "running" and session.status is SessionStatus.RUNNING:
            self.watch(session)
            return
        await self._conclude(session, method=SnapshotMethod.AUTOMATIC)

    async def _abandon(self, session: Session) -> None:
        """End a session that was never shown to anybody. The first of a sandbox takes that with it."""
        reason = "the server ended while it was starting"
        try:
            await self._context.driver.stop(self._context.ref(session), reason=reason)
        except NotFound:
            pass  # it did not get as far as the host
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        await self._context.storage.call("session.discard", session=session.id)
        self._move(session, Cause.LOST, stop_reason=reason)
        self._context.event("session.failed", session, error=reason)
        sandbox = self._sandbox_of(session)
        if sandbox is not None and sandbox.created_ms == session.requested_ms:
            self._context.forget(sandbox)


def _snapshot_id(session: Session) -> str:
    return f"snap_{session.id[4:]}"


def _layer_id(session: Session) -> str:
    return f"lay_{session.id[4:]}"


__all__ = ["Sessions", "State"]
