"""Runs in a machine of the lab: tries every limit of a session where it is started, and prints what happened.

Where limits are not enforced it only says what there is instead.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from sandkeep import Resources
from sandkeep import sync as sandkeep
from sandkeep.embedded import ensure_server

PROCESSES = 60
HOG = "x = b'x' * (2300 << 20)"  # one processor comes with 2048 MB
FORKER = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count, flush=True)
"""
SPINNERS = """
import os, time
os.fork(), os.fork()
end = time.process_time() + 1
while time.process_time() < end:
    pass
"""


def state() -> dict[str, Any]:
    (path,) = glob.glob(f"{os.environ['SANDKEEP_HOME']}/sessions/*/state.json")
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def value(place: list[str], name: str) -> str:
    with open(f"{place[1]}/{name}", encoding="ascii") as file:
        return file.read().strip()


def counter(place: list[str], name: str, key: str) -> int:
    lines = dict(line.split() for line in value(place, name).splitlines())
    return int(lines[key])


def try_limits(box: sandkeep.Sandbox, groups: dict[str, list[str]]) -> dict[str, Any]:
    hog = box.run_process("python3", ["-c", HOG], capture_output=True)
    forker = box.run_process("python3", ["-c", FORKER], capture_output=True)
    box.run_process("pkill", ["-f", "os.fork"])
    box.run_process("python3", ["-c", SPINNERS])
    throttled = counter(groups["cpu"], "cpu.stat", "nr_throttled")
    box.run_process("sh", ["-c", "setsid sleep 77777 >/dev/null 2>&1 </dev/null & echo begun"], check=True)
    checkpoint = box.checkpoint()
    box.stop()
    left = subprocess.run(["pgrep", "-fx", "sleep 77777"], capture_output=True, text=True, check=False).stdout
    deadline = time.monotonic() + 60
    while os.path.exists(groups["kill"][1]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        "hog": [hog.returncode, box.get_process(hog.process_id, session_id=hog.session_id).reason],
        "forks": int(forker.stdout_text),
        "throttled": throttled,
        "checkpoint": bool(checkpoint.id),
        "left": left.split(),
        "group_left": os.path.exists(groups["kill"][1]),
    }


def doctor() -> dict[str, Any]:
    program = os.path.join(os.path.dirname(sys.executable), "sandkeep")
    done = subprocess.run([program, "doctor", "--json"], stdout=subprocess.PIPE, check=False)
    found = {item["name"]: item for item in json.loads(done.stdout)["findings"]}
    limits = {part: found[f"control groups: {part}"] for part in ("memory", "pids", "cpu")}
    return {
        "doctor": {part: item["status"] for part, item in limits.items()},
        "fixes": [item["fix"] for item in limits.values()],
        "scope": found.get("systemd scope"),
    }


def end_server() -> None:
    """Stop the server and wait until it has gone: it writes to the directory that is removed next."""
    with open(f"{os.environ['SANDKEEP_HOME']}/server.json", encoding="utf-8") as file:
        pid = json.load(file)["pid"]
    os.kill(pid, signal.SIGTERM)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.1)


def main() -> None:
    home = os.environ["SANDKEEP_HOME"]
    os.makedirs(home, mode=0o700)
    with open(f"{home}/settings.json", "w", encoding="ascii") as file:
        json.dump({"pids": PROCESSES, "pool": 0}, file)
    report = doctor()
    ensure_server(home, seconds=600)
    with sandkeep.create_sandbox(
        "limits", resources=Resources(1, 2048, exact=False), execution_time_limit=3600
    ) as box:
        found = state()
        groups = found["cgroup"]
        report["groups"] = groups
        report["limits"] = {part: item["state"] for part, item in found["limits"].items()}
        if report["limits"]["memory"] == "enforced":
            report["values"] = {
                name: value(groups[name.partition(".")[0]], name)
                for name in ("memory.max", "pids.max", "cpu.max")
            }
            report |= try_limits(box, groups)
    end_server()
    print(json.dumps(report))


main()
