"""After many operations nothing is left: no socket, task, thread or warning; memory does not follow size."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from sandkeep import sync

OPERATIONS = """
import gc, os, sys
import sandkeep

async def work(client):
    async with client.create_sandbox() as box:
        await box.fs.write_text("f", "x" * 1000)
        for number in range(80):
            await box.fs.read_text("f")
            await box.fs.exists("missing")
            await box.run_process("true")
            process = await box.create_process("sh", ["-c", "echo 1; echo 2; sleep 5"])
            async with process:
                assert await process.stdout.readline() == b"1\\n"
            await process.kill()
            try:
                await box.fs.read_text("missing")
            except sandkeep.SandkeepError:
                pass
            if number % 10 == 0:
                async with box.open_interactive("cat") as terminal:
                    await terminal.write("x")
                    await terminal.read()
                async with box.fs.open("f", "rb") as source:
                    await source.read(10)

def sockets():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "socket:" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
        except OSError:
            pass
    return set(found)
"""

ASYNC = """
async def main():
    before = sockets()
    async with sandkeep.Client() as client:
        await work(client)
    assert sockets() == before, sockets() - before
    async for _ in sandkeep.query_sandboxes():
        pass

def tasks():
    import asyncio
    return len(asyncio.all_tasks())

if sys.argv[1] == "asyncio":
    import asyncio
    async def whole():
        await main()
        assert tasks() == 1
    asyncio.run(whole())
else:
    import trio
    async def whole():
        await main()
        assert trio.lowlevel.current_statistics().tasks_living <= 4, trio.lowlevel.current_statistics()
    trio.run(whole)
gc.collect()
import threading
assert not [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
print("clean")
"""

SYNC = """
before = sockets()
with sandkeep.Client() as client:
    work(client)
assert sockets() == before
for _ in sandkeep.query_sandboxes():
    pass
gc.collect()
import threading
assert threading.active_count() == 1
print("clean")
"""


def run(code: str, *arguments: str) -> None:
    argv = [sys.executable, "-W", "error", "-X", "dev", "-c", code, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    # Development mode also reports slow callbacks, which a busy machine has.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing ")]
    assert (done.returncode, done.stdout, said) == (0, "clean\n", [])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_five_hundred_operations_leave_nothing_open(backend: str) -> None:
    run(OPERATIONS + ASYNC, backend)


def test_five_hundred_blocking_operations_leave_nothing_open() -> None:
    path = Path(__file__).resolve().parents[2] / "scripts/unasync.py"
    unasync = runpy.run_path(str(path))
    run(unasync["rewritten"](OPERATIONS, set()) + SYNC)


BIG = """
import os, resource, sys
from sandkeep import sync
size, here, back = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with sync.create_sandbox() as box:
    box.fs.upload("/bin/true", "warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert box.fs.upload(here, "big").bytes == size
    assert box.fs.stat("big").size == size
    assert box.fs.download("big", back).bytes == size
    os.unlink(back)
    with box.fs.open("again", "wb") as out, box.fs.open("big", "rb") as source:
        for chunk in source.chunks():
            out.write(chunk)
    assert box.fs.stat("again").size == size
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print("grown", grown)
"""


def move_a_file_of(size: int, area: Path) -> None:
    here = area / "big"
    with here.open("wb") as out:
        piece = os.urandom(1 << 20)
        for _ in range(size >> 20):
            out.write(piece)
    argv = [sys.executable, "-W", "error", "-c", BIG, str(size), str(here), str(area / "back")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) < 48 << 10, "kilobytes"


def test_a_handle_that_is_dropped_takes_its_streams_along() -> None:
    """At once, and not when cycles are collected, sockets before those who would close them."""
    with sync.create_sandbox() as box:
        process = box.create_process("sh", ["-c", "echo ready; exec cat"], stdin=True)
        assert process.stdout.readline() == b"ready\n"
        assert process.stdin is not None
        seen = weakref.ref(process), weakref.ref(process.stdout), weakref.ref(process.stdin)
        del process
        assert [each() for each in seen] == [None, None, None]


def test_a_large_file_goes_both_ways_with_little_memory(tmp_path: Path) -> None:
    move_a_file_of(128 << 20, tmp_path)


@pytest.mark.slow
def test_a_file_of_a_gibibyte_goes_both_ways_with_little_memory(tmp_path: Path) -> None:
    move_a_file_of(1 << 30, tmp_path)
