"""Where a soak happens: a server that is started again whenever it ends, and every process it leads to.

This process adopts what is left of processes whose parent was killed, so all that the server ever led to is
found below it, independently of other processes of the machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.soak.tally import Tally
from sandkeep import sync
from sandkeep.linux import syscalls

PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = 120.0
TEAM, PROJECT = "team_soak", "prj_soak"


class Being(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    born: int
    kind: str
    """What it is: server, zygote, worker, netd, supervisor, ready, init, client, or something inside."""
    session: str = ""

    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found.born == self.born and found.state not in "ZX"


class _Stat(NamedTuple):
    state: str
    parent: int
    born: int


def _stat(pid: int) -> _Stat | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return None
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[19]))


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Site:
    """A data directory, the server on it, and who is alive."""

    def __init__(self, data: str, tally: Tally, seed: int) -> None:
        self.data = data
        self._tally = tally
        self._random = random.Random(f"{seed} restarts")
        self._guard = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._doomed: set[int] = set()
        """Servers that this soak has killed: their end is expected."""
        self._clients: dict[int, subprocess.Popen[str]] = {}
        self._closing = False
        self.url = ""
        self.token = ""
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    @property
    def unix(self) -> str:
        return f"unix://{self.data}/server.sock"

    def open(self) -> None:
        syscalls.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._start()
        command = ["token", "create", "--team", TEAM, "--project", PROJECT, "--json"]
        made = subprocess.run(
            [sys.executable, "-m", "sandkeep", *command, "--data-dir", self.data],
            capture_output=True,
            text=True,
            check=True,
        )
        self.token = str(json.loads(made.stdout)["token"])
        self._keeper.start()

    def client(self, *, tcp: bool) -> sync.Client:
        if tcp:
            return sync.Client(self.url, token=self.token)
        return sync.Client(self.unix, team=TEAM, project=PROJECT)

    def close(self) -> None:
        """End the server as an operator does."""
        self._closing = True
        self._keeper.join()
        server = self._server
        if server is not None:
            server.terminate()
            if server.wait(60) != 0:
                self._tally.violation(f"the server ended with status {server.returncode} when asked to")
            self._server = None
        self.reap()

    def abandon(self) -> None:
        """Stop everything, in any state."""
        self._closing = True
        if self._keeper.is_alive():
            self._keeper.join()
        while found := self.beings():
            for being in found:
                with suppress(ProcessLookupError):
                    os.kill(being.pid, signal.SIGKILL)
            with self._guard:
                waited = [*self._clients.values(), *([self._server] if self._server is not None else [])]
            for process in waited:
                process.wait()
            self.reap()
            time.sleep(0.05)

    # --- the server --------------------------------------------------------------------------------------

    def _start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", self.data, "--port", port]
        where = Path(self.data, "server.json")
        with open(f"{self.data}/log", "ab") as log:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        with self._guard:
            self._server = server
        deadline = time.monotonic() + START_SECONDS
        while server.poll() is None:
            try:
                found = json.loads(where.read_text())
            except (OSError, ValueError):
                found = {"pid": None}
            if found["pid"] == server.pid:
                self.url = found["url"]
                return
            if time.monotonic() > deadline:
                self._tally.violation(f"the server was not ready after {START_SECONDS:g} seconds")
                deadline += START_SECONDS
            time.sleep(0.02)

    def _keep(self) -> None:
        """Start the server again when it has ended, as systemd does."""
        while not self._closing:
            self.reap()
            with self._guard:
                server = self._server
            if server is not None and server.poll() is not None:
                if server.pid not in self._doomed and not self._closing:
                    tail = self.log()[-2000:]
                    self._tally.violation(f"the server ended with status {server.returncode}:\n{tail}")
                time.sleep(self._random.uniform(0.1, 1.5))
                if not self._closing:
                    self._start()
            time.sleep(0.05)

    def log(self) -> str:
        return Path(self.data, "log").read_text(errors="replace")

    def serving(self) -> bool:
        """Whether the server has said that it is ready."""
        try:
            found = json.loads(Path(self.data, "server.json").read_text())
        except (OSError, ValueError):
            return False
        with self._guard:
            server = self._server
        return server is not None and server.poll() is None and found["pid"] == server.pid

    # --- processes ---------------------------------------------------------------------------------------

    def run_client(self, *arguments: str) -> tuple[int, IO[str]]:
        """Another client, in a process of its own: its number, and what it prints."""
        command = [sys.executable, "-m", "benchmarks.soak.client", *arguments]
        client = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        with self._guard:
            self._clients[client.pid] = client
        return client.pid, client.stdout

    def end_client(self, pid: int, *, kill: bool = False) -> int:
        with self._guard:
            client = self._clients[pid]
        if kill:
            client.kill()
        status = client.wait()
        with self._guard:
            del self._clients[pid]  # only now: until then nothing else may reap it
        assert client.stdout is not None
        client.stdout.close()
        return status

    def reap(self) -> None:
        """Reap ended orphans that were re-parented to us, except processes that a task waits for."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            with self._guard:
                known = {*self._clients, *([self._server.pid] if self._server is not None else [])}
            if found.si_pid in known:
                return
            try:
                os.waitpid(found.si_pid, os.WNOHANG)
            except ChildProcessError:
                return

    def beings(self) -> list[Being]:
        """Return every process below this one, by kind."""
        table = {
            int(name): stat for name in os.listdir("/proc") if name.isdigit() if (stat := _stat(int(name)))
        }
        children: dict[int, list[int]] = {}
        for pid, stat in table.items():
            children.setdefault(stat.parent, []).append(pid)
        found: list[Being] = []
        waiting = [(pid, "", "") for pid in children.get(os.getpid(), [])]
        while waiting:
            pid, above, session = waiting.pop()
            kind, session = self._kind(pid, above, session)
            if table[pid].state not in "ZX":
                found.append(Being(pid, table[pid].born, kind, session))
            waiting += [(child, kind, session) for child in children.get(pid, [])]
        return found

    def _kind(self, pid: int, above: str, session: str) -> tuple[str, str]:
        with self._guard:
            if self._server is not None and pid == self._server.pid:
                return "server", ""
            if pid in self._clients:
                return "client", ""
        arguments = _arguments(pid)
        first = arguments[0] if arguments else ""
        title, _, rest = first.partition(" ")
        if title == "sandkeep-supervisor":
            return "supervisor", rest
        if title in ("sandkeep-zygote", "sandkeep-netd", "sandkeep-ready"):
            return title.removeprefix("sandkeep-"), ""
        if title == "sandkeep-init":
            return ("init" if above == "supervisor" else "prepared init"), session
        if any(argument.endswith("start_worker.py") for argument in arguments):
            return "worker", ""
        return ("inside" if session or above == "init" else "helper"), session

    def kill(self, kind: str, chance: random.Random) -> Being | None:
        """Kill one process of a kind with SIGKILL, if there is one."""
        found = sorted(being for being in self.beings() if being.kind == kind)
        if not found:
            return None
        victim = chance.choice(found)
        if kind == "server":
            self._doomed.add(victim.pid)
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        self._tally.killed(kind)
        return victim
