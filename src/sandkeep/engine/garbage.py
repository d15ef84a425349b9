"""Delete what nothing needs; first set aside what the store does not know.

The store knows what the engine has made: its rows are written before directories are created, and kept when
those are to be deleted. So an unknown directory on disk is a sign that the store has lost rows. It is kept
for `Settings.set_aside_ms` from the first time it is found, which the log and an event record, and only then
deleted.
"""

from __future__ import annotations

import os
from typing import Any, Final

from sandkeep.engine.context import Context
from sandkeep.engine.names import snapshot_id_of
from sandkeep.host.driver import SessionRef
from sandkeep.store.rows import TERMINAL, SnapshotStatus

_MARK: Final = "set-aside"


async def collect(context: Context) -> None:
    """Delete the layers that nothing needs."""
    await context.before_deleting()
    keep = context.settings.set_aside_ms
    swept = await context.storage.collect_layers(keep_ms=keep)
    if swept.unknown:
        # The store knows the parents of damaged layers.
        parents = context.store.snapshots.layer_parents_everywhere()
        swept = await context.storage.collect_layers(keep_ms=keep, parents=parents)
    if swept.unknown:
        context.log(
            "no layer is deleted: what damaged ones stand on is not known",
            damaged=" ".join(swept.unknown),
            hint="sandkeep repair",
        )
    for layer in swept.set_aside:
        _log(context, "layer.set-aside", layer=layer, kept_ms=keep)
    for layer in swept.expired:
        _log(context, "layer.deleted", layer=layer, why="nobody knew it")


def collect_soon(context: Context) -> None:
    """Collect in the background, once for all requests that come before it begins."""
    if not context.collect_asked:
        context.collect_asked = True
        context.spawn(_collect_once(context), "collect layers", finish=True)


async def _collect_once(context: Context) -> None:
    async with context.collecting:
        # A later request may follow a release that this collection does not see.
        context.collect_asked = False
        await collect(context)


def _log(context: Context, kind: str, **facts: Any) -> None:
    """Record an event about something without a project, in the project of callers without a token."""
    context.log(kind, **facts)
    local = context.store.projects.find(team="local", name="default")
    if local is not None:
        context.record(kind, local.id, **facts)


class Garbage:
    """Removes what a starting server finds on disk beyond the store's rows."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    async def release_holders(self) -> None:
        """Release references whose snapshot, drive or session is over; doubt unknown ones first."""
        holds = self._store.holds()
        for layer in await self._context.storage.restore_holds(holds):
            self._context.log("a reference had been lost", layer=layer)
        known = self._store.holders()
        # The end of an active session may have published its layer without recording it in the row yet.
        active = self._store.sessions.active_on_host(self._context.driver.host)
        known |= {snapshot_id_of(session.id): None for session in active}
        for layer, holders in (await self._context.storage.layer_holders()).items():
            for holder in holders:
                if holder not in known:
                    await self._release(layer, holder)
                elif known[holder] not in (None, layer):
                    # The drive has another layer by now.
                    await self._context.storage.release_layer(layer, holder)
        await collect(self._context)

    async def _release(self, layer: str, holder: str) -> None:
        if self._is_over(holder):
            await self._context.storage.release_layer(layer, holder)
            return
        keep = self._context.settings.set_aside_ms
        doubted = await self._context.storage.doubt_hold(layer, holder, keep_ms=keep)
        if doubted.first:
            _log(self._context, "layer.set-aside", layer=layer, holder=holder, kept_ms=keep)

    def _is_over(self, holder: str) -> bool:
        """Return whether the store has recorded that this holder needs nothing."""
        snapshot = self._store.snapshots.find(holder)
        if snapshot is not None:
            return snapshot.status is SnapshotStatus.DELETED
        session = self._store.sessions.find(holder)
        if session is not None:
            return session.status in TERMINAL
        # A deleted drive has no row; this event was written with its deletion.
        return self._store.events.mentioned_everywhere("drive.deleted", holder)

    async def remove_sessions(self) -> None:
        """Delete directories of sessions whose sandbox is destroyed; set unknown ones aside first."""
        for ref in await self._context.driver.sessions():
            try:
                await self._remove_session(ref)
            except Exception as error:
                self._context.log("removing a session failed", session=ref.session, error=repr(error))

    async def _remove_session(self, ref: SessionRef) -> None:
        # A drive's new files are for a moment in a session directory of their own.
        of_drive = ref.session.partition("-drive")[0]
        session = self._store.sessions.find(of_drive)
        if session is not None:
            if session.status in TERMINAL and (session.sandbox is None or of_drive != ref.session):
                await self._context.remove_session(ref.session)
            return
        since_ms = await self._context.storage.set_session_aside(ref.session)
        expired = self._expired(since_ms, "session.set-aside", session_id=ref.session)
        if expired and not (await self._context.driver.state(ref)).running:
            await self._context.remove_session(ref.session)
            _log(self._context, "session.deleted", session_id=ref.session, why="the store does not know it")

    async def remove_observed(self) -> None:
        """Delete the output of processes that ran elsewhere, if their sandbox is destroyed."""
        observed = os.path.join(self._context.data_dir, "observed")
        names = os.listdir(observed) if os.path.isdir(observed) else []
        strays = [name for name in names if self._is_stray(name, os.path.join(observed, name))]
        await self._context.remove_observed(strays)

    def _is_stray(self, process: str, directory: str) -> bool:
        found = self._store.processes.find(process)
        session = None if found is None else self._store.sessions.find(found.session)
        if session is not None:
            return session.sandbox is None
        if not os.path.isdir(directory):
            return False
        return self._expired(_set_aside(directory), "process.set-aside", process=process)

    def _expired(self, since_ms: int | None, kind: str, **facts: Any) -> bool:
        """Return whether an unknown item was set aside for long enough; report when that begins.

        ``since_ms`` is when that time began; ``None`` if it begins now.
        """
        keep = self._context.settings.set_aside_ms
        if since_ms is None:
            _log(self._context, kind, kept_ms=keep, **facts)
            return False
        return self._context.expiry_ms() - since_ms >= keep


def _set_aside(directory: str) -> int | None:
    """Return since when a directory is set aside, in milliseconds; ``None``: since this call."""
    mark = os.path.join(directory, _MARK)
    try:
        return os.lstat(mark).st_mtime_ns // 1_000_000
    except FileNotFoundError:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return None
