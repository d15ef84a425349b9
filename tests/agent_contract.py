"""What every surface that agents use has to keep: the SDK now, and each adapter of a framework on top of it.

A test module subclasses `AgentContract` and overrides the fixture ``surface``. Every method of the class is
then a test of that surface, against real sandboxes.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.polling import ENOUGH, longer_and_longer

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and what it printed until then."""

    returncode: int | None
    """``None`` if it reached its time limit."""
    stdout: bytes
    stderr: bytes


class AgentBox(Protocol):
    """One sandbox, through the surface under test."""

    async def run(self, command: str, args: list[str], *, limit: float | None = None) -> Ran: ...

    async def write(self, path: str, content: bytes) -> None: ...

    async def read(self, path: str) -> bytes: ...

    async def destroy(self) -> None:
        """Destroy the sandbox while the surface still believes that it is there."""
        ...


class Surface(Protocol):
    """How to have sandboxes."""

    @property
    def gone(self) -> tuple[type[Exception], ...]:
        """What a command raises whose sandbox is destroyed under it."""
        ...

    def box(self) -> AbstractAsyncContextManager[AgentBox]:
        """Return a sandbox that is destroyed at the end of the block."""
        ...

    def program(self, tag: str, seconds: int) -> str:
        """Return Python code that makes a sandbox with a lifetime and this tag, prints "up" and waits."""
        ...

    async def names(self, tag: str | None = None) -> list[str]:
        """Return the sandboxes that exist, or those with a tag."""
        ...


def living(argument: str) -> list[str]:
    """Return the processes of this machine that have such an argument: from outside, nothing is hidden."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if argument.encode() in file.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            pass  # it has just ended
    return found


async def until_living(argument: str, count: int) -> None:
    """Wait until so many processes have such an argument."""
    with anyio.fail_after(ENOUGH):
        while len(living(argument)) != count:  # noqa: ASYNC110 - another process decides when
            await anyio.sleep(0.02)


def unique_seconds() -> str:
    """Return an argument for ``sleep`` that no other process has."""
    return str(100_000 + secrets.randbelow(800_000))


class AgentContract:
    """The tests; ``surface`` is to be overridden."""

    @pytest.fixture
    def surface(self) -> Surface:
        raise NotImplementedError

    @pytest.fixture
    async def box(self, surface: Surface) -> AsyncIterator[AgentBox]:
        async with surface.box() as box:
            yield box

    async def test_a_time_limit_ends_grandchildren_and_keeps_what_was_printed(self, box: AgentBox) -> None:
        seconds = unique_seconds()
        script = f"(setsid sh -c 'sleep {seconds}' &) ; echo partial; echo too >&2; exec sleep {seconds}"
        for limit in longer_and_longer(1):
            done = await box.run("sh", ["-c", script], limit=limit)
            await until_living(seconds, 0)
            assert done.returncode is None
            if done.stdout and done.stderr:
                break
        assert (done.stdout, done.stderr) == (b"partial\n", b"too\n")

    async def test_output_that_is_not_text_arrives_as_it_is(self, box: AgentBox) -> None:
        done = await box.run("printf", [r"a\377\000\200\nb"])
        assert (done.returncode, done.stdout) == (0, b"a\xff\0\x80\nb")

    async def test_fifty_megabytes_go_in_and_come_out(self, box: AgentBox) -> None:
        content = os.urandom(50 * MIB)
        await box.write("large", content)
        assert await box.read("large") == content
        done = await box.run("cat", ["large"])
        assert (done.returncode, done.stdout) == (0, content)

    async def test_a_mebibyte_of_arguments_arrives(self, box: AgentBox) -> None:
        args = ["x" * 65_536] * 16
        script = 'total=0; for word; do total=$((total + ${#word})); done; echo "$total"'
        done = await box.run("bash", ["-c", script, "-", *args])
        assert (done.returncode, done.stdout) == (0, b"1048576\n")

    async def test_cancelling_ends_the_command(self, box: AgentBox) -> None:
        seconds = unique_seconds()

        async def command() -> None:
            await box.run("sh", ["-c", f"(setsid sleep {seconds} &); exec sleep {seconds}"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(command)
            await until_living(seconds, 2)
            tasks.cancel_scope.cancel()
        await until_living(seconds, 0)
        assert (await box.run("echo", ["usable"])).stdout == b"usable\n"

    async def test_a_sandbox_destroyed_during_a_command_is_an_error_and_not_a_hang(
        self, surface: Surface
    ) -> None:
        seconds = unique_seconds()
        raised: list[Exception] = []

        async def command(box: AgentBox) -> None:
            try:
                await box.run("sleep", [seconds])
            except surface.gone as error:
                raised.append(error)

        async with surface.box() as box:
            with anyio.fail_after(ENOUGH):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(command, box)
                    await until_living(seconds, 1)
                    await box.destroy()
        assert len(raised) == 1
        await until_living(seconds, 0)

    @pytest.mark.slow
    async def test_thirty_two_sandboxes_at_once_leave_none(self, surface: Surface) -> None:
        before = set(await surface.names())
        seen: set[bytes] = set()

        async def use(number: int) -> None:
            async with surface.box() as box:
                await box.write("number", b"%d" % number)
                seen.add((await box.run("cat", ["number"])).stdout)

        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(use, number)
        assert seen == {b"%d" % number for number in range(32)}
        assert set(await surface.names()) == before

    @pytest.mark.slow
    async def test_a_killed_client_leaves_none_after_its_lifetime(self, surface: Surface) -> None:
        tag = f"t{secrets.token_hex(4)}"
        argv = [sys.executable, "-c", surface.program(tag, 4)]
        async with await anyio.open_process(argv, stderr=None) as client:
            assert client.stdout is not None
            assert await BufferedByteReceiveStream(client.stdout).receive_until(b"\n", 10) == b"up"
            client.kill()
        with anyio.fail_after(ENOUGH):
            while await surface.names(tag):  # noqa: ASYNC110 - the server decides when
                await anyio.sleep(0.1)
