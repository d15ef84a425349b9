"""The native driver: starts the zygote, sends it specifications, reconnects to sessions after a restart."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from sandkeep.errors import (
    HostCannot,
    NotFound,
    SessionStopped,
    StdinUnavailable,
    WrongState,
    from_json,
    path_error,
)
from sandkeep.host import control
from sandkeep.host.channel import ResponseFuture
from sandkeep.host.control import ProcessFutures
from sandkeep.host.driver import Capabilities, Created, HostWarning, ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.layers.btrfs import create_data_directory
from sandkeep.host.layers.sessions import session_names, session_origin
from sandkeep.host.native import network
from sandkeep.host.native.files import NativeFiles
from sandkeep.host.native.messages import (
    NativeState,
    check_for_earlier,
    process_json,
    session_json,
    too_early,
)
from sandkeep.host.native.mode import Mode, choose_mode
from sandkeep.host.native.zygote_client import LAST_BREATH_SECONDS, ZygoteClient
from sandkeep.host.reports import ENDED, CheckpointReport, InputReport, ProcessRecord, SessionOrigin, Usage
from sandkeep.linux import cgroup, sockets
from sandkeep.linux.overlay import Way
from sandkeep.shared import protocol
from sandkeep.shared.outputlog import Item, OutputReader
from sandkeep.shared.processrecord import LOST, RUNNING, last_record
from sandkeep.shared.sealed import read_sealed, write_sealed

_POLL_SECONDS: Final = 0.5
_NO_ANSWER: Final = b'{"error": {"code": "transport_error", "message": "the supervisor died while starting"}}'


def _damage(reader: OutputReader, written: int) -> list[Item]:
    """Return a gap for output that the supervisor has written and the reader cannot find."""
    gap = reader.give_up(written)
    return [] if gap is None else [gap]


def _unknown(session: str) -> NotFound:
    return NotFound(f"no session {session} on this host", kind="session", name=session)


class NativeProcess:
    """A `ProcessHandle`: the supervisor reports the first output and the end without being asked."""

    def __init__(
        self,
        driver: NativeDriver,
        ref: SessionRef,
        record: ProcessRecord,
        announced: ProcessFutures | None,
    ) -> None:
        """``announced`` is ``None`` for a supervisor of an earlier version, which must be asked instead."""
        self.record = record
        self._driver = driver
        self._ref = ref
        self._first = None if announced is None else announced.more
        self._end = None if announced is None else announced.end
        for future in announced or ():
            future.add_done_callback(_retrieve)

    async def wait(self) -> ProcessRecord:
        announced, self._end = self._end, None
        return await self._driver.wait_announced(self._ref, self.record.id, announced)

    def output(self, *, offset: int = 0, follow: bool = True) -> AsyncIterator[Item]:
        # For one reader only: cancelling a reader cancels the future it waits for.
        announced, self._first = self._first, None
        return self._driver.output(self._ref, self.record.id, offset=offset, follow=follow, first=announced)


def _retrieve(future: ResponseFuture) -> None:
    """Keep asyncio from logging an error that no caller waited for."""
    if not future.cancelled():
        future.exception()


class NativeDriver:
    """Sessions as Linux namespaces, below one data directory."""

    def __init__(
        self,
        data_dir: str,
        *,
        mode: Mode | None = None,
        host: str = "local",
        pool: int = 0,
        way: Way | None = None,
    ) -> None:
        """Configure the driver; ``pool`` is how many sessions to keep prepared, some megabytes each.

        A larger pool makes creates quicker. ``way`` is how overlays are mounted, by default the newest that
        works
        here; tests give others.
        """
        self.host = host
        self.data_dir = os.path.abspath(data_dir)
        self.mode: Mode = mode or choose_mode()
        self.way = way
        self.zygote = ZygoteClient(self.data_dir, self.mode, pool, way)
        self._controls: dict[SessionRef, control.Control] = {}
        self._forgetting: dict[SessionRef, asyncio.Future[None]] = {}

    async def start(self) -> None:
        """Start the zygote unless it runs. ``create`` calls this too, in case the zygote has died."""
        if not os.path.isdir(f"{self.data_dir}/empty"):
            create_data_directory(self.data_dir)
            for name in ("sessions", "empty"):
                os.makedirs(f"{self.data_dir}/{name}", mode=0o755, exist_ok=True)
            os.chmod(self.data_dir, 0o700)
        await self.zygote.start()

    async def close(self) -> None:
        """End the zygote. Sessions keep running."""
        for item in list(self._controls.values()):
            await item.close()
        self._controls.clear()
        await self.zygote.close()

    def spawn(self, argv: list[str], fd: int, environment: dict[str, str]) -> None:
        """Run a program as a child of the zygote, in its namespaces, with ``fd`` as its descriptor 3."""
        self.zygote.spawn(argv, fd, environment)

    def capabilities(self) -> Capabilities:
        known = self.zygote.limits
        freeze = "cgroup" if not known.get("freeze", "unknown") else "signals"
        limits = {name: known.get(name, "not probed yet") for name in ("memory", "cpu", "pids")}
        return Capabilities(tier="native", mode=self.mode, freeze=freeze, limits=limits)

    def warnings(self) -> list[HostWarning]:
        scope = self.zygote.scope
        return [HostWarning("sessions have no scope of their own", scope.why, scope.fix)] if scope.why else []

    # --- sessions ----------------------------------------------------------------------------------------

    def _directory(self, session: str) -> str:
        return f"{self.data_dir}/sessions/{session}"

    async def create(self, spec: SessionSpec, *, network: bool = False) -> Created:
        await self.start()
        directory = self._directory(spec.session)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            raise WrongState(f"session {spec.session} exists", session=spec.session) from None
        except OSError as error:
            raise path_error(error, "create", directory) from error
        try:
            try:
                write_sealed(f"{directory}/spec.json", session_json(spec))
            except OSError as error:  # the disk is full, most often
                raise path_error(error, "create", directory) from error
            data, fds = await self.zygote.ask(spec.session, network=network)
            answer = json.loads(data or _NO_ANSWER)
            if "error" in answer:
                raise from_json(answer["error"])
        except Exception:
            # Nothing ran, so the directory holds only what this method has written.
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return Created(NativeState.from_json(answer["state"]), tuple(fds))

    def control(self, ref: SessionRef) -> control.Control:
        """Return the connection to a session's supervisor, opened on first use and shared afterwards."""
        found = self._controls.get(ref)
        if found is None:
            found = control.Control(self._directory(ref.session), ref.generation)
            self._controls[ref] = found
        return found

    def alive(self, session: str) -> bool:
        """Return whether a supervisor holds the session's lock."""
        try:
            fd = os.open(f"{self._directory(session)}/lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    async def sessions(self) -> list[SessionRef]:
        """Return every session that has a directory here, running or not."""
        found = []
        for name in session_names(f"{self.data_dir}/sessions"):
            try:
                generation = int(read_sealed(f"{self._directory(name)}/spec.json")["generation"])
            except (OSError, ValueError, KeyError, TypeError):
                # The server died before it had written the file, or the file is damaged.
                found.append(SessionRef(self.host, name))
            else:
                found.append(SessionRef(self.host, name, generation))
        return found

    async def origin(self, ref: SessionRef) -> SessionOrigin | None:
        return session_origin(self._directory(ref.session), f"{self.data_dir}/layers")

    async def state(self, ref: SessionRef) -> NativeState:
        """Ask the supervisor for the state, or read its record: ``aborted`` if the supervisor died."""
        directory = self._directory(ref.session)
        while True:
            if self.alive(ref.session):
                try:
                    return NativeState.from_json(await self.control(ref).request("session.info"))
                except SessionStopped:
                    pass
            if not os.path.isdir(directory):
                raise _unknown(ref.session)
            state = control.read_state(directory)
            if state.get("generation", ref.generation) != ref.generation:
                raise SessionStopped(f"session {ref.session} has been replaced", session=ref.session)
            if state.get("status") in ENDED:
                return NativeState.from_json(state)
            given_up = self._mark_aborted(ref)
            if given_up is not None:
                return given_up
            # The supervisor lives but does not listen yet, or no longer: either takes a moment only.
            await asyncio.sleep(LAST_BREATH_SECONDS)

    def _mark_aborted(self, ref: SessionRef) -> NativeState | None:
        """Record, for good, that no supervisor runs a session; return ``None`` if one does.

        A supervisor that a server requested before it died may still be starting. It checks for this record
        once it has the lock, and exits if it finds one.
        """
        directory = self._directory(ref.session)
        try:
            fd = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise _unknown(ref.session) from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            state = control.read_state(directory)
            if state.get("status") not in ENDED:
                state |= {"status": "aborted", "reason": "supervisor died", "generation": ref.generation}
                try:
                    write_sealed(f"{directory}/state.json", state)
                except OSError:
                    pass  # a full disk: the session is over anyway, and the next call writes the record
            return NativeState.from_json(state)
        finally:
            os.close(fd)

    async def stop(self, ref: SessionRef, *, reason: str, grace_ms: int = 0) -> NativeState:
        while True:
            try:
                ended = await self.control(ref).request("session.stop", reason=reason, grace_ms=grace_ms)
                return NativeState.from_json(ended)
            except SessionStopped:
                state = await self.state(ref)
            except HostCannot:
                # The supervisor speaks a protocol that this version cannot use.
                await asyncio.get_running_loop().run_in_executor(None, self._kill, ref.session)
                state = await self.state(ref)
            if state.ended:
                return state
            # The supervisor was still starting when the request was made.

    async def wait_stopped(self, ref: SessionRef) -> NativeState:
        try:
            return NativeState.from_json(await self.control(ref).request("session.wait"))
        except SessionStopped:
            return await self.state(ref)
        except HostCannot:
            pass
        # The supervisor speaks a protocol that this version cannot use. Its lock still shows whether it
        # lives.
        while True:
            try:
                return await self.state(ref)
            except HostCannot:
                await asyncio.sleep(_POLL_SECONDS)

    def _kill(self, session: str) -> None:
        """Kill a session without asking its supervisor, and return when the supervisor has ended.

        The kernel names the process that listens on the socket, so the process id is never a stale one. Init
        ends with its supervisor, and everything inside with init.
        """
        fd = os.open(self._directory(session), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with sockets.connect_in(fd, "supervisor.sock") as sock:
                credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                supervisor = os.pidfd_open(struct.unpack("3i", credentials)[0])
        except (FileNotFoundError, ConnectionError, ProcessLookupError):
            return  # it ended by itself
        finally:
            os.close(fd)
        try:
            signal.pidfd_send_signal(supervisor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(supervisor)
        self._await_release(session)

    async def forget(self, ref: SessionRef) -> None:
        """Drop the connection to an ended session, and return once its supervisor process has ended."""
        under_way = self._forgetting.get(ref)
        if under_way is None:
            under_way = asyncio.ensure_future(self._forget(ref))
            self._forgetting[ref] = under_way
            under_way.add_done_callback(lambda _: self._forgetting.pop(ref, None))
        # The first caller may be cancelled; others wait for the same task.
        await asyncio.shield(under_way)

    async def _forget(self, ref: SessionRef) -> None:
        if (await self.state(ref)).running:
            raise WrongState(f"session {ref.session} is running", session=ref.session)
        found = self._controls.pop(ref, None)
        if found is not None:
            # Fail requests that still wait for a response.
            await found.close(SessionStopped(f"session {ref.session} has ended", session=ref.session))
        await asyncio.get_running_loop().run_in_executor(None, self._await_release, ref.session)

    def _await_release(self, session: str) -> None:
        # A supervisor that has responded may still be closing its overlay; it releases its lock last.
        try:
            fd = os.open(f"{self._directory(session)}/lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)
        self._sweep(session)

    def _sweep(self, session: str) -> None:
        """Remove control groups that a supervisor left because it was killed."""
        record = control.read_state(self._directory(session)).get("cgroup") or {}
        places = {name: cgroup.GroupPlace(*place) for name, place in record.items()}
        cgroup.SessionCgroup(session, places, {}).remove()

    async def set_deadline(
        self, ref: SessionRef, deadline_ms: int | None, *, timeout_ms: int | None = None
    ) -> int | None:
        # The deadline is for supervisors of earlier versions, and for sessions that were given no timeout.
        answer = await self.control(ref).request(
            "session.extend", deadline_ms=deadline_ms, timeout_ms=timeout_ms
        )
        deadline: int | None = answer["deadline_ms"]
        return deadline

    async def usage(self, ref: SessionRef) -> Usage:
        return Usage.from_json(await self.control(ref).request("session.usage"))

    async def freeze(self, ref: SessionRef) -> None:
        await self.control(ref).request("session.freeze")

    async def thaw(self, ref: SessionRef) -> None:
        await self.control(ref).request("session.thaw")

    async def checkpoint(self, ref: SessionRef, destination: str) -> CheckpointReport:
        """Copy the running session's own files to ``destination``; it pauses only for the last pass."""
        answer = await self.control(ref).request("session.checkpoint", destination=destination)
        return CheckpointReport.from_json(answer)

    # --- network -----------------------------------------------------------------------------------------

    async def listeners(self, ref: SessionRef) -> list[int]:
        await self.control(ref).check()
        work = partial(network.get_listeners, self._directory(ref.session), generation=ref.generation)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    # --- processes ---------------------------------------------------------------------------------------

    async def start_process(self, ref: SessionRef, spec: ProcessSpec) -> NativeProcess:
        supervisor, body = self.control(ref), process_json(spec)
        if (spoken := await supervisor.check()) < protocol.PROTOCOL:
            check_for_earlier(ref.session, spoken, body)
        answer, announced = await supervisor.start(**body)
        return NativeProcess(self, ref, ProcessRecord.from_json(answer["process"]), announced)

    def process_directory(self, ref: SessionRef, process_id: str) -> str:
        return f"{self._directory(ref.session)}/processes/{process_id}"

    async def process(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        """Ask the supervisor for the record, or read what it left."""
        try:
            answer = await self.control(ref).request("process.get", process=process_id)
        except SessionStopped:
            return self._saved_record(ref, process_id)
        return ProcessRecord.from_json(answer["process"])

    def _saved_record(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        try:
            body = last_record(self.process_directory(ref, process_id))
        except FileNotFoundError:
            raise NotFound(f"no process {process_id}", kind="process", name=process_id) from None
        except ValueError:
            return ProcessRecord.damaged(process_id)
        record = ProcessRecord.from_json(body)
        return replace(record, status=LOST, reason="supervisor died") if record.status == RUNNING else record

    async def processes(self, ref: SessionRef) -> list[ProcessRecord]:
        try:
            answer = await self.control(ref).request("process.list")
        except SessionStopped:
            directory = f"{self._directory(ref.session)}/processes"
            names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
            saved = [self._saved_record(ref, name) for name in names]
            return [record for record in saved if record.argv]
        return [ProcessRecord.from_json(self._whole(ref, body)) for body in answer["processes"]]

    def _whole(self, ref: SessionRef, body: dict[str, Any]) -> dict[str, Any]:
        """Return a record with all of its arguments, which responses truncate when they are long."""
        if not body.get("argv_cut"):
            return body
        try:
            return {**body, "argv": last_record(self.process_directory(ref, body["id"]))["argv"]}
        except (FileNotFoundError, ValueError):
            return body

    async def wait_process(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        return await self.wait_announced(ref, process_id, None)

    async def wait_announced(
        self, ref: SessionRef, process_id: str, announced: ResponseFuture | None
    ) -> ProcessRecord:
        """Wait for the end of a process, by the supervisor's announcement or by asking it."""
        try:
            answer = await (announced or self.control(ref).request("process.wait", process=process_id))
        except SessionStopped:
            return self._saved_record(ref, process_id)
        return ProcessRecord.from_json(answer["process"])

    async def output(
        self,
        ref: SessionRef,
        process_id: str,
        *,
        offset: int = 0,
        follow: bool = True,
        first: ResponseFuture | None = None,
    ) -> AsyncIterator[Item]:
        """Read the log of a process. If its supervisor died, the log has no `End`.

        ``first`` is the announcement of first output, for a reader from the beginning.
        """
        reader = OutputReader(self.process_directory(ref, process_id), offset)
        written = 0
        try:
            while True:
                items = reader.read() or _damage(reader, written)
                for item in items:
                    yield item
                if reader.ended and follow:
                    return
                if items:
                    continue
                if reader.final:
                    return
                if follow:
                    announced, first = (first if reader.offset == 0 else None), None
                    more = await self._more_output(ref, process_id, reader.offset, announced)
                else:
                    more = await self._written(ref, process_id)
                    if more is not None and more <= max(reader.offset, written):
                        return
                reader.final = more is None
                written = more or written
        finally:
            reader.close()

    async def _written(self, ref: SessionRef, process_id: str) -> int | None:
        """Return how much a process has printed by now; ``None`` when its supervisor is gone."""
        try:
            answer = await self.control(ref).request("process.get", process=process_id)
        except SessionStopped:
            return None
        return int(answer["process"]["output_bytes"])

    def has_output(self, ref: SessionRef, process_id: str) -> bool:
        return os.path.isdir(self.process_directory(ref, process_id))

    async def _more_output(
        self, ref: SessionRef, process_id: str, offset: int, announced: ResponseFuture | None
    ) -> int | None:
        """Wait until there is more output and return how much; ``None`` when there will be no more."""
        asking = announced or self.control(ref).request("process.output", process=process_id, offset=offset)
        try:
            answer = await asking
        except SessionStopped:
            self._saved_record(ref, process_id)
            return None
        return None if answer["ended"] and answer["offset"] <= offset else int(answer["offset"])

    async def signal(
        self, ref: SessionRef, number: int, process_id: str | None = None, *, grace_ms: int | None = None
    ) -> None:
        supervisor = self.control(ref)
        if grace_ms is not None and await supervisor.check() < protocol.LONG:
            raise too_early(ref.session, "a grace period")
        await supervisor.request("process.signal", process=process_id, signal=number, grace_ms=grace_ms)

    async def write_stdin(
        self, ref: SessionRef, process_id: str, data: bytes, *, offset: int | None = None, close: bool = False
    ) -> int:
        answer = await self.control(ref).request(
            "process.stdin", data, process=process_id, offset=offset, close=close
        )
        accepted: int = answer["accepted"]
        return accepted

    async def input(self, ref: SessionRef, process_id: str) -> InputReport:
        if await self.control(ref).check() < protocol.RECORDS_INPUT:
            raise too_early(ref.session, "telling how much input has arrived")
        record = await self.process(ref, process_id)
        if record.stdin is None:
            raise StdinUnavailable("the process has no standard input attached", process=process_id)
        return record.stdin

    async def resize(self, ref: SessionRef, process_id: str, *, rows: int, columns: int) -> None:
        await self.control(ref).request("process.resize", process=process_id, rows=rows, columns=columns)

    # --- files -------------------------------------------------------------------------------------------

    def files(self, ref: SessionRef) -> NativeFiles:
        return NativeFiles(self.control(ref))
