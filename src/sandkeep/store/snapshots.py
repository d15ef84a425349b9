"""Snapshots: immutable filesystem states, as a tree. Deleting one leaves its row as a tombstone.

A snapshot is *pinned* while it is some sandbox's current snapshot or the source of an active session.
Retention must not delete a pinned one; a user may, and a later resume then fails because it is gone.
"""

from __future__ import annotations

from sandkeep.errors import NotFound
from sandkeep.store.database import Database
from sandkeep.store.pages import Page, PageRequest, Sort
from sandkeep.store.rows import ACTIVE_SQL, Snapshot, SnapshotStatus
from sandkeep.store.tables import Conditions, RowTable

_TABLE = RowTable("snapshots", Snapshot)

CREATED = Sort("created", "snapshots.created_ms", int)


class Snapshots:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, snapshot: Snapshot) -> None:
        _TABLE.insert(self._db, snapshot)

    def find(self, snapshot: str) -> Snapshot | None:
        """Find by id alone, in any project: the caller compares ``project`` before showing anything."""
        return _TABLE.find(self._db, "id = {}", snapshot)

    def get(self, project: str, snapshot: str) -> Snapshot:
        """Return the snapshot or its tombstone."""
        row = _TABLE.find(self._db, "project = {} AND id = {}", project, snapshot)
        if row is None:
            raise NotFound(f"no snapshot {snapshot}", kind="snapshot", name=snapshot)
        return row

    def set_expiry(
        self, project: str, snapshot: str, expires_ms: int | None, *, now_ms: int, asked: bool = False
    ) -> Snapshot:
        """Change when it expires (``None``: never). ``asked`` marks the caller's own choice."""
        return self._change(project, snapshot, now_ms, expires_ms=expires_ms, expiry_asked=asked)

    def mark_used(self, project: str, snapshot: str, *, now_ms: int) -> Snapshot:
        return self._change(project, snapshot, now_ms, last_used_ms=now_ms)

    def mark_synced(self, project: str, snapshot: str, *, size_bytes: int, now_ms: int) -> Snapshot:
        return self._change(project, snapshot, now_ms, size_bytes=size_bytes, synced_ms=now_ms)

    def delete(self, project: str, snapshot: str, *, now_ms: int) -> Snapshot:
        """Delete a snapshot, leaving a tombstone. Deleting again changes nothing."""
        before = self.get(project, snapshot)
        if before.status is SnapshotStatus.DELETED:
            return before
        return self._change(project, snapshot, now_ms, status=SnapshotStatus.DELETED)

    def page(
        self,
        project: str,
        request: PageRequest | None = None,
        *,
        sandbox: str | None = None,
        orphaned: bool = False,
    ) -> Page[Snapshot]:
        """Return a page by creation, tombstones included, of the project or of one sandbox (named by its id).

        ``orphaned``: only those that exist, whose sandbox does not, and that nothing uses.
        """
        where = Conditions().add("snapshots.project = {}", project)
        if sandbox is not None:
            where.add("snapshots.sandbox = {}", sandbox)
        if orphaned:
            where.add(
                "snapshots.sandbox IS NULL AND snapshots.status = 'created'"
                " AND NOT EXISTS (SELECT 1 FROM sandboxes AS other"
                " WHERE other.current_snapshot = snapshots.id)"
                " AND NOT EXISTS (SELECT 1 FROM sessions AS other WHERE other.source_snapshot = snapshots.id"
                f" AND other.status IN ({ACTIVE_SQL}))"
            )
        return _TABLE.page(self._db, where, CREATED, request or PageRequest())

    def live_of(self, project: str, sandbox: str) -> list[Snapshot]:
        """Return the sandbox's snapshots that are not deleted or failed, newest first."""
        return _TABLE.select(
            self._db,
            "project = {} AND sandbox = {} AND status = 'created'",
            project,
            sandbox,
            order="created_ms DESC, id DESC",
        )

    def standing_on(self, project: str, image: str) -> list[Snapshot]:
        """Return the project's live snapshots on an image (by id), oldest first."""
        return _TABLE.select(
            self._db,
            "project = {} AND image = {} AND status = 'created'",
            project,
            image,
            order="created_ms, id",
        )

    def ancestors(self, project: str, snapshot: str, *, limit: int) -> list[Snapshot]:
        """Return the parent, its parent, and so on; at most ``limit``, fewer if the project's tree ends."""
        found: list[Snapshot] = []
        at = self.get(project, snapshot)
        while at.parent is not None and len(found) < limit:
            parent = _TABLE.find(self._db, "project = {} AND id = {}", project, at.parent)
            if parent is None:
                break
            found.append(parent)
            at = parent
        return found

    def children(self, project: str, parent: str) -> list[Snapshot]:
        return _TABLE.select(
            self._db, "project = {} AND parent = {}", project, parent, order="created_ms, id"
        )

    def pinned(self, project: str) -> set[str]:
        """Return the ids in use in the project."""
        found = self._db.all(
            "SELECT current_snapshot FROM sandboxes"
            " WHERE project = $1 AND current_snapshot IS NOT NULL"
            " UNION SELECT source_snapshot FROM sessions"
            f" WHERE project = $1 AND source_snapshot IS NOT NULL AND status IN ({ACTIVE_SQL})",
            project,
        )
        return {row[0] for row in found}

    def orphans(self, project: str, sandbox: str) -> list[Snapshot]:
        """Return the snapshots of a sandbox (by id) that no other uses; call before deleting the sandbox."""
        return _TABLE.select(
            self._db,
            "project = {} AND sandbox = {} AND status = 'created'"
            " AND NOT EXISTS (SELECT 1 FROM sandboxes AS other"
            " WHERE other.current_snapshot = snapshots.id AND other.id <> {})"
            " AND NOT EXISTS (SELECT 1 FROM sessions AS other WHERE other.source_snapshot = snapshots.id"
            f" AND other.sandbox <> {{}} AND other.status IN ({ACTIVE_SQL}))",
            project,
            sandbox,
            sandbox,
            sandbox,
            order="created_ms DESC, id DESC",
        )

    def mark_unwanted(self, project: str, snapshot: str, *, now_ms: int) -> Snapshot:
        """Mark a snapshot to be deleted with the last sandbox that uses it."""
        return self._change(project, snapshot, now_ms, unwanted=True)

    def unwanted(self, project: str) -> list[Snapshot]:
        """Return the unwanted snapshots that no sandbox refers to or was started from."""
        return _TABLE.select(
            self._db,
            "project = {} AND unwanted = 1 AND status = 'created'"
            " AND NOT EXISTS (SELECT 1 FROM sandboxes AS other WHERE other.current_snapshot = snapshots.id)"
            " AND NOT EXISTS (SELECT 1 FROM sessions AS other"
            " WHERE other.source_snapshot = snapshots.id AND other.sandbox IS NOT NULL)",
            project,
            order="created_ms, id",
        )

    def expired_everywhere(self, *, now_ms: int) -> list[Snapshot]:
        """Return every project's snapshots past their expiry, pinned or not."""
        return _TABLE.select(
            self._db,
            "status = 'created' AND expires_ms IS NOT NULL AND expires_ms <= {}",
            now_ms,
            order="expires_ms, id",
        )

    def layer_parents_everywhere(self) -> dict[str, str | None]:
        """Return the parent of every layer that was ever a snapshot, as of its creation."""
        found = self._db.all(
            "SELECT s.layer, p.layer FROM snapshots AS s LEFT JOIN snapshots AS p ON p.id = s.parent"
        )
        return dict(found)

    def of_layer_everywhere(self, layer: str) -> list[Snapshot]:
        """Return every project's snapshots with this layer, tombstones included."""
        return _TABLE.select(self._db, "layer = {}", layer, order="created_ms, id")

    def live_everywhere(self) -> list[Snapshot]:
        """Return every project's snapshots that are not deleted or failed, oldest first."""
        return _TABLE.select(self._db, "status = 'created'", order="created_ms, id")

    def unsynced_everywhere(self) -> list[Snapshot]:
        """Return every project's snapshots that do not survive loss of power yet, oldest first."""
        return _TABLE.select(self._db, "status = 'created' AND synced_ms IS NULL", order="created_ms, id")

    def _change(self, project: str, snapshot: str, now_ms: int, **changes: object) -> Snapshot:
        row = _TABLE.update(
            self._db, {**changes, "updated_ms": now_ms}, "project = {} AND id = {}", project, snapshot
        )
        if row is None:
            raise NotFound(f"no snapshot {snapshot}", kind="snapshot", name=snapshot)
        return row
