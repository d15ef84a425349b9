"""Sandboxes made from a repository or an archive: nobody sees one half-filled, and the server fetches for
nobody what only the server can reach."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.engine.sources import open_url
from sandkeep.errors import InvalidRequest, LimitReached, NotFound
from sandkeep.reach import Destination, Reach, Unreachable, is_public
from sandkeep.spec import GitSource, SandboxSpec, TarballSource
from tests.engine.engine_lab import EngineLab
from tests.internet import INSIDE, internet


def archive() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name in ("first", "last"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return held.getvalue()


class Site(ThreadingHTTPServer):
    """Serves an archive, the second half of it when told to, and redirections to anywhere."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Handler)
        self.first = threading.Event()
        self.go_on = threading.Event()
        self.asked: list[str] = []
        self.connections = 0
        self.target = ""

    def get_request(self) -> Any:
        self.connections += 1
        return super().get_request()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.first.set()
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("location", self.server.target)
            self.end_headers()
            return
        content = archive()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        self.server.go_on.wait(30)
        self.wfile.write(content[half:])


@contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Site]:
    with Site(address) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield site
        finally:
            site.go_on.set()
            site.shutdown()
            thread.join()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path / "data"), Settings(private_sources=True)) as lab:
        yield lab


def test_others_wait_until_a_sandbox_is_filled(lab: EngineLab) -> None:
    engine, project = lab.engine, lab.project

    async def both(site: Site) -> str:
        spec = SandboxSpec(name="box", source=TarballSource(f"{site.url}/archive"))
        creating = asyncio.create_task(engine.sandboxes.create(project, spec))
        await asyncio.to_thread(site.first.wait, 30)
        assert engine.sandboxes.get(project, "box").session.status == "pending"
        opening = asyncio.create_task(engine.sandboxes.resume(project, "box"))
        done, _ = await asyncio.wait([opening], timeout=0.3)
        assert not done
        site.go_on.set()
        created, opened = await creating, await opening
        assert (opened.session.id, opened.resumed) == (created.session.id, False)
        return created.session.id

    with serving() as site:
        session = lab.do(both(site))
    assert lab.sh(session, "cat first last") == "firstlast"


def test_a_fetch_that_fails_leaves_no_sandbox(lab: EngineLab) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lab.create("box", source=TarballSource("http://127.0.0.1:1/archive"))
    assert caught.value.details["field"] == "source.url"
    with pytest.raises(NotFound):
        lab.engine.sandboxes.get(lab.project, "box")
    assert lab.engine.store.sessions.count_active(lab.project) == 0


def test_an_archive_that_is_too_large_is_refused(tmp_path: Path) -> None:
    most = len(archive()) - 1
    settings = Settings(private_sources=True, max_source_bytes=most)
    with serving() as site, EngineLab(str(tmp_path / "data"), settings) as lab:
        site.go_on.set()
        with pytest.raises(LimitReached, match=f"more than {most} bytes") as caught:
            lab.create("box", source=TarballSource(f"{site.url}/archive"))
        assert caught.value.details["limit"] == "max_source_bytes"
        with pytest.raises(NotFound):
            lab.engine.sandboxes.get(lab.project, "box")


def test_an_archive_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with (
        serving() as site,
        EngineLab(str(tmp_path / "data"), Settings(private_sources=True, max_pull_ms=1)) as lab,
        pytest.raises(LimitReached, match=r"more than 0\.001 seconds"),
    ):
        site.go_on.set()
        lab.create("box", source=TarballSource(f"{site.url}/archive"))


def test_filling_from_a_repository_is_not_one_of_the_sandboxs_processes(
    lab: EngineLab, tmp_path: Path
) -> None:
    work, bare = tmp_path / "work", tmp_path / "site" / "it.git"
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    commands = (
        ["git", "init", "-q", "-b", "main", str(work)],
        ["git", "-C", str(work), *identity, "commit", "-q", "--allow-empty", "-m", "one"],
        ["git", "clone", "-q", "--bare", str(work), str(bare)],
        ["git", "-C", str(bare), "update-server-info"],
    )
    for command in commands:
        subprocess.run(command, check=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "-d", str(tmp_path / "site"), "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().decode().split(" port ")[1].split()[0]
        started = lab.create("box", source=GitSource(f"http://127.0.0.1:{port}/it.git"))
    finally:
        server.terminate()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    assert lab.engine.processes.list(lab.project, started.session.id) == []
    assert lab.sh(started.session.id, "git -C it log --format=%s") == "one\n"
    lab.reopen()
    assert [p.name for p in lab.engine.processes.list(lab.project, started.session.id)] == ["bash"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://localhost:1/x", "http://[::1]:1/x"])
def test_only_public_addresses_unless_the_operator_says_otherwise(tmp_path: Path, url: str) -> None:
    with EngineLab(str(tmp_path / "data")) as lab:
        for source in (GitSource(url), TarballSource(url)):
            with pytest.raises(InvalidRequest) as caught:
                lab.create("box", source=source)
            assert caught.value.details["field"] == "source.url"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True),
        ("2606:4700::1111", True),
        ("168.63.129.16", False),  # a metadata service at an address that is formally public
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_what_sandboxes_are_kept_from_is_no_source_either(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_an_address_is_looked_at_before_anything_is_said_to_it() -> None:
    with serving() as site, pytest.raises(Unreachable):
        open_url(f"{site.url}/archive", Reach())
    assert (site.asked, site.connections) == ([], 0)


class OneAddress(Reach):
    """For tests that need two sides and have loopback only."""

    def _allows(self, place: Destination, port: int) -> bool:
        return place.text == "127.0.0.1"


def test_redirections_are_looked_at_too() -> None:
    with serving("127.0.0.1") as open_site, serving("127.0.0.2") as closed:
        open_site.target = f"{closed.url}/archive"
        with pytest.raises(Unreachable, match="cannot be reached"):
            open_url(f"{open_site.url}/elsewhere", OneAddress())
        for scheme in ("file:///etc/passwd", f"ftp://127.0.0.2:{closed.server_address[1]}/x"):
            open_site.target = scheme
            with pytest.raises(ValueError, match="not an address for HTTP"):
                open_url(f"{open_site.url}/elsewhere", OneAddress())
    assert (open_site.asked, closed.asked, closed.connections) == (["/elsewhere"] * 3, [], 0)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with pytest.raises(Unreachable):
            open_url("http://no-such-name.invalid/archive", Reach())
    assert proxy.connections == 0


@pytest.mark.root
def test_sources_lead_to_nothing_inside_and_all_sound_the_same(tmp_path: Path) -> None:
    with internet() as net, net.inside(), serving(INSIDE) as own, serving() as loopback:
        with EngineLab(str(tmp_path / "data")) as lab:
            said = set()
            for url in (
                own.url,
                loopback.url,
                f"http://{INSIDE}:1",
                "http://127.0.0.1:1",
                "http://no.invalid",
            ):
                for source in (GitSource(f"{url}/x"), TarballSource(f"{url}/x")):
                    with pytest.raises(InvalidRequest) as caught:
                        lab.create("box", source=source)
                    host = url.removeprefix("http://").partition(":")[0]
                    said.add(str(caught.value).replace(host, "X"))
        assert len(said) == 1, said
        assert own.connections == loopback.connections == 0


_CREATE = """
import asyncio, sys
from sandkeep.engine.engine import Engine
from sandkeep.engine.settings import Settings
from sandkeep.spec import SandboxSpec, TarballSource

async def main():
    engine = await Engine.open(sys.argv[1], settings=Settings(private_sources=True))
    project = engine.project(team="team_test", name="prj_test").id
    await engine.sandboxes.create(project, SandboxSpec(name="box", source=TarballSource(sys.argv[2])))

asyncio.run(main())
"""


def test_a_create_cut_off_by_a_crash_leaves_no_half_filled_sandbox(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with serving() as site:
        victim = subprocess.Popen([sys.executable, "-c", _CREATE, data, f"{site.url}/archive"])
        assert site.first.wait(60)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        with EngineLab(data, Settings(private_sources=True)) as lab:
            with pytest.raises(NotFound):
                lab.engine.sandboxes.get(lab.project, "box")
            assert os.listdir(f"{data}/sessions") == []
            site.go_on.set()
            again = lab.create("box", source=TarballSource(f"{site.url}/archive"))
            assert lab.sh(again.session.id, "cat first last") == "firstlast"
