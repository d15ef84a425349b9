"""Cancelled at any of its waits, in any way, a flow leaves nothing behind, and the client goes on.

Nothing: no process, sandbox, draft, socket or task. Every wait of each flow is tried, in turn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
import trio

import sandkeep
from sandkeep.errors import NotFound
from tests.polling import ENOUGH
from tests.sdk.cancel_steps import cancelled_at_every_step
from tests.sdk.leftovers import sockets_of_this_process

pytestmark = pytest.mark.anyio

WAYS = [("asyncio", "task"), ("asyncio", "scope"), ("trio", "scope")]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param[0])


@pytest.fixture
def way(request: pytest.FixtureRequest, anyio_backend: str) -> str:
    return str(request.node.callspec.params["anyio_backend"][1])


def tasks(backend: str) -> int:
    if backend == "asyncio":
        return len(asyncio.all_tasks())
    return trio.lowlevel.current_statistics().tasks_living


@pytest.fixture
async def client(anyio_backend: str) -> AsyncGenerator[sandkeep.Client, None]:
    sockets, before = sockets_of_this_process(), tasks(anyio_backend)
    async with sandkeep.Client() as client:
        yield client
    assert sockets_of_this_process() == sockets
    assert tasks(anyio_backend) == before


@pytest.fixture
async def box(client: sandkeep.Client) -> AsyncGenerator[sandkeep.Sandbox, None]:
    async with client.create_sandbox() as box:
        yield box


async def nothing_runs(box: sandkeep.Sandbox) -> None:
    for process in await box.processes():
        await process.wait(timeout=ENOUGH)


# --- sandboxes -----------------------------------------------------------------------------------------


async def test_a_create_scope_leaves_no_sandbox(client: sandkeep.Client, way: str) -> None:
    name = f"t-{secrets.token_hex(4)}"

    async def flow() -> None:
        async with client.create_sandbox(name, persistent=False) as box:
            await box.fs.write_text("f", "x")

    async def check() -> None:
        with pytest.raises(NotFound):
            await client.get_sandbox(name)

    assert await cancelled_at_every_step(way, flow, check) > 2


async def test_a_resume_scope_leaves_no_session(client: sandkeep.Client, way: str) -> None:
    async with client.create_sandbox() as box:
        await box.stop()

        async def flow() -> None:
            async with client.resume_sandbox(box.name) as resumed:
                await resumed.fs.exists("f")

        async def check() -> None:
            assert (await box.refresh()).status is sandkeep.SessionStatus.STOPPED

        assert await cancelled_at_every_step(way, flow, check) > 2


async def test_a_sandbox_goes_on_after_a_snapshot_stop_or_resume_that_was_cancelled(
    box: sandkeep.Sandbox, way: str
) -> None:
    await box.fs.write_text("f", "kept")

    async def flow() -> None:
        await box.snapshot()
        await box.resume()
        await box.stop()
        await box.resume()

    async def check() -> None:
        assert await box.fs.read_text("f") == "kept"

    assert await cancelled_at_every_step(way, flow, check) > 2


# --- processes -----------------------------------------------------------------------------------------


async def test_a_run_leaves_no_process(box: sandkeep.Sandbox, way: str) -> None:
    async def flow() -> None:
        await box.run_process("sh", ["-c", "cat; sleep 0.03"], input="x", capture_output=True)
        await box.run_process("sleep", ["0.03"], timeout=20)
        await box.run_process("sh", ["-c", "exit 3"])

    assert await cancelled_at_every_step(way, flow, lambda: nothing_runs(box)) > 2


@pytest.mark.parametrize("limit", [None, 500])
async def test_a_run_that_would_take_long_is_killed(
    box: sandkeep.Sandbox, way: str, limit: float | None
) -> None:
    async def flow() -> None:
        await box.run_process("sleep", ["600"], capture_output=True, timeout=limit)

    steps, patience = 0, 0.3
    while steps < 2 and patience < ENOUGH:  # in which, on a busy machine, it may not even have begun
        steps = await cancelled_at_every_step(way, flow, lambda: nothing_runs(box), patience=patience)
        patience *= 4
    assert steps > 1


async def test_a_run_that_is_cancelled_leaves_no_daemon(box: sandkeep.Sandbox) -> None:
    daemon = "(setsid setsid sh -c 'touch up; exec sleep 7655' &); exec sleep 600"
    async with anyio.create_task_group() as group:
        group.start_soon(box.run_process, "sh", ["-c", daemon])
        waiting = "until [ -e up ]; do sleep 0.02; done"
        await box.run_process("sh", ["-c", waiting], timeout=ENOUGH, check=True)
        group.cancel_scope.cancel()
    script = "while cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q '[s]leep 7655'"
    await box.run_process("sh", ["-c", f"{script}; do sleep 0.05; done"], timeout=ENOUGH, check=True)


async def test_a_process_that_was_only_started_survives_its_starter(box: sandkeep.Sandbox) -> None:
    with anyio.CancelScope() as scope:
        process = await box.create_process("sleep", ["600"])
        scope.deadline = anyio.current_time() + 0.5
        await process.wait()
    assert scope.cancelled_caught
    assert await process.poll() is None
    await process.kill()


async def test_waiting_and_talking_can_be_cut_short(box: sandkeep.Sandbox, way: str) -> None:
    async def flow() -> None:
        process = await box.create_process("cat", stdin=True)
        started.append(process.id)
        assert await process.communicate(b"input") == (b"input", b"")
        assert await process.wait() == 0

    async def check() -> None:
        for process in await box.processes():
            if process.id in started:
                await process.kill()
        await nothing_runs(box)  # and what its starter never heard of is no more

    started: list[str] = []
    assert await cancelled_at_every_step(way, flow, check) > 2


async def test_a_terminal_is_hung_up(box: sandkeep.Sandbox, way: str) -> None:
    async def flow() -> None:
        async with box.open_interactive("sh") as terminal:
            await terminal.write("exit 3\n")
            assert await terminal.wait() == 3

    assert await cancelled_at_every_step(way, flow, lambda: nothing_runs(box)) > 2


# --- files ---------------------------------------------------------------------------------------------


async def test_reading_and_writing_can_be_cut_short(box: sandkeep.Sandbox, way: str, tmp_path: Path) -> None:
    (tmp_path / "up/sub").mkdir(parents=True)
    (tmp_path / "up/sub/f").write_bytes(b"u" * 200_000)
    contents = {b"a" * 300_000, b"b" * 300_000}
    await box.fs.write_bytes("file", min(contents))

    async def flow() -> None:
        await box.fs.write_bytes("file", max(contents))
        assert await box.fs.read_bytes("file") in contents
        await box.fs.write_bytes("file", min(contents))
        await box.fs.upload(tmp_path / "up", "tree")
        await box.fs.upload(tmp_path / "up/sub/f", "one")
        await box.fs.download("tree", tmp_path / "down")
        await box.fs.download("one", tmp_path / "one")

    async def check() -> None:
        assert await box.fs.read_bytes("file") in contents
        assert {path.name for path in tmp_path.iterdir()} <= {"up", "down", "one"}
        assert {path.name for path in (tmp_path / "down").rglob("*")} <= {"sub", "f"}

    assert await cancelled_at_every_step(way, flow, check) > 5


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
async def test_files_are_complete_or_not_there_when_writing_is_cut_short(
    box: sandkeep.Sandbox, way: str, stride: int
) -> None:
    before, after = b"a" * (5 << 20), b"b" * (9 << 20)
    await box.fs.write_bytes("file", before)

    async def flow() -> None:
        async with box.fs.open("file", "wb") as out:
            for start in range(0, len(after), 3 << 20):
                await out.write(after[start : start + (3 << 20)])
        async with box.fs.open("file", "rb") as source:
            while await source.read(1 << 20):
                pass

    async def check() -> None:
        assert await box.fs.read_bytes("file") in (before, after)
        # What a cut connection left half-written is removed as soon as the cut is noticed.
        for _ in range(5000):
            names = [entry.name for entry in await box.fs.listdir(".")]
            if names == ["file"]:
                break
            await anyio.sleep(0.01)
        assert names == ["file"]

    assert await cancelled_at_every_step(way, flow, check, stride=stride) > 2


async def test_a_watch_can_be_cut_short(box: sandkeep.Sandbox, way: str) -> None:
    async def flow() -> None:
        async with aclosing(box.fs.watch()) as watching:
            assert await anext(watching) == []
            await box.fs.write_text("f", "x")
            assert await anext(watching)

    async def check() -> None:
        assert isinstance(await box.fs.exists("f"), bool)

    assert await cancelled_at_every_step(way, flow, check) > 2


# --- what users write ----------------------------------------------------------------------------------


@pytest.mark.parametrize("anyio_backend", [("asyncio", "task")], indirect=True)
async def test_a_timeout_of_asyncio_is_one_timeout_and_nothing_after(client: sandkeep.Client) -> None:
    name = f"t-{secrets.token_hex(4)}"
    for milliseconds in (0, 1, 2, 5, 10, 20, 40):
        try:
            async with asyncio.timeout(milliseconds / 1000):
                async with client.create_sandbox(name) as box:
                    await box.run_process("sleep", ["5"])
        except TimeoutError:
            pass
        await asyncio.sleep(0)  # a cancellation left over would be raised here
        with pytest.raises(NotFound):
            await client.get_sandbox(name)
