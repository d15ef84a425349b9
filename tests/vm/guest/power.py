"""Work that loses its power at any moment, and what must be there afterwards.

    python power.py load --data DIRECTORY     until somebody ends the machine
    python power.py check --data DIRECTORY    after the next boot; prints a JSON object

While it loads, two sandboxes of a durable server are written to and snapshotted again and again, by
checkpoints and by stops. A third only runs. Each snapshot that the server reported as synced is written down,
synced too, in ``acknowledged`` beside the data directory: exactly those must be intact later.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from sandkeep import sync as sandkeep
from sandkeep.spec import SnapshotSource

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.vm.guest.scenario import Server, sh

WRITERS = ("writer-0", "writer-1")


def content(number: int) -> str:
    body = f"{number}\n" * 2000
    return body + hashlib.sha256(body.encode()).hexdigest()


def number_in(text: str) -> int | None:
    """Which content this is, if it is whole."""
    first = text.partition("\n")[0]
    return int(first) if first.isdigit() and text == content(int(first)) else None


class Acknowledged:
    """What the server promised, on disk."""

    def __init__(self, data: Path) -> None:
        self._path = data.parent / f"{data.name}.acknowledged"
        self._lock = threading.Lock()

    def add(self, sandbox: str, snapshot: str, number: int) -> None:
        line = json.dumps({"sandbox": sandbox, "snapshot": snapshot, "number": number}) + "\n"
        with self._lock, self._path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            directory = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    def all(self) -> list[dict[str, Any]]:
        found = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the line that was being written; nobody was told of it
        return found


def load(data: Path) -> None:
    server = Server(data)
    acknowledged = Acknowledged(data)
    start = max((entry["number"] for entry in acknowledged.all()), default=0) + 1

    def write(name: str) -> None:
        with server.local() as client:
            box = client.get_or_create_sandbox(name, execution_time_limit=3600)
            for number in range(start, sys.maxsize):
                box.fs.write_text("state", content(number))
                sh(box, f"echo {number} >>log")
                snapshot = box.stop().snapshot if number % 3 == 0 else box.checkpoint()
                if snapshot is not None and snapshot.synced_at is not None:
                    acknowledged.add(name, snapshot.id, number)

    with server.local() as client:
        box = client.get_or_create_sandbox("runs", execution_time_limit=3600)
        box.create_process("sleep", ["3600"])
    threads = [threading.Thread(target=write, args=(name,)) for name in WRITERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise SystemExit("the load ended by itself")


def check(data: Path) -> dict[str, Any]:
    began = time.monotonic()
    acknowledged = Acknowledged(data).all()
    report: dict[str, Any] = {"acknowledged": len(acknowledged), "looked into": 0, "wrong": []}
    server = Server(data)
    report["started in"] = round(time.monotonic() - began, 1)
    try:
        with server.local() as client:
            report["states"] = {info.name: info.status for info in client.query_sandboxes()}
            known = {snapshot.id for snapshot in client.query_snapshots()}
            report["wrong"] += [entry for entry in acknowledged if entry["snapshot"] not in known]
            for name in WRITERS:
                of_it = [entry for entry in acknowledged if entry["sandbox"] == name]
                for entry in some(of_it):
                    report["looked into"] += 1
                    look_into(client, entry, report)
                last = of_it[-1]["number"] if of_it else None
                report[name] = resume(client, name, last)
            report["runs"] = resume(client, "runs", None)
    except Exception:
        report["failed"] = f"{traceback.format_exc()}\n{server.log()[-4000:]}"
    finally:
        server.stop()
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def some(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last one, which had the least time to reach the disk, and any other."""
    return entries[-1:] + random.sample(entries[:-1], min(1, len(entries[:-1])))


def look_into(client: sandkeep.Client, entry: dict[str, Any], report: dict[str, Any]) -> None:
    with client.create_sandbox(source=SnapshotSource(entry["snapshot"])) as box:
        found = number_in(box.fs.read_text("state"))
        lines = sh(box, "tail -n 1 log").strip()
    if (found, lines) != (entry["number"], str(entry["number"])):
        report["wrong"].append({**entry, "state": found, "log": lines})


def resume(client: sandkeep.Client, name: str, last: int | None) -> dict[str, Any]:
    """A sandbox that lost its session goes on, with no less than its last synced snapshot had."""
    with client.resume_sandbox(name) as box:
        assert sh(box, "echo works") == "works\n"
        if last is None:
            return {"resumed": True}
        found = number_in(box.fs.read_text("state"))
    # What was written after the snapshot was never promised: it may be there in part.
    return {"resumed": True, "acknowledged": last, "found": found, "kept": found is None or found >= last}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("load", "check"))
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "load":
        load(given.data.resolve())
    else:
        print(json.dumps(check(given.data.resolve()), indent=1))


if __name__ == "__main__":
    main()
