"""Everything sandkeep keeps goes by one command, whoever made it and whatever state it is in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandkeep.host import datadir
from tests.cli.program import Program
from tests.conftest import IS_ROOT, User, remove_tree
from tests.polling import ENOUGH, until
from tests.server.server_process import ServerProcess


@pytest.fixture
def home(able: None, test_area: Path, name: str) -> Iterator[Path]:
    """A data directory that a test may remove, and does."""
    directory = test_area / name
    yield directory
    left = list(datadir.processes_of(str(directory)))
    Program({})("uninstall", "--yes", "--data-dir", str(directory))
    assert left == []


@pytest.fixture
def own(home: Path) -> Program:
    return Program({"SANDKEEP_HOME": str(home)})


def removed(directory: Path) -> bool:
    """Whether it could be removed by hand, from under a server that may be removing files of its own."""
    try:
        remove_tree(directory)
    except FileNotFoundError:
        pass
    return not directory.exists()


def gone(pid: int) -> bool:
    """Whether it has ended; who adopted it may take a while to notice."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def test_sandboxes_server_and_files_go_after_asking(own: Program, home: Path) -> None:
    own("run", "--name", "kept", "--stop", "--", "sh", "-c", "echo mine > file")
    own("create", "-q", "--name", "busy")
    own("drives", "get-or-create", "shared")
    pid = int((home / "server.lock").read_text())
    refused = own.fails("uninstall", status=2)
    assert str(home) in refused and "--yes" in refused
    assert "2 sandboxes (1 running), 1 snapshot, 1 drive, no images" in refused and "MiB" in refused
    assert b"Delete" in own.on_terminal("uninstall", typed=b"n\n", status=1)
    assert own("exec", "kept", "cat", "file").text == "mine\n"
    own("stop", "kept")
    assert f"removed {home}" in own.on_terminal("uninstall", typed=b"y\n").decode()
    assert not home.exists() and gone(pid)
    assert list(datadir.processes_of(str(home))) == []
    assert "no sandkeep data" in own("uninstall").err


def test_the_server_in_the_background_is_stopped_and_sandboxes_run_on(
    own: Program, home: Path, server: ServerProcess
) -> None:
    assert "no server" in own("server", "stop").err
    own("create", "-q", "--name", "box")
    own("exec", "box", "touch", "/dev/shm/still-this-session")
    pid = int((home / "server.lock").read_text())
    assert "1 sandbox runs on" in own("server", "stop").err
    assert gone(pid) and own("status", "--json").json["running"] is False
    own("exec", "box", "ls", "/dev/shm/still-this-session")
    assert own("server", "stop", "--json").json["runningSandboxes"] == 1
    assert "serve" in own.fails("server", "start", status=2)
    by_hand = own.fails("server", "stop", "--data-dir", str(server.data))
    assert "started by hand" in by_hand and "systemctl" in by_hand
    # What runs in a directory that is gone is ended, too.
    until(lambda: removed(home))
    assert list(datadir.processes_of(str(home)))
    assert own("uninstall", "--json").json["removed"] is False
    assert list(datadir.processes_of(str(home))) == []


def sandkeep_of(user: User, data: Path) -> Callable[..., str]:
    """The program as another user runs it; gives all that it printed."""
    if user.run([user.interpreter, "-m", "sandkeep", "doctor", "--json"]).returncode:
        pytest.skip(f"sessions of {user.name} cannot run here: see sandkeep doctor")

    def sandkeep(*args: str, status: int = 0) -> str:
        command = [user.interpreter, "-m", "sandkeep", *args]
        done = user.run(command, env={"SANDKEEP_HOME": str(data)}, timeout=2 * ENOUGH)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return sandkeep


@pytest.mark.parametrize("kind", ["ordinary_user", "single_user"])
def test_what_rm_left_is_explained_and_removed(request: pytest.FixtureRequest, kind: str) -> None:
    user: User = request.getfixturevalue(kind)
    data = user.home / "half-removed"
    sandkeep = sandkeep_of(user, data)
    sandkeep("run", "--name", "kept", "--stop", "--", "sh", "-c", "echo mine > file")
    sandkeep("create", "-q", "--name", "running")
    user.run(["rm", "-rf", str(data)])
    if kind == "ordinary_user":
        for said in (sandkeep("run", "true", status=125), sandkeep("ls", status=1)):
            assert "half removed" in said and "'sandkeep uninstall' removes the rest" in said
            assert "server.log" not in said
        assert "cannot be counted" in sandkeep("uninstall", status=2)
    sandkeep("uninstall", "--yes")
    assert not data.exists()
    assert list(datadir.processes_of(str(data))) == []


@pytest.mark.slow
def test_what_rm_left_is_in_nobodys_way_when_nothing_was_kept(ordinary_user: User) -> None:
    data = ordinary_user.home / "nothing-kept"
    sandkeep = sandkeep_of(ordinary_user, data)
    assert sandkeep("run", "echo", "hello") == "hello\n"
    first = int((data / "server.lock").read_text())
    assert ordinary_user.run(["rm", "-rf", str(data)]).returncode == 1
    assert sandkeep("run", "echo", "hello") == "hello\n"
    # The server whose files went ends, and leaves alone those of the one that came after it.
    until(lambda: gone(first))
    assert json.loads(sandkeep("status", "--json"))["running"] is True
    assert "no sandboxes, no snapshots, no drives, no images" in sandkeep("uninstall", "--yes")
    assert not data.exists()


def test_a_damaged_store_is_in_nobodys_way(own: Program, home: Path) -> None:
    own("create", "-q", "--name", "box")
    own("server", "stop", "-q")
    for path in home.glob("store.db*"):
        path.unlink()
    (home / "store.db").write_bytes(b"no store at all" * 1000)
    own.fails("ls")
    gone_now = own("uninstall", "--yes", "--json").json
    assert gone_now["removed"] is True and gone_now["sandboxes"] is None
    assert gone_now["runningSandboxes"] == 1 and gone_now["bytes"] > 1 << 20
    assert not home.exists()


def test_what_is_not_a_data_directory_is_refused(tmp_path: Path) -> None:
    sandkeep = Program({"SANDKEEP_HOME": str(tmp_path / "data")})
    beside = tmp_path / "data"
    (beside / "layers").mkdir(parents=True)
    (beside / "layers" / ".identity").touch()
    (beside / "thesis.tex").touch()
    assert "'thesis.tex'" in sandkeep.fails("uninstall", "--yes", status=2)
    photos = tmp_path / "photos"
    (photos / "images" / "host").mkdir(parents=True)
    (photos / "images" / "host" / "me.jpg").touch()
    assert "nothing in it is sandkeep's" in sandkeep.fails(
        "uninstall", "--yes", "--data-dir", str(photos), status=2
    )
    sandkeep.fails("uninstall", "--yes", "--data-dir", "/", status=2 if IS_ROOT else 1)
    sandkeep.fails("uninstall", "--yes", "--data-dir", str(beside / "thesis.tex"), status=2)
    assert sorted(os.listdir(tmp_path)) == ["data", "photos"]
    assert (beside / "thesis.tex").exists() and (photos / "images" / "host" / "me.jpg").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no sandkeep data" in sandkeep("uninstall", "--yes", "--data-dir", str(empty)).err


def test_a_link_to_a_data_directory_goes_with_it(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "layers" / "lay_1" / "fs").mkdir(parents=True)
    link.symlink_to(real)
    Program({})("uninstall", "--yes", "--data-dir", str(link))
    assert os.listdir(tmp_path) == []


@pytest.mark.root
def test_a_directory_that_others_own_stays_empty_or_untouched(
    ordinary_user: User, single_user: User, test_area: Path
) -> None:
    place = test_area / "srv"
    place.mkdir(mode=0o755)
    data = place / "sandkeep"
    (data / "layers" / "lay_1" / "fs").mkdir(parents=True)
    subprocess.run(["chown", "-R", f"{ordinary_user.uid}", str(data)], check=True)
    (data / "lost+found").mkdir(mode=0o700)  # as on a disk of its own
    os.chmod(data, 0o700)
    command = ["-m", "sandkeep", "uninstall", "--yes", "--data-dir", str(data)]
    other = single_user.run([single_user.interpreter, *command])
    assert other.returncode == 1 and "another user" in other.stderr
    owner = ordinary_user.run([ordinary_user.interpreter, *command])
    assert owner.returncode == 0 and "the empty directory stays" in owner.stderr
    assert os.listdir(data) == ["lost+found"]
    shutil.rmtree(place)


def test_it_is_never_offered_for_a_typing_error(tmp_path: Path) -> None:
    sandkeep = Program({"SANDKEEP_HOME": str(tmp_path)})
    for typed in ("uninstal", "unistall", "install", "uninstall-all"):
        assert "uninstall" not in sandkeep.fails(typed, status=2).replace(repr(typed), "")
