"""Sandboxes: names, configuration, and where each points.

Names are unique in a project and free after `Sandboxes.delete`.

``status`` and ``current_session`` are not changed here: they follow the session (`sandkeep.store.sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from sandkeep.errors import NameTaken, NotFound, WrongState
from sandkeep.store.database import Database, UniqueViolation
from sandkeep.store.pages import Page, PageRequest, Sort, choose_sort
from sandkeep.store.rows import ACTIVE_SQL, KeepLast, Mount, Sandbox, SessionStatus
from sandkeep.store.tables import Conditions, Table

_TABLE = Table("sandboxes", Sandbox)

SORTS = (
    Sort("created", "sandboxes.created_ms", int),
    Sort("name", "sandboxes.name", str),
    Sort("status_updated", "sandboxes.status_updated_ms", int),
    Sort("current_snapshot", "COALESCE(sandboxes.current_snapshot, '')", str),
)


class SandboxChanges(TypedDict, total=False):
    """What may change after creation."""

    image: str
    runtime: str | None
    vcpus: int
    memory_mb: int
    timeout_ms: int
    idle_timeout_ms: int | None
    persistent: bool
    env: Mapping[str, str]
    tags: Mapping[str, str]
    ports: tuple[int, ...]
    network_policy: Mapping[str, Any] | None
    network_id: str | None
    mounts: Mapping[str, Mount]
    snapshot_expiration_ms: int | None
    keep_last_snapshots: KeepLast | None
    current_snapshot: str | None
    region: str
    failover_regions: tuple[str, ...]


class Sandboxes:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, sandbox: Sandbox) -> None:
        """Take the name. Raises `NameTaken`."""
        try:
            with self._db.atomic():
                _TABLE.insert(self._db, sandbox)
                self._index_tags(sandbox)
        except UniqueViolation:
            raise NameTaken(f"a sandbox named {sandbox.name} exists", name=sandbox.name) from None

    def find(self, project: str, name: str) -> Sandbox | None:
        return _TABLE.find(self._db, "project = {} AND name = {}", project, name)

    def get(self, project: str, name: str) -> Sandbox:
        return self._existing(self.find(project, name), name)

    def find_by_id(self, project: str, sandbox: str) -> Sandbox | None:
        return _TABLE.find(self._db, "project = {} AND id = {}", project, sandbox)

    def update(self, project: str, name: str, *, now_ms: int, **changes: Unpack[SandboxChanges]) -> Sandbox:
        """Change the given columns only, and return the sandbox as it is now."""
        with self._db.atomic():
            row = _TABLE.update(
                self._db, {**changes, "updated_ms": now_ms}, "project = {} AND name = {}", project, name
            )
            row = self._existing(row, name)
            if "tags" in changes:
                self._db.run("DELETE FROM sandbox_tags WHERE sandbox = $1", row.id)
                self._index_tags(row)
        return row

    def delete(self, project: str, name: str) -> Sandbox:
        """Forget the sandbox and free its name; sessions and snapshots stay, belonging to nobody.

        Raises `WrongState` while a session is active: nothing would be left to stop it by.
        """
        with self._db.atomic():
            row = self.get(project, name)
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
        tag: tuple[str, str] | None = None,
        status: SessionStatus | None = None,
    ) -> Page[Sandbox]:
        """One page of the project's sandboxes. A name prefix implies the order by name."""
        where = Conditions().add("sandboxes.project = {}", project)
        if name_prefix is not None:
            sort = "name"
            where.add_prefix("sandboxes.name", name_prefix)
        if tag is not None:
            where.add(
                "EXISTS (SELECT 1 FROM sandbox_tags AS t"
                " WHERE t.sandbox = sandboxes.id AND t.name = {} AND t.value = {})",
                *tag,
            )
        if status is not None:
            where.add("sandboxes.status = {}", status)
        return _TABLE.page(self._db, where, choose_sort(SORTS, sort), request or PageRequest())

    def count(self, project: str) -> int:
        found = self._db.one("SELECT count(*) FROM sandboxes WHERE project = $1", project)
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
