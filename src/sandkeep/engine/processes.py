"""Processes of sessions: started in a sandbox, or run elsewhere and observed.

The supervisor's record and log on disk are the truth about a process; the store's row is its index, so that
lists are quick and records outlive the session's directory. A row is finished by whoever sees the end first.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, NamedTuple

from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.names import new_id
from sandkeep.engine.sessions import Sessions
from sandkeep.errors import InvalidRequest, NotFound, StdinUnavailable
from sandkeep.host.driver import ProcessSpec, SessionRef
from sandkeep.store.rows import Process, ProcessKind, ProcessStatus, Session
from sandkeep.supervisor.outputlog import STDERR, STDOUT, Item, OutputReader, OutputWriter

_LONGEST_COMMAND: Final = 1000
"""Characters of a command line in an event; its record has all of it."""


_OPEN_LOGS: Final = 64
"""Of observed processes, at once."""
_LOOK_SECONDS: Final = 5.0


class _Running(NamedTuple):
    """A process of ours that has not ended: where, and who waits for its end on behalf of everybody."""

    ref: SessionRef
    end: asyncio.Task[Process]


class Processes:
    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._store = context.store
        self._observed: dict[str, OutputWriter] = {}
        self._news: dict[str, asyncio.Event] = {}
        """Of observed processes whose output somebody follows."""
        self._running: dict[tuple[str, str, str], _Running] = {}
        """By project, session and process. What is in here need not be looked up in the store."""

    # --- running -----------------------------------------------------------------------------------------

    async def start(
        self,
        project: str,
        session: str,
        *,
        command: str,
        args: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        sudo: bool = False,
        user: str | None = None,
        stdin: bool = False,
        timeout_ms: int | None = None,
        pty: tuple[int, int] | None = None,
        kind: ProcessKind = ProcessKind.RUN,
    ) -> Process:
        """Start a process; returns once it runs. A missing executable is an error, not an exit code."""
        found = await self._sessions.require(project, session, Operation.RUN)
        name = new_id("cmd", now_ms=self._context.now_ms())
        spec = ProcessSpec(
            process=name,
            argv=(command, *args),
            cwd=cwd,
            env={**self._context.network.environment(found), **(env or {})},
            user=user,
            root=sudo,
            stdin=stdin,
            pty=pty,
            kill_after_ms=timeout_ms,
        )
        record = await self._context.driver.start_process(self._context.ref(found), spec)
        process = Process(
            id=name,
            session=session,
            project=project,
            kind=kind,
            name=command,
            args=tuple(args),
            cwd=_plain_directory(record["cwd"]),
            username=record["user"] if sudo or user else None,
            started_ms=record["started_ms"],
        )
        with self._store.transaction():
            self._store.processes.add(process)
            self._context.event(
                "process.started",
                found,
                process=name,
                command=shlex.join((command, *args))[:_LONGEST_COMMAND],
                user=record["user"],
            )
        self._follow(found, process)
        return process

    def _follow(self, session: Session, process: Process) -> None:
        key, ref = (process.project, process.session, process.id), self._context.ref(session)
        task = self._context.spawn(self._see_end(ref, process), f"follow {process.id}")
        self._running[key] = _Running(ref, task)
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _see_end(self, ref: SessionRef, process: Process) -> Process:
        record = await self._context.driver.wait_process(ref, process.id)
        return self._record_end(process, record)

    def _record_end(self, process: Process, record: Mapping[str, object]) -> Process:
        finished = record["finished_ms"]
        return self._store.processes.finish(
            process,
            ProcessStatus(str(record["status"])),
            exit_code=record["exit_code"],  # type: ignore[arg-type]
            now_ms=finished if isinstance(finished, int) else self._context.now_ms(),
            reason=record["reason"],  # type: ignore[arg-type]
        )

    async def reconcile(self, session: Session) -> None:
        """After a restart: learn of processes whose start was not written down, and wait again for all."""
        for record in await self._context.driver.processes(self._context.ref(session)):
            if record["id"].startswith("cmd_") and self._store.processes.find(record["id"]) is None:
                self._store.processes.add(
                    Process(
                        id=record["id"],
                        session=session.id,
                        project=session.project,
                        kind=ProcessKind.INTERACTIVE if record["pty"] else ProcessKind.RUN,
                        name=record["argv"][0],
                        args=tuple(record["argv"][1:]),
                        cwd=_plain_directory(record["cwd"]),
                        started_ms=record["started_ms"],
                    )
                )
        for process in self._store.processes.running(session.project, session.id):
            if process.kind is not ProcessKind.OBSERVED:
                self._follow(session, process)

    # --- looking -----------------------------------------------------------------------------------------

    def get(self, project: str, session: str, process: str) -> Process:
        return self._store.processes.get(project, session, process)

    def list(self, project: str, session: str) -> list[Process]:
        """Every process of a session, newest first."""
        self._sessions.get(project, session)
        return self._store.processes.of_session(project, session)

    async def wait(self, project: str, session: str, process: str) -> Process:
        """The process once it has ended."""
        running = self._running.get((project, session, process))
        if running is not None:
            await asyncio.wait((running.end,))
            if not running.end.cancelled() and running.end.exception() is None:
                return running.end.result()
        found = self.get(project, session, process)
        if found.status is not ProcessStatus.RUNNING:
            return found
        owner = self._sessions.get(project, session)
        record = await self._context.driver.wait_process(self._context.ref(owner), process)
        return self._record_end(found, record)

    async def output(
        self, project: str, session: str, process: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]:
        """What a process printed, from any offset, as bytes with their stream; with ``follow`` to its end."""
        running = self._running.get((project, session, process))
        if running is None and self.get(project, session, process).kind is ProcessKind.OBSERVED:
            with OutputReader(self._observed_directory(process), offset) as reader:
                while True:
                    while items := reader.read():
                        for item in items:
                            yield item
                    if not follow or reader.ended or not await self._more(project, session, process):
                        return
        ref = running.ref if running is not None else self._context.ref(self._sessions.get(project, session))
        async for item in self._context.driver.output(ref, process, offset=offset, follow=follow):
            yield item

    # --- acting ------------------------------------------------------------------------------------------

    async def signal(self, project: str, session: str, process: str, number: int) -> Process:
        """Signal the process's group. One that has ended is returned as it is."""
        found = self.get(project, session, process)
        if found.status is ProcessStatus.RUNNING:
            owner = await self._sessions.require(project, session, Operation.SIGNAL)
            await self._context.driver.signal(self._context.ref(owner), number, process)
            self._context.event("process.signalled", owner, process=process, signal=number)
        return self.get(project, session, process)

    async def write_stdin(
        self,
        project: str,
        session: str,
        process: str,
        data: bytes,
        *,
        offset: int | None = None,
        close: bool = False,
    ) -> tuple[Process, int]:
        """Give a process input; returns the total it has accepted, once its pipe has taken this piece."""
        found = self.get(project, session, process)
        if found.status is not ProcessStatus.RUNNING:
            raise NotFound(f"process {process} has ended", kind="process", name=process)
        owner = await self._sessions.require(project, session, Operation.STDIN)
        try:
            accepted = await self._context.driver.write_stdin(
                self._context.ref(owner), process, data, offset=offset, close=close
            )
        except StdinUnavailable as error:
            if error.details.get("ended"):
                raise NotFound(f"process {process} has ended", kind="process", name=process) from error
            raise
        return found, accepted

    async def resize(self, project: str, session: str, process: str, *, rows: int, columns: int) -> None:
        owner = await self._sessions.require(project, session, Operation.TERMINAL)
        await self._context.driver.resize(self._context.ref(owner), process, rows=rows, columns=columns)

    # --- observed ----------------------------------------------------------------------------------------

    def _observed_directory(self, process: str) -> str:
        return f"{self._context.observed_directory(process)}/output"

    async def _more(self, project: str, session: str, process: str) -> bool:
        """Wait until an observed process has printed more or ended; False when neither can happen."""
        news = self._news.setdefault(process, asyncio.Event())
        while self.get(project, session, process).status is ProcessStatus.RUNNING:
            try:
                await asyncio.wait_for(news.wait(), _LOOK_SECONDS)
                return True
            except TimeoutError:
                if not os.path.isdir(self._context.observed_directory(process)):
                    break  # its sandbox was destroyed
        self._news.pop(process, None)
        return False

    def _tell(self, process: str) -> None:
        news = self._news.pop(process, None)
        if news is not None:
            news.set()

    def observe(
        self, project: str, session: str, *, command: str, args: Sequence[str] = (), cwd: str = "/"
    ) -> Process:
        """Begin the record of a process that runs elsewhere; its output is appended by whoever sees it."""
        owner = self._sessions.get(project, session)
        now = self._context.now_ms()
        process = Process(
            id=new_id("cmd", now_ms=now),
            session=owner.id,
            project=project,
            kind=ProcessKind.OBSERVED,
            name=command,
            args=tuple(args),
            cwd=cwd,
            started_ms=now,
        )
        os.makedirs(self._context.observed_directory(process.id), mode=0o700, exist_ok=True)
        self._store.processes.add(process)
        return process

    def append(self, project: str, session: str, process: str, *, stream: str, data: bytes) -> int:
        """Add to the output of an observed process; returns the log's length."""
        found = self._running_observed(project, session, process)
        streams = {"stdout": STDOUT, "stderr": STDERR}
        if stream not in streams:
            raise InvalidRequest("stream is stdout or stderr", field="stream")
        writer = self._writer(found)
        writer.append(streams[stream], data)
        self._tell(process)
        return writer.offset

    def finish(
        self, project: str, session: str, process: str, *, exit_code: int | None, reason: str | None = None
    ) -> Process:
        """End the record of an observed process."""
        found = self._running_observed(project, session, process)
        writer = self._writer(found)
        writer.end()
        writer.close()
        del self._observed[process]
        self._tell(process)
        status = ProcessStatus.EXITED if exit_code is not None else ProcessStatus.FAILED
        return self._store.processes.finish(
            found,
            status,
            exit_code=exit_code,
            now_ms=self._context.now_ms(),
            reason=reason,
        )

    def _running_observed(self, project: str, session: str, process: str) -> Process:
        found = self.get(project, session, process)
        if found.kind is not ProcessKind.OBSERVED:
            raise InvalidRequest(
                f"{process} runs in the sandbox; its output is recorded there", field="process"
            )
        if found.status is not ProcessStatus.RUNNING:
            raise InvalidRequest(f"{process} has ended", field="process")
        return found

    def _writer(self, process: Process) -> OutputWriter:
        writer = self._observed.pop(process.id, None)
        if writer is None:
            writer = OutputWriter.reopen(
                self._observed_directory(process.id), cap=self._context.settings.log_cap_bytes
            )
        # The last used comes last. One that is never finished must not hold a descriptor for ever.
        self._observed[process.id] = writer
        while len(self._observed) > _OPEN_LOGS:
            self._observed.pop(next(iter(self._observed))).close()
        return writer


def _plain_directory(path: str) -> str:
    return path.rstrip("/") or "/"
