"""One small server on loopback that is an apt archive, a pip index, an npm registry and a git repository."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOST = "registry.test"


class Registries:
    """Where it is, and what it was asked for."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []


@contextmanager
def registries(directory: Path) -> Iterator[Registries]:
    """Serve packages named ``sk-…`` made for the purpose from ``directory``, which is filled."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(directory))

        def do_GET(self) -> None:
            found.asked.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Registries(server.server_address[1])
        _fill(directory, found.port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def _fill(directory: Path, port: int) -> None:
    _wheel(directory)
    _node_package(directory, f"http://{HOST}:{port}")
    if shutil.which("dpkg-deb"):
        _archive(directory)
    _repository(directory)


def _wheel(directory: Path) -> None:
    index = directory / "simple/sk-six"
    index.mkdir(parents=True)
    name, about = "sk_six-1.0-py3-none-any.whl", "sk_six-1.0.dist-info"
    files = {
        "sk_six.py": "def main():\n    print('six')\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: sk-six\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nsk-six = sk_six:main\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items()]
    with zipfile.ZipFile(index / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{about}/RECORD", "".join(rows) + f"{about}/RECORD,,\n")
    (index / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>')


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _node_package(directory: Path, url: str) -> None:
    body: dict[str, Any] = {"name": "sk-cowsay", "version": "1.0.0", "bin": {"sk-cowsay": "say.js"}}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in (
            ("package.json", json.dumps(body)),
            ("say.js", "#!/usr/bin/env node\nconsole.log('moo')\n"),
        ):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    (directory / "files").mkdir()
    (directory / "files/sk-cowsay-1.0.0.tgz").write_bytes(packed.getvalue())
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(packed.getvalue()).digest()).decode()
    body["dist"] = {"tarball": f"{url}/files/sk-cowsay-1.0.0.tgz", "integrity": integrity}
    about = {"name": "sk-cowsay", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": body}}
    (directory / "sk-cowsay").write_text(json.dumps(about))


def _archive(directory: Path) -> None:
    root = directory / "deb"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    program = root / "usr/bin/sk-golang"
    program.write_text("#!/bin/sh\necho go\n")
    program.chmod(0o755)
    control = (
        "Package: sk-golang\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\n"
        "Depends: libc6\nDescription: test\n"
    )
    (root / "DEBIAN/control").write_text(control)
    (directory / "apt").mkdir()
    package = directory / "apt/sk-golang.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, package], check=True, capture_output=True)
    data = package.read_bytes()
    more = f"Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    (directory / "apt/Packages").write_text(control + more)


def _repository(directory: Path) -> None:
    work, bare = directory / "work", directory / "repo.git"
    work.mkdir()
    (work / "README").write_text("cloned\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        **{f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    for command in (
        ["git", "init", "-q", "-b", "main", "."],
        ["git", "add", "README"],
        ["git", "commit", "-q", "-m", "first"],
        ["git", "clone", "-q", "--bare", ".", str(bare)],
        ["git", "-C", str(bare), "update-server-info"],
    ):
        subprocess.run(command, cwd=work, check=True, env=environment)
