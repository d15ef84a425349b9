"""Processes of sessions: started in a sandbox, or run elsewhere and observed.

The supervisor's record and log on disk are authoritative for a process; the store's row is an index, so that
lists are quick and records outlive the session's directory. The first task that sees the end completes the
row.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import TERMINAL, Operation
from sandkeep.engine.names import keyed_id, new_id
from sandkeep.engine.sessions import Sessions
from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    NotFound,
    ProcessError,
    StdinUnavailable,
)
from sandkeep.host.driver import ProcessHandle, ProcessSpec, SessionRef
from sandkeep.host.reports import InputReport, ProcessRecord
from sandkeep.process_options import ProcessOptions
from sandkeep.shared.outputlog import STDERR, STDOUT, Item, OutputReader, OutputWriter
from sandkeep.shared.processrecord import KILLED_BY_REQUEST
from sandkeep.spec import check_env
from sandkeep.store.rows import Process, ProcessKind, ProcessStatus, Session

_LONGEST_COMMAND: Final = 1000
"""Most characters of a command line in an event; the process's record has all of it."""

_NEVER_RAN: Final[dict[int, type[ProcessError]]] = {127: ExecutableNotFound, 126: ExecutableRefused}
"""Exit codes, as in shells, of programs that could not be run."""

_OPEN_LOGS: Final = 64
"""Most open logs of observed processes."""
_LOOK_SECONDS: Final = 5.0
_STARTING_SECONDS: Final = 0.02
_STARTING_LOOKS: Final = 500
"""How often to check for a process that another request is starting."""


class _Started(NamedTuple):
    record: ProcessRecord
    handle: ProcessHandle | None
    """``None`` for a process that an earlier server started."""


class _Running(NamedTuple):
    """A process that has not ended."""

    ref: SessionRef
    handle: ProcessHandle | None
    end: asyncio.Task[Process]
    """Waits for its end, on behalf of every caller."""


class Processes:
    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._store = context.store
        self._observed: dict[str, OutputWriter] = {}
        self._news: dict[str, asyncio.Event] = {}
        """For observed processes whose output a caller follows: set when there is more."""
        self._running: dict[tuple[str, str, str], _Running] = {}
        """Running processes by project, session and id; these need no lookup in the store."""

    # --- running -----------------------------------------------------------------------------------------

    async def start(
        self,
        project: str,
        session: str,
        options: ProcessOptions,
        *,
        kind: ProcessKind = ProcessKind.RUN,
        key: str | None = None,
    ) -> Process:
        """Start a process; return once it runs. A missing executable is an error, not an exit code.

        Of any number of calls with the same ``key`` one starts it, also across a restart, and the others
        return that process.
        """
        name = keyed_id("cmd", session, key) if key else new_id("cmd", now_ms=self._context.now_ms())
        spec = ProcessSpec(
            process=name,
            argv=(options.command, *options.args),
            cwd=options.cwd,
            env=options.env,
            user=options.user,
            root=options.root,
            stdin=options.stdin,
            stderr=options.stderr,
            pty=options.pty,
            kill_after_ms=options.kill_after_ms,
            grace_ms=options.grace_ms,
            metadata=options.metadata,
        )
        if key is None:
            return await self._start(project, session, spec, kind, options.secrets)
        async with self._context.lock(session, name):
            known = self._store.processes.find(name)
            if known is not None and (known.project, known.session) == (project, session):
                if _never_ran(known):
                    raise _NEVER_RAN[known.exit_code or 0](
                        known.reason or "", command=known.name, process=known.id
                    )
                return known
            return await self._start(project, session, spec, kind, options.secrets)

    async def _start(
        self, project: str, session: str, spec: ProcessSpec, kind: ProcessKind, secrets: Mapping[str, str]
    ) -> Process:
        found = await self._sessions.require(project, session, Operation.RUN)
        opened = self._opened(project, secrets)
        spec = replace(spec, env={**self._context.network.environment(found), **spec.env, **opened})
        check_env(opened, field_path="secrets")
        name, (command, *args) = spec.process, spec.argv
        try:
            record, handle = await self._start_once(self._context.ref(found), spec)
        except (ExecutableNotFound, ExecutableRefused) as error:
            self._record_failure(found, spec, kind, error)
            raise
        process = Process(
            id=name,
            session=session,
            project=project,
            kind=kind,
            name=command,
            args=tuple(args),
            cwd=_plain_directory(record.cwd),
            username=record.user if spec.root or spec.user else None,
            started_ms=record.started_ms,
            stdin=spec.stdin,
            metadata=spec.metadata,
        )
        with self._store.transaction():
            self._store.processes.add(process)
            self._context.event(
                "process.started",
                found,
                process=name,
                command=shlex.join((command, *args))[:_LONGEST_COMMAND],
                user=record.user,
            )
        self._follow(found, process, handle)
        return process

    def _opened(self, project: str, secrets: Mapping[str, str]) -> dict[str, str]:
        """Return the values of secrets, by variable."""
        found: dict[str, str] = {}
        for variable, name in secrets.items():
            try:
                found[variable] = self._context.secrets.open(project, name)
            except NotFound as error:
                field = f'secrets["{variable}"]'
                raise NotFound(f"{field}: {error.message}", kind="secret", name=name, field=field) from None
        return found

    def _record_failure(
        self, session: Session, spec: ProcessSpec, kind: ProcessKind, error: ProcessError
    ) -> None:
        """Record a program that could not be run, with the exit code that a shell would give."""
        now = self._context.now_ms()
        command, *args = spec.argv
        process = Process(
            id=spec.process,
            session=session.id,
            project=session.project,
            kind=kind,
            name=command,
            args=tuple(args),
            cwd=_plain_directory(posixpath.join(session.cwd, spec.cwd or "")),
            username=None if spec.user is None else str(spec.user),
            started_ms=now,
            metadata=spec.metadata,
        )
        code = next(code for code, failure in _NEVER_RAN.items() if isinstance(error, failure))
        with self._store.transaction():
            self._store.processes.add(process)
            self._store.processes.finish(
                process, ProcessStatus.FAILED, exit_code=code, now_ms=now, reason=error.message
            )
            shown = shlex.join(spec.argv)[:_LONGEST_COMMAND]
            self._context.event(
                "process.failed", session, process=process.id, command=shown, reason=error.message
            )
        error.details["process"] = process.id

    async def _start_once(self, ref: SessionRef, spec: ProcessSpec) -> _Started:
        """Start a process, or find it: a server may have started it and died before it wrote the row."""
        looks = 0
        while True:
            try:
                handle = await self._context.driver.start_process(ref, spec)
                return _Started(handle.record, handle)
            except InvalidRequest as error:
                if error.details.get("field") != "process" or looks == _STARTING_LOOKS:
                    raise
            looks += 1
            try:
                return _Started(await self._context.driver.process(ref, spec.process), None)
            except NotFound:
                await asyncio.sleep(_STARTING_SECONDS)  # another request starts it, or has just failed to

    def _follow(self, session: Session, process: Process, handle: ProcessHandle | None = None) -> None:
        key, ref = (process.project, process.session, process.id), self._context.ref(session)
        task = self._context.spawn(self._see_end(ref, process, handle), f"follow {process.id}")
        self._running[key] = _Running(ref, handle, task)
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _see_end(self, ref: SessionRef, process: Process, handle: ProcessHandle | None) -> Process:
        driver = self._context.driver
        record = await (driver.wait_process(ref, process.id) if handle is None else handle.wait())
        return self._record_end(process, record)

    def _record_end(self, process: Process, record: ProcessRecord) -> Process:
        status, reason = ProcessStatus(record.status), record.reason
        with self._store.transaction():
            running = self._store.processes.find(process.id)
            # A kill that a caller requested is already recorded.
            unasked = status is ProcessStatus.KILLED and reason is not None and reason != KILLED_BY_REQUEST
            if unasked and running is not None and running.status is ProcessStatus.RUNNING:
                session = self._store.sessions.find(process.session)
                self._context.event("process.killed", session, process=process.id, reason=reason)
            return self._store.processes.finish(
                process,
                status,
                exit_code=record.exit_code,
                now_ms=self._context.now_ms() if record.finished_ms is None else record.finished_ms,
                duration_ms=None if record.finished_ms is None else record.duration_ms,
                reason=reason,
            )

    async def reconcile(self, session: Session) -> None:
        """After a restart: record processes whose start was not recorded, and wait again for all."""
        for record in await self._context.driver.processes(self._context.ref(session)):
            if record.id.startswith("cmd_") and self._store.processes.find(record.id) is None:
                self._store.processes.add(
                    Process(
                        id=record.id,
                        session=session.id,
                        project=session.project,
                        kind=ProcessKind.INTERACTIVE if record.pty else ProcessKind.RUN,
                        name=record.argv[0],
                        args=record.argv[1:],
                        cwd=_plain_directory(record.cwd),
                        started_ms=record.started_ms,
                        stdin=record.stdin is not None,
                        metadata=record.metadata,
                    )
                )
        for process in self._store.processes.running(session.project, session.id):
            if process.kind is not ProcessKind.OBSERVED:
                self._follow(session, process)

    # --- looking -----------------------------------------------------------------------------------------

    def get(self, project: str, session: str, process: str) -> Process:
        return self._store.processes.get(project, session, process)

    def list(self, project: str, session: str) -> list[Process]:
        """Return every process of a session, newest first."""
        self._sessions.get(project, session)
        return self._store.processes.of_session(project, session)

    async def wait(self, project: str, session: str, process: str) -> Process:
        """Return the process once it has ended."""
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
        """Yield what a process printed, from any offset, with the stream; with ``follow`` until its end."""
        running = self._running.get((project, session, process))
        if running is None and self.get(project, session, process).kind is ProcessKind.OBSERVED:
            with OutputReader(self._observed_directory(process), offset) as reader:
                while True:
                    while items := reader.read():
                        for item in items:
                            yield item
                    if not follow or reader.ended or not await self._more(project, session, process):
                        return
        if running is None and _never_ran(self.get(project, session, process)):
            return  # it never ran, so it printed nothing
        if running is not None and running.handle is not None:
            printed = running.handle.output(offset=offset, follow=follow)
        else:
            ref = running.ref if running else self._context.ref(self._sessions.get(project, session))
            printed = self._context.driver.output(ref, process, offset=offset, follow=follow)
        async for item in printed:
            yield item

    async def output_length(self, project: str, session: str, process: str) -> int:
        """Return how many bytes a process of the sandbox has printed by now."""
        self.get(project, session, process)
        ref = self._context.ref(self._sessions.get(project, session))
        return (await self._context.driver.process(ref, process)).output_bytes

    def require_output(self, project: str, session: str, process: str) -> None:
        """Raise `NotFound` if the output is gone: called before a response has begun."""
        found = self.get(project, session, process)
        if found.kind is ProcessKind.OBSERVED or _never_ran(found):
            return
        ref = self._context.ref(self._sessions.get(project, session))
        if not self._context.driver.has_output(ref, process):
            raise NotFound(f"the output of {process} is gone", kind="process", name=process)

    # --- acting ------------------------------------------------------------------------------------------

    async def signal(
        self, project: str, session: str, process: str, number: int, *, grace_ms: int | None = None
    ) -> Process:
        """Signal the process's group. An ended process is returned unchanged, while its session runs.

        ``grace_ms``: this much later SIGKILL follows, for the process and every remaining descendant.
        """
        running = self.get(project, session, process).status is ProcessStatus.RUNNING
        if running or self._sessions.get(project, session).status in TERMINAL:
            owner = await self._sessions.require(project, session, Operation.SIGNAL)
            await self._context.driver.signal(self._context.ref(owner), number, process, grace_ms=grace_ms)
            grace = {} if grace_ms is None else {"grace_ms": grace_ms}
            self._context.event("process.signalled", owner, process=process, signal=number, **grace)
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
        """Write to a process's input; return the total accepted, once its pipe has taken this chunk."""
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

    async def input(self, project: str, session: str, process: str) -> InputReport:
        """Return how much input a process has been given, and whether more can follow.

        Of an ended process, as long as its output is there.
        """
        found = self.get(project, session, process)
        if not found.stdin:
            raise StdinUnavailable("the process has no standard input attached", process=process)
        return await self._context.driver.input(
            self._context.ref(self._sessions.get(project, session)), process
        )

    async def resize(self, project: str, session: str, process: str, *, rows: int, columns: int) -> None:
        owner = await self._sessions.require(project, session, Operation.TERMINAL)
        await self._context.driver.resize(self._context.ref(owner), process, rows=rows, columns=columns)

    # --- observed ----------------------------------------------------------------------------------------

    def _observed_directory(self, process: str) -> str:
        return f"{self._context.observed_directory(process)}/output"

    async def _more(self, project: str, session: str, process: str) -> bool:
        """Wait until an observed process has printed more or ended; return False when neither can happen."""
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

    def _wake_readers(self, process: str) -> None:
        news = self._news.pop(process, None)
        if news is not None:
            news.set()

    def observe(
        self,
        project: str,
        session: str,
        *,
        command: str,
        args: Sequence[str] = (),
        cwd: str = "/",
        metadata: Mapping[str, str] | None = None,
    ) -> Process:
        """Begin the record of a process that runs elsewhere; the caller appends its output."""
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
            metadata=metadata or {},
        )
        os.makedirs(self._context.observed_directory(process.id), mode=0o700, exist_ok=True)
        self._store.processes.add(process)
        return process

    def append(self, project: str, session: str, process: str, *, stream: str, data: bytes) -> int:
        """Append to the output of an observed process; return the log's length."""
        found = self._running_observed(project, session, process)
        streams = {"stdout": STDOUT, "stderr": STDERR}
        if stream not in streams:
            raise InvalidRequest("stream is stdout or stderr", field="stream")
        writer = self._writer(found)
        writer.append(streams[stream], data)
        self._wake_readers(process)
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
        self._wake_readers(process)
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
        # Least recently used first. An unfinished process must not hold a descriptor forever.
        self._observed[process.id] = writer
        while len(self._observed) > _OPEN_LOGS:
            self._observed.pop(next(iter(self._observed))).close()
        return writer


def _never_ran(process: Process) -> bool:
    """Return whether this is the record of a program that could not be run."""
    failed = process.status is ProcessStatus.FAILED and process.exit_code in _NEVER_RAN
    return failed and process.kind is not ProcessKind.OBSERVED


def _plain_directory(path: str) -> str:
    return path.rstrip("/") or "/"
