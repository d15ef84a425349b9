"""What a user waits for before anything happens: the command line, imports, the embedded server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import sandkeep
from benchmarks.lab import Lab, Server
from benchmarks.rows import Budget, Row, Samples, repeat, row
from sandkeep.server.embedded import ask

_PYTHON = "python -c pass"


async def command_line(lab: Lab) -> list[Row]:
    def measure(samples: Samples, what: str, *arguments: str) -> None:
        with samples.of(what):
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    async def step(samples: Samples, number: int) -> None:
        del number
        measure(samples, _PYTHON, "-c", "pass")
        measure(samples, "help", "-m", "sandkeep", "--help")
        measure(samples, "import", "-c", "import sandkeep; sandkeep.Client")

    samples = await repeat(lab.rounds(20, 5), step, warm_up=1)
    bare = (_PYTHON, samples[_PYTHON])
    return [
        row("sandkeep --help", samples["help"], reference=bare, budget=Budget.at_most(200, ratio=False)),
        row("import of the SDK", samples["import"], reference=bare),
    ]


async def embedded(lab: Lab) -> list[Row]:
    """From nothing to an answer: a program's first call on a machine where no server runs."""
    samples = Samples()
    for number in range(lab.rounds(5, 3)):
        area = lab.scratch()
        os.environ["SANDKEEP_HOME"] = area
        try:
            for what in ("first", "again"):
                async with sandkeep.Client() as client:
                    with samples.of(f"server {what}"):
                        assert [info async for info in client.query_sandboxes()] == []
                    if what == "first" or number == 0:
                        with samples.of(f"box {what}"):
                            box = await client.create_sandbox(persistent=False)
                        await box.destroy()
                await _end(Server(0, area))
        finally:
            del os.environ["SANDKEEP_HOME"]
    return [
        row("embedded server, from nothing to an answer", samples["server first"]),
        row("the same on a data directory in use", samples["server again"]),
        row(
            "first sandbox of a data directory", samples["box first"], note="the host image is made meanwhile"
        ),
    ]


async def _end(server: Server) -> None:
    answer = await asyncio.to_thread(ask, server.data, "POST", "/v1/server/retire")
    assert answer is not None and answer[0] == 200, answer
    await asyncio.to_thread(_until_gone, server)


def _until_gone(server: Server) -> None:
    while ask(server.data, "GET", "/version") is not None:
        time.sleep(0.02)
