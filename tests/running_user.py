"""The user that runs the tests: with a single id inside, every account of a sandbox is root."""

from __future__ import annotations

import pytest

from sandkeep.host.native.mode import choose_mode

ONE_ID = choose_mode() == "single"

needs_users = pytest.mark.skipif(ONE_ID, reason="sessions of a user without subordinate ids have one user")
needs_one_id = pytest.mark.skipif(not ONE_ID, reason="for a user without subordinate ids")
