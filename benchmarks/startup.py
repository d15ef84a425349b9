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
from sandkeep.embedded import ask

_PYTHON = "python -c pass"
_PAUSE = 0.06
"""Seconds before a run, in which the server prepares a session again."""


async def command_line(lab: Lab) -> list[Row]:
    """What starts before a server is asked anything."""

    async def step(samples: Samples, number: int) -> None:
        del number
        _measure(samples, _PYTHON, "-c", "pass")
        _measure(samples, "help", "-m", "sandkeep", "--help")
        _measure(samples, "import", "-c", "import sandkeep; sandkeep.Client")
        _measure(samples, "blocking", "-c", "from sandkeep import sync; sync.Client")

    samples = await repeat(lab.rounds(20, 5), step, warm_up=1)
    bare = (_PYTHON, samples[_PYTHON])
    return [
        row("sandkeep --help", samples["help"], reference=bare, budget=Budget.at_most(200, ratio=False)),
        row("import of the SDK", samples["import"], reference=bare, budget=Budget.at_most(5)),
        row("import of the blocking SDK", samples["blocking"], reference=bare, budget=Budget.at_most(5)),
    ]


async def one_run(lab: Lab) -> list[Row]:
    """A whole command: it creates a sandbox on a server that runs, runs a program in it and destroys it."""
    server = await lab.server()

    async def step(samples: Samples, number: int) -> None:
        del number
        _measure(samples, _PYTHON, "-c", "pass")
        await asyncio.sleep(_PAUSE)
        _measure(samples, "run", "-m", "sandkeep", "run", "--", "true", home=server.data)

    samples = await repeat(lab.rounds(20, 5), step, warm_up=1)
    bare = (_PYTHON, samples[_PYTHON])
    return [row("sandkeep run -- true", samples["run"], reference=bare, budget=Budget.at_most(8))]


def _measure(samples: Samples, what: str, *arguments: str, home: str | None = None) -> None:
    # Without bytecode on disk, start-up is mostly compiling.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if home is not None:
        environment["SANDKEEP_HOME"] = home
    with samples.of(what):
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)


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
        row("first sandbox of a data directory", samples["box first"], note="includes making the host image"),
    ]


async def _end(server: Server) -> None:
    answer = await asyncio.to_thread(ask, server.data, "POST", "/v1/server/retire")
    assert answer is not None and answer[0] == 200, answer
    await asyncio.to_thread(_until_gone, server)


def _until_gone(server: Server) -> None:
    while ask(server.data, "GET", "/version") is not None:
        time.sleep(0.02)
