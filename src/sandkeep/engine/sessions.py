"""Sessions: the gate for operations on them, their watch, and what happens at starts, ends and restarts.

Every method that changes a session expects its caller to hold the sandbox's lock; those named ``…_locked``
say so. ``starting`` has the start of a session, ``endings`` its end, and ``keeping`` makes the snapshots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sandkeep.engine import drives
from sandkeep.engine.context import Context, with_room
from sandkeep.engine.endings import Endings
from sandkeep.engine.keeping import Keeping
from sandkeep.engine.lifecycle import Cause, Operation, Verdict, require
from sandkeep.engine.names import keyed_id, new_id
from sandkeep.engine.starting import Starting
from sandkeep.errors import HostCannot, NotFound, SandkeepError, SessionStopped, TimeoutInvalid, WrongState
from sandkeep.host.reports import SessionState
from sandkeep.host.reports import Usage as Usage
from sandkeep.store.rows import ACTIVE, TERMINAL, Session, SessionStatus, Snapshot, SnapshotMethod

_WATCH_AGAIN_SECONDS = 1.0


class Sessions:
    """Operations of callers on sessions. ``Sandboxes`` uses ``starting`` and ``endings``, under the lock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._keeping = Keeping(context)
        self.starting = Starting(context, self.watch)
        self.endings = Endings(context, self._keeping)

    # --- looking -----------------------------------------------------------------------------------------

    def get(self, project: str, session: str) -> Session:
        return self._store.sessions.get(project, session)

    # --- the gate ----------------------------------------------------------------------------------------

    async def require(self, project: str, session_id: str, operation: Operation) -> Session:
        """Ask the gate for an operation that runs in the session; return the session.

        Waits for a session that is starting. The caller does not hold the sandbox's lock, and the session may
        end right after this: its supervisor refuses requests that come too late.
        """
        session = self.get(project, session_id)
        if require(operation, session.status, session_id=session_id) is Verdict.WAIT:
            async with self._context.lock(project, session.sandbox_name):
                session, _ = await self.ask_locked(operation, self.get(project, session_id))
        return session

    async def ask_locked(self, operation: Operation, session: Session) -> tuple[Session, Verdict]:
        """Ask the gate while holding the sandbox's lock; return the current session and the verdict.

        Only the lock's holder moves a session. So a crash or a failed end left any session that is between
        two states here, and this method first brings it to its end.
        """
        verdict = require(operation, session.status, session_id=session.id)
        if verdict is Verdict.WAIT:
            session = await self.refresh_locked(session)
            verdict = require(operation, session.status, session_id=session.id)
        return session, verdict

    # --- watching ----------------------------------------------------------------------------------------

    def watch(self, session: Session) -> None:
        """Watch for a session that ends by itself: at its deadline, by a crash, or on a full disk."""
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
                # For example, descriptors have run out. An unwatched session would seem to run forever.
                self._context.log("watching failed", session=session.id, error=repr(error))
                await asyncio.sleep(_WATCH_AGAIN_SECONDS)
        async with self._context.lock(session.project, session.sandbox_name):
            found = self._store.sessions.find(session.id)
            if found is not None and found.status in ACTIVE:
                await self.endings.end(found)

    async def refresh_locked(self, session: Session) -> Session:
        """Return the session after comparing its row with its supervisor.

        The caller holds the lock, so a session between two states was left there by a crash, or by an end
        that failed half-way. This method brings it to its end.
        """
        if session.status in TERMINAL:
            return session
        if session.status is not SessionStatus.RUNNING:
            await self._reconcile_one(session)
            return self.get(session.project, session.id)
        try:
            state = await self._context.driver.state(self._context.ref(session))
        except NotFound:
            return await self.endings.mark_lost(session)
        if state.running:
            return session
        concluded, _ = await self.endings.end(session)
        return concluded

    # --- ending ------------------------------------------------------------------------------------------

    @with_room
    async def stop(self, project: str, session_id: str) -> tuple[Session, Snapshot | None]:
        """End a session; keep its files when its sandbox is persistent, or was when the session started.

        Stopping twice is allowed.
        """
        session = self.get(project, session_id)
        async with self._context.lock(project, session.sandbox_name):
            session, verdict = await self.ask_locked(Operation.STOP, self.get(project, session_id))
            if verdict is Verdict.DONE:
                return session, await self._keeping.durable(session, self.endings.snapshot_of(session))
            return await self.endings.end(session)

    async def destroy_locked(self, session: Session) -> None:
        """End a session of a sandbox that is being destroyed; discard its files."""
        session, verdict = await self.ask_locked(Operation.DESTROY, session)
        if verdict is Verdict.PROCEED:
            await self.endings.end(session, discard=True)

    @with_room
    async def stop_when(self, session: Session, due: Callable[[], bool], *, reason: str) -> None:
        """Stop a running session if ``due`` returns true, now and again under the lock.

        From then on it is ``stopping`` for every request: none can begin to use it in between.
        """
        if not due():
            return
        async with self._context.lock(session.project, session.sandbox_name):
            found = self.get(session.project, session.id)
            if found.status is SessionStatus.RUNNING and due():
                await self.endings.end(self.endings.intend(found, reason=reason))

    async def snapshot(
        self,
        project: str,
        session_id: str,
        *,
        lifetime_ms: int | None = None,
        comment: str | None = None,
    ) -> tuple[Session, Snapshot]:
        """Keep a session's files in a snapshot, which ends it, whether its sandbox is persistent or not."""
        session = await self.require(project, session_id, Operation.SNAPSHOT)
        async with self._context.lock(project, session.sandbox_name):
            session = await self.refresh_locked(self.get(project, session_id))
            session, _ = await self.ask_locked(Operation.SNAPSHOT, session)
            self._check_kept(session)
            ended, snapshot = await self.endings.end(
                session, method=SnapshotMethod.MANUAL, lifetime_ms=lifetime_ms, comment=comment
            )
        if snapshot is None:
            raise SessionStopped(
                f"session {session_id} is {ended.status}", session=session_id, status=ended.status
            )
        return ended, snapshot

    def _check_kept(self, session: Session) -> None:
        sandbox = self._context.sandbox_of(session)
        if sandbox is not None and sandbox.destroy_on_stop:
            raise WrongState(
                f"{sandbox.name} is destroyed, with its snapshots, when its session ends",
                session=session.id,
                status=session.status,
                hint="take a checkpoint and fork from it, or set destroy_on_stop to False first",
            )

    async def usage(self, session: Session) -> Usage:
        """Return what a running session has used so far."""
        return await self._context.driver.usage(self._context.ref(session))

    # --- while it runs -----------------------------------------------------------------------------------

    async def extend(self, project: str, session_id: str, *, by_ms: int) -> Session:
        """Give the running session more time; later sessions are not affected."""
        session = await self.require(project, session_id, Operation.EXTEND)
        async with self._context.lock(project, session.sandbox_name):
            session, _ = await self.ask_locked(Operation.EXTEND, self.get(project, session_id))
            most = self._context.settings.max_timeout_ms
            timeout = session.timeout_ms + by_ms
            if timeout > most:
                raise TimeoutInvalid(
                    f"a session lives {most} ms at most; this would make it {timeout}",
                    field="duration",
                    maximum_ms=most,
                )
            deadline = await self._context.driver.set_deadline(
                self._context.ref(session),
                (session.deadline_ms or self._context.now_ms()) + by_ms,
                timeout_ms=timeout,
            )
            with self._store.transaction():
                extended = self._store.sessions.update(
                    project,
                    session_id,
                    now_ms=self._context.now_ms(),
                    timeout_ms=timeout,
                    deadline_ms=deadline,
                )
                self._context.event("session.extended", extended, by_ms=by_ms)
            return extended

    async def checkpoint(
        self,
        project: str,
        session_id: str,
        *,
        lifetime_ms: int | None = None,
        comment: str | None = None,
        key: str | None = None,
    ) -> tuple[Session, Snapshot]:
        """Make a snapshot of a running session. Calls with the same ``key`` make a single one."""
        now = self._context.now_ms()
        snapshot_id = keyed_id("snap", session_id, key) if key else new_id("snap", now_ms=now)
        # One after the other, under a lock of their own: a copy may take long, and a caller that stops the
        # session must not wait for it.
        async with self._context.lock(session_id, "checkpoint"):
            taken = self._store.snapshots.find(snapshot_id)
            if taken is not None and taken.project == project:
                return self.get(project, session_id), taken
            running = await self.require(project, session_id, Operation.CHECKPOINT)
            snapshot = await self._keeping.checkpoint(running, snapshot_id, lifetime_ms, comment)
            return self.get(project, session_id), snapshot

    # --- after a restart, and after failures -------------------------------------------------------------

    async def reconcile(self) -> None:
        """Match every session the store calls active with its supervisor, or bring it to its end."""
        for session in self._store.sessions.active_on_host(self._context.driver.host):
            await self._try_to_reconcile(session)

    async def reconcile_unfinished(self) -> None:
        """Complete the moves of sessions that an earlier failure left between two states."""
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
            except Exception as error:  # a failure of one must not affect the others
                why = str(error) if isinstance(error, SandkeepError) else repr(error)
                self._context.log("reconcile failed", session=session.id, error=why)

    async def _reconcile_one(self, session: Session) -> None:
        if session.status is SessionStatus.PENDING:
            await self._abandon(session)
            return
        try:
            state = await self._context.driver.state(self._context.ref(session))
        except NotFound:
            await self.endings.mark_lost(session)
            return
        except HostCannot as error:
            if session.status is not SessionStatus.RUNNING:
                await self.endings.end(session)
                return
            # It keeps running. Callers that use it get this error; stop and destroy end it.
            self._context.log("a session cannot be used", session=session.id, error=str(error))
            self._context.event("session.unsupported", session, reason=error.details.get("why"))
            self.watch(session)
            return
        if state.running and session.status is SessionStatus.RUNNING:
            self._correct_deadline(session, state)
            self.watch(session)
            return
        await self.endings.end(session)

    def _correct_deadline(self, session: Session, state: SessionState) -> None:
        """Correct the row: the wall clock may have been set, and the supervisor knows the time left."""
        if state.deadline_ms != session.deadline_ms:
            self._store.sessions.update(
                session.project, session.id, now_ms=self._context.now_ms(), deadline_ms=state.deadline_ms
            )

    async def _abandon(self, session: Session) -> None:
        """End a session that callers never saw. If it is its sandbox's first, condemn the sandbox too."""
        reason = "the server ended while it was starting"
        try:
            await self._context.driver.stop(self._context.ref(session), reason=reason)
        except NotFound:
            pass  # it did not reach the host
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        await self._context.storage.discard_session(session.id)
        self.starting.fail(session, Cause.LOST, reason)
