"""What holds on every machine, whatever its kernel. The test files name the kernels."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from tests.vm.machine import How, Machine
from tests.vm.recipe import LAB

FIRST_COMMAND = """sandkeep run -- python3 -c 'print("hello from a sandbox")'"""
LIMITS = ("memory", "pids", "cpu")
SCENARIO_SECONDS = 1800.0

Who = tuple[str, How]


def end_embedded_server(machine: Machine, user: str) -> None:
    """It would stay a while, in case somebody comes back."""
    home = "/root" if user == "root" else f"/home/{user}"
    where = f"{home}/.local/share/sandkeep/server.json"
    machine.run(f"""kill $(python3 -c 'import json; print(json.load(open("{where}"))["pid"])')""")


def limit_holds(name: str, facts: dict[str, Any]) -> bool:
    """Whether what the scenario saw is what a session sees that has this limit."""
    if name == "memory":
        return (facts["returncode"], facts["reason"], facts["goes on"]) == (137, "out_of_memory", True)
    if name == "pids":
        return 10 < int(facts["forked"].split()[0]) < 100
    return 0 < float(facts["processors"]) < 1.3  # of the two the machine has


class EveryMachine:
    kernel: ClassVar[str]
    over: ClassVar[dict[str, str]]
    """How root and alice speak to their server in the scenario. Each way is taken on some kernel."""

    def test_the_machine_has_that_kernel(self, machine: Machine) -> None:
        assert machine.run("uname -r").out.startswith(f"{self.kernel}.")
        assert machine.run("stat -fc %T /sys/fs/cgroup").out == "cgroup2fs\n"

    @pytest.mark.parametrize("user", ["root", "alice"])
    def test_the_first_command_works_in_a_login(self, machine: Machine, user: str) -> None:
        assert machine.run(FIRST_COMMAND, user=user, how="login").out == "hello from a sandbox\n"
        end_embedded_server(machine, user)

    @pytest.mark.parametrize("who", [("root", "service"), ("alice", "login")], ids=lambda who: "-".join(who))
    def test_every_operation_works_as_doctor_says(self, machine: Machine, who: Who) -> None:
        user, how = who
        doctor = machine.run("sandkeep doctor --json", user=user, how=how).json()
        found = {finding["name"]: finding["status"] for finding in doctor["findings"]}
        assert doctor["can_run"]
        report = self.play(machine, user, how, over=self.over[user])
        for name in LIMITS:
            enforced = report["limits"][name]["state"] == "enforced"
            assert enforced == (found[f"control groups: {name}"] == "works"), (name, report["limits"], found)
            if report["limits"][name]["state"] != "absent":
                assert limit_holds(name, report["limits"][name]), report["limits"]

    @staticmethod
    def play(
        machine: Machine, user: str, how: How, *, over: str, parts: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The scenario in the machine. Everything in it went well."""
        home = "/srv" if user == "root" else f"/home/{user}"
        command = [
            f"{LAB}/venv/bin/python",
            f"{LAB}/guest/scenario.py",
            "--data",
            f"{home}/scenario",
            "--over",
            over,
        ]
        for part in parts:
            command += ["--part", part]
        report: dict[str, Any] = machine.run(command, user=user, how=how, timeout=SCENARIO_SECONDS).json()
        failed = [f"{name}: {part['failed']}" for name, part in report.items() if "failed" in part]
        assert not failed, "\n".join([*failed, str(report.get("server"))])
        print(f"{machine.image.release}, {user}, {over}: {json.dumps(report)}")
        return report
