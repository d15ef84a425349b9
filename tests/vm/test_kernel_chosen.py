"""The same on a kernel that whoever runs the tests names: `SANDKEEP_VM_KERNEL=6.18`."""

from __future__ import annotations

import os

import pytest

from tests.vm.promises import EveryMachine

CHOSEN = os.environ.get("SANDKEEP_VM_KERNEL", "")


@pytest.mark.skipif(not CHOSEN, reason="SANDKEEP_VM_KERNEL names no further kernel")
class TestChosenKernel(EveryMachine):
    kernel = CHOSEN
    over = {"root": "unix", "alice": "unix"}  # noqa: RUF012
