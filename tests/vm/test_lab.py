"""The lab itself: what tests may rely on when they use a machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vm.conftest import Machines
from tests.vm.machine import CommandFailed, How, Machine, MachineEnded

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def machine(machines: Machines) -> Iterator[Machine]:
    with machines("6.1") as made:
        yield made


def test_a_command_is_run_as_whom_and_where_it_was_asked(machine: Machine) -> None:
    assert machine.run("uname -r").out.strip() == machine.image.release
    groups: dict[tuple[str, How], str] = {
        ("root", "plain"): "/system.slice/lab-agent.service",
        ("root", "service"): "/system.slice/run-",
        ("alice", "login"): "/user.slice/user-1000.slice/session-",
        ("alice", "service"): "/user.slice/user-1000.slice/user@1000.service/app.slice/run-",
        ("alice", "plain"): "/system.slice/lab-agent.service",
    }
    for (user, how), group in groups.items():
        said = machine.run("id -un; pwd; cat /proc/self/cgroup", user=user, how=how)
        name, where, own = said.out.splitlines()
        assert name == user
        assert how == "plain" or where in (f"/home/{user}", "/root")
        assert own.startswith(f"0::{group}")


def test_a_command_that_fails_is_told_with_all_it_said(machine: Machine) -> None:
    with pytest.raises(CommandFailed, match=r"(?s)ended with 3.*on out.*on err.*console of 6\.1"):
        machine.run("echo on out; echo on err >&2; exit 3")
    assert machine.run(["cat"], input="there and back").out == "there and back"
    assert machine.run("sleep 600", timeout=1, check=False).status is None
    assert machine.run("kill -TERM $$", check=False).status == -15


def test_commands_run_side_by_side(machine: Machine) -> None:
    waits = machine.start("until [ -e /run/told ]; do sleep 0.1; done; echo heard")
    machine.run("touch /run/told")
    assert waits.wait().out == "heard\n"


def test_the_disk_keeps_what_was_synced_and_memory_nothing(machine: Machine) -> None:
    before = machine.run("cat /proc/sys/kernel/random/boot_id").out
    machine.run("echo synced >/root/synced; sync; echo memory >/run/memory")
    cut_off = machine.start("sleep 600")
    machine.kill()
    with pytest.raises(MachineEnded):
        cut_off.wait()
    with pytest.raises(MachineEnded):
        machine.run("true")
    machine.boot()
    assert machine.run("cat /root/synced; ls /run/memory || true").out == "synced\n"
    assert machine.run("cat /proc/sys/kernel/random/boot_id").out != before
    machine.crash()
    assert "Kernel panic - not syncing: sysrq triggered crash" in machine.console()
    machine.boot()
    assert machine.run("cat /root/synced").out == "synced\n"
