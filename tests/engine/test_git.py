"""Git repositories as sources: what is told to whom, and what a hostile repository can do to the machine."""

from __future__ import annotations

import base64
import dataclasses
import glob
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine import fetching
from sandkeep.engine.settings import Settings
from sandkeep.errors import InvalidRequest, LimitReached, NoSpace, NotFound
from sandkeep.spec import GitSource
from tests.conftest import IS_ROOT, User
from tests.engine.engine_lab import EngineLab
from tests.polling import until

USER, PASSWORD = "alice", "hunter2/+?"
SPELLINGS = ("hunter2", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())


class Forge(ThreadingHTTPServer):
    """Serves bare repositories, to whom has the password where there is one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = str(directory)
        self.password = ""
        self.seen: set[str] = set()
        """Arguments of processes of the machine that had the password while git was asking."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(SimpleHTTPRequestHandler):
    server: Forge

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=arguments[2].directory)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                arguments = Path(path).read_text(errors="replace")
            except OSError:
                continue
            if any(spelling in arguments for spelling in SPELLINGS):
                self.server.seen.add(arguments)
        wanted = base64.b64encode(f"{USER}:{self.server.password}".encode()).decode()
        if self.server.password and self.headers["Authorization"] != f"Basic {wanted}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="it"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        super().do_GET()


@pytest.fixture
def forge(tmp_path: Path) -> Iterator[Forge]:
    make_repository(tmp_path / "site" / "it.git", tmp_path / "work")
    with serving(tmp_path / "site") as forge:
        yield forge


def make_repository(bare: Path, work: Path, **files: bytes) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    for name, content in {"file": b"text", **files}.items():
        (work / name).write_bytes(content)
    for command in (
        ["git", "-C", str(work), "add", "."],
        ["git", "-C", str(work), *identity, "commit", "-q", "-m", "one"],
        ["git", "clone", "-q", "--bare", str(work), str(bare)],
        ["git", "-C", str(bare), "update-server-info"],
    ):
        subprocess.run(command, check=True)


@contextmanager
def serving(directory: Path) -> Iterator[Forge]:
    with Forge(directory) as forge:
        thread = threading.Thread(target=forge.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield forge
        finally:
            forge.shutdown()
            thread.join()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path / "data"), Settings(private_sources=True)) as lab:
        yield lab


def test_credentials_are_used_and_nobody_sees_them(lab: EngineLab, forge: Forge) -> None:
    forge.password = PASSWORD
    url = f"http://{forge.host}/it.git"
    within = f"http://{USER}:hunter2%2F%2B%3F@{forge.host}/it.git"
    whole = GitSource(url, username=USER, password=PASSWORD)
    sources = (whole, GitSource(within), dataclasses.replace(whole, revision="main"))
    for number, source in enumerate(sources):
        box = lab.create(f"box{number}", source=source).session.id
        assert lab.sh(box, "cat it/file") == "text"
        assert lab.sh(box, "git -C it config --list | grep -c -e hunter2 -e extraheader || true") == "0\n"
        assert lab.sh(box, "git -C it config remote.origin.url") == f"{url}\n"
    assert forge.seen == set()
    with pytest.raises(InvalidRequest) as caught:
        lab.create("box9", source=GitSource(url, username=USER, password="hunter2wrong"))
    assert "hunter2" not in str(caught.value)


def test_a_pack_is_read_by_a_git_that_is_confined(lab: EngineLab, tmp_path: Path) -> None:
    """Over git's own protocol, which sends packs and knows of depths; programs of git run each other."""
    make_repository(
        tmp_path / "site" / "it.git", tmp_path / "work", **{f"f{n}": os.urandom(99) for n in range(200)}
    )
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    daemon = ["git", "daemon", "--export-all", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr"]
    server = subprocess.Popen(
        [*daemon, f"--base-path={tmp_path}/site"], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: _answers(port))
        source = GitSource(f"git://127.0.0.1:{port}/it.git", depth=1, revision="main")
        box = lab.create("box", source=source).session.id
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert lab.sh(box, "ls it | wc -l; ls it/.git/objects/pack/*.pack | wc -l; git -C it fsck") == "201\n1\n"


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# --- limits --------------------------------------------------------------------------------------------


def _nothing_is_left(lab: EngineLab) -> bool:
    try:
        lab.engine.sandboxes.get(lab.project, "box")
    except NotFound:
        return os.listdir(f"{lab.data_dir}/sources") == []
    return False


@pytest.mark.parametrize("files", [1, 300])
def test_a_repository_that_is_too_large_is_refused(tmp_path: Path, files: int) -> None:
    """Whether in one file or in many. What was fetched of it is gone."""
    content = {f"large{number}": os.urandom((3 << 20) // files) for number in range(files)}
    make_repository(tmp_path / "site" / "it.git", tmp_path / "work", **content)
    settings = Settings(private_sources=True, max_source_bytes=1 << 20)
    with serving(tmp_path / "site") as forge, EngineLab(str(tmp_path / "data"), settings) as lab:
        source = GitSource(f"http://{forge.host}/it.git")
        with pytest.raises(LimitReached, match="more than 1048576 bytes") as caught:
            lab.create("box", source=source)
        assert caught.value.details["limit"] == "max_source_bytes"
        assert _nothing_is_left(lab)


def test_a_clone_leaves_some_of_the_disk_to_others(tmp_path: Path, forge: Forge) -> None:
    settings = Settings(private_sources=True, min_free_percent=100)
    with EngineLab(str(tmp_path / "data"), settings) as lab:
        with pytest.raises(NoSpace, match="100 % of the disk"):
            lab.create("box", source=GitSource(f"http://{forge.host}/it.git"))
        assert _nothing_is_left(lab)


def _install(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this the server's git."""
    directory.chmod(0o755)
    program = directory / "bin" / "git"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_git_that_does_not_end_is_ended_with_all_its_processes(
    lab: EngineLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "setsid sleep 98765.4321 & sleep 98765.4321", monkeypatch)
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 2)
    with pytest.raises(LimitReached, match="more than 2 seconds"):
        lab.create("box", source=GitSource("http://127.0.0.1:1/it.git"))
    running = [Path(path).read_bytes() for path in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(path)]
    assert not [line for line in running if b"98765.4321" in line]
    assert _nothing_is_left(lab)


def test_what_a_killed_server_had_fetched_goes_at_the_next_start(lab: EngineLab) -> None:
    left = Path(lab.data_dir) / "sources" / "left" / "git"
    left.mkdir(parents=True)
    (left / "HEAD").write_text("x")
    lab.reopen()
    assert os.listdir(f"{lab.data_dir}/sources") == []


# --- confinement ---------------------------------------------------------------------------------------

# Fails, so that the caller is told what it sees of the machine.
LOOK = """
exec >&2
echo "user=$(id -u) groups=$(id -G)"
echo "processes=$(echo /proc/[0-9]*)"
for path in /etc/shadow /etc/passwd /root /run /var "$DATA"/*; do test -e "$path" && echo "sees=$path"; done
for path in / /usr /etc /dev/null/x "$BIN"; do touch "$path/mine" 2>/dev/null && echo "writes=$path"; done
echo x > /scratch/mine && echo writes=/scratch
cp /bin/true /scratch/program && /scratch/program 2>/dev/null && echo runs=/scratch/program
unshare -U true 2>/dev/null && echo unshares
echo "open=$(ulimit -n) core=$(ulimit -c) data=$(ulimit -d)"
exit 1
"""


def look_around(directory: str, uid: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    data = f"{directory}/data"
    try:
        script = LOOK.replace("$DATA", data).replace("$BIN", f"{directory}/bin")
        _install(Path(directory), script, monkeypatch)
        with EngineLab(data, Settings(private_sources=True)) as lab:
            with pytest.raises(InvalidRequest) as caught:
                lab.create("box", source=GitSource("http://127.0.0.1:1/it.git"))
            text = caught.value.message
            assert not re.search("sees=|runs=|unshares", text), text
            assert re.findall("writes=.*", text) == ["writes=/scratch"], text
            assert "processes=/proc/[0-9]*" in text, text
            assert "open=1024 core=0 data=2097152" in text, text
            found = re.search(r"user=(\d+) groups=(\d+)$", text, re.MULTILINE)
            assert found, text
            if uid == 0:  # an id of its own
                assert int(found[1]) == int(found[2]) >= 0x6FFF_0000
            else:
                assert int(found[1]) == uid
            assert _nothing_is_left(lab)
    finally:
        monkeypatch.undo()


@pytest.mark.skipif(not IS_ROOT, reason="needs real root")
def test_git_sees_the_machines_programs_and_writes_to_one_place_only(tmp_path: Path) -> None:
    look_around(str(tmp_path), 0)


def test_rootless_too(ordinary_user: User) -> None:
    directory = ordinary_user.home / "git"
    ordinary_user.call(os.mkdir, str(directory))
    ordinary_user.call(look_around, str(directory), ordinary_user.uid)
