"""The clients other people use, installed unmodified from their registries, once, outside the repository.

A client is installed into the user's cache under a name that contains its version, next to its final place
and then renamed, so that an interrupted installation is never taken for a finished one. Without a registry
in reach the tests that need the client skip and say so.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tarfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

HERE = Path(__file__).resolve().parent
PYTHON_CLIENT = "vercel-sandbox==0.10.0"
NODE_CLIENTS = {"3.5": "@vercel/sandbox@3.5", "2.9": "@vercel/sandbox@2.9"}
NODE_CLI = "sandbox@4.5"
INSTALL_SECONDS = 300
NAMES = ("one.test", "two.test")
"""Names sandboxes know, of the server on loopback."""


class Server(Protocol):
    """What the tests need to know about the server they talk to."""

    @property
    def url(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def team(self) -> str: ...
    @property
    def project(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """How a driver script ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def observed(self) -> Any:
        """What it printed last: what the client saw, as JSON."""
        assert self.status == 0, f"exit status {self.status}\n{self.stdout}\n{self.stderr}"
        return json.loads(self.stdout.strip().splitlines()[-1])


@dataclass(frozen=True)
class Client:
    """An installed client: the command that starts a driver script or the client itself."""

    command: tuple[str, ...]
    version: str
    preload: Path | None = None

    def run(
        self,
        *arguments: str,
        server: Server,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
        seconds: float = 120,
    ) -> Outcome:
        finished = subprocess.run(
            [*self.command, *arguments],
            env={**_environment(server, self.preload), **(env or {})},
            cwd=cwd or HERE,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Outcome(finished.returncode, finished.stdout, finished.stderr)

    def run_in_terminal(
        self, *arguments: str, server: Server, cwd: Path, typed: str, seconds: float = 60
    ) -> Outcome:
        """Run it in a terminal of 120 columns and 40 rows, and type something once it has said something."""
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        try:
            process = subprocess.Popen(
                [*self.command, *arguments],
                env={**_environment(server, self.preload), "TERM": "xterm"},
                cwd=cwd,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        seen = bytearray()
        deadline = time.monotonic() + seconds
        try:
            waiting = typed.encode()
            while time.monotonic() < deadline:
                if select.select([ours], [], [], 1)[0]:
                    try:
                        seen += os.read(ours, 65536)
                    except OSError:
                        # How the end of a terminal is told to its other side.
                        break
                # The client says what it runs when it starts to pass on what is typed.
                if waiting and b"$ " in seen:
                    os.write(ours, waiting)
                    waiting = b""
            return Outcome(process.wait(10), seen.decode(errors="replace"), "")
        finally:
            os.close(ours)
            if process.poll() is None:
                process.kill()
                process.wait()


def _environment(server: Server, preload: Path | None) -> dict[str, str]:
    """Only what the client needs, so that nothing of the machine's own configuration reaches it."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(HERE.parent.parent),
        "NO_COLOR": "1",
        "SANDBOX_SERVER": server.url,
        "SANDBOX_TEAM": server.team,
        "SANDBOX_PROJECT": server.project,
        "VERCEL_OIDC_TOKEN": server.token,
        "VERCEL_TELEMETRY_DISABLED": "1",
        "SANDBOX_SKIP_VERSION_CHECK": "1",
    }
    if preload is not None:
        environment["NODE_OPTIONS"] = f"--import {preload}"
    return environment


@pytest.fixture(scope="session")
def python_client() -> Client:
    home = _installed("py-" + PYTHON_CLIENT, _install_python)
    command = (str(home / "bin" / "python"), str(HERE / "py" / "scenarios.py"))
    return Client(command, PYTHON_CLIENT.rpartition("=")[2])


@pytest.fixture(scope="session", params=sorted(NODE_CLIENTS))
def node_client(request: pytest.FixtureRequest) -> Client:
    home = _installed("ts-" + request.param, lambda path: _install_node(path, NODE_CLIENTS[request.param]))
    # Node looks for packages from where the script is, so the script goes next to them.
    script = home / "scenarios.mjs"
    _refresh(HERE / "ts" / "scenarios.mjs", script)
    return Client((_node(), str(script)), request.param, HERE / "ts" / "preload.mjs")


@pytest.fixture(scope="session")
def cli_client() -> Client:
    home = _installed("cli-" + NODE_CLI, lambda path: _install_node(path, NODE_CLI))
    command = (str(home / "node_modules" / ".bin" / "sandbox"),)
    return Client(command, NODE_CLI.rpartition("@")[2], HERE / "ts" / "preload.mjs")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sandkeep-tests" / "clients"


def _installed(name: str, install: Any) -> Path:
    cache = _cache()
    home = cache / "".join(
        character if character.isalnum() or character in ".-" else "_" for character in name
    )
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock"):
        if not home.exists():
            fresh = home.with_name(home.name + ".new")
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                install(fresh)
            except (OSError, subprocess.SubprocessError) as error:
                shutil.rmtree(fresh, ignore_errors=True)
                output = getattr(error, "stderr", None) or ""
                pytest.skip(f"cannot install {name} (is a registry in reach?): {error} {output[-400:]}")
            fresh.rename(home)
    return home


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _install_python(home: Path) -> None:
    _call([sys.executable, "-m", "venv", str(home)])
    # Scripts in a virtual environment name the path it was made at; "-m pip" does not need them.
    _call([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", PYTHON_CLIENT])


def _install_node(home: Path, package: str) -> None:
    home.mkdir()
    (home / "package.json").write_text('{"name": "conformance", "version": "0.0.0", "private": true}')
    _node()
    _call(["npm", "install", "--silent", "--no-audit", "--no-fund", package], cwd=home)


def _node() -> str:
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed, so the JavaScript clients cannot run")
    return found


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)


def _refresh(source: Path, target: Path) -> None:
    text = source.read_text()
    if not target.exists() or target.read_text() != text:
        # Another worker may be reading it.
        fresh = target.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.rename(target)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A git repository, a tarball and a place that shows what it is sent, over HTTP on loopback.

    Their addresses by variable name, and the port they share.
    """
    root = tmp_path_factory.mktemp("sources")
    tree = root / "project"
    tree.mkdir()
    (tree / "README.md").write_text("from git\n")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    _call(["git", "init", "--quiet", "--initial-branch=main", str(tree)])
    _call(["git", "-C", str(tree), "add", "README.md"])
    _call(["git", "-C", str(tree), *identity, "commit", "--quiet", "--message=first"])
    _call(["git", "clone", "--quiet", "--bare", str(tree), str(root / "project.git")])
    # What a server without git on its side needs for a clone.
    _call(["git", "-C", str(root / "project.git"), "update-server-info"])
    (root / "hello.txt").write_text("from tarball\n")
    with tarfile.open(root / "hello.tgz", "w:gz") as archive:
        archive.add(root / "hello.txt", "hello.txt")
    handler = partial(_QuietFiles, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever, daemon=True)
        thread.start()
        port = str(files.server_address[1])
        base = f"http://127.0.0.1:{port}"
        yield {"GIT_URL": f"{base}/project.git", "TARBALL_URL": f"{base}/hello.tgz", "WEB_PORT": port}
        files.shutdown()
        thread.join()


class _QuietFiles(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self.path.startswith("/echo"):
            super().do_GET()
            return
        body = f"{self.headers.get('x-injected', 'nothing')}\n".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
