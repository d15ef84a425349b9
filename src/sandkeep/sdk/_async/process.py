"""Processes: a handle like ``subprocess.Popen``, with an output log that outlives every client."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from sandkeep.errors import (
    NotFound,
    OutputDamaged,
    ProcessTimeout,
    RequestTimeout,
    SessionStopped,
    StdinUnavailable,
    TransportError,
)
from sandkeep.sdk import bodies, retry
from sandkeep.sdk._async.processlog import log_of, received_by, refuse_gap, stream_of, write_to
from sandkeep.sdk._async.streams import ByteReader, StdinWriter
from sandkeep.sdk._async.transport import Transport, decode
from sandkeep.sdk._compat_async import OwnWith, shielded, sleep
from sandkeep.sdk.bodies import Duration
from sandkeep.sdk.output import OutputItem, OutputRecord
from sandkeep.sdk.references import ProcessReference
from sandkeep.sdk.sinks import Outlets
from sandkeep.sdk.values import TAIL, CompletedProcess, OutputChunk, OutputGap, ProcessInfo, failed
from sandkeep.states import EndReason, OutputStream, ProcessStatus
from sandkeep.wire.base import given
from sandkeep.wire.objects import CommandObject
from sandkeep.wire.responses import CommandShown

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""Seconds between polls for output if the caller has a time limit."""
LOOK_SECONDS = 8.0
"""How long one request waits for the end of a process, before the next one does."""


class Process(OwnWith):
    """A process in a sandbox, running or ended.

    It belongs to one session and does not continue in another. The handle holds no connection: dropping it
    changes nothing, and :meth:`Sandbox.get_process` returns another one anywhere. ``async with`` closes the
    streams on exit; the process goes on.

    Attributes:
        stdin: its standard input, if it was started with ``stdin=True``; ``None`` otherwise. Handles of
            :meth:`Sandbox.get_process` have it too.
        stdout: its standard output as bytes, from the beginning.
        stderr: its standard error as bytes, from the beginning.
    """

    def __init__(self, transport: Transport, shown: CommandObject, *, started: bool = False) -> None:
        self._transport = transport
        self._info = ProcessInfo.of(shown)
        # The streams hold the id, not this handle, so dropping the handle closes them and their connections.
        log = partial(stream_of, transport, self.session_id, self.id)
        self.stdin: StdinWriter | None = None
        if given(shown.attach_stdin, False):
            self.stdin = StdinWriter(
                partial(write_to, transport, self._path()),
                partial(received_by, transport, self.session_id, self.id),
                # Another client may have written to a process that this one has not started.
                offset=0 if started else None,
            )
        self.stdout: ByteReader = ByteReader(partial(log, OutputStream.STDOUT))
        self.stderr: ByteReader = ByteReader(partial(log, OutputStream.STDERR))

    def __repr__(self) -> str:
        return f"<Process {self.id} {self._info.command!r} {self._info.status.value}>"

    # --- what is known -----------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Permanent id; pass it to :meth:`Sandbox.get_process`."""
        return self._info.id

    @property
    def session_id(self) -> str:
        """Session that it runs or ran in."""
        return self._info.session_id

    @property
    def command(self) -> str:
        """The program."""
        return self._info.command

    @property
    def args(self) -> tuple[str, ...]:
        """Its arguments."""
        return self._info.args

    @property
    def cwd(self) -> str:
        """Directory that it was started in."""
        return self._info.cwd

    @property
    def status(self) -> ProcessStatus:
        """Status when last polled; :meth:`poll` and :meth:`wait` update it."""
        return self._info.status

    @property
    def returncode(self) -> int | None:
        """Exit code when last polled: ``None`` while it runs, 128 + n if signal n ended it."""
        return self._info.returncode

    @property
    def started_at(self) -> datetime:
        """Start time."""
        return self._info.started_at

    @property
    def finished_at(self) -> datetime | None:
        """End time; ``None`` while it runs."""
        return self._info.finished_at

    @property
    def duration(self) -> timedelta | None:
        """Run time; ``None`` while it runs."""
        return self._info.duration

    @property
    def reason(self) -> EndReason | None:
        """How it ended, when last polled: ``None`` while it runs."""
        return self._info.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """Keys and values it was started with."""
        return self._info.metadata

    @property
    def terminal(self) -> bool:
        """Whether it runs on a terminal; :meth:`Sandbox.attach_terminal` attaches to it."""
        return self._info.terminal

    @property
    def explanation(self) -> str | None:
        """Why the status is failed, killed or lost, in words, if known."""
        return self._info.explanation

    # --- waiting -----------------------------------------------------------------------------------------

    async def refresh(self) -> ProcessInfo:
        """Get the process's record from the server; works after the end of the session too."""
        return await self._fetch_info({})

    async def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the process runs. Asks the server."""
        if self.returncode is None:
            await self.refresh()
        return self.returncode

    async def wait(self, timeout: Duration | None = None) -> int:
        """Wait until the process has ended.

        Args:
            timeout: longest time to wait. The process goes on after it.

        Returns:
            The exit code.

        Raises:
            ProcessTimeout: it did not end in time.
        """
        limit = _seconds(timeout)
        return await self._wait(limit, None if limit is None else time.monotonic() + limit)

    async def _wait(self, limit: float | None, until: float | None) -> int:
        again = retry.Reconnecting()
        while self.returncode is None:
            left = LOOK_SECONDS if until is None else min(LOOK_SECONDS, until - time.monotonic())
            if left <= 0:
                raise self._late(limit)
            began = time.monotonic()
            try:
                rest = None if until is None else until - began
                await self._fetch_info({"wait": "true"}, timeout=max(left, 0.001), within=rest)
            except RequestTimeout:
                continue  # it still runs
            except TransportError as error:
                # The server may be restarting; it will know how the process ended.
                if until is not None and time.monotonic() + retry.LONGEST_DELAY > until:
                    raise self._late(limit) from error
                if time.monotonic() - began > 1:
                    again.heard()  # the server accepted the request
                await sleep(again.after(error))
        return self.returncode

    async def communicate(
        self, input: bytes | str | None = None, timeout: Duration | None = None
    ) -> tuple[bytes, bytes]:
        """Send input, close it, wait for the end, and return all output.

        Args:
            input: what to write to its standard input.
            timeout: longest time to wait.

        Returns:
            Standard output and standard error.

        Raises:
            ProcessTimeout: it did not end in time; ``stdout`` and ``stderr`` have the output so far.
            OutputDamaged: a part of the output no longer exists: it was damaged, or more than the log keeps.
            StdinUnavailable: there is input, but the process was started without ``stdin=True``.
        """
        limit = _seconds(timeout)
        until = None if limit is None else time.monotonic() + limit
        if input is not None and self.stdin is None:
            raise StdinUnavailable("the process was started without stdin=True", process=self.id)
        if limit is None:
            await self._feed(input)
        else:
            try:
                await self._feed(input, limit, until)
                await self._wait(limit, until)
            except ProcessTimeout as error:
                try:
                    stdout, stderr = await self._collect(follow=False)
                    error.details.update(stdout=stdout, stderr=stderr)
                except TransportError as lost:
                    error.add_note(f"its output could not be read: {lost}")
                raise
        found = await self._collect(follow=True)
        await self.wait()
        return found

    async def _complete(
        self,
        input: bytes | str | None,
        *,
        timeout: Duration | None = None,
        live: AsyncIterator[OutputItem] | None = None,
        check: bool,
        outlets: Outlets,
        grace: Duration | None = None,
    ) -> CompletedProcess:
        """Wait for the end of a process that ``run_process`` started, or kill it.

        It is killed if the caller is cancelled, its time is over or its output cannot be written, but not if
        the server is lost: then it goes on, and the error's ``process`` names it. ``live`` is the rest of the
        response that started it.
        """
        try:
            if live is not None:
                await self._feed(input)
                await self._follow(live, outlets)
            else:
                limit = _seconds(timeout)
                until = None if limit is None else time.monotonic() + limit
                if outlets.wanted and outlets.collected:
                    await self._gather(input, outlets, limit, until, grace)
                else:
                    await self._feed(input, limit, until)
                    if outlets.wanted:
                        await self._pour(outlets, limit, until)
                    await self._wait(limit, until)
            stdout, stderr = outlets.captured(OutputStream.STDOUT), outlets.captured(OutputStream.STDERR)
        except TransportError as error:
            if outlets.caused(error):
                await self._abandon(error, grace)
                raise
            error.details |= {"process": self.id, "session": self.session_id}
            error.add_note(f"process {self.id} still runs: get_process() returns a handle")
            raise
        except BaseException as error:
            await self._abandon(error, grace)
            raise
        assert self.returncode is not None
        if self.status is ProcessStatus.LOST:
            raise SessionStopped(
                f"the session ended while {self.command} ran: {self.explanation or 'stopped'}",
                session=self.session_id,
                process=self.id,
                reason=EndReason.LOST,
                duration=self.duration,
                stdout=stdout,
                stderr=stderr,
                omitted_bytes=outlets.omitted,
            )
        done = CompletedProcess(
            self.command,
            self.args,
            self.returncode,
            stdout,
            stderr,
            self.id,
            self.session_id,
            reason=self.reason or EndReason.EXITED,
            duration=self.duration or timedelta(),
            omitted_bytes=outlets.omitted,
        )
        if check and done.returncode:
            if stdout is None or stderr is None:
                ends = await self._collect(follow=True, keep=TAIL)
                stdout, stderr = (
                    end if captured is None else captured
                    for end, captured in zip(ends, (stdout, stderr), strict=True)
                )
                done = replace(done, stdout=stdout, stderr=stderr)
            raise failed(done)
        return done

    async def _gather(
        self,
        input: bytes | str | None,
        outlets: Outlets,
        limit: float | None,
        until: float | None,
        grace: Duration | None,
    ) -> None:
        """Wait for the end, then capture the output; if it does not end in time, the output so far.

        That includes what it prints in its grace period.
        """
        try:
            await self._feed(input, limit, until)
            await self._wait(limit, until)
        except ProcessTimeout as error:
            if grace is not None:
                await self._abandon(error, grace)
            try:
                await self._read_into(outlets, follow=False)
            except (TransportError, OutputDamaged) as lost:
                error.add_note(f"its output could not be read: {lost}")
            error.details.update(outlets.facts())
            raise
        await self._read_into(outlets, follow=True)

    async def _read_into(self, outlets: Outlets, *, follow: bool, offset: int = 0) -> None:
        async with aclosing(self.output(offset, follow=follow)) as items:
            async for item in items:
                outlets.take(item)

    async def _follow(self, live: AsyncIterator[OutputItem], outlets: Outlets) -> None:
        """Pass on output and record the exit; if the response breaks off, from the log and a new request."""
        offset = 0
        try:
            async for item in live:
                if isinstance(item, OutputRecord):
                    self._update(item.data)
                elif isinstance(item, OutputChunk | OutputGap):
                    offset = item.end
                    outlets.take(item)
        except TransportError as error:
            if outlets.caused(error):
                raise
        if self.returncode is None:
            await self._read_into(outlets, follow=True, offset=offset)
            await self.wait()

    async def _pour(self, outlets: Outlets, limit: float | None, until: float | None) -> None:
        """Pass on output as it comes, until the process has ended or its time is over.

        This polls: a connection that waits for output would not notice the time limit.
        """
        assert until is not None
        patience = until + retry.LONGEST_DELAY  # for a last poll after the time limit
        offset, pause = 0, _SHORTEST_PAUSE
        while True:
            over = self.returncode is not None
            before = offset
            try:
                # A process that ended in time is not late because its output is long.
                wait = None if over else patience
                log = log_of(self._transport, self.session_id, self.id, offset, follow=over, until=wait)
                async with aclosing(log) as items:
                    async for item in items:
                        offset = item.end
                        outlets.take(item)
                if over:
                    return
                left = until - time.monotonic()
                if left <= 0:
                    raise self._late(limit, **outlets.facts())
                pause = _SHORTEST_PAUSE if offset > before else min(2 * pause, _LONGEST_PAUSE)
                await sleep(min(pause, left))
                rest = max(patience - time.monotonic(), 0.001)
                await self._fetch_info({}, timeout=rest, within=rest)
            except TransportError as error:
                if over or outlets.caused(error) or time.monotonic() + retry.LONGEST_DELAY < until:
                    raise
                raise self._late(limit, **outlets.facts()) from error

    async def _abandon(self, error: BaseException, grace: Duration | None = None) -> None:
        """End the process because of an error: its caller is gone or gave it up.

        With ``grace`` it gets SIGTERM, and so much later the server kills what is left. If its time is over,
        its end is waited for; a cancelled caller does not wait.
        """
        seconds = 0.0 if grace is None else bodies.grace_period(grace) / 1000
        failure: Exception | None = RequestTimeout("the process did not end in time")

        async def end() -> None:
            nonlocal failure
            try:
                await self._end(error, grace)
                failure = None
            except Exception as refused:
                failure = refused

        await shielded(end, 10.0 + seconds)
        if failure is not None:
            text = f"killing process {self.id} failed: {failure}"
            error.add_note(text)
            if not isinstance(error, Exception):
                # The caller of a cancelled or interrupted task may not see the notes.
                warnings.warn(text, RuntimeWarning, stacklevel=3)

    async def _end(self, error: BaseException, grace: Duration | None) -> None:
        try:
            if self.returncode is not None:
                pass
            elif grace is None:
                await self.kill()
            else:
                await self.terminate(grace=grace)
                if isinstance(error, ProcessTimeout):
                    await self._wait(None, None)
        except SessionStopped:
            pass  # the process ended with the session
        if isinstance(error, ProcessTimeout) and not {"stdout", "stderr"} <= error.details.keys():
            stdout, stderr = await self._collect(follow=False, keep=TAIL)
            error.details = {"stdout": stdout, "stderr": stderr, **error.details}

    # --- signals -----------------------------------------------------------------------------------------

    async def send_signal(self, signal: int | str) -> None:
        """Send a signal to the process and everything in its group.

        ``SIGTERM`` and ``SIGKILL`` go to every descendant, also those in groups and sessions of their own.

        Args:
            signal: a number, or a name with or without ``SIG``. A process that has ended is ignored as long
                as its session runs.

            Raises:
                InvalidRequest: there is no such signal.
                SessionStopped: the session has ended, and every process with it.
        """
        await self._signal(bodies.signal_number(signal))

    async def _signal(self, number: int, grace: Duration | None = None) -> None:
        body = {"signal": number}
        if grace is not None:
            body["grace"] = bodies.grace_period(grace)
        # SIGKILL can be sent twice; a handler of another signal would run twice.
        self._update(
            await self._transport.request(
                "POST", f"{self._path()}/kill", json=body, replay=number == bodies.SIGKILL
            )
        )

    async def terminate(self, *, grace: Duration | None = None) -> None:
        """Send ``SIGTERM`` to the process and every descendant.

        Args:
            grace: time after which the server kills those that are left.
        """
        await self._signal(bodies.SIGTERM, grace)

    async def kill(self) -> None:
        """Send ``SIGKILL`` to the process and every descendant."""
        await self.send_signal(bodies.SIGKILL)

    # --- output ------------------------------------------------------------------------------------------

    async def output(
        self, offset: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[OutputChunk | OutputGap, None]:
        """Read the durable log: exact bytes in the order they were written, with stream, time and offset.

        It can be read any number of times, while the process runs or later, even after the end of its session
        and restarts of the server. If the connection is lost, this reconnects and continues at the same
        offset.

        Args:
            offset: where to begin; the ``end`` of the last chunk that you read.
            follow: wait for more until the process has ended; otherwise stop at the present end of the log.

        Yields:
            Chunks, and gaps where the log exceeded its limit or is damaged.
        """
        async with aclosing(
            log_of(self._transport, self.session_id, self.id, offset, follow=follow)
        ) as items:
            async for item in items:
                yield item

    async def _collect(self, *, follow: bool, keep: int | None = None) -> tuple[bytes, bytes]:
        """Return both streams; only the last ``keep`` bytes of each, if given."""
        found = {OutputStream.STDOUT: bytearray(), OutputStream.STDERR: bytearray()}
        async with aclosing(self.output(follow=follow)) as items:
            async for item in items:
                if follow and keep is None:
                    refuse_gap(item, self.id)
                if isinstance(item, OutputChunk):
                    held = found[item.stream]
                    held += item.data
                    if keep is not None and len(held) > 2 * keep:
                        del held[:-keep]
        return tuple(bytes(held if keep is None else held[-keep:]) for held in found.values())  # type: ignore[return-value]

    # --- the rest ----------------------------------------------------------------------------------------

    def reference(self) -> ProcessReference:
        """Return a plain value that names this process, which can be stored and sent, for ``bind`` elsewhere.

        It names the server, the session and the process, and holds no token.
        """
        target = self._transport.target
        return ProcessReference(
            url=target.address,
            team=target.team,
            project=target.project,
            id=self.id,
            session_id=self.session_id,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a process handle cannot be pickled: pickle its reference() for bind(), "
            "or its id for get_process()"
        )

    async def aclose(self) -> None:
        """Close the streams that this handle has open. The process goes on. Can be repeated."""
        await self.stdout.aclose()
        await self.stderr.aclose()

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _feed(
        self, data: bytes | str | None, limit: float | None = None, until: float | None = None
    ) -> None:
        """Send all input, then close it. As in ``subprocess``, the process may read less without an error."""
        if self.stdin is None:
            return
        try:
            await self.stdin._all(b"" if data is None else data, until)
        except (StdinUnavailable, NotFound):
            pass
        except RequestTimeout:
            if until is None or time.monotonic() < until:
                raise
            raise self._late(limit) from None

    async def _fetch_info(
        self, query: dict[str, str], *, timeout: float | None = None, within: float | None = None
    ) -> ProcessInfo:
        response = await self._transport.request(
            "GET", self._path(), query=query, timeout=timeout, within=within
        )
        self._update(response)
        return self._info

    def _update(self, response: bytes) -> None:
        self._info = ProcessInfo.of(decode(CommandShown, response).command)

    def _late(self, limit: float | None, **facts: Any) -> ProcessTimeout:
        return ProcessTimeout(
            f"{self.command} did not end within {limit:g} s",
            command=self.command,
            arguments=self.args,
            timeout=limit,
            reason=EndReason.TIMEOUT,
            process=self.id,
            session=self.session_id,
            **facts,
        )

    def _path(self) -> str:
        return f"/v2/sandboxes/sessions/{self.session_id}/cmd/{self.id}"


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else bodies.time_limit(timeout)
