"""Options of processes: what they are given, what is kept of their output, and how they end."""

from __future__ import annotations

import errno
from datetime import timedelta
from subprocess import STDOUT
from typing import Any

import pytest

import sandkeep
from sandkeep import EndReason
from sandkeep.errors import InvalidRequest, ProcessFailed, ProcessTimeout
from tests.polling import longer_and_longer

pytestmark = pytest.mark.anyio


async def test_arguments_pass_up_to_the_kernels_limits_and_longer_ones_name_the_field() -> None:
    script = "import sys; print(sum(map(len, sys.argv[1:])))"
    async with sandkeep.create_sandbox() as box:
        args = ["x" * 131_000] * 15
        done = await box.run_process("python3", ["-c", script, *args], capture_output=True)
        assert done.stdout_text == f"{15 * 131_000}\n"
        for words, field in ((["x" * 131_072], "args[0]"), (["x" * 131_000] * 47, "args")):
            with pytest.raises(InvalidRequest) as refused:
                await box.run_process("true", words)
            assert (refused.value.field, refused.value.errno) == (field, errno.E2BIG)


TURNS = "import os\nfor turn in range(500): os.write(1 + turn % 2, b'%d ' % turn)"
IN_TURN = b"".join(b"%d " % turn for turn in range(500))


async def test_standard_error_in_the_pipe_of_standard_output_keeps_the_order() -> None:
    async with sandkeep.create_sandbox() as box:
        how: list[dict[str, Any]] = [
            {"capture_output": True, "stderr": "stdout"},
            {"capture_output": True, "stderr": STDOUT, "timeout": 60},
        ]
        for arguments in how:
            done = await box.run_process("python3", ["-c", TURNS], **arguments)
            assert (done.stdout, done.stderr) == (IN_TURN, None)
        process = await box.create_process("python3", ["-c", TURNS], stderr="stdout")
        assert await process.communicate() == (IN_TURN, b"")
        with pytest.raises(InvalidRequest) as refused:
            await box.create_process("true", stderr=2)
        assert refused.value.field == "stderr"


@pytest.mark.parametrize("limit", [None, 60])
async def test_max_output_keeps_head_and_tail_and_says_how_much_is_left_out(limit: int | None) -> None:
    script = "for part in a:10 b:100000 c:10; do yes ${part%:*} | head -${part#*:}; done; echo e >&2"
    async with sandkeep.create_sandbox() as box:
        whole = await box.run_process("bash", ["-c", script], capture_output=True, timeout=limit)
        assert whole.stdout is not None and not whole.truncated and whole.omitted_bytes == 0
        done = await box.run_process(
            "bash", ["-c", script], capture_output=True, timeout=limit, max_output=1001
        )
        assert (done.stdout, done.stderr) == (whole.stdout[:501] + whole.stdout[-500:], b"e\n")
        assert done.truncated and done.omitted_bytes == len(whole.stdout) - 1001
        for wrong in (0, True):
            with pytest.raises(InvalidRequest) as refused:
                await box.run_process("true", capture_output=True, max_output=wrong)
            assert refused.value.field == "max_output"
        with pytest.raises(InvalidRequest, match="captured output"):
            await box.run_process("true", max_output=5)


async def test_max_output_bounds_what_a_timeout_keeps_too() -> None:
    async with sandkeep.create_sandbox() as box:
        for limit in longer_and_longer(1):
            script = ["-c", "yes | head -50000; exec sleep 7717"]
            with pytest.raises(ProcessTimeout) as late:
                await box.run_process("sh", script, capture_output=True, timeout=limit, max_output=100)
            if late.value.omitted_bytes == 2 * 50_000 - 100:
                assert late.value.stdout == b"y\n" * 50
                break
        else:
            pytest.fail("the output never arrived within the time limit")


async def test_a_result_says_how_the_process_ended_and_how_long_it_ran(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        done = await box.run_process("sh", ["-c", "sleep 0.3; exit 3"])
        assert (done.returncode, done.reason) == (3, EndReason.EXITED)
        assert timedelta(seconds=0.3) <= done.duration < timedelta(seconds=30)
        killed = await box.run_process("sh", ["-c", "kill -TERM $$"])
        assert (killed.returncode, killed.reason) == (143, EndReason.KILLED)
        late = await box.run_process("sleep", ["7727"], kill_after=0.1)
        assert (late.returncode, late.reason) == (137, EndReason.TIMEOUT)
        with pytest.raises(ProcessTimeout) as over:
            await box.run_process("sleep", ["7727"], timeout=0.1)
        assert over.value.reason is EndReason.TIMEOUT
        with pytest.raises(ProcessFailed, match=r"137 \(timeout\)") as failed:
            await box.run_process("sleep", ["7727"], kill_after=0.1, check=True)
        assert failed.value.reason is EndReason.TIMEOUT and failed.value.duration >= timedelta(seconds=0.1)
        ended = await box.create_process("sleep", ["7727"])
        assert ended.duration is None, "it runs"
        await ended.kill()
        await ended.wait()
        assert (ended.reason, ended.explanation) == (EndReason.KILLED, "killed by request")
        lost = await box.create_process("sleep", ["7727"])
        await box.stop()
        assert (await lost.refresh()).reason is EndReason.LOST


TOLD = "trap 'echo told; exit 5' TERM; echo up; while :; do sleep 0.05; done"


async def test_a_grace_period_lets_a_process_end_by_itself_at_every_kind_of_time_limit() -> None:
    async with sandkeep.create_sandbox() as box:
        for limit in longer_and_longer(1):
            done = await box.run_process(
                "bash", ["-c", TOLD], capture_output=True, kill_after=limit, grace=60
            )
            with pytest.raises(ProcessTimeout) as late:
                await box.run_process("bash", ["-c", TOLD], capture_output=True, timeout=limit, grace=60)
            if done.stdout == late.value.stdout == b"up\ntold\n":
                assert (done.returncode, done.reason) == (5, EndReason.TIMEOUT)
                assert (await box.processes())[0].returncode == 5
                break
        else:
            pytest.fail("the process was never told within the time limit")
        with pytest.raises(ProcessTimeout):
            await box.run_process("bash", ["-c", "trap '' TERM; sleep 7747"], timeout=0.5, grace=0.2)
        assert (await box.processes())[0].returncode == 137
        async with await box.create_process("bash", ["-c", TOLD]) as process:
            assert await process.stdout.read(3) == b"up\n"
            await process.terminate(grace=60)
            assert await process.wait() == 5


async def test_time_limits_that_are_none_are_refused() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("true")
        for wrong in (0, -1, float("nan"), float("inf"), timedelta(0)):
            with pytest.raises(InvalidRequest) as refused:
                await box.run_process("true", timeout=wrong)
            assert refused.value.field == "timeout"
            for wait in (process.wait, process.communicate):
                with pytest.raises(InvalidRequest) as refused:
                    await wait(timeout=wrong)
                assert refused.value.field == "timeout"
            with pytest.raises(InvalidRequest) as refused:
                await box.run_process("true", timeout=9, grace=wrong)
            assert refused.value.field == "grace"
        with pytest.raises(InvalidRequest, match="kill_after"):
            await box.create_process("true", grace=1)
        assert len(await box.processes()) == 1, "nothing was started"


async def test_none_removes_a_variable_of_the_sandbox() -> None:
    async with sandkeep.create_sandbox(env={"KEPT": "1", "GONE": "2"}) as box:
        done = await box.run_process("env", env={"GONE": None, "NEVER": None}, capture_output=True)
        names = {line.partition("=")[0] for line in done.stdout_text.splitlines()}
        assert "KEPT" in names and not names & {"GONE", "NEVER"}
        script = ["-c", "echo [$KEPT$GONE]"]
        async with box.open_interactive("sh", script, env={"GONE": None}) as terminal:
            assert b"[1]" in b"".join([data async for data in terminal])
