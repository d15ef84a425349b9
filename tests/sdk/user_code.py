"""What users write, for type checkers in their strictest mode: nothing here is run.

``assert_type`` states what a user's editor must know.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta
from typing import assert_type

import sandkeep
from sandkeep import sync
from sandkeep.errors import ProcessFailed, SandkeepError


async def agent(url: str) -> int:
    async with sandkeep.Client(url, token="t", project="p") as client:
        box = await client.create_sandbox(
            "a",
            tags={"k": "v"},
            resources=sandkeep.Resources(cpus=0.5, memory_mb=256, disk_mb=1024, pids=100),
        )
        assert_type(box, sandkeep.Sandbox)
        async with client.get_or_create_sandbox("b", on_create=prepare, runtime="python3.13") as other:
            assert_type(other, sandkeep.Sandbox)
        policy = sandkeep.NetworkPolicy.deny_all()
        await box.update(network_policy=policy, execution_time_limit=timedelta(minutes=5))
        try:
            done = await box.run_process("make", ["test"], check=True, capture_output=True, kill_after=60)
        except ProcessFailed as error:
            assert_type(error.message, str)
            return 1
        except SandkeepError as error:
            print(error.code, error.hint)
            return 2
        assert_type(done.returncode, int)
        assert_type(done.stdout, bytes | None)
        assert_type(done.stdout_text, str)
        async for found in client.query_sandboxes(sandkeep.SandboxQueryByName(prefix="a")):
            assert_type(found, sandkeep.SandboxInfo)
        page = await box.snapshots().page()
        assert_type(page.items, tuple[sandkeep.Snapshot, ...])
        return await talk(box)


async def prepare(box: sandkeep.Sandbox) -> None:
    async with box.fs.batch() as batch:
        batch.write_text("a", "b")


async def talk(box: sandkeep.Sandbox) -> int:
    process = await box.create_process("cat", stdin=True)
    assert process.stdin is not None
    await process.stdin.write("text")
    await process.stdin.aclose()
    async for line in process.stdout.text():
        assert_type(line, str)
    async for item in process.output(offset=0):
        if isinstance(item, sandkeep.OutputChunk):
            assert_type(item.data, bytes)
    async with box.as_user("alice").open_interactive("vi") as terminal:
        assert_type(await terminal.read(), bytes)
    return await process.wait(timeout=3)


async def files(box: sandkeep.Sandbox) -> AsyncGenerator[str, None]:
    async with box.fs.open("t", "w") as text, box.fs.open("b", "rb") as source:
        assert_type(text, sandkeep.TextFileWriter)
        assert_type(await source.read(), bytes)
        assert_type(await source.seek(3), int)
    assert_type(await box.fs.read_bytes("b", offset=1, length=2), bytes)
    assert_type(await box.fs.read_lines("t", start=10, limit=5), sandkeep.FileLines)
    async with box.fs.open("t") as reader:
        assert_type(await reader.readline(), str)
    async for path, directories, others in box.fs.walk():
        assert_type(path, str)
        assert_type(directories, list[sandkeep.FileStat])
        assert_type(others, list[sandkeep.FileStat])
    moved = await box.fs.upload("here", "there", ignore=["*.pyc"], progress=lambda done: print(done.bytes))
    assert_type(moved, sandkeep.Transferred)
    async with aclosing(box.fs.watch()) as watching:
        async for changes in watching:
            for change in changes:
                yield change.path


def blocking() -> int | None:
    with sync.create_sandbox(execution_time_limit=60) as box:
        assert_type(box, sync.Sandbox)
        box.fs.write_text("f", "x")
        assert_type(box.fs.read_text("f"), str)
        stopped = box.stop()
        assert_type(stopped.snapshot, sandkeep.Snapshot | None)
        with box.fs.open("f", "wb") as out:
            assert_type(out, sync.BinaryWriter)
        for snapshot in box.snapshots():
            assert_type(snapshot.created_at.year, int)
        process = box.create_process("true")
        return process.poll()
