"""`Endings`: ends a session, and keeps or discards its files.

Every end of a session (a stop, a snapshot, its deadline, a crash) goes through ``end``. It can be repeated
from the start after a crash at any point: the engine records first how the session is to end, derives the ids
of what it makes from the session's own id, and checks before each step whether it is done.
"""

from __future__ import annotations

from dataclasses import replace

from sandkeep.engine import drives
from sandkeep.engine.context import Context
from sandkeep.engine.garbage import collect_soon
from sandkeep.engine.keeping import Keeping, layer_id_of
from sandkeep.engine.lifecycle import Cause
from sandkeep.engine.names import snapshot_id_of
from sandkeep.errors import NotFound
from sandkeep.host.reports import SessionState, Usage
from sandkeep.store.rows import Ending, Session, SessionStatus, Snapshot, SnapshotMethod


class Endings:
    """Ends sessions. The caller of each method holds the sandbox's lock."""

    def __init__(self, context: Context, keeping: Keeping) -> None:
        self._context = context
        self._store = context.store
        self._keeping = keeping

    def intend(
        self,
        session: Session,
        *,
        method: SnapshotMethod = SnapshotMethod.AUTOMATIC,
        lifetime_ms: int | None = None,
        comment: str | None = None,
        discard: bool = False,
        reason: str | None = None,
    ) -> Session:
        """Record how an active session is to end, before the first step is taken.

        An earlier record stays valid, also after a crash; only ``discard`` overrides it.
        """
        ending = session.ending
        if ending is None:
            sandbox = self._context.sandbox_of(session)
            # An earlier version did not record this: the status showed that files are to be kept.
            wanted = method is SnapshotMethod.MANUAL or session.status is SessionStatus.SNAPSHOTTING
            # A change applies from the next session on, except that it never loses files this one could keep.
            keep = sandbox is not None and (session.persistent or sandbox.persistent or wanted)
            if sandbox is not None and sandbox.destroy_on_stop:
                keep = False
            ending = Ending(keep, method, lifetime_ms, reason, comment)
        if discard:
            ending = replace(ending, keep=False)
        if session.status in (SessionStatus.PENDING, SessionStatus.RUNNING):
            manual = ending.keep and ending.method == SnapshotMethod.MANUAL
            return self._context.move(session, Cause.SNAPSHOT if manual else Cause.STOP, ending=ending)
        if ending == session.ending:
            return session
        return self._store.sessions.update(
            session.project, session.id, now_ms=self._context.now_ms(), ending=ending
        )

    async def end(
        self,
        session: Session,
        *,
        method: SnapshotMethod = SnapshotMethod.AUTOMATIC,
        lifetime_ms: int | None = None,
        comment: str | None = None,
        discard: bool = False,
    ) -> tuple[Session, Snapshot | None]:
        """End every process, keep the files that are to be kept, record the end."""
        await self._context.make_room()
        session = self.intend(
            session, method=method, lifetime_ms=lifetime_ms, comment=comment, discard=discard
        )
        ending = session.ending
        assert ending is not None
        sandbox = self._context.sandbox_of(session)
        ref = self._context.ref(session)
        try:
            state = await self._context.driver.stop(
                ref,
                reason=ending.reason or "stopped by request",
                grace_ms=self._context.settings.stop_grace_ms,
            )
        except NotFound:
            return await self.mark_lost(session), self.snapshot_of(session)
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        snapshot = None
        if ending.keep and sandbox is not None:
            if session.status is SessionStatus.STOPPING:
                session = self._context.move(session, Cause.SNAPSHOT)
            snapshot = await self._keeping.publish(sandbox, session, ending)
        else:
            await self._discard(session)
        cause = Cause.LOST if state.status == "aborted" else Cause.ENDED
        used = state.usage or Usage()
        ended = self._close(
            session, cause, active_cpu_ms=used.cpu_ms or 0, stop_reason=state.reason, **_end_of(state)
        )
        self._context.spawn(self._context.driver.forget(ref), f"forget {session.id}", finish=True)
        return ended, await self._keeping.durable(ended, snapshot)

    async def _discard(self, session: Session) -> None:
        """Discard what a session wrote, also if it was to be kept first and its layer has no row yet."""
        await self._context.storage.discard_session(session.id)
        if session.status is SessionStatus.SNAPSHOTTING and self.snapshot_of(session) is None:
            holder = snapshot_id_of(session.id)
            await self._context.storage.release_layer(layer_id_of(session), holder)
            collect_soon(self._context)

    async def mark_lost(self, session: Session) -> Session:
        """Record the loss of a session whose directory is gone: there is nothing to end or keep."""
        await self._context.network.detach(session.id)
        await drives.detach(self._context, session)
        return self._close(session, Cause.LOST, stop_reason="its host has nothing of it")

    def _close(self, session: Session, cause: Cause, **changes: object) -> Session:
        """Record the end and, in the same transaction, condemn a sandbox that is to be destroyed with it."""
        sandbox = self._context.sandbox_of(session)
        goes = sandbox is not None and sandbox.destroy_on_stop and sandbox.destroying is None
        with self._store.transaction():
            ended = self._context.move(session, cause, **changes)
            self._context.event("session.ended", ended, reason=ended.stop_reason, status=ended.status)
            if goes and sandbox is not None:
                self._context.condemn(sandbox, delete_orphan_snapshots=True, reason="its session ended")
        if goes and sandbox is not None:
            self._context.remove_soon(sandbox)
        return ended

    def snapshot_of(self, session: Session) -> Snapshot | None:
        """Return the snapshot that the end of a session made, if it made one."""
        return self._store.snapshots.find(snapshot_id_of(session.id))


def _end_of(state: SessionState) -> dict[str, int]:
    """Return when a session ended and how long it ran, by its driver: that may be hours ago."""
    if state.status != "stopped" or not state.stopped_ms:
        return {}
    lasted = None if state.usage is None else state.usage.duration_ms
    return {"stopped_ms": state.stopped_ms, **({} if lasted is None else {"duration_ms": lasted})}
