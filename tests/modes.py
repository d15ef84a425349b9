"""What a test has to know about whoever runs it: with one id inside, everybody is root."""

from __future__ import annotations

import os
import pwd
import shutil

import pytest

from tests.conftest import IS_ROOT, subordinate_ids

ONE_ID = not IS_ROOT and (
    shutil.which("newuidmap") is None or subordinate_ids(pwd.getpwuid(os.getuid()).pw_name) is None
)

needs_users = pytest.mark.skipif(ONE_ID, reason="sessions of a user without subordinate ids have one user")
needs_one_id = pytest.mark.skipif(not ONE_ID, reason="for a user without subordinate ids")
