"""Sandboxes: their names, configuration, current session and current snapshot.

Names are unique in a project and free after `Sandboxes.delete`. A sandbox that is *condemned* is being
destroyed: `find`, `get` and lists do not return it, and its name is not free yet.

``status`` and ``current_session`` are not changed here: they follow the session (`sandkeep.store.sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Unpack

from sandkeep.errors import NameTaken, NotFound, WrongState
from sandkeep.store import addresses
from sandkeep.store.database import Database, UniqueViolation
from sandkeep.store.pages import Page, PageRequest, Sort, choose_sort
from sandkeep.store.rows import ACTIVE_SQL, Removal, Sandbox, SandboxChanges, SessionStatus, StoredMount
from sandkeep.store.tables import Conditions, RowTable

_TABLE = RowTable("sandboxes", Sandbox)

SORTS = (
    Sort("created", "sandboxes.created_ms", int),
    Sort("name", "sandboxes.name", str),
    Sort("status_updated", "sandboxes.status_updated_ms", int),
    Sort("current_snapshot", "COALESCE(sandboxes.current_snapshot, '')", str),
)


class Sandboxes:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, sandbox: Sandbox) -> None:
        """Add a sandbox under its name. Raises `NameTaken`."""
        try:
            with self._db.atomic():
                _TABLE.insert(self._db, sandbox)
                self._index_tags(sandbox)
                addresses.assign(self._db, sandbox.id, sandbox.ports)
        except UniqueViolation:
            raise NameTaken(f"a sandbox named {sandbox.name} exists", name=sandbox.name) from None

    def find(self, project: str, name: str) -> Sandbox | None:
        return _TABLE.find(self._db, "project = {} AND name = {} AND destroying IS NULL", project, name)

    def get(self, project: str, name: str) -> Sandbox:
        return self._existing(self.find(project, name), name)

    def find_by_id(self, project: str, sandbox: str) -> Sandbox | None:
        """Return the sandbox, condemned or not."""
        return _TABLE.find(self._db, "project = {} AND id = {}", project, sandbox)

    def update(self, project: str, name: str, *, now_ms: int, **changes: Unpack[SandboxChanges]) -> Sandbox:
        """Change only the given columns, and return the new row."""
        with self._db.atomic():
            row = _TABLE.update(
                self._db, {**changes, "updated_ms": now_ms}, "project = {} AND name = {}", project, name
            )
            row = self._existing(row, name)
            if "tags" in changes:
                self._db.run("DELETE FROM sandbox_tags WHERE sandbox = $1", row.id)
                self._index_tags(row)
            if "ports" in changes:
                addresses.assign(self._db, row.id, row.ports)
        return row

    def addresses(self, project: str, sandbox: str) -> dict[int, int]:
        """Return the number of each port, unique to this port of this sandbox, below `addresses.SPACE`.

        A port may have no number, if nearly all numbers are in use.
        """
        found = self._db.all(
            "SELECT port, number FROM addresses JOIN sandboxes ON sandboxes.id = addresses.sandbox"
            " WHERE sandboxes.project = $1 AND sandboxes.id = $2",
            project,
            sandbox,
        )
        return {int(port): int(number) for port, number in found}

    def condemn(self, project: str, name: str, removal: Removal, *, now_ms: int) -> Sandbox:
        """Record that the sandbox is to be destroyed. A repeated call can only widen what is deleted."""
        with self._db.atomic():
            before = self.condemned(project, name) or self.get(project, name)
            if before.destroying is not None:
                both = before.destroying.delete_orphan_snapshots or removal.delete_orphan_snapshots
                removal = Removal(both, before.destroying.actor, before.destroying.reason)
            row = _TABLE.update(self._db, {"destroying": removal, "updated_ms": now_ms}, "id = {}", before.id)
            assert row is not None
        return row

    def condemned(self, project: str, name: str) -> Sandbox | None:
        """Return the sandbox of that name that is being destroyed."""
        return _TABLE.find(self._db, "project = {} AND name = {} AND destroying IS NOT NULL", project, name)

    def condemned_everywhere(self) -> list[Sandbox]:
        """Return every project's sandboxes whose destruction is not complete."""
        return _TABLE.select(self._db, "destroying IS NOT NULL", order="created_ms, id")

    def of_batches_everywhere(self) -> list[Sandbox]:
        """Return every project's sandboxes whose batch is not complete, condemned or not."""
        return _TABLE.select(self._db, "batch IS NOT NULL", order="created_ms, id")

    def end_batch(self, project: str, batch: str) -> None:
        """Let the sandboxes of a batch stay."""
        self._db.run("UPDATE sandboxes SET batch = NULL WHERE project = $1 AND batch = $2", project, batch)

    def overdue_everywhere(self, *, now_ms: int) -> list[Sandbox]:
        """Return every project's sandboxes whose lifetime has ended and whose destruction has not begun."""
        return _TABLE.select(
            self._db, "delete_at_ms <= {} AND destroying IS NULL", now_ms, order="delete_at_ms, id"
        )

    def delete(self, project: str, name: str) -> Sandbox:
        """Delete the sandbox's row and free its name; sessions and snapshots stay, without a sandbox.

        Raises `WrongState` while a session is active: without the row no caller could stop it.
        """
        with self._db.atomic():
            row = self.condemned(project, name) or self.get(project, name)
            busy = self._db.one(
                f"SELECT id FROM sessions WHERE sandbox = $1 AND status IN ({ACTIVE_SQL})",
                row.id,
            )
            if busy is not None:
                raise WrongState(f"{name} has an active session", session=busy[0])
            self._db.run("DELETE FROM sandboxes WHERE id = $1", row.id)
        return row

    def page(
        self,
        project: str,
        request: PageRequest | None = None,
        *,
        sort: str = "created",
        name_prefix: str | None = None,
        tags: Mapping[str, str] | None = None,
        status: SessionStatus | None = None,
    ) -> Page[Sandbox]:
        """Return a page of the sandboxes that have all of these tags. A prefix implies the order by name."""
        where = Conditions().add("sandboxes.project = {} AND sandboxes.destroying IS NULL", project)
        if name_prefix is not None:
            sort = "name"
            where.add_prefix("sandboxes.name", name_prefix)
        if tags:
            # Counted, because a query can join 64 tables at most.
            either = " OR ".join(["(t.name = {} AND t.value = {})"] * len(tags))
            where.add(
                "(SELECT count(*) FROM sandbox_tags AS t"
                f" WHERE t.sandbox = sandboxes.id AND ({either})) = {{}}",
                *chain.from_iterable(tags.items()),
                len(tags),
            )
        if status is not None:
            where.add("sandboxes.status = {}", status)
        return _TABLE.page(self._db, where, choose_sort(SORTS, sort), request or PageRequest())

    def mounting(self, project: str, drive: str, *, mode: str) -> list[Sandbox]:
        """Return the sandboxes that are configured to mount a drive in this mode."""
        mounted = _TABLE.select(
            self._db, "project = {} AND mounts != '{{}}' AND destroying IS NULL", project, order="name"
        )
        return [row for row in mounted if any(m == StoredMount(drive, mode) for m in row.mounts.values())]

    def count(self, project: str) -> int:
        found = self._db.one(
            "SELECT count(*) FROM sandboxes WHERE project = $1 AND destroying IS NULL", project
        )
        assert found is not None
        return int(found[0])

    def _index_tags(self, sandbox: Sandbox) -> None:
        self._db.run_many(
            "INSERT INTO sandbox_tags (sandbox, name, value) VALUES ($1, $2, $3)",
            ((sandbox.id, name, value) for name, value in sandbox.tags.items()),
        )

    def _existing(self, row: Sandbox | None, name: str) -> Sandbox:
        if row is None:
            raise NotFound(f"no sandbox named {name}", kind="sandbox", name=name)
        return row
