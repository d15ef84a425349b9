"""Debian 12 as it is."""

from __future__ import annotations

from tests.vm.machine import Machine
from tests.vm.promises import FIRST_COMMAND, EveryMachine, end_embedded_server


class TestDebian12(EveryMachine):
    kernel = "6.1"
    over = {"root": "tcp", "alice": "unix"}  # noqa: RUF012

    def test_a_user_without_subordinate_ids_has_sandboxes_too(self, machine: Machine) -> None:
        assert machine.run(FIRST_COMMAND, user="bob").out == "hello from a sandbox\n"
        end_embedded_server(machine, "bob")
        parts = ("create", "files", "stop_and_resume", "fork", "checkpoint", "delete")
        report = self.play(machine, "bob", "login", over="unix", parts=parts)
        assert set(report) == set(parts)
