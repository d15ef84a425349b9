"""`Keeping`: makes snapshots of what sessions wrote, both of ended and of running ones."""

from __future__ import annotations

from dataclasses import replace

from sandkeep.engine import drives
from sandkeep.engine.context import Context, with_room
from sandkeep.engine.garbage import collect_soon
from sandkeep.engine.names import new_id, snapshot_id_of
from sandkeep.engine.retention import first_expiry
from sandkeep.errors import NotFound, SandkeepError
from sandkeep.host.layers.values import Layer
from sandkeep.store.rows import Ending, Sandbox, Session, Snapshot, SnapshotMethod, SnapshotStatus


class Keeping:
    """Publishes layers and records them as snapshots; with the setting ``durable`` syncs them too."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    @with_room
    async def publish(self, sandbox: Sandbox, session: Session, ending: Ending) -> Snapshot | None:
        """Make the ended session's files a snapshot: first the layer, by rename, then the row.

        Returns ``None`` for a session whose files are gone from the disk.
        """
        snapshot_id = snapshot_id_of(session.id)
        try:
            published = await self._context.storage.publish_layer(
                session.id,
                layer_id=layer_id_of(session),
                parent_id=session.layer_base,
                image=session.image,
                host_key=None,
                holder=snapshot_id,
            )
        except NotFound as error:
            if error.details.get("kind") != "upper":
                raise
            self._context.log("a session has no files left to keep", session=session.id)
            return self._store.snapshots.find(snapshot_id)
        return self.add_snapshot(
            sandbox,
            session,
            snapshot_id,
            layer_id=published.id,
            size_bytes=await self._measure(published),
            method=SnapshotMethod(ending.method),
            lifetime_ms=ending.lifetime_ms,
            comment=ending.comment,
            make_current=ending.method == SnapshotMethod.MANUAL or not self._chosen(sandbox, session),
        )

    async def _measure(self, published: Layer) -> int | None:
        """Return the size of a new layer, for the caller that waits for the snapshot; ``None`` if unknown."""
        try:
            return await self._context.storage.measure_layer(published.id)
        except SandkeepError as error:
            # The disk may be too full to record it. Upkeep measures it again.
            self._context.log("measuring a snapshot failed", layer=published.id, error=str(error))
            return published.size_bytes

    def _chosen(self, sandbox: Sandbox, session: Session) -> bool:
        """Return whether a caller chose the current snapshot while the session ran, and it still exists."""
        if not session.rolled_back or sandbox.current_snapshot is None:
            return False
        chosen = self._store.snapshots.find(sandbox.current_snapshot)
        return chosen is not None and chosen.status is SnapshotStatus.CREATED

    def add_snapshot(
        self,
        sandbox: Sandbox,
        session: Session,
        snapshot_id: str,
        *,
        layer_id: str,
        size_bytes: int | None,
        method: SnapshotMethod,
        lifetime_ms: int | None,
        comment: str | None,
        make_current: bool,
    ) -> Snapshot:
        """Write the row of a published layer; with ``make_current`` the sandbox points to it."""
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
            layer=layer_id,
            image=session.image,
            region=sandbox.region,
            size_bytes=size_bytes or 0,
            created_ms=now,
            updated_ms=now,
            expires_ms=expires,
            expiry_asked=lifetime_ms is not None,
            method=method,
            runtime=session.runtime,
            cwd=session.cwd,
            comment=comment,
        )
        with self._store.transaction():
            if self._store.snapshots.find(snapshot_id) is None:
                self._store.snapshots.add(snapshot)
                self._context.event("snapshot.created", session, snapshot=snapshot_id, method=method)
            if make_current:
                self._store.sandboxes.update(
                    sandbox.project, sandbox.name, now_ms=now, current_snapshot=snapshot_id
                )
        return self._store.snapshots.get(sandbox.project, snapshot_id)

    async def checkpoint(
        self, session: Session, snapshot_id: str, lifetime_ms: int | None, comment: str | None
    ) -> Snapshot:
        """Make a snapshot of a running session: its supervisor copies the files, then as in ``publish``."""
        sandbox = self._context.sandbox_of(session)
        if sandbox is None:
            raise NotFound("the sandbox is gone", kind="sandbox", name=session.sandbox_name)
        # Never the id of an earlier attempt, which may have left files.
        layer = f"lay_{new_id('snap', now_ms=self._context.now_ms())[5:]}"
        copy = await self._context.storage.copy_directory(layer)
        try:
            report = await self._context.driver.checkpoint(self._context.ref(session), copy)
            published = await self._context.storage.adopt_layer(
                layer,
                parent_id=session.layer_base,
                image=session.image,
                holder=snapshot_id,
            )
        except BaseException:
            discard = self._context.storage.discard_copy(layer)
            self._context.spawn(discard, f"discard {layer}", finish=True)
            raise
        size = await self._measure(published) or report.copied_bytes
        async with self._context.lock(session.project, session.sandbox_name):
            current = self._context.sandbox_of(session)
            if current is None or current.destroying is not None:
                await self._context.storage.release_layer(layer, snapshot_id)
                collect_soon(self._context)
                raise NotFound("the sandbox is gone", kind="sandbox", name=session.sandbox_name)
            snapshot = self.add_snapshot(
                current,
                session,
                snapshot_id,
                layer_id=published.id,
                size_bytes=size,
                method=SnapshotMethod.CHECKPOINT,
                lifetime_ms=lifetime_ms,
                comment=comment,
                make_current=False,
            )
            synced = await self.durable(session, snapshot)
        return synced or snapshot

    async def durable(self, session: Session, snapshot: Snapshot | None) -> Snapshot | None:
        """With the setting ``durable``, return once what a session wrote survives a power failure.

        That covers its snapshot, what it wrote to drives, and the rows. Upkeep records that a snapshot is
        synced, as for any other, and applies the retention rules.
        """
        if not self._context.settings.durable:
            return snapshot
        for layer in drives.written(self._context, session):
            await self._context.storage.sync_layer(layer)
        if snapshot is not None and snapshot.synced_ms is None and snapshot.status is SnapshotStatus.CREATED:
            synced = await self._context.storage.sync_layer(snapshot.layer)
            snapshot = replace(snapshot, synced_ms=synced.synced_ms)
        await self._context.sync_store()
        return snapshot


def layer_id_of(session: Session) -> str:
    """Return the id of the layer that the end of a session publishes."""
    return f"lay_{session.id[4:]}"
