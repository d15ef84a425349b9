"""What the engine does by itself: missed deadlines, idle sessions, expiry, durability, garbage.

One task, woken by a clock. Each chore is small, can be cut off at any point and picked up at the next turn,
and fails alone, for one sandbox alone: its error is logged and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from sandkeep.engine.context import Context
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.snapshots import Snapshots
from sandkeep.errors import LayerError, SandkeepError
from sandkeep.store.rows import Sandbox, SessionStatus, Snapshot, SnapshotStatus

_TURN_SECONDS = 5.0


class Upkeep:
    def __init__(self, context: Context, sessions: Sessions, snapshots: Snapshots) -> None:
        self._context = context
        self._sessions = sessions
        self._snapshots = snapshots
        self._store = context.store
        self._activity: dict[str, int] = {}

    def touch(self, session: str) -> None:
        """Something was asked of a session: it is not idle."""
        self._activity[session] = self._context.now_ms()

    async def run(self) -> None:
        while True:
            await self.turn()
            await asyncio.sleep(_TURN_SECONDS)

    async def turn(self) -> None:
        chores: tuple[Callable[[], Awaitable[None]], ...] = (
            self._sync_snapshots,
            self._sessions.settle,
            self._end_overdue,
            self._end_idle,
            self._expire_snapshots,
            self._forget,
            self._context.network.refresh,
        )
        for chore in chores:
            try:
                await chore()
            except Exception as error:
                self._context.log("upkeep failed", chore=chore.__name__, error=repr(error))

    @contextmanager
    def _alone(self, chore: str, about: str) -> Iterator[None]:
        """What fails for one is tried again at the next turn, and keeps nobody else waiting."""
        try:
            yield
        except Exception as error:
            self._context.log("upkeep failed", chore=chore, about=about, error=repr(error))

    async def _sync_snapshots(self) -> None:
        """Measure new snapshots and make them safe from loss of power, then let retention rules act."""
        for snapshot in self._store.snapshots.unsynced_everywhere():
            with self._alone("sync", snapshot.id):
                await self._sync(snapshot)

    async def _sync(self, snapshot: Snapshot) -> None:
        try:
            layer = await self._context.storage.call("layer.sync", layer=snapshot.layer)
            measured = await self._context.storage.call("layer.measure", layer=snapshot.layer)
        except LayerError:
            if self._store.snapshots.get(snapshot.project, snapshot.id).status is SnapshotStatus.CREATED:
                raise
            return  # deleted while we were getting to it
        now = layer["synced_ms"] or self._context.now_ms()
        self._store.snapshots.mark_synced(
            snapshot.project, snapshot.id, size_bytes=measured["size_bytes"], now_ms=now
        )
        if snapshot.sandbox is not None:
            sandbox = self._store.sandboxes.find_by_id(snapshot.project, snapshot.sandbox)
            if sandbox is not None:
                async with self._context.lock(sandbox.project, sandbox.name):
                    await self._snapshots.apply_retention(sandbox)
                await self._shorten(sandbox, snapshot)

    async def _shorten(self, sandbox: Sandbox, snapshot: Snapshot) -> None:
        """Keep the chain short that the next session of a sandbox will stand on.

        Every stop adds a layer, and a session looks through all of them. Folding changes nothing that exists,
        so no lock is needed and nobody waits.
        """
        if snapshot.id == sandbox.current_snapshot:
            try:
                await self._context.storage.call(
                    "layer.compact",
                    tip=snapshot.layer,
                    image=snapshot.image,
                    max_depth=self._context.settings.fold_depth,
                )
            except SandkeepError as error:
                # Deleted meanwhile, or its image is. Whoever stands on it all the same has it folded then.
                self._context.log("folding failed", snapshot=snapshot.id, error=str(error))

    async def _end_overdue(self) -> None:
        """Sessions end themselves at their deadline; this finds those whose supervisor could not."""
        now = self._context.now_ms()
        for session in self._store.sessions.due_on_host(self._context.driver.host, now_ms=now):
            with self._alone("end overdue", session.id):
                await self._sessions.stop(session.project, session.id)

    async def _end_idle(self) -> None:
        now = self._context.now_ms()
        active = self._store.sessions.active_on_host(self._context.driver.host)
        self._activity = {s.id: self._activity[s.id] for s in active if s.id in self._activity}
        for session in active:
            if session.status is not SessionStatus.RUNNING or session.idle_timeout_ms is None:
                continue
            last = max(self._activity.get(session.id, 0), session.started_ms or 0)
            busy = self._store.processes.running(session.project, session.id)
            if not busy and now - last >= session.idle_timeout_ms:
                with self._alone("end idle", session.id):
                    await self._sessions.stop(session.project, session.id)

    async def _expire_snapshots(self) -> None:
        for snapshot in self._store.snapshots.expired_everywhere(now_ms=self._context.now_ms()):
            if snapshot.id not in self._store.snapshots.pinned(snapshot.project):
                with self._alone("expire", snapshot.id):
                    await self._snapshots.delete(snapshot.project, snapshot.id)

    async def _forget(self) -> None:
        before = self._context.now_ms() - self._context.settings.session_history_ms
        self._store.sessions.forget_everywhere(before_ms=before)
        self._store.events.forget_everywhere(before_ms=before)
