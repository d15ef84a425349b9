"""A store that does not know what is beside it is refused, and nothing is deleted; ``adopt`` recovers it."""

from __future__ import annotations

import glob
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandkeep.engine.engine import Engine
from sandkeep.engine.settings import Settings
from sandkeep.errors import StoreMismatch
from sandkeep.host.driver import SessionRef
from sandkeep.store import Store
from sandkeep.store.identity import establish, open_store, read
from sandkeep.store.migrations import STEPS, identity, migrate
from sandkeep.store.sqlite import SqliteDatabase
from tests.driver_lab import Lab
from tests.engine.engine_lab import EngineLab
from tests.mode_runner import MODES, Ask, everywhere, opened

_NUMBERS = itertools.count()
SUFFIXES = ("", "-wal", "-shm")
STORE = (*(f"store.db{suffix}" for suffix in SUFFIXES), "layers/.identity")


@pytest.fixture(scope="module", params=[mode for mode in MODES if mode != "single"])
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


class Kept(EngineLab):
    """An engine that can be left as a crash leaves it: sessions run on, the store's log stays as it is."""

    def __init__(self, data_dir: str, *, adopt: bool = False) -> None:
        self.adopt = adopt
        try:
            super().__init__(data_dir, Settings(pool=0))
        except BaseException:
            self._runner.close()
            raise

    async def _open(self) -> Engine:
        return await Engine.open(self.data_dir, settings=self.settings, log=self._note, adopt=self.adopt)

    def leave(self) -> None:
        """End as if killed: what the store's files were a moment before is what they are afterwards."""
        paths = [Path(self.data_dir, name) for name in STORE]
        saved = {path: path.read_bytes() for path in paths if path.exists()}
        self.do(self.engine.close())
        self._runner.close()
        for path in paths:
            path.unlink(missing_ok=True)
        for path, data in saved.items():
            path.write_bytes(data)


def fresh(lab: Lab) -> str:
    """A data directory of its own beside the lab's."""
    return f"{lab.driver.data_dir}-store-{next(_NUMBERS)}"


def inventory(data_dir: str) -> set[str]:
    """Every layer and every session with all of their own files."""
    found = set()
    for place in ("layers", "sessions"):
        for name in os.listdir(f"{data_dir}/{place}"):
            if not name.startswith("."):
                found |= {f"{place}/{name}/{entry}" for entry in os.listdir(f"{data_dir}/{place}/{name}")}
    return found


def missing(path: str) -> None:
    for suffix in SUFFIXES:
        Path(path + suffix).unlink(missing_ok=True)


def emptied(path: str) -> None:
    missing(path)
    Path(path).touch()


def garbage(path: str) -> None:
    missing(path)
    Path(path).write_bytes(b"\xa5" * 8192)


def damaged_page(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(Path(path).read_bytes())
    data[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    Path(path).write_bytes(data)


def never_written_back(path: str) -> None:
    """As earlier versions left a young store: everything in the log, and the log is lost."""
    missing(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {0x736B6570}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


def another(path: str) -> None:
    missing(path)
    other = f"{os.path.dirname(path)}-other"
    os.mkdir(other, 0o700)
    with Kept(other) as lab:
        lab.engine.project(team="another", name="one")
    shutil.copy(f"{other}/store.db", path)
    shutil.rmtree(other)


REFUSED: dict[str, tuple[Callable[[str], None], str]] = {
    "missing": (missing, "missing"),
    "emptied": (emptied, "empty"),
    "garbage": (garbage, "damaged"),
    "damaged page": (damaged_page, "damaged"),
    "never written back": (never_written_back, "empty"),
    "another": (another, "another"),
}


def _refused_and_adopted(lab: Lab, spoil: Callable[[str], None], found: str) -> None:
    data_dir = fresh(lab)
    try:
        with_sessions(data_dir)
        before = inventory(data_dir)
        spoil(f"{data_dir}/store.db")
        for _ in range(2):  # refusing leaves nothing that the next start takes for a store
            with pytest.raises(StoreMismatch) as caught:
                Kept(data_dir)
            assert (caught.value.found, caught.value.layers, caught.value.sessions) == (found, 1, 2)
            assert "--adopt" in str(caught.value.hint)
            assert inventory(data_dir) == before
        with Kept(data_dir, adopt=True) as adopting:
            kinds = sorted((found.kind, found.name) for found in adopting.engine.adopted)
            assert [kind for kind, _ in kinds] == ["session", "snapshot"], kinds
            adopting.project = local(adopting)
            texts = []
            for _, name in kinds:
                started = adopting.do(adopting.engine.sandboxes.resume(adopting.project, name))
                texts.append(adopting.sh(started.session.id, "cat file"))
            assert texts == ["running\n", "stopped\n"]
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


def local(lab: EngineLab) -> str:
    """The project that recovered sandboxes are in."""
    found = lab.engine.store.projects.find(team="local", name="default")
    assert found is not None
    return found.id


def with_sessions(data_dir: str, *, crash: bool = True) -> None:
    """One sandbox that has stopped, one that runs."""
    lab = Kept(data_dir)
    for name in ("stopped", "running"):
        started = lab.create(name)
        lab.sh(started.session.id, f"echo {name} > file")
        if name == "stopped":
            lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    if crash:
        lab.leave()
    else:
        lab.do(lab.engine.close())
        lab._runner.close()


def _make(name: str) -> Callable[[Ask], None]:
    def body(lab: Lab) -> None:
        _refused_and_adopted(lab, *REFUSED[name])

    body.__name__ = body.__qualname__ = f"test_a_store_that_is_{name.replace(' ', '_')}_is_refused"
    body.__module__ = __name__
    return everywhere(body)


for _name in REFUSED:
    _test = _make(_name)
    globals()[_test.__name__] = _test


@everywhere
def test_an_older_store_is_refused(lab: Lab) -> None:
    data_dir = fresh(lab)
    try:
        with_sessions(data_dir, crash=False)
        older = Path(f"{data_dir}/store.db").read_bytes()
        engine = Kept(data_dir)
        started = engine.create("later")
        engine.sh(started.session.id, "echo later > file")
        engine.do(engine.engine.sessions.stop(engine.project, started.session.id))
        engine.do(engine.engine.upkeep.turn())
        engine.leave()
        before = inventory(data_dir)
        missing(f"{data_dir}/store.db")
        Path(f"{data_dir}/store.db").write_bytes(older)
        with pytest.raises(StoreMismatch) as caught:
            Kept(data_dir)
        assert caught.value.found == "older"
        assert inventory(data_dir) == before
        with Kept(data_dir, adopt=True) as adopting:
            [recovered] = [found for found in adopting.engine.adopted if found.kind == "snapshot"]
            tests, adopting.project = adopting.project, local(adopting)
            started = adopting.do(adopting.engine.sandboxes.resume(adopting.project, recovered.name))
            assert adopting.sh(started.session.id, "cat file") == "later\n"
            adopting.do(adopting.engine.sandboxes.destroy(adopting.project, recovered.name))
            adopting.project = tests
            for name in ("stopped", "running"):
                started = adopting.do(adopting.engine.sandboxes.resume(adopting.project, name))
                assert adopting.sh(started.session.id, "cat file") == f"{name}\n"
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


def lost_log(path: str) -> None:
    Path(f"{path}-wal").unlink(missing_ok=True)
    Path(f"{path}-shm").unlink(missing_ok=True)


def truncated_log(path: str) -> None:
    os.truncate(f"{path}-wal", 4096 + 16)


def garbage_log(path: str) -> None:
    size = os.path.getsize(f"{path}-wal")
    Path(f"{path}-wal").write_bytes(b"\x5a" * size)


def emptied_log(path: str) -> None:
    os.truncate(f"{path}-wal", 0)


@pytest.mark.root
@pytest.mark.parametrize("spoil", [lost_log, truncated_log, garbage_log, emptied_log])
def test_with_the_log_only_the_last_moments_are_lost_and_no_byte_of_them(
    spoil: Callable[[str], None], tmp_path: Path
) -> None:
    data_dir = str(tmp_path / "data")
    lab = Kept(data_dir)
    started = lab.create("known")
    lab.sh(started.session.id, "echo known > file")
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    lab.do(lab.engine.upkeep.turn())
    for name in ("stopped", "running"):
        started = lab.create(name)
        lab.sh(started.session.id, f"echo {name} > file")
        if name == "stopped":
            lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    lab.leave()
    before = inventory(data_dir)
    spoil(f"{data_dir}/store.db")
    lab = Kept(data_dir)
    assert before <= inventory(data_dir), "nothing is deleted because the store does not know it"
    state = lab.do(lab.engine.driver.state(SessionRef("local", started.session.id)))
    assert state.status == "running", "what runs runs on"
    kinds = {note for note, _ in lab.log}
    assert {"layer.set-aside", "session.set-aside"} <= kinds, lab.log
    started = lab.do(lab.engine.sandboxes.resume(lab.project, "known"))
    assert lab.sh(started.session.id, "cat file") == "known\n"
    lab.do(lab.engine.close())
    lab._runner.close()
    with Kept(data_dir, adopt=True) as adopting:
        tests, adopting.project = adopting.project, local(adopting)
        texts = []
        for found in sorted(adopting.engine.adopted, key=lambda found: found.kind):
            again = adopting.do(adopting.engine.sandboxes.resume(adopting.project, found.name))
            texts.append(adopting.sh(again.session.id, "cat file"))
            adopting.do(adopting.engine.sandboxes.destroy(adopting.project, found.name))
        adopting.project = tests
        assert texts == ["running\n", "stopped\n"]


@pytest.mark.root
def test_what_is_set_aside_is_deleted_after_its_time(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    lab = Kept(data_dir)
    started = lab.create("known")
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    lab.engine.store._db.run("DELETE FROM snapshots")
    lab.engine.store._db.run("UPDATE sandboxes SET current_snapshot = NULL")
    lab.reopen()
    [layer] = layers(data_dir)
    assert [facts["layer"] for note, facts in lab.log if note == "layer.set-aside"] == [layer]
    lab.reopen()
    assert layers(data_dir) == [layer]
    lab.settings = Settings(pool=0, set_aside_ms=0)
    lab.reopen()
    assert layers(data_dir) == []
    lab.close()


def layers(data_dir: str) -> list[str]:
    return [name for name in os.listdir(f"{data_dir}/layers") if not name.startswith(".")]


def _take_back(path: str, *, version: int) -> None:
    """Give a store the schema it had: what later steps added goes."""
    then = SqliteDatabase(f"{path}-then")
    migrate(then, now_ms=1, steps=STEPS[:version])
    listed = "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'"
    had = set(then.all(listed))
    columns = {
        name: {column for (column,) in then.all("SELECT name FROM pragma_table_info($1)", str(name))}
        for kind, name in had
        if kind == "table"
    }
    then.close()
    for each in glob.glob(f"{path}-then*"):
        os.unlink(each)
    with closing(sqlite3.connect(path)) as store:
        for kind, name in set(store.execute(listed)) - had:
            store.execute(f"DROP {kind} IF EXISTS {name}")
        for table, kept in columns.items():
            for (column,) in store.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall():
                if column not in kept:
                    store.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        store.execute("DELETE FROM schema_steps WHERE version > ?", (version,))
        store.execute(f"PRAGMA user_version = {version}")
        store.commit()


def test_a_directory_of_an_earlier_version_gets_its_identity(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    with_sessions(data_dir)
    _take_back(f"{data_dir}/store.db", version=STEPS.index(identity))
    os.unlink(f"{data_dir}/layers/.identity")
    with Kept(data_dir) as lab:
        assert lab.engine.store.identity.get() == read(data_dir)
        started = lab.do(lab.engine.sandboxes.resume(lab.project, "stopped"))
        assert lab.sh(started.session.id, "cat file") == "stopped\n"


def test_the_note_beside_the_layers_is_never_ahead_of_the_store(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    with open_store(data_dir, now_ms=1) as store:
        establish(store, data_dir)
        noted = read(data_dir)
        shutil.copy(f"{data_dir}/store.db", f"{data_dir}/alone.db")
        with Store.open(f"{data_dir}/alone.db", now_ms=1) as without_log:
            assert without_log.identity.get() == noted
        (tmp_path / "layers" / "lay_1").mkdir()
        os.unlink(f"{data_dir}/layers/.identity")
    with pytest.raises(StoreMismatch, match="it knows no sandbox"):
        open_store(data_dir, now_ms=1)
