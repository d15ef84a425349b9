"""The same operations when there is much already: sandboxes, snapshots, output."""

from __future__ import annotations

import asyncio
import time

import sandkeep
from benchmarks import memory
from benchmarks.lab import Lab, gather
from benchmarks.latency import echo
from benchmarks.rows import MEGABYTES, Budget, Row, Samples, row

SANDBOXES = (10, 100, 1000)
SNAPSHOTS = (1, 30, 300)
LINES = 1_000_000
_ROUNDS = 10


async def sandboxes(lab: Lab) -> list[Row]:
    """Every operation with so many sandboxes running idle beside it."""
    steps = SANDBOXES[:2] if lab.quick else SANDBOXES
    measured: dict[int, Samples] = {}
    idle = 0.0
    async with lab.serving(max_active_sessions=2000) as server, server.client() as client:
        before = memory.of_tree(server.pid)
        for count in steps:
            there = len([info async for info in client.query_sandboxes()])
            await gather([_create(client) for _ in range(count - there)])
            await asyncio.sleep(1)
            idle = (memory.of_tree(server.pid) - before) / count / 1e6
            measured[count] = await _operations(client)
    rows = []
    for what in ("create", "run", "list", "snapshot", "resume", "fork", "log read"):
        first = measured[steps[0]][what]
        for count in steps[1:]:
            name = f"{what} beside {count:,} sandboxes"
            rows.append(row(name, measured[count][what], reference=(f"beside {steps[0]}", first)))
    budget = Budget.at_most(4, ratio=False)
    rows.append(row(f"idle sandbox, {steps[-1]:,} running", [idle], unit=MEGABYTES, budget=budget))
    return rows


async def _create(client: sandkeep.Client) -> sandkeep.Sandbox:
    return await client.create_sandbox(persistent=False)


async def _operations(client: sandkeep.Client) -> Samples:
    samples = Samples()
    for _ in range(_ROUNDS):
        box = await samples.wait("create", client.create_sandbox())
        await echo(box)
        await samples.wait("run", echo(box))
        process = (await box.processes())[0]
        await samples.wait("log read", process.communicate())
        with samples.of("list"):
            assert (await client.query_sandboxes().page()).items
        await samples.wait("snapshot", box.snapshot())
        await asyncio.sleep(0.06)
        await samples.wait("resume", box.resume())
        fork = await samples.wait("fork", box.fork(persistent=False))
        await fork.destroy()
        await box.destroy()
        await asyncio.sleep(0.06)
    return samples


async def snapshots(lab: Lab) -> list[Row]:
    """Resuming and forking a sandbox that has been stopped so many times."""
    steps = SNAPSHOTS[:2] if lab.quick else SNAPSHOTS
    measured: dict[int, Samples] = {}
    client = await lab.client()
    async with client.create_sandbox() as box:
        taken = 0
        for count in steps:
            while taken < count:
                await box.run_process("sh", ["-c", f"echo {taken} > file{taken % 50}"], check=True)
                await box.stop()
                taken += 1
                await box.resume()
            await asyncio.sleep(2)
            measured[count] = samples = Samples()
            for _ in range(_ROUNDS):
                await samples.wait("stop with snapshot", box.stop())
                await asyncio.sleep(0.06)
                await samples.wait("resume", box.resume())
                await samples.wait("run", echo(box))
                fork = await samples.wait("fork", box.fork(persistent=False))
                await fork.destroy()
                await asyncio.sleep(0.06)
            taken += _ROUNDS
    rows = []
    for what in ("stop with snapshot", "resume", "run", "fork"):
        first = measured[steps[0]][what]
        for count in steps[1:]:
            name = f"{what} after {count} snapshots"
            rows.append(row(name, measured[count][what], reference=(f"after {steps[0]}", first)))
    return rows


async def lines(lab: Lab) -> list[Row]:
    """A million lines: read as they come, read again later, and the end of them only."""
    client = await lab.client()
    count = LINES // 10 if lab.quick else LINES
    samples = Samples()
    async with client.create_sandbox(persistent=False) as box:
        for _ in range(3):
            began = time.perf_counter()
            process = await box.create_process("seq", [str(count)])
            found = (await process.communicate())[0].count(b"\n")
            samples.add("live", time.perf_counter() - began)
            assert found == count
            with samples.of("later"):
                assert (await process.communicate())[0].count(b"\n") == count
        await echo(box)
        await samples.wait("run", echo(box))
    return [
        row(f"{count:,} lines, live", samples["live"]),
        row(f"{count:,} lines, read again", samples["later"], reference=("live", samples["live"])),
    ]
