"""Snapshots: looking, deleting, the tree, and keeping no more than asked for."""

from __future__ import annotations

from dataclasses import dataclass

from sandkeep.engine.context import Context
from sandkeep.engine.drives import collect
from sandkeep.engine.retention import Candidate, plan
from sandkeep.store.rows import Sandbox, Snapshot, SnapshotStatus


@dataclass(frozen=True, slots=True)
class Node:
    """A snapshot in the tree, with the other children of its parent."""

    snapshot: Snapshot
    siblings: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    anchor: Node
    nodes: tuple[Node, ...]
    next: str | None
    """Where to go on: the last node, when there is more beyond it."""


class Snapshots:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    def get(self, project: str, snapshot: str) -> Snapshot:
        """The snapshot, or what is remembered of a deleted one."""
        return self._store.snapshots.get(project, snapshot)

    async def delete(self, project: str, snapshot: str) -> Snapshot:
        """Delete a snapshot, the current one of a sandbox too. Layers that others stand on stay."""
        before = self.get(project, snapshot)
        deleted = self._store.snapshots.delete(project, snapshot, now_ms=self._context.now_ms())
        if before.status is SnapshotStatus.CREATED:
            box = self._store.sandboxes.find_by_id(project, before.sandbox) if before.sandbox else None
            named = (before.sandbox, None if box is None else box.name)
            self._context.record("snapshot.deleted", project, sandbox=named, snapshot=snapshot)
            await self._context.storage.call("layer.release", layer=before.layer, holder=before.id)
            self._context.spawn(collect(self._context), "collect layers", finish=True)
        return deleted

    def tree(self, project: str, anchor: str, *, descendants: bool, limit: int) -> Tree:
        """Ancestors of a snapshot up to the root, or its descendants along the newest line."""
        at = self.get(project, anchor)
        found: list[Snapshot] = []
        more = False
        if descendants:
            found, more = self._descendants(project, at, limit)
        else:
            found = self._store.snapshots.ancestors(project, anchor, limit=limit)
            more = len(found) == limit and found[-1].parent is not None
        nodes = tuple(self._node(project, snapshot) for snapshot in found)
        return Tree(self._node(project, at), nodes, found[-1].id if more and found else None)

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
        """Give the sandbox's snapshots the expiry its rules say, and delete those it no longer wants."""
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
                    synced=row.synced_ms is not None or not self._context.settings.durable,
                )
                for row in self._store.snapshots.live_of(sandbox.project, sandbox.id)
            ],
            keep_last=sandbox.keep_last_snapshots,
            default_ms=self._context.settings.snapshot_lifetime_ms if default is None else default,
            now_ms=self._context.now_ms(),
        )
        for snapshot, expires in decided.expire.items():
            self._store.snapshots.set_expiry(
                sandbox.project, snapshot, expires, now_ms=self._context.now_ms()
            )
        for snapshot in decided.delete:
            await self.delete(sandbox.project, snapshot)
