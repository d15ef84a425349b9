"""The embedded `Database`: one SQLite file in write-ahead mode.

A statement takes some ten microseconds, less than handing it to a thread would, so the connection is used
only on the event loop's thread. Consequences:

* a transaction must not contain an ``await``, or another task's statements would become part of it;
* a commit survives ``kill -9`` of this process at once and loss of power after `SqliteDatabase.sync`;
* another process may write too (``sandkeep token create``); each then waits for the other, for at most
  `BUSY_SECONDS`, so those transactions have to be short as well.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sandkeep.errors import HostCannot, InternalError, InvalidRequest, NoSpace, SandkeepError, StoreError
from sandkeep.store.database import UniqueViolation

BUSY_SECONDS = 5.0
OLDEST_SQLITE = (3, 35)
"""The first version with ``RETURNING``."""

_LOG_BYTES = 8 << 20
"""Size reserved for the log on disk: twice the size at which it is written back."""
_LEFT_FREE = 2 << 20
_INDEX_BYTES = 64 << 10
"""Upper bound of the files that SQLite creates beside the database when it opens it."""
_APPLICATION_ID = 0x736B6570
_KEYS = tuple(str(number) for number in range(1, 200))
_UNIQUE = {"SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"}
_NO_ROOM = "no room left on its disk"
_MAKE_ROOM = "make room there; 'sandkeep rm' deletes sandboxes also when the disk is full"


class SqliteDatabase:
    """`sandkeep.store.database.Database` on a file, created when missing and readable by its owner only."""

    def __init__(self, path: str, *, alone: bool = False) -> None:
        """Open the file; ``alone`` excludes other processes, where `_keep_index_in_memory` is needed."""
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
        self._alone = alone
        try:
            # The log and the shared memory file get the mode of the main file, so its mode decides.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(path) from error
            raise StoreError(f"open {path}: {error.strerror}", path=path) from error
        # isolation_level None: the module must not open transactions implicitly.
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, cached_statements=512)
        self._connection = connection
        try:
            if alone:
                self._keep_index_in_memory()
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Claim the file and set it up; wait for other processes that do the same.

        Changing the journal mode fails immediately while another process uses the file: SQLite's time-out
        does not apply there, so this method retries.
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

    def _keep_index_in_memory(self) -> None:
        """Keep the index of the log in memory, not on disk; then no other process can use the store.

        SQLite maps that file, ``-shm``. On btrfs a write to a mapped page needs new room every time the page
        was written back, and where there is none the kernel ends the writer with SIGBUS: a SELECT is enough.
        An exclusive connection keeps the index in its own memory instead.
        """
        self.all("PRAGMA locking_mode = EXCLUSIVE")

    def _reserve(self) -> None:
        """Reserve the log's disk space now, so that sessions and sandboxes can be ended on a full disk.

        SQLite treats the zeros as the end of the log, and overwrites them. On a disk that is already full
        this would take the space that endings and deletions still need.
        """
        disk = os.statvfs(os.path.dirname(os.path.abspath(self._path)))
        if disk.f_bavail * disk.f_frsize < _LOG_BYTES + _LEFT_FREE:
            return
        try:
            with self.transaction():  # no other process writes to it during this block
                fd = os.open(f"{self._path}-wal", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(fd).st_size
                    if size < _LOG_BYTES:
                        os.posix_fallocate(fd, size, _LOG_BYTES - size)
                finally:
                    os.close(fd)
        except OSError:
            pass  # the disk is full, or the filesystem cannot reserve: continue without a reserve

    def _claim(self) -> None:
        """Mark an empty file as sandkeep's, and refuse a database that another program made."""
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
        # On a full disk SQLite rolls back by itself; a second rollback would hide the original error.
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
        """Flush the log to disk. Any thread may call this, so that the event loop does not wait for it.

        What is no longer in the log was synced with the main file before the log was restarted.
        """
        path = f"{self._path}-wal"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreError(f"sync {path}: {error.strerror}", path=path) from error

    @property
    def changes(self) -> int:
        return 0 if self._connection is None else self._connection.total_changes

    @property
    def concurrent(self) -> bool:
        return not self._alone

    def checkpoint(self) -> bool:
        if self._alone:
            [(busy, logged, written)] = self.all("PRAGMA wal_checkpoint(PASSIVE)")
            return not busy and logged == written
        # A separate connection, because it may take a while; passive, so that it blocks no writer.
        try:
            connection = sqlite3.connect(self._path, timeout=0, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = NORMAL")
                [(busy, logged, written)] = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path}: {error}", path=self._path) from error
        return not busy and logged == written

    def rewrite(self) -> None:
        self.all("VACUUM")
        # The log contains older data, which stays until it is overwritten.
        self.all("PRAGMA wal_checkpoint(TRUNCATE)")
        self._reserve()

    def check(self) -> None:
        [(found,), *_] = self.all("PRAGMA quick_check(1)")
        if found != "ok":
            raise StoreError(f"{self._path} is damaged: {found}", path=self._path, damaged=True)

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
            raise  # a wrong statement or a foreign thread: a bug, and the traceback shows where
        except sqlite3.DatabaseError as error:
            raise self._failure(error) from error
        except UnicodeEncodeError as error:
            raise InvalidRequest("text with a lone surrogate cannot be stored") from error
        except OverflowError as error:
            raise InvalidRequest("a number does not fit in 64 bits") from error

    def _failure(self, error: sqlite3.DatabaseError) -> SandkeepError:
        code = getattr(error, "sqlite_errorcode", 0)
        # When SQLite cannot create or extend a file it reports that it cannot open it, or that reading or
        # writing failed; the free space of the disk shows the cause.
        vague = code & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
        if code & 0xFF == sqlite3.SQLITE_FULL or (vague and _is_full(os.path.dirname(self._path) or ".")):
            return _full(self._path)
        return StoreError(f"{self._path}: {error}", path=self._path)


def _full(path: str) -> NoSpace:
    return NoSpace(
        f"the store {path} has {_NO_ROOM}",
        hint=_MAKE_ROOM,
        path=path,
        errno=errno.ENOSPC,
        operation="store",
    )


def _is_full(directory: str) -> bool:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize < _INDEX_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
