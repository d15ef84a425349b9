"""Programs people use, inside a sandbox, against real servers: through rules over TLS, and relayed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from sandkeep.policy import NetworkPolicy, Rule, Transform
from tests.conftest import User
from tests.driver_lab import Lab
from tests.net.network_lab import Box, inspecting, network

pytestmark = pytest.mark.root

LIBRARIES = (
    "requests",
    "urllib3",
    "idna",
    "certifi",
    "charset_normalizer",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
)


class Files:
    """An HTTP/1.1 server of a directory; counts requests that carry the header a rule sets."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.total = 0
        self.marked = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ")[1].partition("?")[0].strip("/")
            self.total += 1
            self.marked += "x-marked: by-rule" in head.lower()
            found = self._directory / path
            found = found / "index.html" if found.is_dir() else found
            body = found.read_bytes() if found.is_file() else b"hello"
            status = b"200 OK" if found.is_file() or not path else b"404 Not Found"
            kind = b"text/html" if found.suffix == ".html" else b"application/octet-stream"
            writer.write(b"HTTP/1.1 %s\r\ncontent-type: %s\r\n" % (status, kind))
            writer.write(b"content-length: %d\r\n\r\n" % len(body))
            if not head.startswith("HEAD "):
                writer.write(body)
            await writer.drain()


@pytest.fixture(scope="module")
def site(test_area: Path) -> Iterator[Path]:
    """A package index, a registry and a repository, each with one small thing in it."""
    root = Path(tempfile.mkdtemp(dir=test_area))
    _wheel(root)
    _npm(root)
    _git(root)
    yield root
    shutil.rmtree(root)


def _wheel(root: Path) -> None:
    index = root / "simple" / "demo"
    index.mkdir(parents=True)
    name = "demo-1.0-py3-none-any.whl"
    info = "demo-1.0.dist-info"
    with zipfile.ZipFile(index / name, "w") as wheel:
        wheel.writestr("demo.py", "print('demo from wheel')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        lines = ("Wheel-Version: 1.0", "Generator: t", "Root-Is-Purelib: true", "Tag: py3-none-any", "")
        wheel.writestr(f"{info}/WHEEL", "\n".join(lines))
        wheel.writestr(f"{info}/RECORD", "")
    (index / "index.html").write_text(f'<a href="{name}">{name}</a>')


def _npm(root: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        files = {
            "package/package.json": json.dumps({"name": "demopkg", "version": "1.0.0", "main": "index.js"}),
            "package/index.js": "module.exports = 'demo from npm'\n",
        }
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (root / "demopkg-1.0.0.tgz").write_bytes(data.getvalue())


def _describe_npm(root: Path, origin: str) -> None:
    """The registry's answer names its own address, known once the server has a port."""
    digest = base64.b64encode(hashlib.sha512((root / "demopkg-1.0.0.tgz").read_bytes()).digest()).decode()
    dist = {"tarball": f"{origin}/demopkg-1.0.0.tgz", "integrity": f"sha512-{digest}"}
    version = {"name": "demopkg", "version": "1.0.0", "dist": dist}
    body = {"name": "demopkg", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (root / "demopkg").mkdir(exist_ok=True)
    (root / "demopkg" / "index.html").write_text(json.dumps(body))


def _git(root: Path) -> None:
    work = root / "work"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q", str(work)], check=True)
    (work / "file").write_text("demo from git\n")
    subprocess.run([*git, "-C", str(work), "add", "file"], check=True)
    subprocess.run([*git, "-C", str(work), "commit", "-qm", "one"], check=True)
    subprocess.run([*git, "clone", "-q", "--bare", str(work), str(root / "repo.git")], check=True)
    subprocess.run([*git, "-C", str(root / "repo.git"), "update-server-info"], check=True)


def _source(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry


def _libraries(box: Box) -> None:
    """The HTTP libraries of this environment, copied into the sandbox."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in LIBRARIES:
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            archive.add(os.path.dirname(spec.origin), name, filter=_source)

    async def pieces() -> AsyncIterator[bytes]:
        yield data.getvalue()

    project, session = box.session.project, box.session.id
    box.net.do(box.net.engine.files.extract(project, session, pieces(), cwd="/tmp/lib"))


@contextmanager
def _lab(test_area: Path) -> Iterator[Lab]:
    with Lab(str(test_area / "lab")) as lab:
        yield lab


def test_package_managers_and_libraries_work_through_rules(test_area: Path, site: Path) -> None:
    """curl, git, pip, npm, Node's fetch, requests, httpx and Java accept our certificates and get theirs."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    with _lab(test_area) as lab, inspecting(lab) as (net, authority):
        server = Files(site)
        port = net.serve(server, ssl=authority.server("one.test"))
        origin = f"https://one.test:{port}"
        _describe_npm(site, origin)
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(Transform((("x-marked", "by-rule"),)))]}))
        _libraries(box)
        java = (
            "public class A { public static void main(String[] a) throws Exception {"
            f' var in = new java.net.URL("{origin}/").openStream();'
            " System.out.println(new String(in.readAllBytes())); } }"
        )
        python = "PYTHONPATH=/tmp/lib python3 -c"
        attempts: dict[str, tuple[str, str]] = {
            "curl": (f"curl -sS {origin}/", "hello"),
            "git": (f"git clone -q {origin}/repo.git /tmp/r && cat /tmp/r/file", "demo from git"),
            "pip": (
                f"python3 -m pip install -q --target /tmp/p -i {origin}/simple demo;"
                " PYTHONPATH=/tmp/p python3 -m demo",
                "demo from wheel",
            ),
            "npm": (
                f"cd /tmp && npm install --silent --no-audit --registry {origin}/ demopkg >/dev/null;"
                " node -p 'require(\"demopkg\")'",
                "demo from npm",
            ),
            "node": (f"node -e \"fetch('{origin}/').then(r => r.text()).then(console.log)\"", "hello"),
            "urllib": (
                f"python3 -c \"from urllib.request import *; print(urlopen('{origin}/').read())\"",
                "hello",
            ),
            "requests": (f"{python} \"import requests; print(requests.get('{origin}/').text)\"", "hello"),
            "httpx": (f"{python} \"import httpx; print(httpx.get('{origin}/').text)\"", "hello"),
            "java": (f"cat > /tmp/A.java <<'END'\n{java}\nEND\njava /tmp/A.java", "hello"),
        }
        for name, (script, expected) in attempts.items():
            if name in ("npm", "node", "java") and not shutil.which(name):
                continue
            before = server.marked
            out = box.sh(script, timeout=200)
            assert expected in out, (name, out)
            assert server.marked > before, name
        assert server.marked == server.total


@contextmanager
def _postgres(user: User) -> Iterator[int]:
    if shutil.which("postgres") is None or shutil.which("psql") is None:
        pytest.skip("PostgreSQL is not installed")
    binaries = os.path.dirname(os.path.realpath(shutil.which("postgres") or ""))
    data = user.home / "postgres"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = user.run([f"{binaries}/initdb", "-A", "trust", "-U", "demo", "-N", "-D", str(data)])
    assert made.returncode == 0, made.stderr
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": user.home}
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    control = [f"{binaries}/pg_ctl", "-D", str(data), "-w", "-l", str(data / "log")]
    started = user.run([*control, "-o", options, "start"])
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield port
    finally:
        user.run([*control, "-m", "immediate", "stop"])
        shutil.rmtree(data)


def test_a_database_is_reached_by_name_and_not_by_another(test_area: Path, ordinary_user: User) -> None:
    """A protocol that is neither HTTP nor TLS: psql to an allowed name works, to any other it does not."""
    with _postgres(ordinary_user) as port, _lab(test_area) as lab, network(lab) as net:
        box = net.box(NetworkPolicy.custom(["two.test"]))
        query = "-U demo -d postgres -Atc 'select 6 * 7'"
        assert box.sh(f"psql -h two.test -p {port} {query}") == "42"
        assert "could not translate host name" in box.sh(f"psql -h one.test -p {port} {query}")
        assert box.events("closed", name="two.test")[0].data["received"] > 0
