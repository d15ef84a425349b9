"""`Starting`: records a session, boots it on the host, attaches its network and fills it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sandkeep.engine import drives
from sandkeep.engine.beginnings import first_row, spec_of
from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Cause
from sandkeep.errors import LayerError, LimitReached, SnapshotGone, files_exhausted
from sandkeep.host.reports import SessionState
from sandkeep.host.rootfs import Composed
from sandkeep.linux import openfiles
from sandkeep.store.rows import Sandbox, Session, Snapshot, SnapshotStatus

Fill = Callable[[Session], Awaitable[None]]
"""Puts content into a new session before callers can use it."""

_SPARE_FILES = 64
_FILES_OF_A_START = 16
"""Most descriptors that starting a session takes temporarily."""


class Starting:
    """Starts sessions. ``watch`` is called with each running session."""

    def __init__(self, context: Context, watch: Callable[[Session], None]) -> None:
        self._context = context
        self._store = context.store
        self._watch = watch
        self._starting = 0

    def check_room(self, project: str) -> None:
        most = self._context.settings.max_active_sessions
        if self._store.sessions.count_active(project) >= most:
            raise LimitReached(f"the project has {most} active sessions", limit="sessions", value=most)
        try:
            # Half-way through, none would be left to undo the start.
            openfiles.require_room(_SPARE_FILES + _FILES_OF_A_START * self._starting)
        except OSError as error:
            raise files_exhausted(error) or error from error

    def record_locked(
        self, sandbox: Sandbox, *, source: Snapshot | None, interactive: bool = False, first: bool = False
    ) -> Session:
        """Record a session that is about to start. The store refuses a second active one of a sandbox.

        The ``first`` session was requested together with its sandbox, which distinguishes it from later ones.
        """
        now = sandbox.created_ms if first else self._context.now_ms()
        session = first_row(self._context, sandbox, now_ms=now, source=source, interactive=interactive)
        self._store.sessions.start(session)
        return session

    async def boot_locked(self, sandbox: Sandbox, session: Session, fill: Fill | None = None) -> Session:
        """Start the session of ``record_locked``. On failure it is ``failed`` and nothing runs.

        Callers see it as ``pending`` until ``fill`` has returned.
        """
        self._starting += 1
        try:
            rootfs, warnings = await self._rootfs(session)
            created = await self._context.driver.create(
                spec_of(self._context, sandbox, session, rootfs), network=True
            )
            await self._attach_and_fill(session, created.listeners, fill)
        except BaseException as error:
            self.fail(session, Cause.BOOT_FAILED, str(error))
            self._context.spawn(
                drives.release_snapshots(self._context, session),
                f"release drives of {session.id}",
                finish=True,
            )
            raise
        finally:
            self._starting -= 1
        state = created.state
        with self._store.transaction():
            session = self._context.move(
                session,
                Cause.BOOTED,
                started_ms=state.started_ms,
                deadline_ms=state.deadline_ms,
                barriers=_enforced(state),
                image=rootfs.image,
            )
            if session.source_snapshot is not None:
                now = self._context.now_ms()
                self._store.snapshots.mark_used(session.project, session.source_snapshot, now_ms=now)
            self._context.event("session.started", session, image=rootfs.image, warnings=warnings)
        self._context.activity.touch(session.id)
        self._watch(session)
        return session

    def fail(self, session: Session, cause: Cause, reason: str) -> None:
        """Record that a session never ran for callers, and condemn the sandbox that was made for it alone."""
        with self._store.transaction():
            failed = self._context.move(session, cause, stop_reason=reason)
            self._context.event("session.failed", failed, error=reason)
            sandbox = self._context.sandbox_of(session)
            if sandbox is not None and sandbox.created_ms == session.requested_ms:
                self._context.condemn(sandbox)

    async def _attach_and_fill(self, session: Session, listeners: Sequence[int], fill: Fill | None) -> None:
        """Enforce the session's network policy and fill it, or end it: it never runs without either."""
        try:
            await self._context.network.attach(session, listeners)
            if fill is not None:
                await fill(session)
        except BaseException as error:
            ref = self._context.ref(session)
            await self._context.driver.stop(ref, reason=f"could not be made ready: {error}")
            await self._context.network.detach(session.id)
            await self._context.remove_session(session.id)
            raise

    async def _rootfs(self, session: Session) -> Composed:
        try:
            with self._context.preparation() as progress:
                rootfs, warnings = await self._context.storage.rootfs(
                    session.image,
                    layer_id=session.layer_base,
                    # A snapshot belongs to its project, and so do the layers below it, independent of image
                    # names.
                    project_id=session.project if session.source_snapshot is None else None,
                    progress=progress,
                )
        except LayerError as error:
            await self._context.damage.notice(error)
            raise
        return Composed(await drives.mount(self._context, session, rootfs), warnings)

    def source_of(self, sandbox: Sandbox) -> Snapshot | None:
        """Return the next session's snapshot. A snapshot that is gone is an error, not a fresh start."""
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


def _enforced(state: SessionState) -> dict[str, Any]:
    """Return the columns about a session's barriers and limits."""
    return {
        "barriers": {name: found.to_json() for name, found in state.barriers.items()},
        "limits": {name: found.to_json() for name, found in state.limits.items()},
        "mode": state.mode,
    }
