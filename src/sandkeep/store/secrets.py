"""Secrets: values by logical name, per project. Values are sealed; this module never sees the plain text."""

from __future__ import annotations

from typing import NamedTuple

from sandkeep.errors import NotFound
from sandkeep.store.database import Database


class SealedSecret(NamedTuple):
    project: str
    name: str
    sealed: bytes
    created_ms: int
    updated_ms: int


class Secrets:
    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, project: str, name: str, sealed: bytes, *, now_ms: int) -> None:
        """Store a value under a name, replacing an earlier one."""
        self._db.run(
            "INSERT INTO secrets (project, name, sealed, created_ms, updated_ms) VALUES ($1, $2, $3, $4, $4)"
            " ON CONFLICT (project, name) DO UPDATE SET sealed = $3, updated_ms = $4",
            project,
            name,
            sealed,
            now_ms,
        )

    def find(self, project: str, name: str) -> SealedSecret | None:
        row = self._db.one(
            "SELECT project, name, sealed, created_ms, updated_ms FROM secrets"
            " WHERE project = $1 AND name = $2",
            project,
            name,
        )
        return SealedSecret(*row) if row is not None else None

    def all(self, project: str) -> list[SealedSecret]:
        rows = self._db.all(
            "SELECT project, name, sealed, created_ms, updated_ms FROM secrets"
            " WHERE project = $1 ORDER BY name",
            project,
        )
        return [SealedSecret(*row) for row in rows]

    def delete(self, project: str, name: str) -> None:
        if not self._db.run("DELETE FROM secrets WHERE project = $1 AND name = $2", project, name):
            raise NotFound(f"no secret named {name}", kind="secret", name=name)
