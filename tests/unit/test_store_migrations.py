"""The schema's steps: applied once, in order, whole or not at all, and never backwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from sandkeep.errors import SchemaTooNew
from sandkeep.store import Store, rows
from sandkeep.store.database import Database
from sandkeep.store.migrations import STEPS, addresses_of_ports, first_schema, migrate
from sandkeep.store.sqlite import SqliteDatabase
from tests.unit.store_rows import drop_columns_since_sealed_policies, sandbox


def second(db: Database) -> None:
    db.run("CREATE TABLE added (n BIGINT)")


def broken(db: Database) -> None:
    db.run("CREATE TABLE torn (n BIGINT)")
    raise RuntimeError("broken step")


def tables(db: SqliteDatabase) -> set[str]:
    return {name for (name,) in db.all("SELECT name FROM sqlite_master WHERE type = 'table'")}


def version(db: SqliteDatabase) -> int:
    [(found,)] = db.all("PRAGMA user_version")
    return int(found)


def test_steps_run_once_and_in_order_and_are_recorded(tmp_path: Path) -> None:
    db = SqliteDatabase(str(tmp_path / "store.db"))
    assert migrate(db, now_ms=5, steps=(first_schema,)) == 1
    assert migrate(db, now_ms=6, steps=(first_schema,)) == 1
    assert migrate(db, now_ms=7, steps=(first_schema, second)) == 2
    assert db.all("SELECT * FROM schema_steps") == [(1, "first_schema", 5), (2, "second", 7)]
    db.close()


def test_a_failing_step_leaves_the_schema_as_it_was(tmp_path: Path) -> None:
    db = SqliteDatabase(str(tmp_path / "store.db"))
    migrate(db, now_ms=1, steps=(first_schema,))
    before = tables(db)
    with pytest.raises(RuntimeError):
        migrate(db, now_ms=2, steps=(first_schema, second, broken))
    assert (version(db), tables(db)) == (1, before)
    db.close()


def test_a_newer_schema_is_refused_with_advice(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    db = SqliteDatabase(path)
    migrate(db, now_ms=1, steps=(*STEPS, second))
    db.close()
    with pytest.raises(SchemaTooNew) as caught:
        Store.open(path, now_ms=2)
    assert (caught.value.found, caught.value.known) == (len(STEPS) + 1, len(STEPS))
    assert caught.value.hint


def test_opening_at_the_same_time_migrates_once(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")

    def open_and_close(_: int) -> None:
        Store.open(path, now_ms=1).close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_and_close, range(64)))
    db = SqliteDatabase(path)
    assert db.all("SELECT count(*) FROM schema_steps") == [(len(STEPS),)]
    db.close()


_STALLING = """
import sys, time
from sandkeep.store.migrations import STEPS, migrate
from sandkeep.store.sqlite import SqliteDatabase

def stall(db):
    db.run("CREATE TABLE torn (n BIGINT)")
    db.run("DROP TABLE events")
    print("in the middle", flush=True)
    time.sleep(60)

migrate(SqliteDatabase(sys.argv[1]), now_ms=1, steps=(*STEPS, stall))
"""


@pytest.mark.parametrize("existing", [False, True], ids=["new", "upgrade"])
def test_kill_9_in_the_middle_of_a_migration_leaves_the_old_schema(tmp_path: Path, existing: bool) -> None:
    path = str(tmp_path / "store.db")
    if existing:
        with Store.open(path, now_ms=1) as store:
            store.projects.ensure("p", team="t", name="kept", now_ms=1)
    child = subprocess.Popen([sys.executable, "-c", _STALLING, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in the middle\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()

    db = SqliteDatabase(path)
    assert version(db) == (len(STEPS) if existing else 0)
    assert "torn" not in tables(db)
    assert ("events" in tables(db)) is existing
    assert db.all("PRAGMA integrity_check") == [("ok",)]
    db.close()
    with Store.open(path, now_ms=2) as store:
        assert (store.projects.find(team="t", name="kept") is not None) is existing


def test_ports_of_sandboxes_that_exist_get_addresses(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    box, without = sandbox("p", "old", ports=(3000, 3001)), sandbox("p", "none")
    with Store.open(path, now_ms=1) as store:
        store.projects.ensure("p", team="t", name="p", now_ms=1)
        store.sandboxes.add(box)
        store.sandboxes.add(without)
    before = STEPS.index(addresses_of_ports)
    db = SqliteDatabase(path)
    db.run("DROP TABLE addresses")
    drop_columns_since_sealed_policies(db.run)
    db.run("DELETE FROM schema_steps WHERE version > $1", before)
    db.all(f"PRAGMA user_version = {before}")
    db.close()
    with Store.open(path, now_ms=2) as store:
        assert store.sandboxes.addresses("p", box.id).keys() == {3000, 3001}
        assert store.sandboxes.addresses("p", without.id) == {}


def test_every_field_of_every_row_has_its_column_and_the_other_way_round(tmp_path: Path) -> None:
    db = SqliteDatabase(str(tmp_path / "store.db"))
    migrate(db, now_ms=1)
    for table, row in (
        ("projects", rows.Project),
        ("tokens", rows.Token),
        ("sandboxes", rows.Sandbox),
        ("sessions", rows.Session),
        ("processes", rows.Process),
        ("snapshots", rows.Snapshot),
        ("drives", rows.Drive),
        ("events", rows.Event),
    ):
        columns = [column for (_, column, *_rest) in db.all(f"PRAGMA table_info({table})")]
        assert columns == [f.name for f in fields(row)], table
    db.close()
