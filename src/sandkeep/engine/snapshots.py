"""Snapshots: reading, deleting, the tree of ancestors and descendants, and retention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sandkeep.engine.context import Context, with_room
from sandkeep.engine.garbage import collect_soon
from sandkeep.engine.retention import Candidate, plan
from sandkeep.store.rows import Sandbox, Snapshot, SnapshotStatus


@dataclass(frozen=True, slots=True)
class Node:
    """A snapshot in the tree, with the other children of its parent."""

    snapshot: Snapshot
    siblings: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTree:
    anchor: Node
    nodes: tuple[Node, ...]
    next: str | None
    """The id to continue from, when there are more nodes."""


class Snapshots:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    def get(self, project: str, snapshot: str) -> Snapshot:
        """Return the snapshot, or the tombstone of a deleted one."""
        return self._store.snapshots.get(project, snapshot)

    async def delete(self, project: str, snapshot: str) -> Snapshot:
        """Delete a snapshot, even the current one of a sandbox. Layers below others stay."""
        await self.delete_all([self.get(project, snapshot)])
        return self.get(project, snapshot)

    @with_room
    async def delete_all(self, snapshots: Iterable[Snapshot]) -> None:
        """Delete several snapshots, with one collection of unneeded layers."""
        snapshots = list(snapshots)
        if not snapshots:
            return
        with self._store.transaction():
            for snapshot in snapshots:
                self.mark_deleted(snapshot)
        await self.release_layers(snapshots)

    def mark_deleted(self, snapshot: Snapshot) -> None:
        """Mark the row as deleted, in the caller's transaction. The caller then calls ``release_layers``."""
        if snapshot.status is SnapshotStatus.DELETED:
            return
        project, made_by = snapshot.project, snapshot.sandbox
        self._store.snapshots.delete(project, snapshot.id, now_ms=self._context.now_ms())
        box = self._store.sandboxes.find_by_id(project, made_by) if made_by else None
        named = (made_by, None if box is None else box.name)
        self._context.record("snapshot.deleted", project, sandbox=named, snapshot=snapshot.id)

    async def release_layers(self, snapshots: Iterable[Snapshot]) -> None:
        """Release the layers of deleted snapshots, also of earlier deletions that were interrupted."""
        holds = [(snapshot.layer, snapshot.id) for snapshot in snapshots]
        await self._context.storage.release_layers(holds)
        collect_soon(self._context)

    def tree(self, project: str, anchor: str, *, descendants: bool, limit: int) -> SnapshotTree:
        """Return the ancestors of a snapshot up to the root, or its descendants along the newest line."""
        at = self.get(project, anchor)
        found: list[Snapshot] = []
        more = False
        if descendants:
            found, more = self._descendants(project, at, limit)
        else:
            found = self._store.snapshots.ancestors(project, anchor, limit=limit)
            more = len(found) == limit and found[-1].parent is not None
        nodes = tuple(self._node(project, snapshot) for snapshot in found)
        return SnapshotTree(self._node(project, at), nodes, found[-1].id if more and found else None)

    def _descendants(self, project: str, at: Snapshot, limit: int) -> tuple[list[Snapshot], bool]:
        found: list[Snapshot] = []
        while len(found) < limit:
            children = self._store.snapshots.children(project, at.id)
            if not children:
                return found, False
            at = children[-1]
            found.append(at)
        return found, bool(self._store.snapshots.children(project, at.id))

    def _node(self, project: str, snapshot: Snapshot) -> Node:
        if snapshot.parent is None:
            return Node(snapshot, ())
        others = self._store.snapshots.children(project, snapshot.parent)
        return Node(snapshot, tuple(other for other in others if other.id != snapshot.id))

    async def apply_retention(self, sandbox: Sandbox) -> None:
        """Set the expiry of a sandbox's snapshots by its retention rules, and delete those beyond them."""
        pinned = self._store.snapshots.pinned(sandbox.project)
        default = sandbox.snapshot_expiration_ms
        decided = plan(
            [
                Candidate(
                    id=row.id,
                    created_ms=row.created_ms,
                    expires_ms=row.expires_ms,
                    expiry_asked=row.expiry_asked,
                    pinned=row.id in pinned,
                    synced=row.synced_ms is not None,
                )
                for row in self._store.snapshots.live_of(sandbox.project, sandbox.id)
            ],
            keep_last=sandbox.keep_last_snapshots,
            default_ms=self._context.settings.snapshot_lifetime_ms if default is None else default,
            now_ms=self._context.expiry_ms(),
        )
        for snapshot, expires in decided.expire.items():
            self._store.snapshots.set_expiry(
                sandbox.project, snapshot, expires, now_ms=self._context.now_ms()
            )
        await self.delete_all([self.get(sandbox.project, snapshot) for snapshot in decided.delete])
