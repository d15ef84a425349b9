"""The host layer by itself (driver, supervisor, worker): no server, no SDK, nothing prepared ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from benchmarks import references as ref
from benchmarks.lab import Lab
from benchmarks.rows import Row, Samples, repeat, row
from sandkeep.host.driver import ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.rootfs import Rootfs
from sandkeep.host.storage import Storage

CREATE, FIRST, EXEC = "host: create", "host: create + first output", "host: run echo"
BY_NAMES = "host: create, overlay by names"
"""The way of kernels before 6.15, which works on newer ones too."""
STOP, IDLE = "host: stop", "host: create after a pause"
PUBLISH, RESUME = "host: publish a stopped session", "host: resume from a layer"
PAUSE = 0.1
"""Long enough for the kernel to leave the state in which moving a process between v1 groups is cheap."""
COMPARED = {
    CREATE: (ref.BWRAP, ref.RUNC),
    FIRST: (ref.BWRAP, ref.RUNC),
    EXEC: (ref.SUBPROCESS, ref.RUNC_EXEC),
    STOP: (),
    PUBLISH: (),
    RESUME: (CREATE,),
    IDLE: (CREATE,),
    BY_NAMES: (CREATE,),
}


class Bench:
    def __init__(self, driver: NativeDriver, storage: Storage, rootfs: Rootfs, prefix: str = "bench") -> None:
        self.driver = driver
        self.storage = storage
        self.rootfs = rootfs
        self._names = (f"{prefix}-{number}" for number in range(1 << 30))

    async def create(self, rootfs: Rootfs, layer: str | None = None) -> SessionRef:
        name = next(self._names)
        await self.driver.create(SessionSpec(session=name, rootfs=rootfs, layer=layer))
        return SessionRef(self.driver.host, name)

    async def echo(self, ref: SessionRef, process: str, *, whole: bool) -> None:
        """Run echo and read what it prints, as far as its first output or to its end."""
        started = await self.driver.start_process(ref, ProcessSpec(process, ("echo", "x")))
        async for _ in started.output():
            if not whole:
                break

    async def remove(self, ref: SessionRef) -> None:
        await self.driver.stop(ref, reason="measured")
        await self.driver.forget(ref)
        await self.storage.remove_session(ref.session)

    async def round(self, times: Samples, number: int) -> None:
        ref: SessionRef = await times.wait(CREATE, self.create(self.rootfs))
        await self.echo(ref, "warm", whole=True)
        await times.wait(EXEC, self.echo(ref, "measured", whole=True))
        await times.wait(STOP, self.driver.stop(ref, reason="measured"))
        await self.driver.forget(ref)
        layer = f"bench-layer-{number}"
        publish = self.storage.publish_layer(
            ref.session,
            layer_id=layer,
            parent_id=None,
            image=self.rootfs.image,
            host_key=self.rootfs.host_key,
        )
        await times.wait(PUBLISH, publish)
        await self.storage.remove_session(ref.session)
        resumed = await times.wait(RESUME, self.resume(layer))
        await self.remove(resumed)
        await self.storage.collect_layers()
        with times.of(FIRST):
            first = await self.create(self.rootfs)
            await self.echo(first, "first", whole=False)
        await self.remove(first)
        await asyncio.sleep(PAUSE)
        await self.remove(await times.wait(IDLE, self.create(self.rootfs)))

    async def resume(self, layer: str) -> SessionRef:
        rootfs, _ = await self.storage.rootfs("host", layer_id=layer)
        return await self.create(rootfs, layer)


async def host(lab: Lab) -> list[Row]:
    """Every step of a session's life, called directly."""
    commands = lab.commands()
    async with AsyncExitStack() as held:
        driver = NativeDriver(lab.scratch())
        await driver.start()
        held.push_async_callback(driver.close)
        storage = Storage(driver)
        held.push_async_callback(storage.close)
        rootfs, _ = await storage.rootfs("host")
        bench = Bench(driver, storage, rootfs)
        older = NativeDriver(driver.data_dir, way="names")
        await older.start()
        held.push_async_callback(older.close)
        by_names = Bench(older, storage, rootfs, "by-names")

        async def step(samples: Samples, number: int) -> None:
            commands.time(samples, ref.SUBPROCESS, ref.BWRAP, ref.RUNC, ref.RUNC_EXEC)
            await bench.round(samples, number)
            await by_names.remove(await samples.wait(BY_NAMES, by_names.create(rootfs)))

        samples = await repeat(lab.rounds(60, 10), step, warm_up=5)
    return [
        row(what, samples[what], reference=None if other is None else (other, samples[other]))
        for what, others in COMPARED.items()
        for other in _at_least_one(others)
    ]


def _at_least_one(others: Sequence[str]) -> Sequence[str | None]:
    return others or (None,)
