"""Output beyond what a server's log keeps: it is never missing without a word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandkeep import sync
from sandkeep.errors import OutputDamaged
from tests.server.server_process import ServerProcess, running_server

CAP, WRITTEN = 1 << 20, 4 << 20
WRITE = ["-c", f"import sys; sys.stdout.buffer.write(b'x' * {WRITTEN} + b'end')"]


@pytest.fixture(scope="module")
def small(able: None) -> Iterator[ServerProcess]:
    with running_server(settings={"log_cap_bytes": CAP}) as server:
        yield server


def test_output_that_the_log_dropped_counts_as_omitted_and_is_refused_where_that_cannot_be_said(
    small: ServerProcess,
) -> None:
    with sync.Client(f"unix://{small.socket}") as client, client.create_sandbox() as box:
        # With a time limit the output is read from the log after the end.
        done = box.run_process("python3", WRITE, capture_output=True, timeout=60)
        assert done.stdout is not None and done.stdout.endswith(b"end") and done.truncated
        assert done.omitted_bytes == WRITTEN + 3 - len(done.stdout)
        process = box.get_process(done.process_id)
        for read in (process.communicate, process.stdout.read):
            with pytest.raises(OutputDamaged, match="more than the log keeps"):
                read()
