"""Processes: a durable record of everything run in a session. A finished record never changes."""

from __future__ import annotations

from sandkeep.errors import NotFound
from sandkeep.store.database import Database
from sandkeep.store.rows import Process, ProcessKind, ProcessStatus
from sandkeep.store.tables import RowTable

_TABLE = RowTable("processes", Process)


class Processes:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, process: Process) -> None:
        _TABLE.insert(self._db, process)

    def find(self, process: str) -> Process | None:
        """Find by id alone, in any project: the caller compares ``project`` before showing anything."""
        return _TABLE.find(self._db, "id = {}", process)

    def get(self, project: str, session: str, process: str) -> Process:
        row = _TABLE.find(self._db, "project = {} AND session = {} AND id = {}", project, session, process)
        if row is None:
            raise NotFound(f"no process {process}", kind="process", name=process)
        return row

    def finish(
        self,
        process: Process,
        status: ProcessStatus,
        *,
        exit_code: int | None,
        now_ms: int,
        duration_ms: int | None = None,
        reason: str | None = None,
    ) -> Process:
        """Record the end of a running process; return one that has ended already unchanged.

        ``duration_ms`` defaults to the difference of two readings of the wall clock, which may have been set.
        """
        changes = {
            "status": status,
            "exit_code": exit_code,
            "finished_ms": now_ms,
            "duration_ms": max(0, now_ms - process.started_ms) if duration_ms is None else duration_ms,
            "reason": reason,
        }
        which = "project = {} AND id = {} AND status = 'running'"
        row = _TABLE.update(self._db, changes, which, process.project, process.id)
        return row if row is not None else self.get(process.project, process.session, process.id)

    def of_session(self, project: str, session: str) -> list[Process]:
        """Return every process of a session, newest first."""
        return _TABLE.select(
            self._db,
            "project = {} AND session = {}",
            project,
            session,
            order="started_ms DESC, id DESC",
        )

    def observed_everywhere(self, session: str) -> list[str]:
        """Return the ids of the processes of a session, in any project, that ran outside it."""
        rows = self._db.all(
            "SELECT id FROM processes WHERE session = $1 AND kind = $2", session, ProcessKind.OBSERVED
        )
        return [row[0] for row in rows]

    def running(self, project: str, session: str) -> list[Process]:
        return _TABLE.select(
            self._db,
            "project = {} AND session = {} AND status = 'running'",
            project,
            session,
            order="started_ms, id",
        )
