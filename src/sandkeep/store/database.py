"""The interface the store needs from a database: numbered parameters, plain tuples, and atomic blocks.

SQL in this package is written once, with ``$1`` parameters and no dialect of its own beyond ``RETURNING``,
row values and partial indexes, so that any implementation of `Database` can run it. Values going in and out
are ``str``, ``int``, ``bytes`` and ``None``; everything richer is encoded by `sandkeep.store.tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class UniqueViolation(Exception):
    """A unique index refused a row. Never leaves the package: each noun translates it into its own error."""


class Database(Protocol):
    """One connection, used by one thread at a time."""

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement and return every row of its result."""

    def one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Run one statement and return the first row of its result, if there is any."""

    def run(self, sql: str, *values: Any) -> int:
        """Run one statement and return how many rows it changed."""

    def run_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run one statement once per row of values."""

    def transaction(self) -> AbstractContextManager[None]:
        """Run a block as a whole or not at all, with the write lock from the start. Raises when nested."""

    def atomic(self) -> AbstractContextManager[None]:
        """Run a block as a whole or not at all, inside the current transaction or in one of its own."""

    def sync(self) -> None:
        """Return when everything committed so far survives loss of power."""

    @property
    def changes(self) -> int:
        """A number that changes whenever something was written through this object."""

    @property
    def concurrent(self) -> bool:
        """Whether `checkpoint` may be called in another thread."""

    def checkpoint(self) -> bool:
        """Write the log back; return whether all of it is in the main file and safe from loss of power."""

    def rewrite(self) -> None:
        """Rewrite the whole database, so that no file contains deleted data."""

    def check(self) -> None:
        """Read the whole database. Raises `StoreError` when it is damaged."""

    def close(self) -> None:
        """Release the connection. Calling it twice is harmless."""
