"""The kernel of Debian 13."""

from __future__ import annotations

from tests.vm.machine import Machine
from tests.vm.promises import FIRST_COMMAND, EveryMachine, end_embedded_server
from tests.vm.recipe import LAB


class TestDebian13(EveryMachine):
    kernel = "6.12"
    over = {"root": "unix", "alice": "tcp"}  # noqa: RUF012

    def test_the_first_command_works_in_a_clone(self, machine: Machine) -> None:
        """What it installs comes from a directory: the machine has no network."""
        machine.run(f"cp -r {LAB}/source clone", user="alice")
        without_network = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{LAB}/wheels"}
        said = machine.run(
            f"cd clone && ./dev {FIRST_COMMAND}", user="alice", env=without_network, timeout=1200
        )
        assert said.out == "hello from a sandbox\n"
        end_embedded_server(machine, "alice")
