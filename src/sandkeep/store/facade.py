"""`Store`: every noun over one database."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from sandkeep.store.database import Database
from sandkeep.store.drives import Drives
from sandkeep.store.events import Events
from sandkeep.store.identities import Identities
from sandkeep.store.migrations import migrate
from sandkeep.store.policies import Policies
from sandkeep.store.processes import Processes
from sandkeep.store.projects import Projects
from sandkeep.store.rows import ACTIVE_SQL
from sandkeep.store.sandboxes import Sandboxes
from sandkeep.store.secrets import Secrets
from sandkeep.store.sessions import Sessions
from sandkeep.store.snapshots import Snapshots
from sandkeep.store.sqlite import SqliteDatabase
from sandkeep.store.tokens import Tokens


class Store:
    """The metadata of one installation. The package docstring says what callers may rely on."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.projects = Projects(db)
        self.tokens = Tokens(db)
        self.sandboxes = Sandboxes(db)
        self.sessions = Sessions(db)
        self.processes = Processes(db)
        self.snapshots = Snapshots(db)
        self.drives = Drives(db)
        self.events = Events(db)
        self.secrets = Secrets(db)
        self.identity = Identities(db)
        self.policies = Policies(db)

    @classmethod
    def open(cls, path: str, *, now_ms: int, alone: bool = False) -> Store:
        """Open the SQLite file at ``path``; create or migrate it as needed.

        Raises `SchemaTooNew` for a database of a newer sandkeep, `NoSpace` where its disk is full, and
        `StoreError` for anything unusable. ``alone`` excludes other processes while it is open.
        """
        db = SqliteDatabase(path, alone=alone)
        try:
            migrate(db, now_ms=now_ms)
        except BaseException:
            db.close()
            raise
        return cls(db)

    def transaction(self) -> AbstractContextManager[None]:
        """Make several calls atomic: all happen or none. No ``await`` inside; nesting is refused."""
        return self._db.transaction()

    def rewrite(self) -> None:
        """Rewrite the store, so that its files contain nothing of changed or deleted rows."""
        self._db.rewrite()

    def layers_in_use(self) -> set[str]:
        """Return the layers that snapshots, active sessions and drives use; those below are needed too."""
        found = self._db.all(
            "SELECT layer FROM snapshots WHERE status = 'created'"
            " UNION SELECT layer_base FROM sessions"
            f" WHERE status IN ({ACTIVE_SQL}) AND layer_base IS NOT NULL"
            " UNION SELECT layer FROM drives WHERE layer IS NOT NULL"
        )
        return {row[0] for row in found}

    def holders(self) -> dict[str, str | None]:
        """Return everything that may refer to a layer, and to which one; ``None`` for any.

        An active session may be about to create a layer that is not recorded yet: its own, or one of a drive
        that it writes to. A session that reads a drive refers to the layer the drive had at its start.
        """
        found = self._db.all(
            "SELECT id, layer FROM snapshots WHERE status = 'created'"
            " UNION SELECT id, CASE WHEN current_session IS NULL THEN layer END FROM drives"
            f" UNION SELECT id, NULL FROM sessions WHERE status IN ({ACTIVE_SQL})"
        )
        return {row[0]: row[1] for row in found}

    def holds(self) -> dict[str, str]:
        """Return which layer each live snapshot and each drive refers to."""
        found = self._db.all(
            "SELECT id, layer FROM snapshots WHERE status = 'created'"
            " UNION SELECT id, layer FROM drives WHERE layer IS NOT NULL"
        )
        return dict(found)

    def sync(self) -> None:
        """Return when everything committed so far survives loss of power. Any thread may call it."""
        self._db.sync()

    @property
    def changes(self) -> int:
        """A number that changes whenever something was written through this object."""
        return self._db.changes

    async def write_back(self) -> bool:
        """Write the log back, in a thread if the database allows it; return whether all of it is back.

        Everything committed before is then in the main file, safe from loss of power and of the log.
        """
        return await asyncio.to_thread(self._db.checkpoint) if self._db.concurrent else self._db.checkpoint()

    def checkpoint(self) -> bool:
        """Write the log back as `write_back` does, but block."""
        return self._db.checkpoint()

    def check(self) -> None:
        """Read the whole database. Raises `StoreError` when it is damaged."""
        self._db.check()

    def is_empty(self) -> bool:
        """Return whether no row refers to anything on disk."""
        found = self._db.one(
            "SELECT 1 FROM sandboxes UNION ALL SELECT 1 FROM sessions UNION ALL SELECT 1 FROM snapshots"
            " UNION ALL SELECT 1 FROM drives LIMIT 1"
        )
        return found is None

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
