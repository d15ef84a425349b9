"""The load that power is cut under: clients of a server on a recorded disk, and what they were promised."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sandkeep.errors import NotFound
from sandkeep.sync import Client, Sandbox, SnapshotQuery, SnapshotRetention, SnapshotStatus
from tests.faults.recorded_disk import Entry, RecordedDisk, make_disk, read_log
from tests.server.server_process import ServerProcess

DISK_BYTES: Final = 384 << 20
_WORKERS: Final = 3
_NEVER: Final = sys.maxsize
_SETTINGS: Final = {"fold_depth": 3, "pool": 1}
_DIRECTORY: Final = "kept"

Files = dict[str, str]
"""Name to digest."""


# --- what was promised ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """A snapshot, and from and until when (as positions of the log) it has to survive."""

    snapshot: str
    sandbox: str
    files: Files
    home: str
    since: int = _NEVER
    until: int = _NEVER
    current_until: int = 0
    """Until when a resume of the sandbox begins with it."""
    only_current: bool = False
    """A rule of the sandbox deletes it when it is no longer the current one."""

    def binds(self, position: int) -> bool:
        return self.is_current(position) if self.only_current else self.since <= position < self.until

    def is_current(self, position: int) -> bool:
        return self.since <= position < min(self.current_until, self.until)


class Journal:
    """What clients were told, kept where no power cut reaches it."""

    def __init__(self, position: Callable[[], int]) -> None:
        self.position = position
        self.operations = 0
        self._taken: list[Taken] = []
        self._synced: dict[str, int] = {}
        self._lock = threading.Lock()

    def took(self, box: Box, snapshot: str, *, current: bool, synced: bool) -> None:
        with self._lock:
            if synced:
                self._synced[snapshot] = self.position()
            taken = Taken(snapshot, box.name, dict(box.files), box.home)
            taken.current_until = _NEVER if current else 0
            taken.only_current = box.keeps_last
            self._taken.append(taken)

    def saw_synced(self, snapshot: str, position: int) -> None:
        with self._lock:
            self._synced.setdefault(snapshot, position)

    def begins(self, sandbox: str, *, destroy: bool = False) -> None:
        """Somebody is about to change a sandbox."""
        with self._lock:
            self.operations += 1
            for taken in self._taken:
                if taken.sandbox == sandbox:
                    taken.current_until = min(taken.current_until, self.position())
                    if destroy:
                        taken.until = min(taken.until, self.position())

    def promises(self) -> list[Taken]:
        for taken in self._taken:
            taken.since = self._synced.get(taken.snapshot, _NEVER)
        return [taken for taken in self._taken if taken.since != _NEVER]


# --- the load ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Box:
    """A sandbox of the load, with what is in it."""

    handle: Sandbox
    files: Files = field(default_factory=dict)
    saved: Files | None = None
    """What its latest stop kept."""
    keeps_last: bool = False
    """It has a rule that only the last snapshot is kept."""

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def home(self) -> str:
        return os.path.join(self.handle.cwd, _DIRECTORY)


class Worker:
    """One client: creates, writes, runs, checkpoints, stops, resumes, forks and destroys."""

    def __init__(self, number: int, url: str, journal: Journal, *, durable: bool) -> None:
        self._client = Client(url)
        self._journal = journal
        self._durable = durable
        self._random = random.Random(number)
        self._number = number
        self._made = 0
        self._boxes: list[Box] = []

    def run(self, until: float) -> None:
        with self._client:
            while time.monotonic() < until:
                box = self._next()
                self._use(box)
                self._end(box)

    def _name(self) -> str:
        self._made += 1
        return f"w{self._number}-{self._made}"

    def _next(self) -> Box:
        chance = self._random.random()
        stopped = [box for box in self._boxes if box.saved is not None]
        if len(self._boxes) > 2 and chance < 0.15:
            gone = self._boxes.pop(0)
            self._journal.begins(gone.name, destroy=True)
            gone.handle.destroy()
        if len(self._boxes) < 2 or chance < 0.2:
            name = self._name()
            self._journal.begins(name)
            box = Box(self._client.create_sandbox(name, destroy=False))
            if self._random.random() < 0.3:
                box.handle.update(snapshot_retention=SnapshotRetention(1))
                box.keeps_last = True
            self._boxes.append(box)
        elif stopped and chance < 0.35:
            source = self._random.choice(stopped)
            name = self._name()
            self._journal.begins(name)
            handle = source.handle.fork(name, destroy=False)
            box = Box(handle, dict(source.saved or {}), keeps_last=source.keeps_last)
            self._boxes.append(box)
        else:
            box = self._random.choice(self._boxes)
            self._journal.begins(box.name)
            box.handle.resume()
        return box

    def _use(self, box: Box) -> None:
        box.handle.fs.mkdir(_DIRECTORY, exist_ok=True)
        for _ in range(self._random.randint(1, 4)):
            name = f"f{self._random.randrange(8)}"
            content = self._random.randbytes(self._random.choice((10, 3000, 40_000, 400_000)))
            box.handle.fs.write_bytes(f"{_DIRECTORY}/{name}", content)
            box.files[name] = hashlib.sha256(content).hexdigest()
        if len(box.files) > 3 and self._random.random() < 0.5:
            name = self._random.choice(sorted(box.files))
            box.handle.fs.remove(f"{_DIRECTORY}/{name}")
            del box.files[name]
        box.handle.run_process("bash", ["-c", "seq 500; echo done >&2"], capture_output=True, check=True)
        if self._random.random() < 0.3:
            box.handle.create_process("bash", ["-c", "while sleep 0.05; do seq 50; done"])
        if self._random.random() < 0.3:
            snapshot = box.handle.checkpoint()
            self._journal.took(box, snapshot.id, current=False, synced=self._durable)

    def _end(self, box: Box) -> None:
        if self._random.random() < 0.2:
            return  # it is left running
        if self._random.random() < 0.5:
            snapshot = box.handle.stop().snapshot
            assert snapshot is not None
        else:
            snapshot = box.handle.snapshot()
        self._journal.took(box, snapshot.id, current=True, synced=self._durable)
        box.saved = dict(box.files)


def _watch(url: str, journal: Journal, over: threading.Event) -> None:
    """Note when the server first says of a snapshot that it is synced."""
    with Client(url) as client:
        while not over.is_set():
            query = SnapshotQuery(status=SnapshotStatus.CREATED)
            found = [snapshot.id for snapshot in client.query_snapshots(query) if snapshot.synced_at]
            position = journal.position()
            for snapshot in found:
                journal.saw_synced(snapshot, position)
            over.wait(0.1)


@dataclass(frozen=True, slots=True)
class Recording:
    base: Path
    log: Path
    entries: list[Entry]
    first: int
    """Entries before it are the making of the data directory."""
    promises: list[Taken]
    operations: int
    durable: bool
    filesystem: str


def record(directory: Path, *, durable: bool, seconds: float, filesystem: str = "ext4") -> Recording:
    """Use a server on a recorded disk for a while."""
    directory.mkdir()
    base = directory / "base"
    make_disk(base, filesystem, DISK_BYTES)
    disk = RecordedDisk(directory, base)
    place = directory / "m"
    with disk.mounted(place):
        journal = Journal(disk.position)
        with serving(place, durable=durable) as server:
            url = f"unix://{server.socket}"
            with Client(url) as client, client.create_sandbox("first"):
                pass  # the image is made with the first one
            first = disk.position()
            _load(url, journal, seconds, durable=durable)
            end = disk.position()
            with Client(url) as client:
                destroy_all(client)
    entries = read_log(disk.log, end)
    skipped = sum(1 for entry in entries if entry.at <= first)
    return Recording(
        base, disk.log, entries, skipped, journal.promises(), journal.operations, durable, filesystem
    )


def _load(url: str, journal: Journal, seconds: float, *, durable: bool) -> None:
    over = threading.Event()
    until = time.monotonic() + seconds
    workers = [Worker(number, url, journal, durable=durable) for number in range(_WORKERS)]
    with ThreadPoolExecutor(_WORKERS + 1) as pool:
        watching = pool.submit(_watch, url, journal, over)
        try:
            for done in [pool.submit(worker.run, until) for worker in workers]:
                done.result()
        finally:
            over.set()
        watching.result()


@contextmanager
def serving(place: Path, *, durable: bool) -> Iterator[ServerProcess]:
    data = place / "data"
    data.mkdir(exist_ok=True, mode=0o700)
    server = ServerProcess(data, settings={**_SETTINGS, "durable": durable})
    server.token = "none"
    server.start("--no-tcp")
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def connected(place: Path, *, durable: bool) -> Iterator[Client]:
    with serving(place, durable=durable) as server, Client(f"unix://{server.socket}") as client:
        yield client


def destroy_all(client: Client) -> None:
    for info in list(client.query_sandboxes()):
        try:
            client.get_sandbox(info.name).destroy()
        except NotFound:
            pass  # one that was being destroyed
