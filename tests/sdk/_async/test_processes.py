"""Processes: as ``subprocess`` has them, with output that is exact and stays."""

from __future__ import annotations

import io
import time
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pytest

import sandkeep
from sandkeep import sync
from sandkeep.errors import (
    Conflict,
    ExecutableNotFound,
    ExecutableRefused,
    HostCannot,
    InvalidRequest,
    NotFound,
    PathExists,
    ProcessFailed,
    ProcessTimeout,
    SessionStopped,
    StdinUnavailable,
    StreamClosed,
)
from tests.polling import ENOUGH, longer_and_longer
from tests.running_user import ONE_ID, needs_one_id, needs_users

pytestmark = pytest.mark.anyio

EVERY_BYTE = bytes(range(256))
PRINT_EVERY_BYTE = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)"


async def test_a_process_is_run_to_its_end() -> None:
    async with sandkeep.create_sandbox() as box:
        done = await box.run_process("sh", ["-c", "echo out; echo err >&2; exit 3"], capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
        assert (done.command, done.args) == ("sh", ("-c", "echo out; echo err >&2; exit 3"))
        assert (await box.run_process("true")).stdout is None, "not captured"


async def test_check_raises_with_command_code_and_the_end_of_the_output() -> None:
    async with sandkeep.create_sandbox() as box:
        for captured in (True, False):
            with pytest.raises(ProcessFailed) as failed:
                script = "echo working; echo broken >&2; exit 7"
                await box.run_process("sh", ["-c", script], check=True, capture_output=captured)
            assert failed.value.command == "sh" and failed.value.returncode == 7
            assert (failed.value.stdout, failed.value.stderr) == (b"working\n", b"broken\n")
            assert "broken" in str(failed.value) and failed.value.code == "process_failed"
        done = await box.run_process("false", capture_output=True)
        with pytest.raises(ProcessFailed):
            done.check_returncode()


async def test_output_that_is_not_text_is_exact() -> None:
    async with sandkeep.create_sandbox() as box:
        done = await box.run_process("python3", ["-c", PRINT_EVERY_BYTE], capture_output=True)
        assert done.stdout == EVERY_BYTE * 1000
        assert "\ufffd" in done.stdout_text
        process = await box.create_process("python3", ["-c", PRINT_EVERY_BYTE])
        assert await process.stdout.read() == EVERY_BYTE * 1000


class Answering:
    """A target that lets the process go on when it has got something: too late unless that is at once."""

    def __init__(self, name: str) -> None:
        self.got = b""
        self._name = name

    def write(self, data: bytes) -> None:
        self.got += data
        with sync.Client() as client:
            client.get_sandbox(self._name).fs.write_text(f"heard-{len(self.got)}", "")


@pytest.mark.parametrize("limit", [None, ENOUGH])
async def test_output_goes_where_it_should_while_it_is_printed(
    limit: float | None, tmp_path: Path, name: str
) -> None:
    """Into files, streams and the result, both or one of them, byte by byte."""
    async with sandkeep.create_sandbox(name) as box:
        script = "until [ -e heard-$0 ]; do sleep 0.02; done"
        script = f"printf 12; (exec sh -c '{script}' 2); echo 345 >&2; (exec sh -c '{script}' 6); exit 3"
        target = Answering(name)
        done = await box.run_process("sh", ["-c", script], stdout=target, stderr=STDOUT, timeout=limit)
        assert (done.returncode, done.stdout, done.stderr, target.got) == (3, None, None, b"12345\n")

        both = ["-c", f"{PRINT_EVERY_BYTE}; sys.stderr.write('err')"]
        path, held = tmp_path / "path", io.BytesIO()
        path.write_bytes(b"x" * 300_000)
        done = await box.run_process("python3", both, stdout=path, stderr=held, timeout=limit)
        assert (path.read_bytes(), held.getvalue()) == (EVERY_BYTE * 1000, b"err")
        with (tmp_path / "text").open("w") as text:
            text.write("first ")
            await box.run_process("python3", both, stdout=text, stderr=text.fileno(), timeout=limit)
            text.write(" last")
        found = (tmp_path / "text").read_bytes()
        assert found.startswith(b"first ") and found.endswith(b" last")
        assert len(found) == 256_000 + 3 + 11 and EVERY_BYTE * 1000 in found.replace(b"err", b"")
        done = await box.run_process("python3", both, stdout=PIPE, stderr=DEVNULL, timeout=limit)
        assert (done.stdout, done.stderr) == (EVERY_BYTE * 1000, None)
        done = await box.run_process("python3", both, stdout=PIPE, stderr=STDOUT, timeout=limit)
        assert done.stdout is not None and sorted(done.stdout) == sorted(EVERY_BYTE * 1000 + b"err")
        done = await box.run_process("python3", both, stdout=str(path), stderr=PIPE, timeout=limit)
        assert (done.stdout, done.stderr) == (None, b"err")
        with pytest.raises(ProcessFailed) as failed:
            script = "echo out; echo err >&2; exit 4"
            await box.run_process("sh", ["-c", script], stdout=path, stderr=PIPE, check=True, timeout=limit)
        assert (failed.value.stdout, failed.value.stderr) == (b"out\n", b"err\n")
        assert path.read_bytes() == b"out\n"


async def test_a_time_limit_ends_what_goes_elsewhere_too() -> None:
    async with sandkeep.create_sandbox() as box:
        limits = longer_and_longer(1)
        while True:
            held = io.BytesIO()
            with pytest.raises(ProcessTimeout) as late:
                script = "echo out; echo err >&2; exec sleep 7657"
                await box.run_process("sh", ["-c", script], stdout=held, stderr=PIPE, timeout=next(limits))
            if late.value.stderr:
                break
        assert (held.getvalue(), late.value.stdout, late.value.stderr) == (b"out\n", b"out\n", b"err\n")
        deadline = time.monotonic() + ENOUGH
        while "running" in {process.status for process in await box.processes()}:
            assert time.monotonic() < deadline, "it was not killed"


class Failing:
    """A target whose connection is lost; nobody could tell where the rest should go."""

    def write(self, data: bytes) -> None:
        raise StreamClosed("the other end")


@pytest.mark.parametrize("limit", [None, ENOUGH])
async def test_a_process_whose_output_cannot_be_written_is_killed(limit: float | None) -> None:
    async with sandkeep.create_sandbox() as box:
        script = "echo out; exec sleep 7658"
        with pytest.raises(OSError, match="No space"):
            await box.run_process("sh", ["-c", script], stdout="/dev/full", timeout=limit)
        with pytest.raises(StreamClosed, match="the other end"):
            await box.run_process("sh", ["-c", script], stdout=Failing(), timeout=limit)
        processes = await box.processes()
        assert [await process.wait(ENOUGH) for process in processes] == [137, 137]
        with pytest.raises(FileNotFoundError):
            await box.run_process("true", stdout="/no/such/directory/file", timeout=limit)
        assert len(await box.processes()) == 2, "nothing was started"


async def test_targets_that_cannot_be_written_to_start_nothing(tmp_path: Path) -> None:
    async with sandkeep.create_sandbox() as box:
        run: Any = box.run_process
        same = tmp_path / "same"
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("capture_output", {"capture_output": True, "stdout": PIPE}),
            ("stdout", {"stdout": STDOUT}),
            ("stdout", {"stdout": True}),
            ("stdout", {"stdout": -7}),
            ("stdout", {"stdout": ""}),
            ("stdout", {"stdout": 1.5}),
            ("stderr", {"stderr": io.StringIO()}),
            ("stderr", {"stdout": same, "stderr": str(same)}),
        ]
        for name, arguments in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await run("true", **arguments)
            assert refused.value.field == name
        assert await box.processes() == [] and not same.exists()


async def test_input_is_read_to_its_end() -> None:
    async with sandkeep.create_sandbox() as box:
        data = EVERY_BYTE * 8192
        done = await box.run_process("cat", input=data, capture_output=True)
        assert done.stdout == data
        assert (await box.run_process("cat", input="täxt", capture_output=True)).stdout_text == "täxt"
        assert (await box.run_process("cat", capture_output=True)).stdout == b"", "empty without input"
        assert (await box.run_process("true", input=data)).returncode == 0, "reading it is not required"


async def test_input_nobody_reads_does_not_outlast_the_time_given() -> None:
    async with sandkeep.create_sandbox() as box:
        data = b"x" * 1_000_000
        for capture in (False, True):
            with pytest.raises(ProcessTimeout) as late:
                await box.run_process("sleep", ["60"], input=data, timeout=0.5, capture_output=capture)
            assert late.value.timeout == 0.5
        process = await box.create_process("sleep", ["60"], stdin=True)
        with pytest.raises(ProcessTimeout):
            await process.communicate(data, timeout=0.5)
        assert await process.poll() is None, "it goes on"


async def test_arguments_of_another_kind_start_nothing() -> None:
    async with sandkeep.create_sandbox() as box:
        run: Any = box.run_process
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("timeout", {"timeout": "5"}),
            ("timeout", {"timeout": float("inf")}),
            ("kill_after", {"kill_after": float("nan")}),
            ("input", {"input": 5}),
            ('env["A"]', {"env": {"A": 1}}),
            ("args", {"args": None}),
        ]
        for name, arguments in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await run("true", **arguments)
            assert refused.value.field == name
        assert await box.processes() == []
        with pytest.raises(InvalidRequest):
            await box.get_process("")
        with pytest.raises(ExecutableNotFound) as missing:
            await run("ls -la")
        assert missing.value.hint and "shell" in missing.value.hint


async def test_where_with_what_and_as_whom() -> None:
    async with sandkeep.create_sandbox(env={"A": "sandbox", "B": "sandbox"}) as box:
        await box.fs.mkdir("below")
        show = ["-c", "pwd; echo $A $B; id -u"]
        done = await box.run_process("sh", show, cwd="below", env={"B": "process"}, capture_output=True)
        where, variables, uid = done.stdout_text.split("\n")[:3]
        assert where == f"{box.cwd}/below" and variables == "sandbox process" and (uid == "0") == ONE_ID
        done = await box.run_process("id", ["-u"], sudo=True, capture_output=True)
        assert done.stdout == b"0\n"


async def test_a_missing_program_is_an_error_of_its_own() -> None:
    async with sandkeep.create_sandbox() as box:
        with pytest.raises(ExecutableNotFound) as missing:
            await box.run_process("no-such-program", ["-x"], cwd="/tmp")
        await box.fs.write_text("refused", "not a program", mode=0o644)
        with pytest.raises(ExecutableRefused) as refused:
            await box.create_process("./refused")
        found = {process.id: process for process in await box.processes()}
        for error, command, code in ((missing, "no-such-program", 127), (refused, "./refused", 126)):
            record = found[error.value.process]
            assert (record.command, record.returncode, record.status) == (
                command,
                code,
                sandkeep.ProcessStatus.FAILED,
            )
            assert (record.reason, record.explanation) == (sandkeep.EndReason.FAILED, error.value.message)
            assert record.finished_at is not None
            assert await record.communicate() == (b"", b"") and await record.wait() == code
        told = [event async for event in box.events(kind="process.failed")]
        assert [event.data["process"] for event in told] == [missing.value.process, refused.value.process]
        with pytest.raises(InvalidRequest, match="args"):
            await box.run_process("echo", "not a list")  # type: ignore[arg-type]


async def test_a_timeout_kills_and_keeps_what_was_printed() -> None:
    async with sandkeep.create_sandbox() as box:
        limits = longer_and_longer(500)
        while True:
            began, limit = time.monotonic(), next(limits) / 1000
            with pytest.raises(ProcessTimeout) as late:
                script = "echo so far; sleep 600"
                await box.run_process("sh", ["-c", script], timeout=limit, capture_output=True)
            assert time.monotonic() - began < limit + ENOUGH
            if late.value.stdout:
                break
        assert late.value.stdout == b"so far\n" and late.value.timeout == limit
        process = await box.get_process(late.value.process)
        assert await process.wait(timeout=ENOUGH) == 137


async def test_kill_after_ends_it_from_the_other_side_with_its_output() -> None:
    async with sandkeep.create_sandbox() as box:
        limits = longer_and_longer(500)
        while True:
            done = await box.run_process(
                "sh",
                ["-c", "echo so far; sleep 60 & sleep 60"],
                kill_after=timedelta(milliseconds=next(limits)),
                capture_output=True,
            )
            if done.stdout:
                break
        assert (done.returncode, done.stdout) == (137, b"so far\n")


DAEMON = "(setsid setsid sh -c 'echo up; exec sleep 7654' 2>&1 &); exec sleep 7653"


async def test_a_timeout_and_a_kill_take_every_descendant_along() -> None:
    """Also one in a session of its own that has lost its parent."""
    async with sandkeep.create_sandbox() as box:
        limits = longer_and_longer(1)
        while True:
            with pytest.raises(ProcessTimeout) as late:
                await box.run_process("sh", ["-c", DAEMON], timeout=next(limits), capture_output=True)
            if late.value.stdout:
                break
        assert late.value.stdout == b"up\n"
        await gone(box, "sleep 765")
        for end in (sandkeep.Process.kill, sandkeep.Process.terminate):
            async with await box.create_process("sh", ["-c", DAEMON]) as process:
                assert await process.stdout.readline() == b"up\n"
                await end(process)
                await process.wait(timeout=ENOUGH)
            await gone(box, "sleep 765")


async def gone(box: sandkeep.Sandbox, command: str) -> None:
    script = (
        f"while cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q '[{command[0]}]{command[1:]}'"
    )
    await box.run_process("sh", ["-c", f"{script}; do sleep 0.05; done"], timeout=ENOUGH, check=True)


async def test_a_handle_waits_polls_and_signals() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("sleep", ["60"])
        assert process.returncode is None and await process.poll() is None
        with pytest.raises(ProcessTimeout):
            await process.wait(timeout=0.2)
        await process.terminate()
        assert await process.wait() == 143
        await process.kill()
        assert process.returncode == 143, "it had ended"
        assert process.finished_at is not None and process.duration is not None
        assert process.finished_at == process.started_at + process.duration
        script = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done"
        async with await box.create_process("sh", ["-c", script]) as ended:
            assert await ended.stdout.readline() == b"ready\n"
            await ended.send_signal("usr1")
            assert await ended.wait(timeout=ENOUGH) == 5
        with pytest.raises(InvalidRequest):
            await ended.send_signal("nonsense")


async def test_streams_are_read_while_it_runs() -> None:
    async with sandkeep.create_sandbox() as box:
        script = "for i in 1 2 3; do read line; echo got $line; echo note $i >&2; done"
        async with await box.create_process("sh", ["-c", script], stdin=True) as process:
            assert process.stdin is not None
            lines = process.stdout.text()
            for word in ("one", "two", "three"):
                await process.stdin.write(f"{word}\n")
                assert await lines.readline() == f"got {word}\n"
            await process.stdin.aclose()
            assert await lines.readline() == ""
            assert await process.stderr.read() == b"note 1\nnote 2\nnote 3\n"
            assert await process.wait() == 0


async def test_the_input_of_a_process_found_again_is_written_and_closed() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("cat", stdin=True)
        assert process.stdin is not None and process.stdin.offset == 0
        await process.stdin.write("one ")
        async with sandkeep.Client() as other:
            found = await (await other.get_sandbox(box.name)).get_process(process.id)
            [listed] = await box.processes()
            assert found.stdin is not None and listed.stdin is not None and found.stdin.offset is None
            await found.stdin.write("two ")
            assert [await writer.tell() for writer in (found.stdin, listed.stdin)] == [8, 8]
            await found.stdin.write("one two three", offset=0)
            await found.stdin.write("two", offset=4)
            assert found.stdin.offset == 13
            with pytest.raises(Conflict):
                await found.stdin.write("gap", offset=20)
            with pytest.raises(InvalidRequest) as refused:
                await found.stdin.write("x", offset=-1)
            assert refused.value.field == "offset"
            await found.stdin.write("!")
            with pytest.raises(Conflict) as taken:
                await process.stdin.write("behind")
            assert (taken.value.offset, taken.value.bytes_written) == (4, 14)
            await listed.stdin.aclose()
            with pytest.raises((StdinUnavailable, NotFound)):
                await found.stdin.write("more")
        assert await process.stdout.read() == b"one two three!"
        assert await process.wait() == 0
        assert await listed.stdin.tell() == 14
        with pytest.raises(NotFound):
            await listed.stdin.write("ended")


async def test_a_process_found_again_without_a_pipe_has_no_input() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("sleep", ["60"])
        found = await box.get_process(process.id)
        assert found.stdin is None
        with pytest.raises(StdinUnavailable):
            await found.communicate(b"input")
        fed = await box.create_process("cat", stdin=True)
        again = await box.get_process(fed.id)
        assert await again.communicate(b"all") == (b"all", b"")


async def test_metadata_of_processes_is_kept_shown_and_searched() -> None:
    async with sandkeep.create_sandbox() as box:
        metadata = {"step": "3", "note": "größer: ☃\n"}
        first = await box.create_process("sleep", ["60"], metadata=metadata)
        done = await box.run_process("true", metadata={"step": "3"})
        plain = await box.create_process("true")
        assert first.metadata == metadata and plain.metadata == {}
        assert (await box.get_process(first.id)).metadata == metadata
        assert (await first.refresh()).metadata == metadata
        found = [process.id for process in await box.processes(metadata={"step": "3"})]
        assert found == [done.process_id, first.id]
        assert [each.id for each in await box.processes(metadata=metadata)] == [first.id]
        assert await box.processes(metadata={"step": "4"}) == []
        with pytest.raises(ExecutableNotFound) as missing:
            await box.create_process("nothing-like-this", metadata={"a": "b"})
        assert (await box.get_process(missing.value.process)).metadata == {"a": "b"}
        wrong: list[tuple[Any, str]] = [
            ({"a": 1}, 'metadata["a"]'),
            ({"": "x"}, 'metadata[""]'),
            ({"a:b": "x"}, 'metadata["a:b"]'),
            ({"a": "\0"}, 'metadata["a"]'),
            ({"a": "x" * 4096}, "metadata"),
            ({str(number): "" for number in range(33)}, "metadata"),
        ]
        for value, field in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await box.create_process("true", metadata=value)
            assert refused.value.field == field


async def test_streams_end_although_a_child_holds_them() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("sh", ["-c", "sleep 60 & echo done"])
        assert [line async for line in process.stdout] == [b"done\n"]


async def test_communicate_returns_everything_and_keeps_it_on_a_timeout() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("sh", ["-c", "cat; echo end >&2"], stdin=True)
        assert await process.communicate(b"input") == (b"input", b"end\n")
        process = await box.create_process("sh", ["-c", "echo early; sleep 600"])
        limits = longer_and_longer(300)
        while True:
            with pytest.raises(ProcessTimeout) as late:
                await process.communicate(timeout=next(limits) / 1000)
            if late.value.stdout:
                break
        assert late.value.stdout == b"early\n"
        assert await process.poll() is None, "communicate does not kill"
        with pytest.raises(StdinUnavailable):
            await process.communicate(b"input")
        await process.kill()


async def test_the_log_is_read_from_any_offset_any_number_of_times_and_after_the_session() -> None:
    async with sandkeep.create_sandbox() as box:
        script = "echo one; read line; echo two >&2; read line; echo 3"
        process = await box.create_process("sh", ["-c", script], stdin=True)
        assert process.stdin is not None
        first = []
        async for chunk in process.output():
            first.append(chunk)
            if chunk.offset < 8:
                await process.stdin.write("\n")
        streams = [chunk.stream.value for chunk in first if isinstance(chunk, sandkeep.OutputChunk)]
        assert streams == ["stdout", "stderr", "stdout"]
        assert [chunk.offset for chunk in first] == [0, 4, 8]
        await box.stop()
        again = await box.get_process(process.id)
        assert [chunk async for chunk in again.output(offset=4)] == first[1:]
        assert [chunk async for chunk in again.output(follow=False)] == first
        assert again.returncode == 0 and again.duration is not None
        assert box.status is sandkeep.SessionStatus.STOPPED, "looking resumes nothing"


async def test_processes_are_found_again_by_id_in_whatever_session() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("echo", ["hello"])
        assert [found.id for found in await box.processes()] == [process.id]
        await process.wait()
        session = box.current_session.id
        await box.stop()
        await box.run_process("true")
        found = await box.get_process(process.id)
        assert (found.session_id, found.command, found.args) == (session, "echo", ("hello",))
        assert await found.stdout.read() == b"hello\n"
        assert [old.id for old in await box.processes(session_id=session)] == [process.id]
        with pytest.raises(NotFound):
            await box.get_process("cmd_nothing")


async def test_a_process_belongs_to_its_session() -> None:
    async with sandkeep.create_sandbox() as box:
        process = await box.create_process("sleep", ["60"])
        assert process.finished_at is None
        ended = await box.create_process("true")
        await ended.wait()
        await box.stop()
        for over in (process, ended):
            with pytest.raises(SessionStopped):
                await over.send_signal("usr1")
            with pytest.raises(SessionStopped):
                await over.kill()
        await box.resume()
        assert await process.poll() is not None
        assert process.status is sandkeep.ProcessStatus.LOST
        with pytest.raises(NotFound):
            await box.get_process(process.id, session_id=box.current_session.id)


@needs_one_id
async def test_where_everybody_is_root_users_are_refused() -> None:
    async with sandkeep.create_sandbox() as box:
        with pytest.raises(HostCannot, match="is root"):
            await box.create_user("alice")
        with pytest.raises(HostCannot, match="is root"):
            await box.create_group("devs")
        with pytest.raises(HostCannot, match="is root"):
            await box.add_user_to_group("nobody", "daemon")
        with pytest.raises(HostCannot, match="is root"):
            await box.remove_user_from_group("nobody", "daemon")
        assert "alice" not in await box.fs.read_text("/etc/passwd")
        assert "devs" not in await box.fs.read_text("/etc/group")


@needs_users
async def test_users_have_their_own_files_and_processes() -> None:
    async with sandkeep.create_sandbox() as box:
        alice = await box.create_user("alice")
        with pytest.raises(PathExists):
            await box.create_user("alice")
        done = await alice.run_process("id", ["-un"], capture_output=True, check=True)
        assert done.stdout == b"alice\n"
        await alice.fs.write_text("/home/alice/secret", "mine", mode=0o600)
        owner = await box.run_process(
            "stat", ["-c", "%U", "/home/alice/secret"], sudo=True, capture_output=True
        )
        assert owner.stdout == b"alice\n"
        async with alice.fs.batch() as batch:
            batch.write_text("/home/alice/a/b", "batched")
        assert await box.as_user("alice").fs.read_text("/home/alice/a/b") == "batched"


@needs_users
async def test_groups_share_a_directory_with_their_members_only() -> None:
    async with sandkeep.create_sandbox() as box:
        alice, bob = await box.create_user("alice"), await box.create_user("bob")
        devs = await box.create_group("devs")
        assert devs == sandkeep.SandboxGroup("devs", "/shared/devs")
        with pytest.raises(PathExists):
            await box.create_group("devs")
        path = f"{devs.directory}/notes"
        with pytest.raises(PermissionError):
            await alice.fs.write_text(path, "no member")
        await box.add_user_to_group(alice, devs)
        await box.add_user_to_group("bob", "devs")
        await alice.fs.write_text(path, "ours", mode=0o660)
        assert (await box.fs.stat(devs.directory)).mode & 0o7777 == 0o2770
        await bob.run_process("sh", ["-c", f"echo and mine >> {path}"], check=True)
        assert await alice.fs.read_text(path) == "oursand mine\n"
        assert [entry.name for entry in await box.fs.listdir(devs.directory)] == ["notes"]
        await box.remove_user_from_group(bob, devs)
        with pytest.raises(PermissionError):
            await bob.fs.read_text(path)
        assert (await alice.run_process("id", ["-Gn"], capture_output=True)).stdout_text == "alice devs\n"
        change: Any = box.add_user_to_group
        for arguments, kind in (
            (("carol", "devs"), "account"),
            (("alice", "ops"), "group"),
        ):
            with pytest.raises(NotFound) as missing:
                await change(*arguments)
            assert missing.value.kind == kind
        with pytest.raises(NotFound, match="bob is not in group devs"):
            await box.remove_user_from_group("bob", "devs")
        for wrong in ("..", "", "a/b", "-x", "a,b", "x" * 33):
            with pytest.raises(InvalidRequest) as refused:
                await box.create_group(wrong)
            assert refused.value.field == "name"
        with pytest.raises(InvalidRequest):
            await change("alice", "devs,root")
        with pytest.raises(InvalidRequest):
            await change(alice, 5)


async def test_a_program_on_a_terminal_is_killed_when_its_time_is_over() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.open_interactive("sleep", ["7656"], kill_after=0.2) as terminal:
            assert await terminal.wait() == 137
        with pytest.raises(InvalidRequest, match="kill_after"):
            box.open_interactive("true", kill_after=0)


async def test_a_terminal_that_cannot_start_its_program_says_so() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.open_interactive("no-such-program") as terminal:
            with pytest.raises(ExecutableNotFound, match="no-such-program"):
                await terminal.wait()
        async with box.open_interactive("/etc/passwd") as terminal:
            with pytest.raises(ExecutableRefused):
                await terminal.read()


async def test_a_terminal_is_left_and_attached_to_again_by_several_clients() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.open_interactive("cat", detachable=True, metadata={"a": "b"}) as terminal:
            process_id = terminal.process_id
            assert process_id is not None
            await terminal.write("early\n")
            await until_read(terminal, b"early\r\nearly")
        process = await box.get_process(process_id)
        assert await process.poll() is None and process.terminal and process.metadata == {"a": "b"}
        async with box.attach_terminal(process_id) as one, box.attach_terminal(process_id) as two:
            await until_read(one, b"early\r\nearly")
            await two.write("late\n")
            await until_read(one, b"late\r\nlate")
            await until_read(two, b"late\r\nlate")
        async with box.attach_terminal(process_id, scrollback=0, columns=70, rows=20) as three:
            await three.write("\x04")
            assert b"early" not in b"".join([data async for data in three])
            assert three.returncode == 0
        async with box.attach_terminal(process_id, scrollback=None) as ended:
            await until_read(ended, b"early")
            assert await ended.wait() == 0
        refused: list[dict[str, Any]] = [{"columns": 80}, {"scrollback": -1}, {"columns": 0, "rows": 1}]
        for wrong in refused:
            with pytest.raises(InvalidRequest):
                box.attach_terminal(process_id, **wrong)
        plain = await box.create_process("sleep", ["60"])
        for unsuitable, kind in ((plain.id, InvalidRequest), ("cmd_none", NotFound)):
            with pytest.raises(kind):
                async with box.attach_terminal(unsuitable):
                    pass
        await box.stop()
        with pytest.raises(SessionStopped):
            async with box.attach_terminal(process_id):
                pass
        assert box.status is sandkeep.SessionStatus.STOPPED, "attaching resumes nothing"


async def until_read(terminal: sandkeep.Terminal, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        data = await terminal.read()
        assert data, seen
        seen += data


async def test_a_terminal_echoes_resizes_and_ends() -> None:
    async with sandkeep.create_sandbox() as box, box.open_interactive("sh", columns=100, rows=30) as terminal:
        await terminal.write("stty size; exit 4\n")
        shown = b"".join([piece async for piece in terminal])
        assert b"30 100" in shown
        assert terminal.returncode == 4 and await terminal.wait() == 4


@needs_users
async def test_a_terminal_of_a_user_is_theirs_alone() -> None:
    async with sandkeep.create_sandbox() as box:
        alice = await box.create_user("alice")
        async with alice.open_interactive("sh", ["-c", "id -un; test -O $(tty) && echo mine"]) as terminal:
            shown = b"".join([piece async for piece in terminal])
        assert shown.split() == [b"alice", b"mine"] and terminal.returncode == 0
        before = len(await box.processes())
        with pytest.raises(NotFound) as caught:
            async with box.as_user("nobody-here").open_interactive():
                pass
        assert (caught.value.kind, caught.value.name) == ("user", "nobody-here")
        assert len(await box.processes()) == before


async def test_a_terminal_is_told_its_new_size_and_hung_up_on_exit() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.open_interactive(
            "sh", ["-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"]
        ) as terminal:
            shown = b""
            while b"ready" not in shown:
                shown += await terminal.read()
            await terminal.resize(columns=44, rows=11)
            while b"11 44" not in shown:
                shown += await terminal.read()
        process = (await box.processes())[0]
        assert await process.wait(timeout=ENOUGH) != 0


async def test_what_a_terminal_cannot_be_started_with_is_refused_by_name() -> None:
    async with sandkeep.create_sandbox() as box:
        start: Any = box.open_interactive
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("columns", {"columns": 0}),
            ("rows", {"rows": 70_000}),
            ("args", {"args": "-c"}),
            ("args[0]", {"args": ["a\0b"]}),
            ('env["A"]', {"env": {"A": 1}}),
            ('env["A=B"]', {"env": {"A=B": "1"}}),
            ("command", {"command": ""}),
        ]
        for name, arguments in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await start(**arguments)
            assert refused.value.field == name
        async with start("printf", ["\udcff"]) as terminal:
            assert await terminal.read() == b"\xff"
            with pytest.raises(InvalidRequest):
                await terminal.resize(columns=-1, rows=1)
        unnamed: Any = None
        with pytest.raises(InvalidRequest):
            box.as_user(unnamed)
        with pytest.raises(InvalidRequest):
            await box.processes(session_id="")
