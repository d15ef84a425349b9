"""Chores the engine runs by itself: missed deadlines, idle sessions, expiry, durability, garbage.

One task, woken by a clock. Each chore is small, can be interrupted at any point and continued in the next
cycle, and fails separately, for one sandbox: its error is logged and the others continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from sandkeep.engine.batches import Batches
from sandkeep.engine.context import Context
from sandkeep.engine.sandboxes import Sandboxes
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.snapshots import Snapshots
from sandkeep.errors import HostCannot, LayerError, SandkeepError
from sandkeep.host.reports import SessionState
from sandkeep.shared import clock
from sandkeep.store.identity import write as write_identity
from sandkeep.store.rows import ProcessKind, Sandbox, Session, SessionStatus, Snapshot, SnapshotStatus

IDLE: Final = "idle"
"""Why a session ended that was unused for its idle timeout."""
_TURN_SECONDS = 5.0


class _Times(NamedTuple):
    """Times of a running session, on the steady clock."""

    timeout_ms: int
    """The timeout it had when these were read."""
    due: int | None


class Upkeep:
    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        snapshots: Snapshots,
        sandboxes: Sandboxes,
        batches: Batches,
    ) -> None:
        self._context = context
        self._sandboxes = sandboxes
        self._batches = batches
        self._sessions = sessions
        self._snapshots = snapshots
        self._store = context.store
        self._times: dict[str, _Times] = {}
        self._activity = context.activity
        self._kept = -1

    async def run(self) -> None:
        while True:
            await self.turn()
            await asyncio.sleep(_TURN_SECONDS)

    async def turn(self) -> None:
        chores: tuple[Callable[[], Awaitable[None]], ...] = (
            self._sync_snapshots,
            self._sessions.reconcile_unfinished,
            self._batches.finish,
            self._sandboxes.finish_removals,
            self._sandboxes.destroy_overdue,
            self._end_overdue,
            self._end_idle,
            self._expire_snapshots,
            self._forget,
            self.keep_store,
            self._context.keep_room,
            self._context.network.refresh,
        )
        for chore in chores:
            try:
                await chore()
            except Exception as error:
                self._context.log("upkeep failed", chore=chore.__name__, error=repr(error))

    @contextmanager
    def _alone(self, chore: str, about: str) -> Iterator[None]:
        """Log and swallow an error; the chore is retried in the next cycle, and the others continue."""
        try:
            yield
        except Exception as error:
            self._context.log("upkeep failed", chore=chore, about=about, error=repr(error))

    async def _sync_snapshots(self) -> None:
        """Measure new snapshots and make them safe from loss of power, then let retention rules act."""
        for snapshot in self._store.snapshots.unsynced_everywhere():
            if self._context.damage.of_layer(snapshot.layer) is not None:
                continue
            with self._alone("sync", snapshot.id):
                await self._sync(snapshot)

    async def _sync(self, snapshot: Snapshot) -> None:
        try:
            layer = await self._context.storage.sync_layer(snapshot.layer)
            size = await self._context.storage.measure_layer(snapshot.layer)
            await self._context.sync_store()  # a layer without its row would have no owner
        except LayerError:
            if self._store.snapshots.get(snapshot.project, snapshot.id).status is SnapshotStatus.CREATED:
                raise
            return  # deleted meanwhile
        now = layer.synced_ms or self._context.now_ms()
        self._store.snapshots.mark_synced(snapshot.project, snapshot.id, size_bytes=size, now_ms=now)
        if snapshot.sandbox is not None:
            sandbox = self._store.sandboxes.find_by_id(snapshot.project, snapshot.sandbox)
            if sandbox is not None:
                async with self._context.lock(sandbox.project, sandbox.name):
                    await self._snapshots.apply_retention(sandbox)
                await self._fold_chain(sandbox, snapshot)

    async def _fold_chain(self, sandbox: Sandbox, snapshot: Snapshot) -> None:
        """Keep the chain short that the next session of a sandbox will run on.

        Every stop adds a layer, and a session searches all of them. Folding changes no existing directory, so
        no lock is needed and no caller waits.
        """
        if snapshot.id == sandbox.current_snapshot:
            try:
                await self._context.storage.fold_layers(
                    snapshot.layer,
                    image=snapshot.image,
                    max_depth=self._context.settings.fold_depth,
                )
            except SandkeepError as error:
                # It, or its image, was deleted meanwhile. A session that still starts from it has it folded.
                self._context.log("folding failed", snapshot=snapshot.id, error=str(error))

    async def _end_overdue(self) -> None:
        """End sessions past their deadline whose supervisor could not; the others end themselves."""
        running = self._running()
        self._times = {s.id: self._times[s.id] for s in running if s.id in self._times}
        for session in running:
            with self._alone("end overdue", session.id):
                due = (await self._times_of(session)).due
                if due is not None and clock.steady_ms() >= due:
                    await self._sessions.stop(session.project, session.id)

    async def _times_of(self, session: Session) -> _Times:
        """Return the times by the supervisor's clock; ask again when the session was extended."""
        known = self._times.get(session.id)
        if known is None or known.timeout_ms != session.timeout_ms:
            try:
                state = await self._context.driver.state(self._context.ref(session))
            except HostCannot:
                # Its supervisor speaks an unsupported protocol; use the row.
                state = SessionState(status="running", deadline_ms=session.deadline_ms)
            now = clock.steady_ms()
            left = state.remaining_ms
            if left is None and state.deadline_ms is not None:
                # A supervisor of an earlier version reports it by the wall clock only.
                left = state.deadline_ms - self._context.now_ms()
            due = None if left is None else now + left
            known = _Times(session.timeout_ms, due)
            self._times[session.id] = known
        return known

    def _running(self) -> list[Session]:
        active = self._store.sessions.active_on_host(self._context.driver.host)
        return [session for session in active if session.status is SessionStatus.RUNNING]

    def _limited(self) -> list[Session]:
        """Return the running sessions that have an idle timeout."""
        return [session for session in self._running() if session.idle_timeout_ms is not None]

    async def _end_idle(self) -> None:
        """Stop the sessions that have been unused for as long as their idle timeout."""
        self._activity.keep_only(session.id for session in self._running())
        for session in self._limited():
            with self._alone("end idle", session.id):
                await self._notice_output(session)
                await self._sessions.stop_when(session, partial(self._is_idle, session), reason=IDLE)
        self._activity.save(session.id for session in self._limited())

    def _is_idle(self, session: Session) -> bool:
        limit = session.idle_timeout_ms
        return limit is not None and self._activity.idle_ms(session.id) >= limit

    async def _notice_output(self, session: Session) -> None:
        """Ask the supervisor how much each running process has printed."""
        found: dict[str, int] = {}
        for process in self._store.processes.running(session.project, session.id):
            if process.kind is not ProcessKind.OBSERVED:  # its output comes in requests
                record = await self._context.driver.process(self._context.ref(session), process.id)
                found[process.id] = record.output_bytes
        self._activity.printed(session.id, found)

    async def keep_activity(self) -> None:
        """Save how long sessions have been idle, before the server ends."""
        self._activity.save((session.id for session in self._limited()), exactly=True)

    async def _expire_snapshots(self) -> None:
        expired = [
            snapshot
            for snapshot in self._store.snapshots.expired_everywhere(now_ms=self._context.expiry_ms())
            if snapshot.id not in self._store.snapshots.pinned(snapshot.project)
        ]
        await self._snapshots.delete_all(expired)

    async def _forget(self) -> None:
        before = self._context.expiry_ms() - self._context.settings.session_history_ms
        self._store.sessions.forget_everywhere(before_ms=before)
        self._store.events.forget_everywhere(before_ms=before)

    async def keep_store(self) -> None:
        """Write the store's log back, and record beside the layers the store's generation.

        So the log never holds more than a few seconds, and an older store, such as a restored one, is
        recognised.
        """
        if self._store.changes == self._kept:
            return
        identity = self._store.identity.advance()
        self._kept = self._store.changes
        if identity is not None and await self._store.write_back():
            await asyncio.to_thread(write_identity, self._context.data_dir, identity)
