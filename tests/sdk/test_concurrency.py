"""Many at once: one resume, one creation, one event loop at a time."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

import sandkeep
from sandkeep import sync
from sandkeep.errors import InvalidRequest, SessionStopped
from tests.server.server_process import ServerProcess


@pytest.mark.anyio
async def test_concurrent_callers_share_one_resume() -> None:
    resumed: list[str] = []

    async def note(box: sandkeep.Sandbox) -> None:
        resumed.append(box.current_session.id)

    async with sandkeep.create_sandbox(on_resume=note) as box:
        await box.fs.write_text("f", "x")
        await box.stop()
        found: list[str] = []

        async def look() -> None:
            found.append(await box.fs.read_text("f"))

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(look)
        assert found == ["x"] * 16
        assert len(resumed) == 1
        assert len(await box.sessions().all()) == 2


@pytest.mark.anyio
async def test_of_many_get_or_create_calls_one_creates() -> None:
    name = f"t-{secrets.token_hex(4)}"
    created: list[str] = []
    boxes: list[sandkeep.Sandbox] = []

    async def note(box: sandkeep.Sandbox) -> None:
        created.append(box.name)

    async def get() -> None:
        boxes.append(await sandkeep.get_or_create_sandbox(name, on_create=note))

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(get)
    assert created == [name]
    assert len({box.current_session.id for box in boxes}) == 1
    await boxes[0].destroy()


def test_threads_share_one_resume_and_one_client() -> None:
    resumed: list[str] = []
    with sync.create_sandbox(on_resume=lambda box: resumed.append(box.name)) as box:
        box.fs.write_text("f", "x")
        box.stop()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _: box.fs.read_text("f"), range(8)))
        assert found == ["x"] * 8 and len(resumed) == 1


def test_every_event_loop_has_a_client_of_its_own() -> None:
    async def look() -> int:
        await sandkeep.query_sandboxes().page()
        return id(sandkeep.default_client())

    assert asyncio.run(look()) and asyncio.run(look())


def test_a_client_of_another_event_loop_is_refused() -> None:
    client = sandkeep.Client()

    async def look() -> None:
        await client.query_sandboxes().page()

    async def close() -> None:
        await client.aclose()

    runner = asyncio.Runner()
    runner.run(look())
    with pytest.raises(InvalidRequest, match="another event loop"):
        asyncio.run(look())
    runner.run(close())
    runner.close()


def test_a_child_process_does_not_use_its_parents_connections() -> None:
    sync.query_sandboxes().page()
    child = os.fork()
    if child == 0:
        try:
            sync.query_sandboxes().page()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_over_tcp_with_a_token_it_is_the_same(server: ServerProcess) -> None:
    with sync.Client(server.url, token=server.token) as client, client.create_sandbox() as box:
        assert box.run_process("echo", ["tcp"], capture_output=True).stdout == b"tcp\n"
        with box.open_interactive("echo", ["terminal"]) as terminal:
            assert b"terminal" in b"".join(terminal)
    with pytest.raises(sync.SandkeepError) as refused, sync.Client(server.url, token="wrong") as client:
        client.query_sandboxes().page()
    assert refused.value.code == "unauthenticated" and refused.value.http_status == 401
    assert refused.value.hint


def test_a_program_without_a_server_starts_one(tmp_path: os.PathLike[str]) -> None:
    """Two programs at once: one server, which goes away by being told to."""
    code = """
from sandkeep import sync
with sync.create_sandbox() as box:
    print(box.run_process("echo", ["embedded"], capture_output=True).stdout_text, end="")
"""
    env = {name: value for name, value in os.environ.items() if name != "SANDKEEP_URL"}
    env["SANDKEEP_HOME"] = home = os.path.join(tmp_path, "h" * 100)
    try:
        programs = [
            subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=env, stdout=-1, stderr=-1)
            for _ in range(2)
        ]
        for program in programs:
            out, err = program.communicate(timeout=60)
            assert (program.returncode, out, err) == (0, b"embedded\n", b"")
    finally:
        from sandkeep.embedded import ask

        ask(home, "POST", "/v1/server/retire")
        for _ in range(1200):
            if ask(home, "GET", "/version") is None:
                break
            anyio.run(anyio.sleep, 0.05)


@pytest.mark.anyio
async def test_a_session_that_ends_under_a_run_is_told_with_what_was_printed() -> None:
    async with sandkeep.create_sandbox() as box, anyio.create_task_group() as group:

        async def stop_once_it_has_printed() -> None:
            other = await sandkeep.get_sandbox(box.name)
            while not (running := await other.processes()):
                pass
            async with running[0] as process:
                assert await process.stdout.readline() == b"so far\n"
            await other.stop()

        group.start_soon(stop_once_it_has_printed)
        with pytest.raises(SessionStopped) as ended:
            await box.run_process("sh", ["-c", "echo so far; sleep 60"], capture_output=True)
        assert ended.value.stdout == b"so far\n"


@pytest.mark.anyio
async def test_what_is_opened_is_opened_once_and_not_forgotten() -> None:
    opening = sandkeep.create_sandbox(persistent=False)
    box = await opening
    with pytest.raises(RuntimeError, match="only once"):
        await opening
    await box.destroy()
    forgotten = sandkeep.create_sandbox()
    with pytest.warns(RuntimeWarning, match=r"create_sandbox\(\) was never awaited; write 'await'"):
        del forgotten


@pytest.mark.anyio
async def test_what_is_used_before_it_is_opened_says_what_is_missing() -> None:
    opening: Any = sandkeep.create_sandbox(persistent=False)
    with pytest.raises(AttributeError, match="has no 'run_process': write 'await' or 'async with'"):
        opening.run_process("true")
    with pytest.raises(TypeError, match=r"create_sandbox\(\) needs 'async with'"), opening:
        pytest.fail("entered")


@pytest.mark.anyio
async def test_the_with_of_the_other_half_says_which_one_is_needed() -> None:
    for kind in (sandkeep.Sandbox, sandkeep.Client, sandkeep.Process, sandkeep.Batch, sandkeep.Terminal):
        handle: Any = kind.__new__(kind)
        with pytest.raises(TypeError, match=f"{kind.__name__} needs 'async with'"), handle:
            pytest.fail("entered")
    blocking: Any = sync.BinaryReader.__new__(sync.BinaryReader)
    with pytest.raises(TypeError, match=r"BinaryReader of sandkeep\.sync needs 'with'"):
        async with blocking:
            pytest.fail("entered")


def test_without_an_event_loop_the_other_half_is_named() -> None:
    with pytest.raises(InvalidRequest, match="from sandkeep import sync as sandkeep"):
        sandkeep.create_sandbox()


def test_a_handle_of_an_event_loop_that_has_ended_says_so() -> None:
    async def make() -> sandkeep.Sandbox:
        return await sandkeep.create_sandbox(persistent=False)

    async def use(box: sandkeep.Sandbox) -> None:
        with pytest.raises(InvalidRequest, match=r"event loop or process that has ended .*get_sandbox"):
            await box.run_process("true")
        await (await sandkeep.get_sandbox(box.name)).destroy()

    asyncio.run(use(asyncio.run(make())))
