"""The host layer's own speed, next to bwrap, runc and a bare subprocess measured in the same run.

    python benchmarks/host.py [--rounds N] [--quick] [--json]

Each round does everything once, in turn, so that whatever else the machine does hits all of them alike. Read
the ratios, not the milliseconds. Under root it needs nothing; as an ordinary user runc is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from sandkeep.host.driver import ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.rootfs import Rootfs
from sandkeep.host.storage import Storage

WARM_UP = 5
SUBPROCESS, BWRAP, RUNC, RUNC_EXEC = "subprocess.run echo", "bwrap echo", "runc run echo", "runc exec echo"
CREATE, FIRST, EXEC, STOP = "create", "create + first output", "run echo in a session", "stop"
IDLE = "create after a pause"
PAUSE = 0.1
"""Long enough for the kernel to leave the state in which moving a process between v1 groups is cheap."""
PUBLISH, RESUME = "publish (snapshot of a stopped session)", "resume (create from a layer)"
COMPARED = {
    CREATE: (BWRAP, RUNC),
    FIRST: (BWRAP, RUNC),
    EXEC: (SUBPROCESS, RUNC_EXEC),
    IDLE: (CREATE,),
    RESUME: (CREATE,),
}


class Times:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what].append(time.perf_counter() - started)

    async def wait(self, what: str, work: Awaitable[Any]) -> Any:
        with self.of(what):
            return await work

    def rows(self) -> list[dict[str, Any]]:
        medians = {what: statistics.median(values) for what, values in self.seconds.items()}
        rows = []
        for what, values in self.seconds.items():
            ordered = sorted(values)
            rows.append(
                {
                    "what": what,
                    "median_ms": round(medians[what] * 1000, 2),
                    "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 2),
                    "runs": len(values),
                    "ratios": {
                        other: round(medians[what] / medians[other], 2)
                        for other in COMPARED.get(what, ())
                        if other in medians
                    },
                }
            )
        return rows


class Bench:
    def __init__(self, driver: NativeDriver, storage: Storage, rootfs: Rootfs, times: Times) -> None:
        self.driver = driver
        self.storage = storage
        self.rootfs = rootfs
        self.times = times
        self._names = (f"bench-{number}" for number in range(1 << 30))

    async def create(self, rootfs: Rootfs, layer: str | None = None) -> SessionRef:
        name = next(self._names)
        await self.driver.create(SessionSpec(session=name, rootfs=rootfs, layer=layer))
        return SessionRef(self.driver.host, name)

    async def echo(self, ref: SessionRef, process: str, *, whole: bool) -> None:
        """Run echo and read what it prints, as far as its first output or to its end."""
        await self.driver.start_process(ref, ProcessSpec(process, ("echo", "x")))
        async for _ in self.driver.output(ref, process):
            if not whole:
                break

    async def remove(self, ref: SessionRef) -> None:
        await self.driver.stop(ref, reason="measured")
        await self.driver.forget(ref)
        await self.storage.call("session.remove", session=ref.session)

    async def round(self, number: int) -> None:
        times = self.times
        ref: SessionRef = await times.wait(CREATE, self.create(self.rootfs))
        await self.echo(ref, "warm", whole=True)
        await times.wait(EXEC, self.echo(ref, "measured", whole=True))
        await times.wait(STOP, self.driver.stop(ref, reason="measured"))
        await self.driver.forget(ref)
        layer = f"bench-layer-{number}"
        publish = self.storage.call(
            "layer.publish",
            session=ref.session,
            layer=layer,
            parent=None,
            image=self.rootfs.image,
            host_key=self.rootfs.host_key,
        )
        await times.wait(PUBLISH, publish)
        await self.storage.call("session.remove", session=ref.session)
        resumed = await times.wait(RESUME, self.resume(layer))
        await self.remove(resumed)
        await self.storage.call("layer.collect")
        with times.of(FIRST):
            first = await self.create(self.rootfs)
            await self.echo(first, "first", whole=False)
        await self.remove(first)
        await asyncio.sleep(PAUSE)
        await self.remove(await times.wait(IDLE, self.create(self.rootfs)))

    async def resume(self, layer: str) -> SessionRef:
        rootfs, _ = await self.storage.rootfs("host", layer=layer)
        return await self.create(rootfs, layer)


class Others:
    """What the same machine does without us."""

    def __init__(self, area: str, times: Times) -> None:
        self._times = times
        self._commands = {SUBPROCESS: ["echo", "x"]}
        self._runc: list[str] = []
        links = ["bin", "sbin", "lib", "lib64"]
        if bwrap := shutil.which("bwrap"):
            command = [
                bwrap,
                "--unshare-all",
                "--ro-bind",
                "/usr",
                "/usr",
                "--proc",
                "/proc",
                "--dev",
                "/dev",
            ]
            for link in links:
                command += ["--symlink", f"usr/{link}", f"/{link}"]
            self._commands[BWRAP] = [*command, "--tmpfs", "/tmp", "echo", "x"]
        if (runc := shutil.which("runc")) and os.geteuid() == 0:
            bundle = self._bundle(f"{area}/bundle", links, ["echo", "x"])
            waiting = self._bundle(f"{area}/waiting", links, ["sleep", "3600"])
            self._runc = [runc, "--root", f"{area}/runc"]
            self._commands[RUNC] = [*self._runc, "run", "--bundle", bundle, "bench"]
            detached = [*self._runc, "run", "--detach", "--bundle", waiting, "waiting"]
            subprocess.run(detached, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._commands[RUNC_EXEC] = [*self._runc, "exec", "waiting", "echo", "x"]

    def _bundle(self, path: str, links: list[str], argv: list[str]) -> str:
        """The usual default container, with the host's /usr bound instead of an image."""
        os.makedirs(f"{path}/rootfs/usr")
        for link in links:
            os.symlink(f"usr/{link}", f"{path}/rootfs/{link}")
        subprocess.run(["runc", "spec", "--bundle", path], check=True)
        with open(f"{path}/config.json") as handle:
            config = json.load(handle)
        config["process"] |= {"terminal": False, "args": argv}
        config["root"]["readonly"] = False
        bind = {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]}
        config["mounts"].append(bind)
        with open(f"{path}/config.json", "w") as handle:
            json.dump(config, handle)
        return path

    def round(self) -> None:
        for what, command in self._commands.items():
            with self._times.of(what):
                subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        if self._runc:
            subprocess.run([*self._runc, "delete", "--force", "waiting"], check=False, capture_output=True)


async def measure(data_dir: str, rounds: int) -> tuple[list[dict[str, Any]], str]:
    driver = NativeDriver(data_dir)
    await driver.start()
    storage = Storage(driver)
    warm, times = Times(), Times()
    others = Others(data_dir, warm)
    try:
        rootfs, _ = await storage.rootfs("host")
        bench = Bench(driver, storage, rootfs, warm)
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                bench.times = others._times = times
            others.round()
            await bench.round(number)
    finally:
        others.close()
        await storage.close()
        await driver.close()
    return times.rows(), driver.mode


def show(rows: list[dict[str, Any]], mode: str) -> None:
    print(f"mode {mode}, {rows[0]['runs']} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"| {'what':40} | median ms | p99 ms | as a multiple of |")
    print(f"| {'-' * 40} | --------: | -----: | --- |")
    for row in rows:
        ratios = ", ".join(f"{value} × {other}" for other, value in row["ratios"].items())
        print(f"| {row['what']:40} | {row['median_ms']:9.2f} | {row['p99_ms']:6.2f} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="15 rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--directory", help="where to keep data meanwhile; a temporary directory if not given"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-", dir=options.directory) as area:
        rows, mode = asyncio.run(measure(area, 15 if options.quick else options.rounds))
    if options.json:
        print(json.dumps({"mode": mode, "rows": rows}, indent=2))
    else:
        show(rows, mode)


if __name__ == "__main__":
    main()
