"""The embedded `Database`: one SQLite file in write-ahead mode.

A statement takes some ten microseconds, less than handing it to a thread would, so the connection is used
directly on the event loop's thread and belongs to it. What follows from that:

* a transaction must not contain an ``await``, or another task's statements would become part of it;
* a commit survives ``kill -9`` of this process at once and loss of power after `SqliteDatabase.sync`;
* another process may write too (``sandkeep token create``); each then waits for the other, for at most
  `BUSY_SECONDS`, so those transactions have to be short as well.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sandkeep.errors import HostCannot, InternalError, InvalidRequest, StoreError
from sandkeep.store.database import UniqueViolation

BUSY_SECONDS = 5.0
OLDEST_SQLITE = (3, 35)
"""The first with ``RETURNING``."""

_LOG_BYTES = 8 << 20
"""What the log is given on disk ahead of time: twice what it grows to before it is written back."""
_APPLICATION_ID = 0x736B6570
_KEYS = tuple(str(number) for number in range(1, 100))
_UNIQUE = {"SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"}


class SqliteDatabase:
    """`sandkeep.store.database.Database` on a file, created when missing and readable by its owner only."""

    def __init__(self, path: str) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise HostCannot(
                f"SQLite {sqlite3.sqlite_version} is too old",
                part="store",
                why="it does not know RETURNING",
                hint="use a Python built with SQLite 3.35 or newer",
            )
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._in_transaction = False
        self._savepoints = 0
        try:
            # The log and the shared memory file take their mode from the main file, so that one decides.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreError(f"open {path}: {error.strerror}", path=path) from error
        # isolation_level None: the module must not open transactions behind our back.
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, cached_statements=512)
        self._connection = connection
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Claim the file and set it up, waiting for others who do the same.

        Changing the journal mode is refused at once while somebody else uses the file: the time-out does not
        count there, so we have to wait ourselves.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._claim()
                self.all("PRAGMA journal_mode = WAL")
                break
            except StoreError as error:
                busy = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
        self.all("PRAGMA synchronous = NORMAL")
        self.all("PRAGMA foreign_keys = ON")
        self._reserve()

    def _reserve(self) -> None:
        """Give the log its room now, so that things can still be ended and deleted when the disk is full.

        SQLite takes the zeros for the end of what was logged, and writes over them.
        """
        try:
            with self.transaction():  # nobody else writes to it meanwhile
                fd = os.open(f"{self._path}-wal", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(fd).st_size
                    if size < _LOG_BYTES:
                        os.posix_fallocate(fd, size, _LOG_BYTES - size)
                finally:
                    os.close(fd)
        except OSError:
            pass  # there is no room, or the filesystem promises none: it goes as far as it goes

    def _claim(self) -> None:
        """Mark an empty file as ours, and refuse a database that some other program made."""
        [(found,)] = self.all("PRAGMA application_id")
        if found == _APPLICATION_ID:
            return
        with self.transaction():
            [(found,)] = self.all("PRAGMA application_id")
            [(objects,)] = self.all("SELECT count(*) FROM sqlite_master")
            if found != _APPLICATION_ID and (found or objects):
                raise StoreError(
                    f"{self._path} is a database of another program",
                    path=self._path,
                    hint="choose another data directory",
                )
            self.all(f"PRAGMA application_id = {_APPLICATION_ID}")

    @property
    def path(self) -> str:
        return self._path

    def all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        # fetchall, always: a statement with RETURNING is committed only once it has been read to its end.
        return self._execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        rows = self._execute(sql, values).fetchall()
        return rows[0] if rows else None

    def run(self, sql: str, *values: Any) -> int:
        return self._execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        for row in rows:
            self._execute(sql, row)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._in_transaction:
            raise InternalError("a store transaction was opened inside another one")
        self._execute("BEGIN IMMEDIATE", ())
        self._in_transaction = True
        try:
            yield
            self._execute("COMMIT", ())
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._in_transaction = False

    def _roll_back(self) -> None:
        # A full disk makes SQLite roll back by itself; asking again would hide the error that matters.
        if self._connection is not None and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    @contextmanager
    def atomic(self) -> Iterator[None]:
        if not self._in_transaction:
            with self.transaction():
                yield
            return
        self._savepoints += 1
        name = f"s{self._savepoints}"
        self._execute(f"SAVEPOINT {name}", ())
        try:
            yield
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                self._execute(f"ROLLBACK TO {name}", ())
                self._execute(f"RELEASE {name}", ())
            raise
        else:
            self._execute(f"RELEASE {name}", ())
        finally:
            self._savepoints -= 1

    def sync(self) -> None:
        [(busy, _, _)] = self.all("PRAGMA wal_checkpoint(FULL)")
        if busy:
            raise StoreError(f"{self._path} is in use and could not be synced", path=self._path)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        if self._connection is None:
            raise InternalError("the store is closed")
        try:
            return self._connection.execute(sql, dict(zip(_KEYS, values, strict=False)))
        except sqlite3.IntegrityError as error:
            if error.sqlite_errorname in _UNIQUE:
                raise UniqueViolation(str(error)) from error
            raise StoreError(f"the store refused a row: {error}", path=self._path) from error
        except sqlite3.ProgrammingError:
            raise  # a wrong statement or a foreign thread: our bug, and the traceback says where
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path}: {error}", path=self._path) from error
        except UnicodeEncodeError as error:
            raise InvalidRequest("text with a lone surrogate cannot be stored") from error
        except OverflowError as error:
            raise InvalidRequest("a number does not fit in 64 bits") from error
