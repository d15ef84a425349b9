"""Bytes: files up and down, output, and the network."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys

from benchmarks import references as ref
from benchmarks.lab import Lab
from benchmarks.rows import MEGABYTES_A_SECOND, Budget, Row, Samples, repeat, row
from sandkeep import NetworkPolicy

FILES = 1000
BIG = 256 << 20
OUTPUT = 96 << 20
"""Less than the output log keeps."""
RELAYED = 256 << 20


async def many_files(lab: Lab) -> list[Row]:
    client = await lab.client()
    area = lab.scratch()
    for number in range(FILES):
        directory = f"{area}/tree/{number % 20}"
        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/{number}", "wb") as out:
            out.write(os.urandom(2048))
    async with client.create_sandbox(persistent=False) as box:

        async def step(samples: Samples, number: int) -> None:
            with samples.of(ref.TAR):
                ref.tar_copy(f"{area}/tree", f"{area}/copy")
            await samples.wait("up", box.fs.upload(f"{area}/tree", f"tree{number}"))
            got = await samples.wait("down", box.fs.download(f"tree{number}", f"{area}/got"))
            assert got.files == FILES
            for name in ("copy", "got"):
                shutil.rmtree(f"{area}/{name}")
            await box.fs.remove(f"tree{number}", recursive=True)

        samples = await repeat(lab.rounds(15, 5), step, warm_up=2)
    tar = (ref.TAR, samples[ref.TAR])
    return [
        row("1,000 files up", samples["up"], reference=tar, budget=Budget.at_most(1.3)),
        row("1,000 files down", samples["down"], reference=tar, budget=Budget.at_most(1.3)),
    ]


async def big_file(lab: Lab) -> list[Row]:
    client = await lab.client()
    area = lab.scratch()
    piece = os.urandom(1 << 20)
    with open(f"{area}/big", "wb") as out:
        for _ in range(BIG >> 20):
            out.write(piece)
    async with client.create_sandbox(persistent=False) as box:

        async def step(samples: Samples, number: int) -> None:
            del number
            with samples.of(ref.COPY):
                ref.copy(f"{area}/big", f"{area}/copy")
            await samples.wait("up", box.fs.upload(f"{area}/big", "big"))
            await samples.wait("down", box.fs.download("big", f"{area}/got"))
            assert os.path.getsize(f"{area}/got") == BIG
            for name in ("copy", "got"):
                os.unlink(f"{area}/{name}")
            await box.fs.remove("big")

        samples = await repeat(lab.rounds(10, 3), step, warm_up=1)
    copied = (ref.COPY, _rates(BIG, samples[ref.COPY]))
    return [
        row(
            f"256 MiB {way}",
            _rates(BIG, samples[way]),
            unit=MEGABYTES_A_SECOND,
            reference=copied,
            budget=Budget.no_less(0.8),
        )
        for way in ("up", "down")
    ]


async def output(lab: Lab) -> list[Row]:
    client = await lab.client()
    bare = ["head", "-c", str(OUTPUT), "/dev/zero"]
    async with client.create_sandbox(persistent=False) as box:

        async def step(samples: Samples, number: int) -> None:
            del number
            with samples.of("pipe"):
                ref.capture(bare)
            with samples.of("output"):
                process = await box.create_process(bare[0], bare[1:])
                size = 0
                async for piece in process.stdout:
                    size += len(piece)
            assert size == OUTPUT, size

        samples = await repeat(lab.rounds(10, 3), step, warm_up=1)
    return [
        row(
            "output, process to SDK reader",
            _rates(OUTPUT, samples["output"]),
            unit=MEGABYTES_A_SECOND,
            reference=("a pipe to subprocess.run", _rates(OUTPUT, samples["pipe"])),
            budget=Budget.no_less(0.7),
        )
    ]


async def relay(lab: Lab) -> list[Row]:
    """An allowed domain, whose server is on loopback, read from inside and from outside."""
    sender = ref.Sender(RELAYED)
    network = {"names": {"bench.test": ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"]}
    try:
        async with lab.serving(network=network) as server, server.client() as client:
            policy = NetworkPolicy.custom(["bench.test"])
            async with client.create_sandbox(persistent=False, network_policy=policy) as box:

                async def step(samples: Samples, number: int) -> None:
                    del number
                    argv = ["-c", ref.RECEIVE, "127.0.0.1", str(sender.port)]
                    bare = await asyncio.to_thread(
                        subprocess.run, [sys.executable, *argv], check=True, capture_output=True
                    )
                    samples.add("bare", _rate(bare.stdout))
                    argv[2] = "bench.test"
                    done = await box.run_process("python3", argv, check=True, capture_output=True)
                    assert done.stdout is not None
                    samples.add("relayed", _rate(done.stdout))

                samples = await repeat(lab.rounds(8, 3), step, warm_up=1)
    finally:
        sender.close()
    return [
        row(
            "relay, allowed domain",
            samples["relayed"],
            unit=MEGABYTES_A_SECOND,
            reference=(ref.LOOPBACK, samples["bare"]),
            budget=Budget.no_less(0.6),
        )
    ]


def _rate(printed: bytes) -> float:
    size, seconds = printed.split()
    assert int(size) == RELAYED, printed
    return int(size) / float(seconds) / 1e6


def _rates(size: int, seconds: list[float]) -> list[float]:
    return [size / value / 1e6 for value in seconds]
