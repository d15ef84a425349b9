"""Creating sandboxes and running things in them, one at a time: what a caller of the SDK waits for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import sandkeep
import sandkeep.sync
from benchmarks import references as ref
from benchmarks.lab import Lab
from benchmarks.rows import Budget, Row, Samples, repeat, row
from sandkeep.host.driver import ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.rootfs import Rootfs
from sandkeep.host.storage import Storage

CREATE, UNPREPARED, FIRST, RUN = "create", "create, nothing prepared", "create + first output", "run echo"
BLOCKING, RESUME = "run echo, blocking SDK", "resume"
HOST_CREATE, HOST_RUN = "host layer: create", "host layer: run echo"
_PAUSE = 0.06
"""Between creates, so that the pool is refilled, as for a caller that did not just empty it."""


class Host:
    """The host layer called directly: what no server above it can beat."""

    def __init__(self, driver: NativeDriver, storage: Storage, rootfs: Rootfs) -> None:
        self._driver = driver
        self._storage = storage
        self._rootfs = rootfs

    @classmethod
    async def open(cls, directory: str, held: AsyncExitStack) -> Host:
        driver = NativeDriver(directory, pool=2)
        await driver.start()
        held.push_async_callback(driver.close)
        storage = Storage(driver)
        held.push_async_callback(storage.close)
        rootfs, _ = await storage.rootfs("host")
        return cls(driver, storage, rootfs)

    async def create(self) -> SessionRef:
        name = f"bench-{secrets.token_hex(6)}"
        await self._driver.create(SessionSpec(session=name, rootfs=self._rootfs))
        return SessionRef(self._driver.host, name)

    async def run(self, ref: SessionRef) -> None:
        process = secrets.token_hex(6)
        started = await self._driver.start_process(ref, ProcessSpec(process, ("echo", "x")))
        async for _ in started.output():
            pass

    async def remove(self, ref: SessionRef) -> None:
        await self._driver.stop(ref, reason="measured")
        await self._driver.forget(ref)
        await self._storage.remove_session(ref.session)


async def echo(box: sandkeep.Sandbox) -> None:
    done = await box.run_process("echo", ["x"], capture_output=True)
    assert done.stdout == b"x\n"


async def first_output(client: sandkeep.Client) -> sandkeep.Sandbox:
    """A new sandbox that has printed something."""
    box = await client.create_sandbox(persistent=False)
    await echo(box)
    return box


async def create(lab: Lab) -> list[Row]:
    commands = lab.commands()
    client = await lab.client()
    async with AsyncExitStack() as held:
        bare = await held.enter_async_context(lab.serving(pool=0))
        unprepared = await held.enter_async_context(bare.client())
        host = await Host.open(lab.scratch(), held)

        async def step(samples: Samples, number: int) -> None:
            del number
            commands.time(samples, ref.BWRAP_TRUE, ref.RUNC_TRUE, ref.RUNC)
            await asyncio.sleep(_PAUSE)
            box = await samples.wait(CREATE, client.create_sandbox(persistent=False))
            await box.destroy()
            await asyncio.sleep(_PAUSE)
            box = await samples.wait(FIRST, first_output(client))
            await box.destroy()
            await asyncio.sleep(_PAUSE)
            session = await samples.wait(HOST_CREATE, host.create())
            await host.remove(session)
            await asyncio.sleep(_PAUSE)
            box = await samples.wait(UNPREPARED, unprepared.create_sandbox(persistent=False))
            await box.destroy()

        samples = await repeat(lab.rounds(80, 10), step)
    created = samples[CREATE]
    return [
        row(CREATE, created, reference=(ref.RUNC_TRUE, samples[ref.RUNC_TRUE]), budget=Budget.at_most(0.3)),
        row(CREATE, created, reference=(ref.BWRAP_TRUE, samples[ref.BWRAP_TRUE]), budget=Budget.at_most(3)),
        row(CREATE, created, reference=(HOST_CREATE, samples[HOST_CREATE])),
        row(UNPREPARED, samples[UNPREPARED], reference=(ref.RUNC_TRUE, samples[ref.RUNC_TRUE])),
        row(FIRST, samples[FIRST], reference=(ref.RUNC, samples[ref.RUNC]), budget=Budget.at_most(0.45)),
    ]


async def run(lab: Lab) -> list[Row]:
    commands = lab.commands()
    client = await lab.client()
    server = await lab.server()
    async with AsyncExitStack() as held:
        host = await Host.open(lab.scratch(), held)
        session = await host.create()
        held.push_async_callback(host.remove, session)
        box = await held.enter_async_context(client.create_sandbox(persistent=False))
        blocking = held.enter_context(sandkeep.sync.Client(url=server.url))
        same = await asyncio.to_thread(blocking.get_sandbox, box.name)

        async def blocking_echo() -> None:
            assert same.run_process("echo", ["x"], capture_output=True).stdout == b"x\n"

        async def outside(samples: Samples, command: str) -> None:
            commands.time(samples, command)

        async def step(samples: Samples, number: int) -> None:
            ways: list[Callable[[], Awaitable[None]]] = [
                lambda: outside(samples, ref.SUBPROCESS),
                lambda: samples.wait(RUN, echo(box)),
                lambda: samples.wait(HOST_RUN, host.run(session)),
                lambda: samples.wait(BLOCKING, blocking_echo()),
                lambda: outside(samples, ref.RUNC_EXEC),
            ]
            # The run after the largest finds the caches cold, so every size is that run in turn: each
            # round begins elsewhere and takes other steps, which with a prime number of ways meets all.
            stride = 1 + number // len(ways) % (len(ways) - 1)
            for place in range(len(ways)):
                await ways[(number + place * stride) % len(ways)]()

        samples = await repeat(lab.rounds(200, 20), step, warm_up=10)
    bare = (ref.SUBPROCESS, samples[ref.SUBPROCESS])
    return [
        row(RUN, samples[RUN], reference=bare, budget=Budget.at_most(2.5)),
        row(RUN, samples[RUN], reference=(HOST_RUN, samples[HOST_RUN])),
        row(RUN, samples[RUN], reference=(ref.RUNC_EXEC, samples[ref.RUNC_EXEC])),
        row(BLOCKING, samples[BLOCKING], reference=bare, budget=Budget.at_most(2.5)),
    ]
