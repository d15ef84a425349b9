"""Drives: named filesystems, written by one session at a time.

A drive is released when its session ends (`sandkeep.store.sessions`), so the caller must commit what that
session wrote before: the next session that attaches the drive starts from the committed layer.
"""

from __future__ import annotations

from sandkeep.errors import DriveAttached, NameTaken, NotFound
from sandkeep.store.database import Database, UniqueViolation
from sandkeep.store.pages import Page, PageRequest, Sort, choose_sort
from sandkeep.store.rows import Drive
from sandkeep.store.tables import Conditions, RowTable

_TABLE = RowTable("drives", Drive)

SORTS = (
    Sort("created", "drives.created_ms", int),
    Sort("updated", "drives.updated_ms", int),
    Sort("name", "drives.name", str),
)


class Drives:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, drive: Drive) -> None:
        """Add a drive under its name. Raises `NameTaken`."""
        try:
            with self._db.atomic():
                _TABLE.insert(self._db, drive)
        except UniqueViolation:
            raise NameTaken(f"a drive named {drive.name} exists", name=drive.name) from None

    def find(self, project: str, name: str) -> Drive | None:
        return _TABLE.find(self._db, "project = {} AND name = {}", project, name)

    def find_by_id(self, project: str, drive: str) -> Drive | None:
        return _TABLE.find(self._db, "project = {} AND id = {}", project, drive)

    def get(self, project: str, name: str) -> Drive:
        return self._existing(self.find(project, name), name)

    def attach(self, project: str, name: str, session: str, *, now_ms: int) -> Drive:
        """Give the session the right to write. Raises `DriveAttached` when another session has it."""
        row = _TABLE.update(
            self._db,
            {"current_session": session, "updated_ms": now_ms},
            "project = {} AND name = {} AND (current_session IS NULL OR current_session = {})",
            project,
            name,
            session,
        )
        if row is not None:
            return row
        held = self.get(project, name)
        raise self._attached(held)

    def commit(self, project: str, name: str, session: str, *, layer: str, now_ms: int) -> Drive:
        """Make ``layer`` the drive's content. Raises `DriveAttached` when the session does not hold it."""
        row = _TABLE.update(
            self._db,
            {"layer": layer, "updated_ms": now_ms},
            "project = {} AND name = {} AND current_session = {}",
            project,
            name,
            session,
        )
        if row is not None:
            return row
        held = self.get(project, name)
        raise DriveAttached(
            f"drive {name} is not attached to {session}", drive=name, session=held.current_session
        )

    def delete(self, project: str, name: str) -> Drive:
        """Delete the row of a detached drive. Raises `DriveAttached`."""
        with self._db.atomic():
            row = self.get(project, name)
            if row.current_session is not None:
                raise self._attached(row)
            self._db.run("DELETE FROM drives WHERE id = $1", row.id)
        return row

    def _attached(self, drive: Drive) -> DriveAttached:
        found = self._db.all("SELECT sandbox_name FROM sessions WHERE id = $1", drive.current_session)
        sandbox = found[0][0] if found else None
        by = f" by sandbox {sandbox}" if sandbox else ""
        return DriveAttached(
            f"drive {drive.name} is mounted read-write{by}",
            drive=drive.name,
            session=drive.current_session,
            sandbox=sandbox,
            hint="it is free when that session has ended; until then it can be mounted as a snapshot",
        )

    def page(
        self,
        project: str,
        request: PageRequest | None = None,
        *,
        sort: str = "created",
        name_prefix: str | None = None,
    ) -> Page[Drive]:
        where = Conditions().add("drives.project = {}", project)
        if name_prefix is not None:
            where.add_prefix("drives.name", name_prefix)
        return _TABLE.page(self._db, where, choose_sort(SORTS, sort), request or PageRequest())

    def _existing(self, row: Drive | None, name: str) -> Drive:
        if row is None:
            raise NotFound(f"no drive named {name}", kind="drive", name=name)
        return row
