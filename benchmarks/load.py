"""Many at once: sixteen clients, idle sandboxes, idle connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import sandkeep
from benchmarks import memory
from benchmarks import references as ref
from benchmarks.counters import spent
from benchmarks.lab import Lab, gather
from benchmarks.latency import echo
from benchmarks.rows import MEGABYTES, RATE, Budget, Row, Series, row

CLIENTS = 16
CONNECTIONS = 200


async def rates(lab: Lab) -> list[Row]:
    server = await lab.server()
    made: list[sandkeep.Sandbox] = []
    creates, runs, bare = Series(), Series(), Series()
    async with AsyncExitStack() as held:
        clients = [await held.enter_async_context(server.client()) for _ in range(CLIENTS)]
        boxes = await asyncio.gather(*(_create(client) for client in clients))
        await asyncio.gather(*(echo(box) for box in boxes))

        async def create(number: int) -> None:
            made.append(await _create(clients[number]))

        async def run(number: int) -> None:
            await echo(boxes[number])

        for _ in range(lab.rounds(6, 3)):
            await _rate(creates, create, lab.rounds(96, 48))
            await gather([box.destroy() for box in made])
            made.clear()
            await asyncio.sleep(0.5)
            await _rate(runs, run, lab.rounds(1600, 480))
            bare.append(await asyncio.to_thread(_bare_rate, lab.rounds(800, 320)))
        await gather([box.destroy() for box in boxes])
    return [
        row(
            f"creates, {CLIENTS} clients",
            creates,
            unit=RATE,
            budget=Budget.no_less(60, ratio=False),
            note="no error",
        ),
        row(
            f"runs, {CLIENTS} clients",
            runs,
            unit=RATE,
            reference=(f"{ref.SUBPROCESS}, {CLIENTS} threads", bare),
            budget=Budget.no_less(0.8),
            note="no error",
        ),
    ]


async def _create(client: sandkeep.Client) -> sandkeep.Sandbox:
    return await client.create_sandbox(persistent=False)


async def _rate(series: Series, do: Callable[[int], Awaitable[None]], times: int) -> None:
    """Each client does its share, one after another; an error ends everything."""

    async def client(number: int) -> None:
        for _ in range(times // CLIENTS):
            await do(number)

    done = times // CLIENTS * CLIENTS
    before, began = spent(), time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    series.append(done / (time.perf_counter() - began))
    series.costs.append((spent() - before) / done)


def _bare_rate(times: int) -> float:
    """What the machine has to give at the moment."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        began = time.perf_counter()
        for output in threads.map(ref.capture, [["echo", "x"]] * times):
            assert output == b"x\n"
        return times / (time.perf_counter() - began)


async def idle(lab: Lab) -> list[Row]:
    """What one more idle sandbox takes: its own processes, and what the server and the kernel keep for it."""
    count = lab.rounds(100, 20)
    async with lab.serving() as server, server.client() as client:
        first = await gather([_create(client) for _ in range(4)])
        await asyncio.gather(*(echo(box) for box in first))
        before = memory.of_tree(server.pid)
        free = memory.available()
        await gather([_create(client) for _ in range(count)])
        await asyncio.sleep(1)
        after = memory.of_tree(server.pid)
        taken = free - memory.available()
    return [
        row(
            "idle sandbox",
            [(after - before) / count / 1e6],
            unit=MEGABYTES,
            budget=Budget.at_most(4, ratio=False),
            note=f"{count} of them, share of all processes; {taken / count / 1e6:.1f} MB with the kernel's",
        )
    ]


async def connections(lab: Lab) -> list[Row]:
    async with lab.serving() as server:
        before = memory.resident(server.pid)
        writers: list[asyncio.StreamWriter] = []
        for _ in range(CONNECTIONS):
            reader, writer = await asyncio.open_unix_connection(f"{server.data}/server.sock")
            writer.write(b"GET /version HTTP/1.1\r\nhost: sandkeep\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
        after = memory.resident(server.pid)
        for writer in writers:
            writer.close()
    return [
        row(
            "idle connection to the server",
            [(after - before) / CONNECTIONS / 1e6],
            unit=MEGABYTES,
            note=f"{CONNECTIONS} of them; the server alone {before / 1e6:.0f} MB",
        )
    ]
