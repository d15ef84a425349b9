"""Limits of a sandbox: each is asked for by itself, holds, and stays until it is changed."""

from __future__ import annotations

import pytest

import sandkeep
from sandkeep import Resources
from sandkeep.errors import (
    ConfigurationDiffers,
    InvalidRequest,
    LimitUnenforceable,
    ProcessFailed,
    SandkeepError,
)
from sandkeep.sdk._compat_async import sleep
from tests.polling import longer_and_longer

pytestmark = pytest.mark.anyio

_HOG = "held = [bytearray(b'x') * (10 << 20) for _ in range({})]; print(len(held), flush=True)"
_FORKS = """
import os, signal
count = 0
try:
    while count < 5000:
        if os.fork() == 0:
            signal.pause()
        count += 1
except BlockingIOError:
    print(count, flush=True)
os.kill(-1, signal.SIGKILL)
"""
_QUOTA = "cd /sys/fs/cgroup; cat cpu.max || cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us"


async def test_a_small_sandbox_runs_out_of_its_own_memory_and_of_nothing_else() -> None:
    async with sandkeep.create_sandbox(resources=Resources(memory_mb=128)) as box:
        session = box.current_session
        assert session.limits["memory"] in ("enforced", "watched")
        assert (session.resources.memory_mb, session.resources.cpus) == (128, 2)
        fits = await box.run_process("python3", ["-c", _HOG.format(6)], capture_output=True, check=True)
        assert fits.stdout_text == "6\n"
        hog = _HOG.format(20) + "; import time; time.sleep(60)"  # until the supervisor looks, where it does
        with pytest.raises(ProcessFailed) as failed:
            await box.run_process("python3", ["-c", hog], check=True)
        assert failed.value.reason == "out_of_memory"
        done = await box.run_process("echo", ["alive"], capture_output=True)
        assert done.stdout_text == "alive\n"


async def test_a_fork_bomb_stops_at_the_number_of_processes() -> None:
    try:
        box = await sandkeep.create_sandbox(resources=Resources(pids=64))
    except LimitUnenforceable as refused:
        assert (refused.part, refused.details["field"]) == ("pids", "resources.pids")
        pytest.skip(f"processes of a session cannot be limited here: {refused.why}")
    try:
        assert box.current_session.limits["pids"] == "enforced"
        bomb = await box.run_process("python3", ["-c", _FORKS], capture_output=True)
        assert 30 < int(bomb.stdout_text) < 64
    finally:
        await box.destroy()


async def test_a_part_of_a_processor_is_the_quota_of_the_control_group() -> None:
    try:
        box = await sandkeep.create_sandbox(resources=Resources(cpus=0.25))
    except LimitUnenforceable as refused:
        assert (refused.part, refused.details["field"]) == ("cpu", "resources.cpus")
        pytest.skip(f"processors of a session cannot be limited here: {refused.why}")
    try:
        assert box.current_session.limits["cpu"] == "enforced"
        assert (box.resources.cpus, box.resources.memory_mb) == (0.25, 4096)
        found = await box.run_process("sh", ["-c", _QUOTA], capture_output=True)
        quota, period = map(int, found.stdout_text.split())
        assert quota / period == 0.25
    finally:
        await box.destroy()


@pytest.mark.slow
async def test_a_session_that_writes_more_than_its_disk_space_ends_and_its_files_are_kept(name: str) -> None:
    async with sandkeep.create_sandbox(name, resources=Resources(disk_mb=20)) as box:
        assert box.current_session.limits["disk"] in ("enforced", "watched")
        await box.run_process("sh", ["-c", "head -c 5M /dev/zero > small"], check=True)
        with pytest.raises(SandkeepError):
            await box.run_process("sh", ["-c", "head -c 60M /dev/zero > big; sleep 600"], check=True)
        for wait in longer_and_longer(1):
            await box.refresh()
            if box.current_session.stop_reason:
                break
            await sleep(wait)
        reason = box.current_session.stop_reason or ""
        assert reason.startswith("disk full") and f"{20 << 20} allowed" in reason
        assert (await box.fs.stat("small")).size == 5 << 20  # by another session
        assert box.current_session.resources.disk_mb == 20


async def test_limits_stay_through_resume_fork_and_update(name: str) -> None:
    asked = Resources(0.5, 256, 1024, 100, exact=False)
    async with sandkeep.create_sandbox(name, resources=asked) as box:
        for found in (box.resources, box.current_session.resources):
            assert (found, found.asked) == (asked, asked.asked)
        await box.stop()
        box = await sandkeep.resume_sandbox(name)
        assert box.resources == box.current_session.resources == asked
        async with sandkeep.fork_sandbox(name) as heir:
            assert heir.resources == heir.current_session.resources == asked
        other = Resources(pids=50, exact=False)
        async with sandkeep.fork_sandbox(name, resources=other) as heir:
            assert heir.resources == other == Resources(2, 4096, None, 50)
        await box.update(resources=Resources(memory_mb=512, exact=False))
        assert (await sandkeep.get_sandbox(name)).resources == Resources(memory_mb=512)
        assert box.current_session.resources == asked  # it counts from the next session on
        await box.stop()
        box = await sandkeep.resume_sandbox(name)
        assert box.current_session.resources == Resources(memory_mb=512)


async def test_get_or_create_compares_the_limits_that_are_asked_for(name: str) -> None:
    async with sandkeep.create_sandbox(name, resources=Resources(0.5, 256, exact=False)):
        for same in (Resources(0.5), Resources(memory_mb=256), Resources(0.5, 256), Resources()):
            found = await sandkeep.get_or_create_sandbox(
                name,
                resources=Resources(**same.asked, exact=False),  # type: ignore[arg-type]
            )
            assert found.resources == Resources(0.5, 256)
        for field, other in (
            ("cpus", Resources(2, 256, exact=False)),
            ("memoryMb", Resources(memory_mb=4096, exact=False)),
            ("diskMb", Resources(disk_mb=1024, exact=False)),
            ("pids", Resources(pids=100, exact=False)),
        ):
            with pytest.raises(ConfigurationDiffers) as differs:
                await sandkeep.get_or_create_sandbox(name, resources=other)
            assert differs.value.field == f"resources.{field}"


async def test_more_than_the_operator_allows_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await sandkeep.create_sandbox(name, resources=Resources(pids=5000, exact=False))
    assert refused.value.field == "resources.pids" and "4096" in refused.value.message
