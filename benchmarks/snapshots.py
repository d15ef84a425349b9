"""Stopping, resuming, checkpoints and forks: none of it may depend on how much was written."""

from __future__ import annotations

import asyncio

import sandkeep
from benchmarks import references as ref
from benchmarks.lab import Lab, gather
from benchmarks.rows import Budget, Row, Samples, repeat, row

SMALL, LARGE = 1 << 20, 1 << 30
FILES = 10_000
FORKS = 100
CREATE = "create"

_WRITE_FILES = """
import os, sys
os.makedirs("many", exist_ok=True)
for number in range(int(sys.argv[1])):
    with open(f"many/{number}", "wb") as out:
        out.write(b"%d" % number * 100)
"""
_FEEL_PAUSES = """
import sys, time
longest, last = 0.0, time.monotonic()
print("ready", flush=True)
import select
while not select.select([0], [], [], 0.001)[0]:
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print(longest)
"""
"""Wakes up every millisecond until its input ends, then prints the longest it had to wait for that."""


async def write(box: sandkeep.Sandbox, size: int) -> None:
    await box.run_process("sh", ["-c", f"head -c {size} /dev/zero > data"], check=True)


async def stop_and_resume(lab: Lab) -> list[Row]:
    client = await lab.client()
    used: list[sandkeep.Sandbox] = []
    sizes = {SMALL: "1 MiB", LARGE: "1 GiB"}

    async def step(samples: Samples, number: int) -> None:
        del number
        for size, text in sizes.items():
            box = await samples.wait(CREATE, client.create_sandbox())
            await write(box, size)
            await samples.wait(f"stop {text}", box.stop())
            await asyncio.sleep(0.06)
            await samples.wait(f"resume {text}", box.resume())
            used.append(box)

    samples = await repeat(lab.rounds(12, 4), step, warm_up=1)
    for box in used:
        await box.destroy()
    small, large = (samples[f"stop {text}"] for text in sizes.values())
    resumed, resumed_large = (samples[f"resume {text}"] for text in sizes.values())
    return [
        row(
            "stop with snapshot, 1 GiB dirty",
            large,
            reference=("the same, 1 MiB", small),
            budget=Budget.at_most(1.5),
        ),
        row(
            "resume, 1 GiB", resumed_large, reference=("the same, 1 MiB", resumed), budget=Budget.at_most(1.5)
        ),
        row("resume", resumed, reference=(CREATE, samples[CREATE]), budget=Budget.at_most(1.2)),
    ]


async def checkpoint(lab: Lab) -> list[Row]:
    client = await lab.client()
    samples = Samples()
    for _ in range(lab.rounds(3, 1)):
        async with client.create_sandbox() as box:
            await write(box, LARGE)
            await box.run_process("python3", ["-c", _WRITE_FILES, str(FILES)], check=True)
            samples.add("idle", await _longest_pause(box, None))
            samples.add("pause", await _longest_pause(box, samples))
    noise = max(samples["idle"]) * 1000
    return [
        row(
            "checkpoint pause, 1 GiB + 10k files dirty",
            samples["pause"],
            budget=Budget.at_most(40, ratio=False),
            note=f"felt inside; {noise:.0f} ms with no checkpoint",
        ),
        row("checkpoint, the whole of it", samples["whole"]),
    ]


async def _longest_pause(box: sandkeep.Sandbox, samples: Samples | None) -> float:
    async with await box.create_process("python3", ["-c", _FEEL_PAUSES], stdin=True) as feeling:
        assert await feeling.stdout.readline() == b"ready\n"
        if samples is None:
            await asyncio.sleep(1)
        else:
            await samples.wait("whole", box.checkpoint())
        stdout, _ = await feeling.communicate()
        return float(stdout.split()[-1])


async def forks(lab: Lab) -> list[Row]:
    """A hundred forks in one request, and one; a hundred containers, none of which waits for another."""
    client = await lab.client()
    commands = lab.commands()
    containers = f"{FORKS} × {ref.RUNC_TRUE} at once"
    async with client.create_sandbox() as base:
        await write(base, SMALL)
        await base.snapshot()

        async def step(samples: Samples, number: int) -> None:
            del number
            fork = await samples.wait("one", base.fork(persistent=False))
            await fork.destroy()
            commands.time_at_once(samples, containers, FORKS)
            await asyncio.sleep(1)
            made = await samples.wait("all", base.fork(count=FORKS, persistent=False))
            assert len(made) == FORKS
            await gather([fork.destroy() for fork in made])
            await asyncio.sleep(1)

        samples = await repeat(lab.rounds(5, 2), step, warm_up=1)
    return [
        row(
            f"{FORKS} forks at once",
            samples["all"],
            reference=(containers, samples[containers]),
            budget=Budget.at_most(0.4),
        ),
        row("one fork", samples["one"]),
    ]
