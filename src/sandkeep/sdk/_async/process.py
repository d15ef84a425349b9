"""Processes: a handle like ``subprocess.Popen``, with an output log that outlives every client."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType

from sandkeep.errors import (
    NotFound,
    ProcessTimeout,
    RequestTimeout,
    SessionStopped,
    StdinUnavailable,
    TransportError,
)
from sandkeep.sdk import bodies, retry
from sandkeep.sdk._async.processlog import log_of, stream_of, write_to
from sandkeep.sdk._async.streams import ByteReader, StdinWriter
from sandkeep.sdk._async.transport import Transport, read
from sandkeep.sdk.bodies import Duration
from sandkeep.sdk.concurrent import shielded, sleep
from sandkeep.sdk.output import OutputItem, OutputRecord
from sandkeep.sdk.values import TAIL, CompletedProcess, OutputChunk, OutputGap, ProcessInfo, failed
from sandkeep.types import OutputStream, ProcessStatus, duration
from sandkeep.wire.objects import CommandObject
from sandkeep.wire.responses import CommandShown

LOOK_SECONDS = 8.0
"""How long one request waits for a process to end, before the next one does."""


class Process:
    """A process in a sandbox, running or over.

    It belongs to one session and is never resumed with another. The handle holds no connection: dropping it
    changes nothing, and :meth:`Sandbox.get_process` makes another one anywhere. ``async with`` closes the
    streams on exit; the process goes on.

    Attributes:
        stdin: where to write, if it was started with ``stdin=True``; ``None`` otherwise.
        stdout: what it prints, as bytes, from the beginning.
        stderr: the same for standard error.
    """

    def __init__(self, transport: Transport, shown: CommandObject, *, stdin: bool) -> None:
        self._transport = transport
        self._info = ProcessInfo.of(shown)
        # They know the process and not this handle: when that is dropped, so are they, and their connections.
        log = partial(stream_of, transport, self.session_id, self.id)
        self.stdin: StdinWriter | None = (
            StdinWriter(partial(write_to, transport, self._path())) if stdin else None
        )
        self.stdout: ByteReader = ByteReader(partial(log, OutputStream.STDOUT))
        self.stderr: ByteReader = ByteReader(partial(log, OutputStream.STDERR))

    def __repr__(self) -> str:
        return f"<Process {self.id} {self._info.command!r} {self._info.status.value}>"

    # --- what is known -----------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Names it for good; give it to :meth:`Sandbox.get_process`."""
        return self._info.id

    @property
    def session_id(self) -> str:
        """The session it runs or ran in."""
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
        """The directory it was started in."""
        return self._info.cwd

    @property
    def status(self) -> ProcessStatus:
        """As last seen; :meth:`poll` and :meth:`wait` look again."""
        return self._info.status

    @property
    def returncode(self) -> int | None:
        """As last seen: ``None`` while it runs, 128 + n when signal n ended it."""
        return self._info.returncode

    @property
    def started_at(self) -> datetime:
        """When it was started."""
        return self._info.started_at

    @property
    def duration(self) -> timedelta | None:
        """How long it ran; ``None`` while it does."""
        return self._info.duration

    @property
    def reason(self) -> str | None:
        """Why it is failed, killed or lost."""
        return self._info.reason

    # --- waiting -----------------------------------------------------------------------------------------

    async def refresh(self) -> ProcessInfo:
        """Ask the server what is known now, after the end of the session too."""
        return await self._look({})

    async def poll(self) -> int | None:
        """The return code if it has ended, ``None`` if not. Asks the server."""
        if self.returncode is None:
            await self.refresh()
        return self.returncode

    async def wait(self, timeout: Duration | None = None) -> int:
        """Wait until it has ended.

        Args:
            timeout: how long at most. The process goes on when the time is over.

        Returns:
            The return code.

        Raises:
            ProcessTimeout: it had not ended by then.
        """
        limit = _seconds(timeout)
        return await self._wait(limit, None if limit is None else time.monotonic() + limit)

    async def _wait(self, limit: float | None, until: float | None) -> int:
        attempt = 0
        while self.returncode is None:
            left = LOOK_SECONDS if until is None else min(LOOK_SECONDS, until - time.monotonic())
            if left <= 0:
                raise self._late(limit)
            began = time.monotonic()
            try:
                await self._look({"wait": "true"}, timeout=max(left, 0.001))
            except RequestTimeout:
                continue  # it still runs
            except TransportError:
                # The server may be restarting; it will know what became of the process.
                attempt = 1 if time.monotonic() - began > 1 else attempt + 1
                if attempt > 2 * retry.ATTEMPTS:
                    raise
                await sleep(retry.backoff(attempt))
        return self.returncode

    async def communicate(
        self, input: bytes | str | None = None, timeout: Duration | None = None
    ) -> tuple[bytes, bytes]:
        """Send input, close it, wait for the end, and return everything it printed.

        Args:
            input: what to write to its standard input first.
            timeout: how long to wait at most.

        Returns:
            Standard output and standard error.

        Raises:
            ProcessTimeout: it had not ended by then; what it printed so far is in ``stdout`` and ``stderr``.
            StdinUnavailable: there is input and the process was started without ``stdin=True``.
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
                stdout, stderr = await self._collect(follow=False)
                error.details.update(stdout=stdout, stderr=stderr)
                raise
        found = await self._collect(follow=True)
        await self.wait()
        return found

    async def complete(
        self,
        input: bytes | str | None,
        *,
        timeout: Duration | None = None,
        live: AsyncIterator[OutputItem] | None = None,
        check: bool,
        capture: bool,
    ) -> CompletedProcess:
        """What ``run_process`` does after starting: see the process to its end, or kill it.

        ``live`` is the rest of the answer that started it.
        """
        try:
            stdout: bytes | None = None
            stderr: bytes | None = None
            if live is not None:
                await self._feed(input)
                found = await self._follow(live)
                if capture:
                    stdout, stderr = found
            elif capture:
                stdout, stderr = await self.communicate(input, timeout)
            else:
                limit = _seconds(timeout)
                until = None if limit is None else time.monotonic() + limit
                await self._feed(input, limit, until)
                await self._wait(limit, until)
        except BaseException as error:
            await self.abandon(error)
            raise
        assert self.returncode is not None
        if self.status is ProcessStatus.LOST:
            raise SessionStopped(
                f"the session ended while {self.command} ran: {self.reason or 'stopped'}",
                session=self.session_id,
                process=self.id,
                stdout=stdout,
                stderr=stderr,
            )
        done = CompletedProcess(
            self.command, self.args, self.returncode, stdout, stderr, self.id, self.session_id
        )
        if check and done.returncode:
            if not capture:
                stdout, stderr = await self._collect(follow=True, keep=TAIL)
                done = CompletedProcess(
                    self.command, self.args, self.returncode, stdout, stderr, self.id, self.session_id
                )
            raise failed(done)
        return done

    async def _follow(self, live: AsyncIterator[OutputItem]) -> tuple[bytes, bytes]:
        """What it prints and how it ends; by the log and another request when the answer breaks off."""
        found = {OutputStream.STDOUT: bytearray(), OutputStream.STDERR: bytearray()}
        offset = 0
        try:
            async for item in live:
                if isinstance(item, OutputRecord):
                    self._learn(item.data)
                elif isinstance(item, OutputChunk | OutputGap):
                    offset = item.end
                    if isinstance(item, OutputChunk):
                        found[item.stream] += item.data
        except TransportError:
            pass
        if self.returncode is None:
            async with aclosing(self.output(offset)) as rest:
                async for item in rest:
                    if isinstance(item, OutputChunk):
                        found[item.stream] += item.data
            await self.wait()
        return bytes(found[OutputStream.STDOUT]), bytes(found[OutputStream.STDERR])

    async def abandon(self, error: BaseException) -> None:
        """Kill it because of an error: whoever asked for it is gone, or does not want it any more."""
        await shielded(lambda: self._end(error), 10.0)

    async def _end(self, error: BaseException) -> None:
        try:
            await self.kill()
            if isinstance(error, ProcessTimeout) and "stdout" not in error.details:
                stdout, stderr = await self._collect(follow=False, keep=TAIL)
                error.details.update(stdout=stdout, stderr=stderr)
        except Exception as failure:
            error.add_note(f"killing process {self.id} failed: {failure}")

    # --- signals -----------------------------------------------------------------------------------------

    async def send_signal(self, signal: int | str) -> None:
        """Send a signal to the process and everything in its group.

        Args:
            signal: a number, or a name with or without ``SIG``. A process that has ended is left alone.

        Raises:
            InvalidRequest: there is no such signal.
            SessionStopped: the session has ended, and every process with it.
        """
        body = {"signal": bodies.signal_number(signal)}
        self._learn(await self._transport.request("POST", f"{self._path()}/kill", json=body))

    async def terminate(self) -> None:
        """Ask it to end: ``SIGTERM``."""
        await self.send_signal(signals.SIGTERM)

    async def kill(self) -> None:
        """End it: ``SIGKILL``."""
        await self.send_signal(signals.SIGKILL)

    # --- output ------------------------------------------------------------------------------------------

    async def output(
        self, offset: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[OutputChunk | OutputGap, None]:
        """Read the durable log: exact bytes in the order they came, with stream, time and offset.

        It can be read any number of times, while the process runs or long after, also when its session is
        over and after the server was restarted. A connection lost on the way is made again and goes on where
        it was.

        Args:
            offset: where to begin; the ``end`` of the last chunk that was seen.
            follow: wait for more until the process has ended; otherwise stop at what is there.

        Yields:
            Chunks, and gaps where the log outgrew its limit.
        """
        async with aclosing(
            log_of(self._transport, self.session_id, self.id, offset, follow=follow)
        ) as items:
            async for item in items:
                yield item

    async def _collect(self, *, follow: bool, keep: int | None = None) -> tuple[bytes, bytes]:
        """Both streams; only the last ``keep`` bytes of each, if given."""
        found = {OutputStream.STDOUT: bytearray(), OutputStream.STDERR: bytearray()}
        async with aclosing(self.output(follow=follow)) as items:
            async for item in items:
                if isinstance(item, OutputChunk):
                    held = found[item.stream]
                    held += item.data
                    if keep is not None and len(held) > 2 * keep:
                        del held[:-keep]
        return tuple(bytes(held if keep is None else held[-keep:]) for held in found.values())  # type: ignore[return-value]

    # --- the rest ----------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the streams this handle has open. The process goes on. Can be repeated."""
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
        """All input, then its end. As for ``subprocess``, not reading all of it is no error."""
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

    async def _look(self, query: dict[str, str], *, timeout: float | None = None) -> ProcessInfo:
        self._learn(await self._transport.request("GET", self._path(), query=query, timeout=timeout))
        return self._info

    def _learn(self, answer: bytes) -> None:
        self._info = ProcessInfo.of(read(CommandShown, answer).command)

    def _late(self, limit: float | None) -> ProcessTimeout:
        return ProcessTimeout(
            f"{self.command} has not ended after {limit:g} seconds",
            command=self.command,
            arguments=self.args,
            timeout=limit,
            process=self.id,
            session=self.session_id,
        )

    def _path(self) -> str:
        return f"/v2/sandboxes/sessions/{self.session_id}/cmd/{self.id}"


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else duration(timeout, "timeout").total_seconds()
