"""Power loss at many instants: a server under load on a recorded disk, and a start on what each cut leaves.

``./dev python -m tests.faults.power --instants 200`` records a load, once as servers come and once with the
setting ``durable``, and then cuts the power at instants of it: at random ones, and just after somebody was
told that a snapshot is synced. Of what the disk had not been told to keep, all, nothing or a random part is
lost. On each disk the real server has to start, every snapshot that was reported synced has to be there with
its content, and every sandbox has to be usable or destroyable.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sandkeep.errors import SandkeepError
from sandkeep.host.layers.store import LayerStore
from sandkeep.linux import syscalls
from sandkeep.sync import Client, Sandbox, SnapshotQuery, SnapshotSource, SnapshotStatus
from tests.faults.power_load import DISK_BYTES, Recording, Taken, connected, destroy_all, record, serving
from tests.faults.recorded_disk import ALONE, Instant, RecordedDisk, Replay, make_disk, mounted, read_log

AT_ONCE: Final = 2
"""Disks looked at side by side, where the filesystem allows."""
_SAY_EVERY: Final = 20
_KEPT: Final = (1.0, 0.0, 0.5, 0.8)


def missing() -> str | None:
    """What this machine lacks for it."""
    if os.geteuid() != 0:
        return "needs root: it mounts disks"
    for path in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(path):
            return f"needs {path}"
    for program in ("mkfs.ext4", "losetup", "mount"):
        if shutil.which(program) is None:
            return f"needs {program}"
    return None


# --- after the cut -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What was found at one instant, or at all of them."""

    instants: int = 0
    starts: int = 0
    intact: int = 0
    checked: int = 0
    resumed: int = 0
    damaged: list[str] = field(default_factory=list)
    """Sandboxes whose resume was refused, none of them with something synced, and why."""
    violations: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.instants += other.instants
        self.starts += other.starts
        self.intact += other.intact
        self.checked += other.checked
        self.resumed += other.resumed
        self.damaged += other.damaged
        self.violations += other.violations

    def __str__(self) -> str:
        return (
            f"{self.instants} instants, {self.starts} starts,"
            f" {self.intact} of {self.checked} synced snapshots intact,"
            f" {self.resumed} sandboxes resumed, {len(self.damaged)} reported damaged,"
            f" {len(self.violations)} violations"
        )


def choose(recording: Recording, count: int, seed: int) -> list[Instant]:
    """Instants anywhere, just after a snapshot was reported synced, and while a data directory is made.

    The earliest first.
    """
    chance = random.Random(seed)
    ends = [entry.at + entry.size for entry in recording.entries]
    told = [bisect.bisect_right(ends, taken.since) for taken in recording.promises]
    found = []
    for number in range(count):
        entry = chance.randint(recording.first, len(recording.entries))
        if number % 2 and told:
            entry = min(chance.choice(told) + chance.randint(0, 3), len(recording.entries))
        elif number % 8 == 0:
            entry = chance.randint(1, recording.first)
        found.append(Instant(entry, _KEPT[number // 2 % len(_KEPT)], chance.randrange(1 << 30)))
    return sorted(found, key=lambda instant: instant.entry)


def cut(
    recording: Recording, directory: Path, count: int, *, seed: int, say: Callable[[str], None]
) -> Outcome:
    """Cut the power at so many instants of a recording and look at what is left each time."""
    total = Outcome()
    base = directory / "disk"
    subprocess.run(["cp", "--sparse=always", str(recording.base), str(base)], check=True)
    replay = Replay(base, recording.log, recording.entries)
    at_once = 1 if recording.filesystem in ALONE else AT_ONCE
    room = threading.Semaphore(at_once)

    def look(number: int, instant: Instant, disk: Path) -> Outcome:
        try:
            return examine(recording, instant, disk, directory / f"m{number}")
        finally:
            disk.unlink()
            room.release()

    def settle(instant: Instant, outcome: Outcome) -> None:
        for violation in outcome.violations:
            say(f"{instant}: {violation}")
        for damaged in outcome.damaged:
            say(f"{instant}: as was to be expected, {damaged}")
        total.add(outcome)
        if total.instants % _SAY_EVERY == 0:
            say(f"so far: {total}")

    looks: deque[tuple[Instant, Future[Outcome]]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        for number, instant in enumerate(choose(recording, count, seed)):
            room.acquire()
            disk = directory / f"d{number}"
            replay.disk(instant, disk)
            looks.append((instant, pool.submit(look, number, instant, disk)))
            while looks and looks[0][1].done():
                settle(looks[0][0], looks.popleft()[1].result())
        for instant, done in looks:
            settle(instant, done.result())
    replay.close()
    return total


def examine(recording: Recording, instant: Instant, disk: Path, place: Path) -> Outcome:
    found = Outcome(instants=1)
    position = recording.entries[instant.entry - 1].at + recording.entries[instant.entry - 1].size
    promises = [taken for taken in recording.promises if taken.binds(position)]
    try:
        with mounted(disk, place):
            found.checked = len(promises)
            try:
                with serving(place, durable=recording.durable) as server:
                    found.starts = 1
                    with Client(f"unix://{server.socket}") as client:
                        _look(found, client, place / "data", promises, position, random.Random(instant.seed))
                        destroy_all(client)
            except AssertionError as error:
                found.violations.append(f"the server did not start: {_tail(str(error))}")
            finally:
                if _end_sessions(place / "data" / "sessions"):
                    found.violations.append("sessions ran on after their sandboxes were destroyed")
    except (SandkeepError, subprocess.SubprocessError, OSError, AssertionError) as error:
        found.violations.append(f"{type(error).__name__}: {error}")
    place.rmdir()
    return found


@contextmanager
def after_a_cut(
    directory: Path, use: Callable[[Client, Path], None], *, durable: bool = False
) -> Iterator[Client]:
    """A client of a server on a disk that lost its power, and all that was not flushed, when ``use`` ended.

    ``use`` is given a client of the server on the recorded disk, and where that is mounted.
    """
    base = directory / "base"
    make_disk(base, "ext4", DISK_BYTES)
    disk = RecordedDisk(directory, base)
    place = directory / "m"
    with disk.mounted(place), connected(place, durable=durable) as client:
        use(client, place)
        end = disk.position()
        destroy_all(client)
    entries = read_log(disk.log, end)
    replay = Replay(base, disk.log, entries)
    replay.disk(Instant(len(entries), 0.0, 0), directory / "after")
    replay.close()
    with mounted(directory / "after", place), connected(place, durable=durable) as client:
        try:
            yield client
        finally:
            destroy_all(client)


def _end_sessions(sessions: Path) -> bool:
    """End the supervisors that are left, told by the locks they hold; whether there were any."""
    locks = [lock.stat() for lock in sessions.glob("*/lock")]
    places = {f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}" for lock in locks}
    held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    pids = {int(words[4]) for words in held if words[1] == "FLOCK" and words[5] in places}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return bool(pids)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-4:])


def _look(
    found: Outcome,
    client: Client,
    data: Path,
    promises: list[Taken],
    position: int,
    chance: random.Random,
) -> None:
    known = {snapshot.id for snapshot in client.query_snapshots(SnapshotQuery(status=SnapshotStatus.CREATED))}
    for taken in promises:
        if taken.snapshot not in known:
            found.violations.append(f"{taken.snapshot} of {taken.sandbox} is not known any more")
        elif wrong := _wrong_files(data, taken):
            found.violations.append(f"{taken.snapshot} of {taken.sandbox}: {wrong}")
        else:
            found.intact += 1
    current = {taken.sandbox: taken for taken in promises if taken.is_current(position)}
    names = [info.name for info in client.query_sandboxes()]
    for name in current.keys() - set(names):
        found.violations.append(f"sandbox {name} is not known any more")
    kept = sorted(current.keys() & set(names))
    others = sorted(set(names) - set(kept))
    for name in chance.sample(kept, min(len(kept), 2)) + chance.sample(others, min(len(others), 2)):
        _resume(found, client, name, current.get(name))
    if not promises:
        with client.create_sandbox("another") as another:
            another.run_process("true", check=True)
        return
    taken = chance.choice(promises)
    with client.create_sandbox("heir", source=SnapshotSource(taken.snapshot)) as heir:
        if wrong := _differs(heir, taken):
            found.violations.append(f"a sandbox from {taken.snapshot}: {wrong}")


def _wrong_files(data: Path, taken: Taken) -> str | None:
    """What of a snapshot's files is not as it was, read from the layers themselves."""
    held = list((data / "layers").glob(f"[!.]*/refs/{taken.snapshot}"))
    if not held:
        return "no layer is held for it"
    try:
        chain = LayerStore(str(data), flavour="trusted").chain(held[0].parts[-3])
    except SandkeepError as error:
        return str(error)
    roots = [data / "layers" / layer.id / layer.directory / "root" for layer in chain]
    for name, digest in taken.files.items():
        paths = [path for root in roots if (path := root / taken.home.lstrip("/") / name).exists()]
        if not paths:
            return f"{name} is missing"
        if hashlib.sha256(paths[0].read_bytes()).hexdigest() != digest:
            return f"{name} has another content"
    return None


def _resume(found: Outcome, client: Client, name: str, taken: Taken | None) -> None:
    try:
        box = client.resume_sandbox(name)
        box.run_process("true", check=True)
    except SandkeepError as error:
        if taken is None:
            found.damaged.append(f"{name} cannot be resumed: {type(error).__name__}: {error}")
        else:
            found.violations.append(f"{name} cannot be resumed: {type(error).__name__}: {error}")
        return
    found.resumed += 1
    if taken is not None and (wrong := _differs(box, taken)):
        found.violations.append(f"{name} was resumed with something else: {wrong}")


def _differs(box: Sandbox, taken: Taken) -> str | None:
    """How the files a session sees differ from those of the snapshot it was to start from."""
    script = 'cd "$1" && sha256sum -- *'
    done = box.run_process("bash", ["-c", script, "-", taken.home], capture_output=True)
    lines = (line.split(maxsplit=1) for line in done.stdout_text.splitlines())
    seen = {name: digest for digest, name in lines}
    names = {name for name in seen.keys() | taken.files.keys() if seen.get(name) != taken.files.get(name)}
    return f"{', '.join(sorted(names))} differ" if names else None


# --- the whole -----------------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(line, flush=True)


def run(
    directory: Path,
    *,
    instants: int,
    seconds: float,
    seed: int = 0,
    filesystem: str = "ext4",
    say: Callable[[str], None] = _say,
) -> Outcome:
    """Record both loads, cut the power at so many instants in all, and add up what was found."""
    total = Outcome()
    for durable, count in ((False, instants - instants // 3), (True, instants // 3)):
        if not count:
            continue
        area = directory / ("durable" if durable else "usual")
        recording = record(area, durable=durable, seconds=seconds, filesystem=filesystem)
        say(
            f"{filesystem}{', durable' if durable else ''}: {recording.operations} operations,"
            f" {len(recording.promises)} snapshots synced, {len(recording.entries)} writes and flushes"
        )
        disks = directory / "disks"
        disks.mkdir(exist_ok=True)
        # In memory: a flush of what is thrown away after a look need not reach a disk.
        syscalls.mount("tmpfs", str(disks), "tmpfs", 0, "mode=0700")
        try:
            outcome = cut(recording, disks, count, seed=seed, say=say)
        finally:
            syscalls.umount2(str(disks), syscalls.MNT_DETACH)
            disks.rmdir()
        say(f"{filesystem}{', durable' if durable else ''}: {outcome}")
        total.add(outcome)
        subprocess.run(["rm", "-r", str(area)], check=True)
    return total


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--instants", type=int, default=200)
    arguments.add_argument("--seconds", type=float, default=30.0, help="of load to record, each")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--filesystem", default="ext4", choices=("ext4", "xfs", "btrfs"))
    given = arguments.parse_args()
    if (reason := missing()) is not None:
        print(f"power: {reason}", file=sys.stderr)
        return 2
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    with tempfile.TemporaryDirectory(prefix="power-") as directory:
        total = run(
            Path(directory),
            instants=given.instants,
            seconds=given.seconds,
            seed=given.seed,
            filesystem=given.filesystem,
        )
    print(f"in all: {total}")
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
