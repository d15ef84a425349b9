"""`Store`: every noun over one database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from sandkeep.store.database import Database
from sandkeep.store.drives import Drives
from sandkeep.store.events import Events
from sandkeep.store.migrations import migrate
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
    """The metadata of one installation. See the package for what it promises and who may call it."""

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

    @classmethod
    def open(cls, path: str, *, now_ms: int) -> Store:
        """Open the SQLite file at ``path``, made or migrated as needed.

        Raises `SchemaTooNew` for a database of a newer sandkeep and `StoreError` for anything unusable.
        """
        db = SqliteDatabase(path)
        try:
            migrate(db, now_ms=now_ms)
        except BaseException:
            db.close()
            raise
        return cls(db)

    def transaction(self) -> AbstractContextManager[None]:
        """Make several calls one: all happen or none. No ``await`` inside; nesting is refused."""
        return self._db.transaction()

    def layers_in_use(self) -> set[str]:
        """Layers that snapshots, active sessions and drives start from. What is below them is needed too."""
        found = self._db.all(
            "SELECT layer FROM snapshots WHERE status = 'created'"
            " UNION SELECT layer_base FROM sessions"
            f" WHERE status IN ({ACTIVE_SQL}) AND layer_base IS NOT NULL"
            " UNION SELECT layer FROM drives WHERE layer IS NOT NULL"
        )
        return {row[0] for row in found}

    def holders(self) -> set[str]:
        """Everything that may refer to a layer: live snapshots, drives, active sessions."""
        found = self._db.all(
            "SELECT id FROM snapshots WHERE status = 'created' UNION SELECT id FROM drives"
            f" UNION SELECT id FROM sessions WHERE status IN ({ACTIVE_SQL})"
        )
        return {row[0] for row in found}

    def sync(self) -> None:
        """Return when everything committed so far survives loss of power. Takes milliseconds."""
        self._db.sync()

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
