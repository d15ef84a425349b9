"""A second driver, written against `sandkeep.host.driver` alone: plain processes in plain directories.

It isolates nothing. A session's files are a directory below ``sessions``, where the worker finds what the
session wrote; the layers below are copied there when the session starts. Everything else is in memory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from sandkeep.errors import HostCannot, InvalidRequest, NotFound, SessionStopped, WrongState
from sandkeep.host.driver import (
    Capabilities,
    Created,
    Files,
    HostWarning,
    ProcessSpec,
    SessionRef,
    SessionSpec,
)
from sandkeep.host.reports import (
    CheckpointReport,
    DriveOrigin,
    Enforcement,
    InputReport,
    ProcessRecord,
    SessionOrigin,
    SessionState,
    Status,
    Usage,
)
from sandkeep.shared.outputlog import STDERR, STDOUT, Chunk, End, Item


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class FakeProcess:
    """One process, its record and all its output."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, cwd: str) -> None:
        self.record = ProcessRecord(
            id=spec.process,
            status="running",
            argv=spec.argv,
            cwd=cwd,
            user="fake",
            pid=process.pid,
            started_ms=_now_ms(),
        )
        self.items: list[Item] = []
        self._offset = 0
        self._process = process
        self._news = asyncio.Condition()
        self.killed_for: str | None = None
        self.end = asyncio.create_task(self._follow(), name=f"fake {spec.process}")

    async def _follow(self) -> ProcessRecord:
        assert self._process.stdout is not None and self._process.stderr is not None
        await asyncio.gather(
            self._read(STDOUT, self._process.stdout), self._read(STDERR, self._process.stderr)
        )
        code = await self._process.wait()
        number = -code if code < 0 else None
        status = "lost" if self.killed_for else "exited" if number is None else "killed"
        self.record = replace(
            self.record,
            status=status,
            exit_code=None if self.killed_for else code if number is None else 128 + number,
            signal=number,
            reason=self.killed_for,
            finished_ms=_now_ms(),
            output_bytes=self._offset,
        )
        await self._add(End(self._offset, _now_ms() * 1000))
        return self.record

    async def _read(self, stream: int, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            await self._add(Chunk(self._offset, _now_ms() * 1000, stream, data))
            self._offset += len(data)

    async def _add(self, item: Item) -> None:
        async with self._news:
            self.items.append(item)
            self._news.notify_all()

    def kill(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    async def wait(self) -> ProcessRecord:
        return await asyncio.shield(self.end)

    async def output(self, *, offset: int = 0, follow: bool = True) -> AsyncIterator[Item]:
        taken = 0
        while True:
            for item in self.items[taken:]:
                taken += 1
                if isinstance(item, Chunk) and item.offset < offset:
                    continue
                yield item
                if isinstance(item, End):
                    return
            if not follow:
                return
            async with self._news:
                while len(self.items) == taken:
                    await self._news.wait()


@dataclass
class FakeSession:
    spec: SessionSpec
    root: str
    state: SessionState
    deadline: asyncio.TimerHandle | None = None
    processes: dict[str, FakeProcess] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeDriver:
    """See the module."""

    host = "fake"

    def __init__(self, data_dir: str) -> None:
        self._sessions_directory = os.path.join(data_dir, "sessions")
        self._sessions: dict[SessionRef, FakeSession] = {}

    async def start(self) -> None:
        os.makedirs(self._sessions_directory, mode=0o755, exist_ok=True)

    async def close(self) -> None:
        for ref in list(self._sessions):
            await self.stop(ref, reason="closed")

    def capabilities(self) -> Capabilities:
        return Capabilities(tier="native", mode="fake", pty=False, checkpoint=False)

    def warnings(self) -> Sequence[HostWarning]:
        return ()

    # --- sessions

    def _session(self, ref: SessionRef) -> FakeSession:
        found = self._sessions.get(ref)
        if found is None:
            raise NotFound(f"no session {ref.session} on this host", kind="session", name=ref.session)
        return found

    def _running(self, ref: SessionRef) -> FakeSession:
        found = self._session(ref)
        if not found.state.running:
            raise SessionStopped(f"session {ref.session} has stopped", session=ref.session)
        return found

    async def create(self, spec: SessionSpec, *, network: bool = False) -> Created:
        ref = SessionRef(self.host, spec.session, spec.generation)
        files = os.path.join(self._sessions_directory, spec.session, "fs")
        if os.path.exists(files):
            raise WrongState(f"session {spec.session} exists", session=spec.session)
        for slot in spec.rootfs.slots:
            os.makedirs(os.path.join(files, slot.name))
            for lower in reversed(slot.lowers):
                if "/layers/" in lower.path:
                    shutil.copytree(lower.path, os.path.join(files, slot.name), dirs_exist_ok=True)
        absent = Enforcement("absent", why="a fake isolates nothing")
        state = SessionState(
            status="running",
            generation=spec.generation,
            tier="native",
            mode="fake",
            started_ms=_now_ms(),
            deadline_ms=spec.deadline_ms,
            barriers={"everything": absent},
        )
        session = FakeSession(spec, os.path.join(files, "root"), state)
        self._sessions[ref] = session
        self._arm(ref, session, spec.deadline_ms)
        return Created(state)

    def _arm(self, ref: SessionRef, session: FakeSession, deadline_ms: int | None) -> None:
        if session.deadline is not None:
            session.deadline.cancel()
        session.state = replace(session.state, deadline_ms=deadline_ms)
        if deadline_ms is not None:
            left = max(deadline_ms - _now_ms(), 0) / 1000
            loop = asyncio.get_running_loop()
            session.deadline = loop.call_later(left, self._end, ref, "stopped", "deadline reached")

    def _end(self, ref: SessionRef, status: Status, reason: str) -> None:
        session = self._sessions[ref]
        if session.state.ended:
            return
        if session.deadline is not None:
            session.deadline.cancel()
        for process in session.processes.values():
            if process.record.status == "running":
                process.killed_for = reason
                process.kill(signal.SIGKILL)
        usage = Usage(cpu_ms=1, duration_ms=_now_ms() - (session.state.started_ms or 0))
        stopped = None if status == "aborted" else _now_ms()
        session.state = replace(session.state, status=status, reason=reason, stopped_ms=stopped, usage=usage)
        session.ended.set()

    def crash(self, ref: SessionRef) -> None:
        """End a session as a host does that lost it."""
        self._end(ref, "aborted", "the fake was told to crash")

    async def state(self, ref: SessionRef) -> SessionState:
        return self._session(ref).state

    async def stop(self, ref: SessionRef, *, reason: str, grace_ms: int = 0) -> SessionState:
        session = self._session(ref)
        self._end(ref, "stopped", reason)
        await asyncio.gather(*(process.wait() for process in session.processes.values()))
        return session.state

    async def wait_stopped(self, ref: SessionRef) -> SessionState:
        session = self._session(ref)
        await session.ended.wait()
        return session.state

    async def set_deadline(
        self, ref: SessionRef, deadline_ms: int | None, *, timeout_ms: int | None = None
    ) -> int | None:
        session = self._running(ref)
        if timeout_ms is not None:
            deadline_ms = (session.state.started_ms or 0) + timeout_ms
        self._arm(ref, session, deadline_ms)
        return deadline_ms

    async def usage(self, ref: SessionRef) -> Usage:
        return Usage(duration_ms=_now_ms() - (self._running(ref).state.started_ms or 0))

    async def freeze(self, ref: SessionRef) -> None:
        await self.signal(ref, signal.SIGSTOP)

    async def thaw(self, ref: SessionRef) -> None:
        await self.signal(ref, signal.SIGCONT)

    async def checkpoint(self, ref: SessionRef, destination: str) -> CheckpointReport:
        shutil.copytree(os.path.dirname(self._running(ref).root), destination)
        return CheckpointReport(copied_files=0, copied_bytes=0, passes=1, pause_ms=0)

    async def forget(self, ref: SessionRef) -> None:
        if self._session(ref).state.running:
            raise WrongState(f"session {ref.session} is running", session=ref.session)

    async def sessions(self) -> Sequence[SessionRef]:
        return list(self._sessions)

    async def origin(self, ref: SessionRef) -> SessionOrigin | None:
        session = self._session(ref)
        if not os.path.isdir(os.path.dirname(session.root)):
            return None
        spec = session.spec
        drives = tuple(
            DriveOrigin(slot.target, slot.read_only, None) for slot in spec.rootfs.slots if slot.drive
        )
        return SessionOrigin(spec.rootfs.image, spec.layer, spec.cwd, spec.deadline_ms, drives)

    # --- network

    async def listeners(self, ref: SessionRef) -> Sequence[int]:
        raise HostCannot("a fake has no network", part="network-steering")

    # --- processes

    def _process(self, ref: SessionRef, process_id: str) -> FakeProcess:
        found = self._session(ref).processes.get(process_id)
        if found is None:
            raise NotFound(f"no process {process_id}", kind="process", name=process_id)
        return found

    async def start_process(self, ref: SessionRef, spec: ProcessSpec) -> FakeProcess:
        session = self._running(ref)
        if spec.process in session.processes:
            raise InvalidRequest(f"there is a process {spec.process}", field="process")
        inside = os.path.join(session.spec.cwd or "/", spec.cwd or "")
        cwd = session.root + inside
        os.makedirs(cwd, exist_ok=True)
        variables = {"PATH": os.environ["PATH"], **session.spec.env, **spec.env}
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            cwd=cwd,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        session.processes[spec.process] = started = FakeProcess(spec, process, inside)
        return started

    async def process(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        return self._process(ref, process_id).record

    async def processes(self, ref: SessionRef) -> Sequence[ProcessRecord]:
        return [process.record for process in self._session(ref).processes.values()]

    async def wait_process(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        return await self._process(ref, process_id).wait()

    async def signal(
        self, ref: SessionRef, number: int, process_id: str | None = None, *, grace_ms: int | None = None
    ) -> None:
        chosen = self._running(ref).processes
        for process in chosen.values() if process_id is None else [self._process(ref, process_id)]:
            process.kill(number)

    async def write_stdin(
        self, ref: SessionRef, process_id: str, data: bytes, *, offset: int | None = None, close: bool = False
    ) -> int:
        raise HostCannot("a fake gives no input", part="stdin")

    async def input(self, ref: SessionRef, process_id: str) -> InputReport:
        raise HostCannot("a fake gives no input", part="stdin")

    async def resize(self, ref: SessionRef, process_id: str, *, rows: int, columns: int) -> None:
        raise HostCannot("a fake has no terminals", part="terminal")

    def has_output(self, ref: SessionRef, process_id: str) -> bool:
        return ref in self._sessions and process_id in self._sessions[ref].processes

    def output(
        self, ref: SessionRef, process_id: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]:
        return self._process(ref, process_id).output(offset=offset, follow=follow)

    # --- files

    def files(self, ref: SessionRef) -> Files:
        raise HostCannot("a fake has no access to files", part="files")
