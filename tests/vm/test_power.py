"""Machines that lose their power, crash and reboot while sandboxes run and snapshots are taken."""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from typing import Any

import pytest

from tests.polling import until
from tests.vm.machine import Job, Machine
from tests.vm.recipe import LAB

ENDS = ("power", *(pytest.param(end, marks=pytest.mark.long) for end in ("crash", "reboot", *["power"] * 3)))
DATA = {"root": "/srv/power", "alice": "/home/alice/power"}
PATIENCE = 1200.0


def power(machine: Machine, user: str, what: str) -> Job:
    command = [f"{LAB}/venv/bin/python", f"{LAB}/guest/power.py", what, "--data", DATA[user]]
    return machine.start(command, user=user, how="service", timeout=PATIENCE)


def acknowledged(machine: Machine, user: str) -> int:
    return int(machine.run(f"cat {DATA[user]}.acknowledged 2>/dev/null | wc -l").out)


@pytest.fixture(scope="class")
def instants() -> random.Random:
    seed = os.environ.get("SANDKEEP_VM_SEED") or os.urandom(4).hex()
    print(f"SANDKEEP_VM_SEED={seed}")
    return random.Random(seed)


class TestPower:
    kernel = "6.1"

    @pytest.mark.parametrize("end", ENDS, ids=str)
    def test_what_was_synced_is_there(self, machine: Machine, instants: random.Random, end: str) -> None:
        """The server starts, every synced snapshot is whole, and sandboxes whose session was lost go on."""
        before = {user: acknowledged(machine, user) for user in DATA}
        loads = {user: power(machine, user, "load") for user in DATA}
        for user in DATA:
            until(partial(self.busy, machine, loads[user], user, before[user]), seconds=PATIENCE)
        time.sleep(instants.uniform(0, 10))  # any instant will do
        {"power": machine.kill, "crash": machine.crash, "reboot": machine.reboot}[end]()
        if not machine.on:
            machine.boot()
        checks = {user: power(machine, user, "check") for user in DATA}
        for user, check in checks.items():
            report = check.wait().json()
            print(f"{machine.image.release}, {end}, {user}: {json.dumps(report)}")
            self.holds(report, more_than=before[user])

    @staticmethod
    def busy(machine: Machine, load: Job, user: str, before: int) -> bool:
        ended = load.ended()
        assert ended is None, ended
        return acknowledged(machine, user) >= before + 2

    @staticmethod
    def holds(report: dict[str, Any], *, more_than: int) -> None:
        assert "failed" not in report, report["failed"]
        assert report["acknowledged"] > more_than and report["looked into"] >= 1
        assert report["wrong"] == []
        for name in ("writer-0", "writer-1", "runs"):
            assert report[name]["resumed"] and report[name].get("kept", True), report
