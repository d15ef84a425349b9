"""The embedded database: transactions, durability, files, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import InternalError, NoSpace, StoreError
from sandkeep.store import PageRequest, Store
from sandkeep.store.database import UniqueViolation
from sandkeep.store.migrations import migrate
from sandkeep.store.rows import ACTIVE_SQL, SessionStatus
from sandkeep.store.sqlite import SqliteDatabase
from tests.unit.store_rows import drive, sandbox, snapshot, start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[SqliteDatabase]:
    opened = SqliteDatabase(str(tmp_path / "store.db"))
    opened.run("CREATE TABLE t (n INTEGER PRIMARY KEY)")
    yield opened
    opened.close()


def numbers(db: SqliteDatabase) -> list[int]:
    return [n for (n,) in db.all("SELECT n FROM t ORDER BY n")]


def add(db: SqliteDatabase, *values: int) -> None:
    db.run_many("INSERT INTO t VALUES ($1)", ((value,) for value in values))


def test_a_transaction_happens_whole_or_not_at_all(db: SqliteDatabase) -> None:
    with db.transaction():
        add(db, 1, 2)
    with pytest.raises(ZeroDivisionError), db.transaction():
        add(db, 3)
        raise ZeroDivisionError
    assert numbers(db) == [1, 2]
    with db.transaction():
        add(db, 4)
    assert numbers(db) == [1, 2, 4], "a failed one leaves the connection usable"


def test_a_transaction_inside_another_is_refused(db: SqliteDatabase) -> None:
    with pytest.raises(InternalError), db.transaction():
        add(db, 1)
        with db.transaction():
            pass
    assert numbers(db) == []


def test_an_atomic_block_undoes_itself_and_nothing_else(db: SqliteDatabase) -> None:
    with db.transaction():
        add(db, 1)
        with pytest.raises(UniqueViolation), db.atomic():
            add(db, 2)
            with db.atomic():
                add(db, 3)
            add(db, 1)
        with db.atomic():
            add(db, 4)
    assert numbers(db) == [1, 4]
    with pytest.raises(UniqueViolation), db.atomic():
        add(db, 5, 1)
    assert numbers(db) == [1, 4]


def test_another_connection_sees_a_commit_and_nothing_before_it(db: SqliteDatabase) -> None:
    other = SqliteDatabase(db.path)
    with db.transaction():
        add(db, 1)
        assert numbers(other) == []
    assert numbers(other) == [1]
    other.close()


def test_writers_in_two_processes_wait_for_each_other(db: SqliteDatabase) -> None:
    script = (
        "import sys; from sandkeep.store.sqlite import SqliteDatabase; db = SqliteDatabase(sys.argv[1])\n"
        "for n in range(1000, 1100): db.run('INSERT INTO t VALUES ($1)', n)\n"
        "db.close()"
    )
    child = subprocess.Popen([sys.executable, "-c", script, db.path])
    for n in range(100):
        with db.transaction():
            add(db, n)
    assert child.wait(60) == 0
    assert len(numbers(db)) == 200


def test_a_closed_store_and_a_foreign_thread_are_our_bugs(db: SqliteDatabase) -> None:
    caught: list[BaseException] = []

    def use() -> None:
        try:
            db.all("SELECT 1")
        except sqlite3.ProgrammingError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert caught
    db.close()
    db.close()
    with pytest.raises(InternalError):
        db.all("SELECT 1")


def test_a_store_without_room_says_so_and_goes_on(db: SqliteDatabase) -> None:
    add(db, 1)
    [(pages,)] = db.all("PRAGMA page_count")
    db.all(f"PRAGMA max_page_count = {pages}")  # for SQLite a full disk, in the same words
    with pytest.raises(NoSpace) as caught:
        for n in range(2, 10_000):
            add(db, n)
    assert caught.value.path == db.path and caught.value.hint
    assert numbers(db)[0] == 1
    db.all("PRAGMA max_page_count = 100000")
    add(db, 100_000)
    assert numbers(db)[-1] == 100_000


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store.open(str(tmp_path / "store.db"), now_ms=1)
    finally:
        os.umask(before)
    store.projects.ensure("p", team="t", name="n", now_ms=1)
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} >= {"store.db", "store.db-wal"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()


def test_settings_that_the_promises_rest_on(db: SqliteDatabase) -> None:
    assert db.all("PRAGMA journal_mode") == [("wal",)]
    assert db.all("PRAGMA synchronous") == [(1,)]
    assert db.all("PRAGMA foreign_keys") == [(1,)]


def test_the_log_has_its_room_before_it_is_needed(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    db = SqliteDatabase(path)
    room = os.stat(f"{path}-wal")
    assert room.st_size == 8 << 20 and room.st_blocks * 512 >= 8 << 20
    db.run("CREATE TABLE t (n INTEGER PRIMARY KEY)")
    for n in range(1000):
        db.run("INSERT INTO t VALUES ($1)", n)
    again = SqliteDatabase(path)  # with more zeros to come than there is log
    assert len(numbers(again)) == 1000
    assert again.all("PRAGMA integrity_check") == [("ok",)]
    assert os.stat(f"{path}-wal").st_size == 8 << 20
    again.close()
    db.close()


def test_with_a_full_disk_there_is_room_to_delete(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs a small filesystem")
    script = f"""
import os, sys
from sandkeep.store.sqlite import SqliteDatabase
from tests.unit.test_store_sqlite import numbers
db = SqliteDatabase("{tmp_path}/small/store.db")
db.run("CREATE TABLE t (n INTEGER PRIMARY KEY)")
db.run_many("INSERT INTO t VALUES ($1)", [(n,) for n in range(100)])
with open("{tmp_path}/small/filler", "wb", buffering=0) as out:
    try:
        while out.write(bytes(4096)) == 4096:
            pass
    except OSError:
        pass
for n in range(90):
    with db.transaction():
        db.run("DELETE FROM t WHERE n = $1", n)
print(numbers(db))
"""
    (tmp_path / "small").mkdir()
    mount = f'mount -t tmpfs -o size=16m tmpfs {tmp_path}/small && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{list(range(90, 100))}\n", done.stderr


@pytest.mark.parametrize("alone", [False, True])
def test_the_log_can_be_written_back(tmp_path: Path, alone: bool) -> None:
    """Also where no second connection can be opened."""
    path = str(tmp_path / "store.db")
    with Store.open(path, now_ms=1, alone=alone) as store:
        store.projects.ensure("p", team="t", name="p", now_ms=1)
        assert store.checkpoint()
        shutil.copy(path, f"{path}-copy")  # without the log
    with Store.open(f"{path}-copy", now_ms=1) as copy:
        assert copy.projects.find(team="t", name="p") is not None


def test_a_file_that_is_no_database_of_ours_is_refused_and_untouched(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_bytes(b"not a database, and longer than a page header " * 40)
    with pytest.raises(StoreError):
        Store.open(str(text), now_ms=1)
    assert text.read_bytes().startswith(b"not a database")

    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE theirs (n)")
    connection.close()
    with pytest.raises(StoreError) as caught:
        Store.open(str(foreign), now_ms=1)
    assert caught.value.hint

    with pytest.raises(StoreError):
        Store.open(str(tmp_path / "missing" / "store.db"), now_ms=1)


_WRITER = """
import sys
from sandkeep.store import Store
from tests.unit.store_rows import start

with Store.open(sys.argv[1], now_ms=1) as store:
    store.projects.ensure("p", team="t", name="p", now_ms=1)
    for number in range(1_000_000):
        start(store, "p", f"n{number}", f"s{number}")
        print(number, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9_of_the_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(50)]
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
        child.wait()
        child.stdout.close()
        with Store.open(path, now_ms=1) as store:
            for number in acknowledged:
                assert store.sandboxes.get("p", f"n{number}").current_session == f"s{number}"
            page = store.sandboxes.page("p", PageRequest(limit=100))
            assert all(box.current_session for box in page.items), "never half a transaction"
            while page.items:
                for box in page.items:
                    session = f"s{box.name[1:]}"
                    store.sessions.move(
                        "p", session, SessionStatus.STOPPED, expected=set(SessionStatus), now_ms=2
                    )
                    store.sandboxes.delete("p", box.name)
                page = store.sandboxes.page("p", PageRequest(limit=100))
            store.sessions.forget_everywhere(before_ms=10)
            store.sync()
        checked = sqlite3.connect(path)
        assert checked.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert checked.execute("PRAGMA foreign_key_check").fetchall() == []
        checked.close()


class _Explaining(SqliteDatabase):
    """Keeps the query plan of every select it runs."""

    def __init__(self, path: str) -> None:
        self.plans: dict[str, str] = {}
        super().__init__(path)

    def _execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        if sql.startswith("SELECT") and "sqlite_master" not in sql:
            found = super()._execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
            self.plans[sql] = " | ".join(row[3] for row in found)
        return super()._execute(sql, values)


def test_everyday_queries_are_served_by_indexes(tmp_path: Path) -> None:
    db = _Explaining(str(tmp_path / "store.db"))
    migrate(db, now_ms=1)
    store = Store(db)
    store.projects.ensure("p", team="t", name="p", now_ms=1)
    box, _ = start(store, "p", "a", "s1")
    store.snapshots.add(snapshot(box, "snap_1"))
    store.drives.add(drive("p", "d"))
    store.sandboxes.add(sandbox("p", "b"))
    db.plans.clear()
    cursor = store.sandboxes.page("p", PageRequest(limit=1)).next
    store.sandboxes.page("p", PageRequest(cursor=cursor))
    for sort in ("created", "name", "status_updated"):
        store.sandboxes.page("p", sort=sort, tags={"a": "b", "c": "d"})
    store.sandboxes.page("p", name_prefix="a")
    store.sandboxes.get("p", "a")
    store.sessions.page("p")
    store.sessions.page("p", sandbox=box.id)
    store.sessions.active("p", box.id)
    store.sessions.active_on_host("here")
    store.snapshots.page("p")
    store.snapshots.live_of("p", box.id)
    store.snapshots.children("p", "snap_1")
    store.snapshots.expired_everywhere(now_ms=1)
    store.drives.page("p", sort="updated")
    store.events.page("p")
    store.events.page("p", session="s1")
    store.processes.of_session("p", "s1")
    store.processes.running("p", "s1")
    store.tokens.authenticate("x", now_ms=1)
    scans = {sql: plan for sql, plan in db.plans.items() if "SCAN" in plan}
    assert not scans
    paged = {sql: plan for sql, plan in db.plans.items() if "LIMIT" in sql}
    assert len(paged) > 8
    unsorted = {sql: plan for sql, plan in paged.items() if "TEMP B-TREE FOR ORDER BY" in plan}
    assert not unsorted
    store.close()


def test_the_index_and_the_queries_agree_on_what_is_active(tmp_path: Path) -> None:
    db = SqliteDatabase(str(tmp_path / "store.db"))
    migrate(db, now_ms=1)
    [(sql,)] = db.all("SELECT sql FROM sqlite_master WHERE name = 'one_active_session'")
    assert f"status IN ({ACTIVE_SQL})" in sql
    db.close()
