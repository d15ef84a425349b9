"""Whole files that are being replaced while their server is killed: sent again, by whichever way."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sandkeep import sync as sandkeep
from tests.polling import ENOUGH
from tests.sdk.outages import meanwhile, restart
from tests.server.server_process import ServerProcess

LARGE = "x" * (32 << 20)
"""More than fits into all buffers on the way: part of it is under way when the server dies."""


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_file_is_replaced_although_its_server_is_killed_meanwhile(
    server: ServerProcess, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandkeep.sdk.retry.OUTAGE_SECONDS", ENOUGH)
    if way == "unix":
        client = sandkeep.Client(f"unix://{server.socket}", team=server.team, project=server.project)
    else:
        client = sandkeep.Client(server.url, token=server.token)

    def kill() -> None:
        time.sleep(0.3)
        restart(server, signal.SIGKILL)

    with client, client.create_sandbox() as box:
        box.fs.write_text("file", "before")
        # It takes connections and does nothing with them: the request is under way, and never carried out.
        os.kill(server.pid, signal.SIGSTOP)
        with meanwhile(kill):
            assert box.fs.write_text("file", LARGE) == len(LARGE)
        assert box.fs.read_text("file") == LARGE
