"""A kernel that is too old: it is refused with the reason, and nothing is left half-done."""

from __future__ import annotations

import pytest

from tests.vm.machine import Machine
from tests.vm.promises import FIRST_COMMAND


@pytest.mark.long
class TestDebian11Kernel:
    kernel = "5.10"

    @pytest.mark.parametrize("user", ["root", "alice"])
    def test_it_is_refused_with_the_reason(self, machine: Machine, user: str) -> None:
        doctor = machine.run("sandkeep doctor --json", user=user, how="login", check=False)
        assert doctor.status == 1
        assert not doctor.json()["can_run"]
        missing = [
            found for found in doctor.json()["findings"] if found["status"] == "missing" and found["required"]
        ]
        assert missing and all(found["fix"] for found in missing), missing
        refused = machine.run(FIRST_COMMAND, user=user, how="login", check=False)
        assert refused.status == 125 and refused.out == "", refused
        print(refused.err)
