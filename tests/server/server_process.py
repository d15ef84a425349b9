"""A real server process on a data directory of its own, and a client that hides nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import remove_tree

TEAM, PROJECT = "team_tests", "prj_tests"
START_SECONDS = 30.0


class ServerProcess:
    """``sandkeep serve`` as an operator starts it."""

    def __init__(self, data: Path, *, settings: dict[str, Any] | None = None) -> None:
        self.data = data
        self.team = TEAM
        self.project = PROJECT
        if settings is not None:
            (data / "settings.json").write_text(json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.token = ""

    @property
    def socket(self) -> str:
        return str(self.data / "server.sock")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(self.data)]
        if "--no-tcp" not in arguments:
            command += ["--port", self.url.rpartition(":")[2] or "0"]
        command += [argument for argument in arguments if argument != "--no-tcp"]
        with open(self.data / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while self._announced().get("pid") != self._process.pid:
            assert self._process.poll() is None, f"the server ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"the server does not get ready:\n{self.log()}"
            time.sleep(0.01)
        self.url = self._announced()["url"] or ""
        if not self.token:
            self.token = self.make_token("--jwt")

    def _announced(self) -> dict[str, Any]:
        """What is in ``server.json``; after a power failure it may be there with nothing in it."""
        try:
            return dict(json.loads((self.data / "server.json").read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    def log(self) -> str:
        return (self.data / "log").read_text()

    def make_token(self, *arguments: str, team: str = TEAM, project: str = PROJECT) -> str:
        return str(self.token_command("create", "--team", team, "--project", project, *arguments)["token"])

    def token_command(self, action: str, *arguments: str) -> Any:
        command = [sys.executable, "-m", "sandkeep", "token", action, "--data-dir", str(self.data), "--json"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server; sessions go on."""
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(30)
        self._process = None
        return status

    def clear(self) -> None:
        """Destroy every sandbox, end the server."""
        if self._process is None:
            self.start()
        with self.local() as client:
            for team, project in self._projects():
                scope = {"teamId": team, "project": project, "projectId": project}
                while found := client.get("/v2/sandboxes", params=scope).json()["sandboxes"]:
                    for sandbox in found:
                        client.delete(f"/v2/sandboxes/{sandbox['name']}", params=scope)
        self.stop()

    def _projects(self) -> list[tuple[str, str]]:
        import sqlite3

        connection = sqlite3.connect(self.data / "store.db")
        try:
            return list(connection.execute("SELECT team, name FROM projects"))
        finally:
            connection.close()

    def local(self, **options: Any) -> httpx.Client:
        """Over the unix socket, as the user the server runs as, in the default project unless told."""
        transport = httpx.HTTPTransport(uds=self.socket)
        return httpx.Client(transport=transport, base_url="http://sandkeep", timeout=60, **options)

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        """Over TCP with a token, the tests' own unless another is given (empty: none)."""
        token = self.token if token is None else token
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)


@contextmanager
def running_server(
    *arguments: str, settings: dict[str, Any] | None = None, start: bool = True
) -> Iterator[ServerProcess]:
    """A server in an empty data directory; everything it made is gone afterwards."""
    base = os.environ.get("TMPDIR")
    data = Path(tempfile.mkdtemp(prefix="server-", dir=base))
    server = ServerProcess(data, settings=settings)
    try:
        if start:
            server.start(*arguments)
        yield server
    finally:
        server.clear()
        remove_tree(data)
