"""Network policies in the rows of sandboxes and sessions, for code that rewrites all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sandkeep.store.database import Database

_TABLES = ("sandboxes", "sessions")


class StoredPolicy(NamedTuple):
    table: str
    id: str
    project: str
    policy: dict[str, Any]


class Policies:
    def __init__(self, db: Database) -> None:
        self._db = db

    def unsealed(self, mark: str) -> list[StoredPolicy]:
        """Return the policies of all projects with headers that do not have ``mark``."""
        found = []
        for table in _TABLES:
            rows = self._db.all(
                f"SELECT id, project, network_policy FROM {table} WHERE network_policy LIKE '%\"headers\"%'"
            )
            for name, project, text in rows:
                policy = json.loads(text)
                if mark not in policy:
                    found.append(StoredPolicy(table, name, project, policy))
        return found

    def replace(self, row: StoredPolicy, policy: Mapping[str, Any]) -> None:
        """Replace the policy of one row."""
        text = json.dumps(policy, separators=(",", ":"))
        self._db.run(f"UPDATE {row.table} SET network_policy = $1 WHERE id = $2", text, row.id)
