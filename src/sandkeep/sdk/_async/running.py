"""Running things: what a sandbox and its users have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from sandkeep.errors import RequestTimeout, StreamClosed
from sandkeep.sdk import bodies
from sandkeep.sdk._async.files import Files
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.processlog import items_of
from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.streams import input_bytes
from sandkeep.sdk._async.terminal import Terminal
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, read
from sandkeep.sdk.bodies import Duration
from sandkeep.sdk.concurrent import Opening, shielded
from sandkeep.sdk.output import OutputItem, OutputRecord
from sandkeep.sdk.values import CompletedProcess
from sandkeep.types import duration, expect
from sandkeep.wire import frames
from sandkeep.wire.responses import CommandShown

Started = tuple[Process, AsyncIterator[OutputItem] | None]
"""A process, and the rest of the answer that started it."""

_START_SECONDS = 60.0


class Runner:
    """Starts processes in a sandbox as one of its users, and has that user's view of the files."""

    def __init__(self, transport: Transport, recovery: Recovery, *, user: str | None) -> None:
        self._transport = transport
        self._recovery = recovery
        self._user = user
        self.fs: Files = Files(transport, recovery, user=user)
        """The files, as this user."""

    async def run_process(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        sudo: bool = False,
        input: bytes | str | None = None,
        kill_after: Duration | None = None,
        timeout: Duration | None = None,
        check: bool = False,
        capture_output: bool = False,
    ) -> CompletedProcess:
        """Run a program and wait until it has ended, like ``subprocess.run``.

        Args:
            command: the program, found in the sandbox's ``PATH``; no shell is involved.
            args: its arguments.
            cwd: where it runs; relative to the sandbox's working directory.
            env: variables, over those of the sandbox.
            sudo: run it as root.
            input: what it reads from standard input, which is empty otherwise.
            kill_after: have the server kill it and all its descendants after so long, whatever becomes of
                this client. It then counts as ended, with return code 137.
            timeout: give up waiting after so long: the process is killed and ``ProcessTimeout`` raised.
            check: raise ``ProcessFailed`` when it ends with another code than 0.
            capture_output: return what it printed. Otherwise it stays in the durable log only.

        Returns:
            How it ended.

        Raises:
            ExecutableNotFound: there is no such program.
            ProcessFailed: with ``check``; has ``command``, ``returncode`` and the end of the output.
            ProcessTimeout: with ``timeout``; has what was printed until then.
            SessionStopped: the session ended while it ran; has what was captured until then.

        When the caller is cancelled, or interrupted, the process is killed.
        """
        body = bodies.process(
            command,
            args,
            cwd=cwd,
            env=env,
            sudo=sudo,
            user=self._user,
            kill_after=kill_after,
            stdin=input is not None,
        )
        if timeout is not None:
            duration(timeout, "timeout")
        if input is not None:
            input_bytes(input)
        if timeout is None:
            body.update(wait=True, logs=capture_output)
        async with AsyncExitStack() as held:

            async def start() -> Started:
                if timeout is None:
                    return await self._recovery.run(lambda session: self._run(session, body, held))
                return await self._create(body)

            process, live = await _known(command, start)
            return await process.complete(
                input, timeout=timeout, live=live, check=check, capture=capture_output
            )

    async def _run(self, session: str, body: dict[str, Any], held: AsyncExitStack) -> Started:
        """Start something whose output and end come in the same answer."""
        answer = await held.enter_async_context(
            self._transport.stream(
                "POST",
                f"/v2/sandboxes/sessions/{session}/cmd",
                json=body,
                headers={"Accept": frames.CONTENT_TYPE},
                timeout=QUIET_SECONDS,
            )
        )
        live = await held.enter_async_context(aclosing(items_of(answer)))
        async for item in live:
            if isinstance(item, OutputRecord):
                shown = read(CommandShown, item.data).command
                return Process(self._transport, shown, stdin="attachStdin" in body), live
        raise StreamClosed("the server did not say which process it started")

    async def create_process(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        sudo: bool = False,
        stdin: bool = False,
        kill_after: Duration | None = None,
    ) -> Process:
        """Start a program and return at once, like ``subprocess.Popen``.

        Args:
            command: the program, found in the sandbox's ``PATH``; no shell is involved.
            args: its arguments.
            cwd: where it runs; relative to the sandbox's working directory.
            env: variables, over those of the sandbox.
            sudo: run it as root.
            stdin: keep its standard input open for :attr:`Process.stdin`; it is empty otherwise.
            kill_after: have the server kill it and all its descendants after so long.

        Returns:
            A handle. The process does not depend on it, nor on this client.

        Raises:
            ExecutableNotFound: there is no such program.
            ExecutableRefused: it is there and cannot be run.

        When the caller is cancelled before it has the handle, the process is killed: nobody knows of it.
        """
        body = bodies.process(
            command,
            args,
            cwd=cwd,
            env=env,
            sudo=sudo,
            user=self._user,
            kill_after=kill_after,
            stdin=stdin,
        )

        process, _ = await _known(command, lambda: self._create(body))
        return process

    async def _create(self, body: dict[str, Any]) -> Started:
        async def send(session: str) -> Process:
            path = f"/v2/sandboxes/sessions/{session}/cmd"
            answer = await self._transport.request("POST", path, json=body)
            return Process(self._transport, read(CommandShown, answer).command, stdin="attachStdin" in body)

        return await self._recovery.run(send), None

    def open_interactive(
        self,
        command: str = "/bin/bash",
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> Opening[Terminal]:
        """Run a program on a terminal.

        Args:
            command: the program.
            args: its arguments.
            cwd: where it runs.
            env: variables, over those of the sandbox; ``TERM`` is set unless given.
            columns: width of the terminal.
            rows: its height.

        Returns:
            The terminal: close it yourself, or use ``async with``, which hangs up on exit.

        Raises:
            InvalidRequest: an argument cannot be; ``field`` names it.
            NotFound: there is no such user. What is wrong with the program, the terminal's ``read`` tells.
        """
        message = bodies.terminal(command, args, cwd=cwd, env=env, columns=columns, rows=rows)

        async def start() -> Terminal:
            async def connect(session: str) -> Terminal:
                terminal = Terminal(self._transport)
                await terminal.open(session, message, user=self._user)
                return terminal

            return await self._recovery.run(connect)

        return Opening(start)


async def _known(command: str, start: Callable[[], Awaitable[Started]]) -> Started:
    """Start something for somebody who waits for it: what was started is known, or killed."""
    started: Started | None = None

    async def whole() -> None:
        nonlocal started
        started = await start()

    try:
        await shielded(whole, _START_SECONDS)
    except BaseException as error:
        if started is not None:
            await started[0].abandon(error)
        raise
    if started is None:
        raise RequestTimeout(f"{command} was not started in {_START_SECONDS:g} seconds")
    return started


class SandboxUser(Runner):
    """An account inside a sandbox: its processes and its view of the files.

    Made by :meth:`Sandbox.as_user` and :meth:`Sandbox.create_user`.
    """

    def __init__(self, transport: Transport, recovery: Recovery, name: str) -> None:
        # Without a name it would be the sandbox's own user.
        expect("name", name, str, "the name of an account")
        super().__init__(transport, recovery, user=name)
        self.name: str = name
        """The account's name."""

    def __repr__(self) -> str:
        return f"<SandboxUser {self.name}>"
