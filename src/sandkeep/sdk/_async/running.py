"""Running processes: the common part of a sandbox and its users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Literal

from sandkeep.checks import expect, refuse
from sandkeep.errors import RequestTimeout, StreamClosed, TransportError
from sandkeep.sdk import bodies, retry
from sandkeep.sdk._async.files import Files
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.processlog import items_of
from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.streams import input_bytes
from sandkeep.sdk._async.terminal import Terminal
from sandkeep.sdk._async.transport import KEY_HEADER, QUIET_SECONDS, Transport, decode, new_key
from sandkeep.sdk._compat_async import Pending, shielded, sleep
from sandkeep.sdk.bodies import Duration, Texts
from sandkeep.sdk.output import OutputItem, OutputRecord
from sandkeep.sdk.sinks import Outlets, OutputTarget
from sandkeep.sdk.values import CompletedProcess
from sandkeep.wire import frames
from sandkeep.wire.responses import CommandShown

Started = tuple[Process, AsyncIterator[OutputItem] | None]
"""A process, and the rest of the response that started it."""

_START_SECONDS = 60.0


class Runner:
    """Starts processes in a sandbox as one of its users, and gives access to the files as that user."""

    def __init__(self, transport: Transport, recovery: Recovery, *, user: str | None) -> None:
        self._transport = transport
        self._recovery = recovery
        self._user = user
        self.fs: Files = Files(transport, recovery, user=user)
        """The files, accessed as this user."""

    async def run_process(
        self,
        command: str,
        args: Texts = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
        secrets: Mapping[str, str] | None = None,
        sudo: bool = False,
        input: bytes | str | None = None,
        kill_after: Duration | None = None,
        timeout: Duration | None = None,
        grace: Duration | None = None,
        check: bool = False,
        capture_output: bool = False,
        stdout: OutputTarget | None = None,
        stderr: OutputTarget | None = None,
        max_output: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> CompletedProcess:
        """Run a program and wait until it ends, like ``subprocess.run``.

        Args:
            command: the program, found in the sandbox's ``PATH``; no shell is involved.
            args: its arguments.
            cwd: working directory; relative to the sandbox's working directory.
            env: environment variables, added to those of the sandbox; ``None`` removes one.
            secrets: names of secrets of the project, by the variable that gets the value; only this process
                and what it starts have them.
            sudo: run it as root.
            input: its standard input, which is empty by default.
            kill_after: time after which the server kills it and all its descendants, even if this client is
                gone. The call then returns normally, with exit code 137.
            timeout: time after which to give up: the process and all its descendants are killed and
                ``ProcessTimeout`` is raised.
            grace: at these times, and if the caller is cancelled, they get ``SIGTERM``, and ``SIGKILL`` only
                so much later.
            check: raise ``ProcessFailed`` if the exit code is not 0.
            capture_output: return the output. Otherwise it is only in the durable log.
            stdout: target of the output while it runs: ``subprocess.PIPE`` for the result,
                ``subprocess.DEVNULL`` for none; or a path on this machine, a file descriptor, or an object
                with ``write`` for bytes. A text file such as ``sys.stdout`` gets the bytes unchanged.
            stderr: the same for standard error. ``"stdout"`` or ``subprocess.STDOUT``: the same pipe as
                standard output, so the order of both is kept; a file of that name is ``"./stdout"``.
            max_output: most bytes to capture of each stream: the first half of so many and the last. The
                result says how many were left out, and the durable log has them.
            metadata: keys and values that its record keeps, for :attr:`Process.metadata`.

        Returns:
            Its exit code and captured output.

        Raises:
            ExecutableNotFound: there is no such program.
            ProcessFailed: with ``check``; has ``command``, ``returncode`` and the end of the output.
            ProcessTimeout: with ``timeout``; has the output so far.
            SessionStopped: the session ended while it ran; has the output captured so far.
            OSError: output cannot be written to its target; the process is killed.
            OutputDamaged: a part of the output no longer exists; the process is killed.

            If the caller is cancelled or interrupted, the process is killed. If the server goes away, the
            process goes on, and so does this call once the server is back.
        """
        outlets = Outlets(stdout, stderr, capture_output=capture_output, max_output=max_output)
        body = bodies.process(
            command,
            args,
            cwd=cwd,
            env=env,
            secrets=secrets,
            sudo=sudo,
            user=self._user,
            kill_after=kill_after,
            stdin=input is not None,
            stderr="stdout" if outlets.merged else None,
            grace=grace,
            metadata=metadata,
        )
        within = None if timeout is None else bodies.time_limit(timeout)
        if input is not None:
            input_bytes(input)
        if timeout is None:
            body.update(wait=True, logs=outlets.wanted)
        key = new_key()
        async with AsyncExitStack() as held:
            held.enter_context(outlets)

            async def start() -> Started:
                if timeout is None:
                    return await self._recovery.run(lambda session: self._run(session, body, key, held))
                return await self._create(body, key, within=within)

            process, live = await _known(command, start, grace)
            return await process._complete(
                input, timeout=timeout, live=live, check=check, outlets=outlets, grace=grace
            )

    async def _run(self, session: str, body: dict[str, Any], key: str, held: AsyncExitStack) -> Started:
        """Start a process whose output and exit come in the same response.

        If the response breaks off before it names the process, the request is sent again with the same key,
        so that the server starts the process only once.
        """
        again = retry.Reconnecting()
        while True:
            async with AsyncExitStack() as response_held:
                try:
                    started = await self._ask_to_run(session, body, key, response_held)
                    held.push_async_exit(response_held.pop_all())
                    return started
                except RequestTimeout:
                    raise
                except TransportError as error:
                    delay = again.after(error)
            await sleep(delay)

    async def _ask_to_run(
        self, session: str, body: dict[str, Any], key: str, held: AsyncExitStack
    ) -> Started:
        response = await held.enter_async_context(
            self._transport.stream(
                "POST",
                f"/v2/sandboxes/sessions/{session}/cmd",
                json=body,
                headers={"Accept": frames.CONTENT_TYPE, KEY_HEADER: key},
                timeout=QUIET_SECONDS,
            )
        )
        live = await held.enter_async_context(aclosing(items_of(response)))
        async for item in live:
            if isinstance(item, OutputRecord):
                shown = decode(CommandShown, item.data).command
                return Process(self._transport, shown, started=True), live
        raise StreamClosed("the server did not report which process it started")

    async def create_process(
        self,
        command: str,
        args: Texts = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
        secrets: Mapping[str, str] | None = None,
        sudo: bool = False,
        stdin: bool = False,
        stderr: Literal["stdout"] | int | None = None,
        kill_after: Duration | None = None,
        grace: Duration | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a program and return immediately, like ``subprocess.Popen``.

        Args:
            command: the program, found in the sandbox's ``PATH``; no shell is involved.
            args: its arguments.
            cwd: working directory; relative to the sandbox's working directory.
            env: environment variables, added to those of the sandbox; ``None`` removes one.
            secrets: names of secrets of the project, by the variable that gets the value; only this process
                and what it starts have them.
            sudo: run it as root.
            stdin: keep its standard input open for :attr:`Process.stdin`; it is empty by default.
            stderr: ``"stdout"`` or ``subprocess.STDOUT`` puts standard error into the pipe of standard
                output, so the order of both is kept.
            kill_after: time after which the server kills it and all its descendants.
            grace: at that time they get ``SIGTERM``, and ``SIGKILL`` only so much later.
            metadata: keys and values that its record keeps, for :attr:`Process.metadata`.

        Returns:
            A handle. The process does not depend on it or on this client.

        Raises:
            ExecutableNotFound: there is no such program.
            ExecutableRefused: the kernel refuses to run the program.

        If the caller is cancelled before it gets the handle, the process is killed.
        """
        body = bodies.process(
            command,
            args,
            cwd=cwd,
            env=env,
            secrets=secrets,
            sudo=sudo,
            user=self._user,
            kill_after=kill_after,
            stdin=stdin,
            stderr=stderr,
            grace=grace,
            metadata=metadata,
        )
        if grace is not None and kill_after is None:
            refuse("grace", "is part of kill_after, which is not given; terminate() has its own")

        key = new_key()
        process, _ = await _known(command, lambda: self._create(body, key))
        return process

    async def _create(self, body: dict[str, Any], key: str, within: float | None = None) -> Started:
        async def send(session: str) -> Process:
            path = f"/v2/sandboxes/sessions/{session}/cmd"
            response = await self._transport.request("POST", path, json=body, key=key, within=within)
            return Process(self._transport, decode(CommandShown, response).command, started=True)

        return await self._recovery.run(send), None

    def open_interactive(
        self,
        command: str = "/bin/bash",
        args: Texts = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str | None] | None = None,
        secrets: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
        kill_after: Duration | None = None,
        extend_timeout: bool = True,
        detachable: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> Pending[Terminal]:
        """Run a program on a terminal.

        Args:
            command: the program.
            args: its arguments.
            cwd: working directory.
            env: environment variables, added to those of the sandbox; ``None`` removes one, and ``TERM`` is
                set by default.
            secrets: names of secrets of the project, by the variable that gets the value; only this process
                and what it starts have them.
            columns: width of the terminal.
            rows: its height.
            kill_after: time after which the server kills it and all its descendants.
            extend_timeout: let the server extend the session's time limit while the terminal is open, up to
                the longest lifetime of a session.
            detachable: let the program go on when the connection ends, however it ends;
                :meth:`Sandbox.attach_terminal` attaches to it. Otherwise it is hung up then.
            metadata: keys and values that its record keeps.

        Returns:
            The terminal: close it yourself, or use ``async with``, which closes it on exit.

        Raises:
            InvalidRequest: an argument is invalid; ``field`` names it.
            NotFound: the user does not exist. Errors of the program itself are raised by the terminal's
                ``read``.
        """
        message = bodies.terminal(
            command,
            args,
            cwd=cwd,
            env=env,
            secrets=secrets,
            columns=columns,
            rows=rows,
            kill_after=kill_after,
            detachable=detachable,
            metadata=metadata,
        )

        async def start() -> Terminal:
            async def connect(session: str) -> Terminal:
                terminal = Terminal(self._transport)
                await terminal._open(session, message, user=self._user, extend=extend_timeout)
                return terminal

            return await self._recovery.run(connect)

        return Pending(start)


async def _known(
    command: str, start: Callable[[], Awaitable[Started]], grace: Duration | None = None
) -> Started:
    """Start a process for a caller that waits: the caller gets it, or it is killed."""
    started: Started | None = None

    async def whole() -> None:
        nonlocal started
        started = await start()

    try:
        await shielded(whole, _START_SECONDS)
    except BaseException as error:
        if started is not None:
            await started[0]._abandon(error, grace)
        raise
    if started is None:
        raise RequestTimeout(f"{command} was not started within {_START_SECONDS:g} s")
    return started


class SandboxUser(Runner):
    """An account inside a sandbox: its processes and its view of the files.

    Made by :meth:`Sandbox.as_user` and :meth:`Sandbox.create_user`.
    """

    def __init__(self, transport: Transport, recovery: Recovery, name: str) -> None:
        # An empty name would mean the sandbox's own user.
        expect("name", name, str, "the name of an account")
        super().__init__(transport, recovery, user=name)
        self.name: str = name
        """The account's name."""

    def __repr__(self) -> str:
        return f"<SandboxUser {self.name}>"
