"""Whether an operation starts a session when the last one has ended: ``auto_resume``."""

from __future__ import annotations

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, SessionStopped
from sandkeep.sdk._compat_async import sleep

pytestmark = pytest.mark.anyio


async def _ended(name: str) -> sandkeep.Sandbox:
    """Return another handle, once the session of the sandbox has ended."""
    other = await sandkeep.get_sandbox(name)
    for _ in range(1200):
        if other.status.is_final:
            break
        await sleep(0.05)
        await other.refresh()
    assert other.status.is_final
    return other


async def test_a_sandbox_that_keeps_nothing_never_comes_back_empty_by_itself(name: str) -> None:
    async with sandkeep.create_sandbox(name, persistent=False, execution_time_limit=2) as box:
        await box.fs.write_text("note", "not kept")
        other = await _ended(name)
        for handle in (box, other):
            with pytest.raises(SessionStopped, match="nothing was run") as refused:
                await handle.run_process("touch", ["made"])
            assert "not kept" in str(refused.value.hint) and "auto_resume=True" in str(refused.value.hint)
            assert refused.value.details["sandbox"] == name
        with pytest.raises(SessionStopped):
            await box.fs.read_text("note")
        with pytest.raises(SessionStopped):
            await box.as_user("root").run_process("true")
        assert len(await box.sessions().all()) == 1
        # Asked for, it starts anew, and the handle that asked uses that session.
        await box.resume()
        assert not await box.fs.exists("note") and not await box.fs.exists("made")
        assert len(await box.sessions().all()) == 2


async def test_asked_for_a_sandbox_that_keeps_nothing_resumes_empty(name: str) -> None:
    async with sandkeep.create_sandbox(name, persistent=False, auto_resume=True) as box:
        await box.fs.write_text("note", "not kept")
        await box.stop()
        assert not await box.fs.exists("note")
        await box.stop()
        async with sandkeep.resume_sandbox(name) as resumed:
            assert not await resumed.fs.exists("note")


async def test_what_a_snapshot_kept_is_resumed_also_if_the_sandbox_is_not_persistent(name: str) -> None:
    async with sandkeep.create_sandbox(name, persistent=False) as box:
        await box.fs.write_text("note", "kept")
        await box.snapshot()
        assert await box.fs.read_text("note") == "kept"
        await box.fs.write_text("note", "not kept")
        await box.stop()
        with pytest.raises(SessionStopped):
            await box.fs.read_text("note")


async def test_without_auto_resume_no_operation_starts_a_session(name: str) -> None:
    async with sandkeep.create_sandbox(name, auto_resume=False) as box:
        await box.fs.write_text("note", "kept")
        await box.stop()
        with pytest.raises(SessionStopped, match="nothing was run") as refused:
            await box.run_process("true")
        assert "resume()" in str(refused.value.hint)
        got = await sandkeep.get_sandbox(name, auto_resume=False)
        with pytest.raises(SessionStopped):
            await got.fs.read_text("note")
        bound = await sandkeep.bind(box.reference(), auto_resume=False)
        with pytest.raises(SessionStopped):
            await bound.fs.read_text("note")
        assert len(await box.sessions().all()) == 1
        assert await (await got.resume()).fs.read_text("note") == "kept"


async def test_a_client_decides_for_its_handles_and_a_call_for_its_own(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box, sandkeep.Client(auto_resume=False) as client:
        await box.stop()
        with pytest.raises(SessionStopped):
            await (await client.get_sandbox(name)).run_process("true")
        await (await client.get_sandbox(name, auto_resume=True)).run_process("true", check=True)
    with pytest.raises(InvalidRequest, match="auto_resume"):
        await sandkeep.get_sandbox(name, auto_resume=1)  # type: ignore[arg-type]  # pyright: ignore
