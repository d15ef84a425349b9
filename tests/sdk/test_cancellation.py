"""Cancelled anywhere, the SDK leaves nothing behind: no process, no sandbox, no broken client."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import anyio
import pytest

import sandkeep
from sandkeep.errors import NotFound

pytestmark = pytest.mark.anyio

MOST_AWAITS = 400


class Cancelling:
    """Cancels a flow at its n-th wait: each time the loop would have gone on to something else."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    async def run(self, flow: Callable[[], Awaitable[object]]) -> bool:
        """Whether the flow was cancelled (otherwise it had fewer waits)."""
        finished = False

        async def body() -> None:
            nonlocal finished
            await flow()
            finished = True

        async with anyio.create_task_group() as group:
            group.start_soon(body)
            while not finished and self.seen < self.at:
                self.seen += 1
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        return not finished


def points() -> list[int]:
    """Densely where most happens, then wider apart: a round trip is many turns of the loop."""
    return [*range(0, 60, 4), *range(60, MOST_AWAITS, 40), 1000, 4000]


async def test_a_cancelled_create_scope_leaves_no_sandbox() -> None:
    for at in points():
        name = f"t-{secrets.token_hex(4)}"

        async def flow(name: str = name) -> None:
            async with sandkeep.create_sandbox(name, persistent=False) as box:
                await box.fs.write_text("f", "x")
                await box.fs.read_text("f")

        await Cancelling(at).run(flow)
        with pytest.raises(NotFound):
            await sandkeep.get_sandbox(name)


async def test_a_cancelled_run_leaves_no_process() -> None:
    async with sandkeep.create_sandbox() as box:
        for at in points():
            with anyio.move_on_after(10):
                await Cancelling(at).run(lambda: box.run_process("sleep", ["60"], capture_output=True))
        for process in await box.processes():
            assert await process.wait(timeout=5) == 137


async def test_a_run_that_is_cancelled_while_it_waits_is_killed() -> None:
    async with sandkeep.create_sandbox() as box:
        with anyio.move_on_after(0.5):
            await box.run_process("sleep", ["60"])
        [process] = await box.processes()
        assert await process.wait(timeout=5) == 137


async def test_a_process_that_was_only_started_survives_its_starter() -> None:
    async with sandkeep.create_sandbox() as box:
        with anyio.move_on_after(0.5):
            process = await box.create_process("sleep", ["60"])
            await process.wait()
        assert await process.poll() is None
        await process.kill()


async def test_files_are_complete_or_not_there_when_writing_is_cancelled() -> None:
    async with sandkeep.create_sandbox() as box:
        before, after = b"a" * (6 << 20), b"b" * (9 << 20)
        await box.fs.write_bytes("file", before)

        async def flow() -> None:
            async with box.fs.open("file", "wb") as out:
                for start in range(0, len(after), 1 << 20):
                    await out.write(after[start : start + (1 << 20)])

        for at in (0, 20, 100, 500, 2000):
            await Cancelling(at).run(flow)
            assert await box.fs.read_bytes("file") in (before, after)
            # What a cut connection left half-written is removed as soon as the cut is noticed.
            for _ in range(200):
                names = [entry.name for entry in await box.fs.listdir(".")]
                if names == ["file"]:
                    break
                await anyio.sleep(0.01)
            assert names == ["file"]


async def test_a_client_goes_on_after_cancellations() -> None:
    async with sandkeep.Client() as client, client.create_sandbox() as box:
        await box.fs.write_bytes("f", b"x" * 100_000)
        for at in range(0, 120, 3):
            await Cancelling(at).run(lambda: box.fs.read_bytes("f"))
        assert await box.fs.read_bytes("f") == b"x" * 100_000
