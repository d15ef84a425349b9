"""Count a store's rows without opening it as a server does: it may be in use, or damaged."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple
from urllib.parse import quote

_QUERIES: Final = (
    "SELECT count(*) FROM sandboxes",
    "SELECT count(*) FROM snapshots WHERE status = 'created'",
    "SELECT count(*) FROM drives",
)


class Counts(NamedTuple):
    """Counts over all projects."""

    sandboxes: int
    snapshots: int
    drives: int


def count(path: str) -> Counts | None:
    """Count rows; return ``None`` if the store is missing, damaged, or locked by a server."""
    try:
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
        try:
            return Counts(*(connection.execute(query).fetchone()[0] for query in _QUERIES))
        finally:
            connection.close()
    except sqlite3.Error:
        return None
