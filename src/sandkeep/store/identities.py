"""The store's own id, and a generation that grows as it changes: together they identify its state."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from sandkeep.store.database import Database


class StoreIdentity(NamedTuple):
    id: str
    generation: int


def new_identity() -> StoreIdentity:
    return StoreIdentity(f"store_{secrets.token_hex(16)}", 0)


class Identities:
    def __init__(self, db: Database) -> None:
        self._db = db

    def get(self) -> StoreIdentity | None:
        """Return the identity; ``None`` in a store that is new, or of an earlier version."""
        row = self._db.one("SELECT id, generation FROM identity")
        return None if row is None else StoreIdentity(*row)

    def put(self, identity: StoreIdentity) -> None:
        with self._db.atomic():
            self._db.run("DELETE FROM identity")
            self._db.run("INSERT INTO identity (id, generation) VALUES ($1, $2)", *identity)

    def advance(self) -> StoreIdentity | None:
        """Increment the generation, and return the new identity."""
        row = self._db.one("UPDATE identity SET generation = generation + 1 RETURNING id, generation")
        return None if row is None else StoreIdentity(*row)
