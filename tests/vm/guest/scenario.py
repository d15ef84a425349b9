"""Every operation once, as a user of the blocking SDK has them done, on whatever machine this is run.

    python scenario.py --data DIRECTORY --over unix|tcp [--part NAME]...

Starts a server on the data directory, does one part after another, destroys everything, ends the server, and
prints one JSON object: for each part its seconds, the facts it found, and the traceback if it failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandkeep import errors
from sandkeep import sync as sandkeep
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import Mount, Resources, SnapshotSource

PATIENCE = 300.0
PIDS = 100
NAME = "server.example"
HOG = "x = bytearray(b'x' * (2300 << 20)); print(len(x))"
FORK = """
import os, time
started = 0
try:
    while started < 1000:
        if os.fork() == 0:
            time.sleep(600)
        started += 1
except OSError as error:
    print(started, error.errno)
    os.kill(-1, 9)
"""
SPIN = """
import os, time
began = time.monotonic()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        while time.monotonic() < began + 4:
            pass
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
used = os.times()
print((used.children_user + used.children_system) / (time.monotonic() - began))
"""
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=60).read().decode())"

Facts = dict[str, Any]


class Scenario:
    def __init__(self, client: sandkeep.Client, local: sandkeep.Client, address: str, scratch: Path) -> None:
        self.client = client
        self.local = local
        """Over the unix socket, for what only the server's own user may do."""
        self.address = address
        """Of a web server of this machine."""
        self.scratch = scratch

    def create(self) -> Facts:
        """A sandbox that the other parts use; programs run in it, and not in the machine's namespaces."""
        box = self.client.create_sandbox("first", execution_time_limit=3600)
        done = box.run_process("python3", ["-c", "print(6 * 7)"], capture_output=True, check=True)
        assert done.stdout == b"42\n", done
        shown = sh(box, "id -un; readlink /proc/self/ns/mnt; cat /proc/mounts").splitlines()
        assert shown[1] != os.readlink("/proc/self/ns/mnt")
        assert box.run_process("sh", ["-c", "exit 7"]).returncode == 7
        session = box.current_session
        return {"user": shown[0], "barriers": dict(session.barriers), "limits": dict(session.limits)}

    def files(self) -> Facts:
        box = self.client.get_sandbox("first")
        box.fs.write_text("work/a.txt", "first")
        large = os.urandom(1 << 20)
        box.fs.write_bytes("work/large", large)
        with box.fs.batch() as batch:
            batch.write_text("work/b.txt", "second")
            batch.write_text("work/c.txt", "third")
        box.fs.rename("work/c.txt", "work/d.txt")
        box.fs.remove("work/b.txt")
        assert box.fs.read_text("work/a.txt") == "first"
        assert box.fs.read_bytes("work/large") == large
        assert [entry.name for entry in box.fs.listdir("work")] == ["a.txt", "d.txt", "large"]
        assert sh(box, "cat work/d.txt") == "third"
        return {}

    def stop_and_resume(self) -> Facts:
        """What is written, deleted and renamed stays so, also where it came from the image."""
        box = self.client.get_sandbox("first")
        script = "rm /etc/hostname; mkdir /opt/new; mv /etc/init.d /etc/moved"
        assert box.run_process("sh", ["-c", script], sudo=True).returncode == 0
        before = box.current_session.id
        stopped = box.stop()
        assert stopped.snapshot is not None and stopped.session.status == "stopped", stopped
        assert stopped.snapshot.synced_at is not None  # the server was told to be durable
        assert sh(box, "cat work/a.txt; ls -d /opt/new /etc/moved; ls -d /etc/hostname || true").split() == [
            "first/etc/moved",
            "/opt/new",
        ]
        assert box.current_session.id != before
        return {}

    def fork(self) -> Facts:
        with self.client.fork_sandbox("first", "second") as other:
            assert other.fs.read_text("work/a.txt") == "first"
            other.fs.write_text("work/a.txt", "of the fork")
        assert self.client.get_sandbox("first").fs.read_text("work/a.txt") == "first"
        return {}

    def checkpoint(self) -> Facts:
        """A snapshot beside a session that goes on, a sandbox made from it, and the way back."""
        box = self.client.get_sandbox("first")
        runs = box.create_process("sleep", ["3600"])
        box.fs.write_text("work/state", "one")
        kept = box.checkpoint()
        box.fs.write_text("work/state", "two")
        assert runs.poll() is None
        with self.client.create_sandbox("from-checkpoint", source=SnapshotSource(kept.id)) as other:
            assert other.fs.read_text("work/state") == "one"
        taken = box.snapshot()
        assert runs.poll() is not None
        assert box.fs.read_text("work/state") == "two"
        box.stop()
        box.rollback(kept)
        assert box.fs.read_text("work/state") == "one"
        assert {kept.id, taken.id} <= {snapshot.id for snapshot in box.snapshots()}
        return {}

    def image(self) -> Facts:
        """A root filesystem of two programs, imported from an archive."""
        archive = self.scratch / "tiny.tar"
        pack(archive, ["/bin/sh", "/bin/cat"])
        image = self.local.images.import_(str(archive), "tiny", kind="tar")
        with self.client.create_sandbox("tiny", image="tiny") as box:
            assert sh(box, "echo from sh >kept; cat kept") == "from sh\n"
            box.stop()
            assert sh(box, "cat kept; test -e /usr/bin/python3 || echo none") == "from sh\nnone\n"
        for snapshot in self.client.query_snapshots():
            if snapshot.session_id not in self._sessions_of("first"):
                self.client.delete_snapshot(snapshot.id)
        self.local.images.delete("tiny")
        return {"image": image.id}

    def drives(self) -> Facts:
        self.client.get_or_create_drive("shared", max_size_bytes=1 << 30)
        with self.client.create_sandbox("writes", mounts={"/data": Mount("shared")}) as box:
            sh(box, "echo kept >/data/file")
        with self.client.create_sandbox("reads", mounts={"/data": Mount("shared")}) as box:
            assert sh(box, "cat /data/file") == "kept\n"
        self.client.fork_drive("shared", "copy")
        with self.client.create_sandbox("reads-copy", mounts={"/data": Mount("copy")}) as box:
            assert sh(box, "cat /data/file; echo more >>/data/file") == "kept\n"
        for name in ("shared", "copy"):
            self.client.delete_drive(name)
        assert self.client.query_drives().all() == []
        return {}

    def network(self) -> Facts:
        """Nothing, one name, and nothing again, in the same session."""
        address = self.address.replace("127.0.0.1", NAME)
        with self.client.create_sandbox("online", network_policy=NetworkPolicy.deny_all()) as box:

            def reaches(url: str) -> bool:
                done = box.run_process("python3", ["-c", FETCH, url], capture_output=True)
                return done.returncode == 0 and done.stdout == b"served\n"

            assert not reaches(address) and not reaches(self.address)
            box.update_network_policy(NetworkPolicy.custom([NAME]))
            assert reaches(address)
            assert not reaches(address.replace(NAME, "other.example"))
            box.update_network_policy(NetworkPolicy.deny_all())
            assert not reaches(address)
        return {}

    def limits(self) -> Facts:
        """Each limit the session says is enforced, or watched, is. What is not possible here is said too."""
        facts: Facts = {}
        with self.client.create_sandbox(
            "limited", resources=Resources(cpus=1, memory_mb=2048, exact=False)
        ) as box:
            limits = dict(box.current_session.limits)
            hog = box.create_process("python3", ["-c", HOG])
            facts["memory"] = {
                "state": limits["memory"],
                "returncode": hog.wait(PATIENCE),
                "reason": hog.reason,
            }
            facts["memory"]["goes on"] = sh(box, "echo yes") == "yes\n"
            forked = box.create_process("python3", ["-c", FORK])
            forked.wait(PATIENCE)
            facts["pids"] = {"state": limits["pids"], "forked": forked.stdout.read().decode()}
            spun = sh(box, f"python3 -c '{SPIN}'")
            facts["cpu"] = {"state": limits["cpu"], "processors": float(spun)}
        return facts

    def delete(self) -> Facts:
        for info in self.client.query_sandboxes():
            self.client.get_sandbox(info.name).destroy()
        assert self.client.query_sandboxes().all() == []
        return {}

    def _sessions_of(self, name: str) -> set[str]:
        return {session.id for session in self.client.get_sandbox(name).sessions()}


PARTS: dict[str, Callable[[Scenario], Facts]] = {
    "create": Scenario.create,
    "files": Scenario.files,
    "stop_and_resume": Scenario.stop_and_resume,
    "fork": Scenario.fork,
    "checkpoint": Scenario.checkpoint,
    "image": Scenario.image,
    "drives": Scenario.drives,
    "network": Scenario.network,
    "limits": Scenario.limits,
    "delete": Scenario.delete,
}


def sh(box: sandkeep.Sandbox, script: str) -> str:
    done = box.run_process("sh", ["-c", script], capture_output=True)
    assert done.returncode == 0, f"{script}\nended with {done.returncode}\n{done.stdout!r}\n{done.stderr!r}"
    return done.stdout_text


def pack(archive: Path, programs: list[str]) -> None:
    """Programs of this machine and the libraries they load, as a root filesystem."""
    files = set(programs)
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files |= {word for word in listed.split() if word.startswith("/")}
    with tarfile.open(archive, "w", dereference=True) as tar:
        for name in ("bin", "etc", "lib", "lib64", "tmp", "usr", "usr/bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        accounts = b"root:x:0:0:root:/root:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(accounts)
        tar.addfile(entry, io.BytesIO(accounts))
        for name in sorted(files):
            tar.add(name, name.lstrip("/"))


# --- the server, and somebody to talk to ---------------------------------------------------------------


class Server:
    """`sandkeep serve` as an operator starts it. Sessions go on when it stops."""

    def __init__(self, data: Path, *, settings: dict[str, Any] | None = None) -> None:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        (data / "settings.json").write_text(json.dumps({"durable": True, **(settings or {})}))
        self._data = data
        self._command = [sys.executable, "-m", "sandkeep"]
        serve = [*self._command, "serve", "--data-dir", str(data), "--port", "0"]
        with open(data / "log", "ab") as log:
            self._process = subprocess.Popen(serve, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = self._ready()

    def _ready(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ValueError):
                told = json.loads((self._data / "server.json").read_text())
                if told["pid"] == self._process.pid:
                    return str(told["url"])
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{(self._data / 'log').read_text()[-8000:]}")

    def local(self) -> sandkeep.Client:
        return sandkeep.Client(f"unix://{self._data}/server.sock", project="scenario", timeout=PATIENCE)

    def remote(self) -> sandkeep.Client:
        make = [*self._command, "token", "create", "--data-dir", str(self._data), "--json"]
        make += ["--team", "local", "--project", "scenario"]
        token = json.loads(subprocess.run(make, capture_output=True, check=True).stdout)["token"]
        return sandkeep.Client(self.url, token=token, timeout=PATIENCE)

    def log(self) -> str:
        return (self._data / "log").read_text()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE)


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"served")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def play(data: Path, over: str, parts: list[str]) -> dict[str, Any]:
    network = {"names": {NAME: ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"], "ingress_port": 0}
    report: dict[str, Any] = {}
    with contextlib.ExitStack() as until_the_end:
        server = Server(data, settings={"pids": PIDS, "network": network})
        until_the_end.callback(server.stop)
        address = until_the_end.enter_context(web_server())
        scratch = until_the_end.enter_context(tempfile.TemporaryDirectory())
        local = until_the_end.enter_context(server.local())
        client = until_the_end.enter_context(server.remote()) if over == "tcp" else local
        scenario = Scenario(client, local, address, Path(scratch))
        for name in parts or PARTS:
            report[name] = attempt(PARTS[name], scenario)
        with contextlib.suppress(errors.SandkeepError):
            for info in client.query_sandboxes():
                client.get_sandbox(info.name).destroy()
    if any("failed" in part for part in report.values()):
        report["server"] = {"log": server.log()[-8000:]}
    return report


def attempt(part: Callable[[Scenario], Facts], scenario: Scenario) -> Facts:
    began = time.monotonic()
    facts: Facts = {}
    try:
        facts.update(part(scenario))
    except Exception:
        facts["failed"] = traceback.format_exc()
    facts["seconds"] = round(time.monotonic() - began, 1)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--over", choices=("unix", "tcp"), default="unix")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), default=[])
    given = parser.parse_args()
    print(json.dumps(play(given.data.resolve(), given.over, given.part), indent=1))


if __name__ == "__main__":
    main()
