"""Sessions: each execution of a sandbox, and the only writer of a sandbox's status.

The database itself enforces two rules, for every caller: a sandbox has at most one active session, and a
session never leaves a terminal status. Ending a session settles its dependents in the same transaction: usage
is added to the sandbox's totals, open processes become ``lost``, drives are released.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict, Unpack

from sandkeep.errors import NotFound, WrongState
from sandkeep.store.database import Database, UniqueViolation
from sandkeep.store.pages import Page, PageRequest, Sort
from sandkeep.store.rows import ACTIVE_SQL, TERMINAL, Ending, Session, SessionStatus, StoredMount
from sandkeep.store.tables import Conditions, RowTable

_TABLE = RowTable("sessions", Session)

CREATED = Sort("created", "sessions.created_ms", int)

_STAMP = {
    SessionStatus.RUNNING: "started_ms",
    SessionStatus.STOPPING: "requested_stop_ms",
    SessionStatus.SNAPSHOTTING: "requested_stop_ms",
    SessionStatus.STOPPED: "stopped_ms",
    SessionStatus.FAILED: "stopped_ms",
    SessionStatus.ABORTED: "aborted_ms",
}
"""The time column that each status sets when it is entered, unless it is set already."""


class SessionChanges(TypedDict, total=False):
    """The columns that may change while a session is active."""

    host: str
    generation: int
    started_ms: int
    requested_stop_ms: int
    stopped_ms: int
    aborted_ms: int
    snapshotted_ms: int
    timeout_ms: int
    deadline_ms: int | None
    layer_base: str | None
    image: str
    network_policy: Mapping[str, Any] | None
    interactive_port: int | None
    driver: str
    barriers: Mapping[str, Any]
    stop_reason: str | None
    active_cpu_ms: int
    duration_ms: int
    ingress_bytes: int
    egress_bytes: int
    ending: Ending
    rolled_back: bool


class Sessions:
    def __init__(self, db: Database) -> None:
        self._db = db

    def start(self, session: Session) -> None:
        """Record a new session as its sandbox's current one. Raises `WrongState` when one is active."""
        try:
            with self._db.atomic():
                _TABLE.insert(self._db, session)
                self._db.run(
                    "UPDATE sandboxes SET current_session = $1, status = $2, status_updated_ms = $3"
                    " WHERE id = $4",
                    session.id,
                    session.status,
                    session.created_ms,
                    session.sandbox,
                )
        except UniqueViolation:
            raise WrongState(
                f"{session.sandbox_name} has an active session already", sandbox=session.sandbox_name
            ) from None

    def find(self, session: str) -> Session | None:
        """Find by id alone, in any project: the caller compares ``project`` before showing anything."""
        return _TABLE.find(self._db, "id = {}", session)

    def get(self, project: str, session: str) -> Session:
        row = _TABLE.find(self._db, "project = {} AND id = {}", project, session)
        if row is None:
            raise NotFound(f"no session {session}", kind="session", name=session)
        return row

    def active(self, project: str, sandbox: str) -> Session | None:
        """Return the active session of a sandbox (given by its id)."""
        return _TABLE.find(
            self._db, f"project = {{}} AND sandbox = {{}} AND status IN ({ACTIVE_SQL})", project, sandbox
        )

    def move(
        self,
        project: str,
        session: str,
        to: SessionStatus,
        *,
        expected: Collection[SessionStatus],
        now_ms: int,
        **changes: Unpack[SessionChanges],
    ) -> Session:
        """Change the status if it is one of ``expected``, along with other columns; return the new row.

        Raises `WrongState`, with the status found, when another caller changed it first.
        """
        with self._db.atomic():
            before = self.get(project, session)
            if before.status not in expected or before.status in TERMINAL:
                raise WrongState(
                    f"session {session} is {before.status}", session=session, status=before.status
                )
            values: dict[str, Any] = {"status": to, "updated_ms": now_ms, **changes}
            stamp = _STAMP.get(to)
            if stamp is not None and getattr(before, stamp) is None:
                values.setdefault(stamp, now_ms)
            if to in TERMINAL and before.started_ms is not None:
                values.setdefault("duration_ms", max(0, now_ms - before.started_ms))
            row = _TABLE.update(self._db, values, "id = {}", session)
            assert row is not None
            self._db.run(
                "UPDATE sandboxes SET status = $1, status_updated_ms = $2 WHERE current_session = $3",
                to,
                now_ms,
                session,
            )
            if to in TERMINAL:
                self._add_totals(row, now_ms)
        return row

    def update(
        self, project: str, session: str, *, now_ms: int, **changes: Unpack[SessionChanges]
    ) -> Session:
        """Change columns of an active session. Raises `WrongState` once it has ended."""
        row = _TABLE.update(
            self._db,
            {**changes, "updated_ms": now_ms},
            f"project = {{}} AND id = {{}} AND status IN ({ACTIVE_SQL})",
            project,
            session,
        )
        if row is not None:
            return row
        ended = self.get(project, session)
        raise WrongState(f"session {session} is {ended.status}", session=session, status=ended.status)

    def set_mounts(self, project: str, session: str, mounts: Mapping[str, StoredMount]) -> None:
        """Set the drives of a session that was found on disk without a row of its own."""
        _TABLE.update(self._db, {"mounts": mounts}, "project = {} AND id = {}", project, session)

    def page(
        self, project: str, request: PageRequest | None = None, *, sandbox: str | None = None
    ) -> Page[Session]:
        """Return one page by creation, of the whole project or of one sandbox (given by its id)."""
        where = Conditions().add("sessions.project = {}", project)
        if sandbox is not None:
            where.add("sessions.sandbox = {}", sandbox)
        return _TABLE.page(self._db, where, CREATED, request or PageRequest())

    def count_active(self, project: str) -> int:
        found = self._db.one(
            f"SELECT count(*) FROM sessions WHERE project = $1 AND status IN ({ACTIVE_SQL})", project
        )
        assert found is not None
        return int(found[0])

    def active_on_host(self, host: str) -> list[Session]:
        """Return every project's active sessions on a host, to reconnect to after a restart."""
        return _TABLE.select(
            self._db, f"host = {{}} AND status IN ({ACTIVE_SQL})", host, order="created_ms, id"
        )

    def standing_on(self, project: str, image: str) -> list[Session]:
        """Return the project's active sessions on an image, given by its id."""
        return _TABLE.select(
            self._db,
            f"project = {{}} AND image = {{}} AND status IN ({ACTIVE_SQL})",
            project,
            image,
            order="created_ms, id",
        )

    def forget_everywhere(self, *, before_ms: int) -> int:
        """Delete ended sessions, with their processes, whose sandbox is gone and that ended before a time."""
        return self._db.run(
            f"DELETE FROM sessions WHERE sandbox IS NULL AND status NOT IN ({ACTIVE_SQL})"
            " AND COALESCE(stopped_ms, aborted_ms, updated_ms) < $1",
            before_ms,
        )

    def _add_totals(self, session: Session, now_ms: int) -> None:
        self._db.run(
            "UPDATE sandboxes SET total_active_cpu_ms = total_active_cpu_ms + $1,"
            " total_duration_ms = total_duration_ms + $2,"
            " total_ingress_bytes = total_ingress_bytes + $3,"
            " total_egress_bytes = total_egress_bytes + $4 WHERE id = $5",
            session.active_cpu_ms,
            session.duration_ms,
            session.ingress_bytes,
            session.egress_bytes,
            session.sandbox,
        )
        self._db.run(
            "UPDATE processes SET status = 'lost', finished_ms = $1, duration_ms = $1 - started_ms,"
            " reason = $2 WHERE session = $3 AND status = 'running'",
            now_ms,
            f"session {session.status}" + (f": {session.stop_reason}" if session.stop_reason else ""),
            session.id,
        )
        self._db.run("UPDATE drives SET current_session = NULL WHERE current_session = $1", session.id)
