"""The native driver: starts the zygote, hands it specifications, finds sessions again after a restart."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from sandkeep.errors import (
    NotFound,
    SessionStopped,
    WrongState,
    from_json,
    path_error,
)
from sandkeep.host import control
from sandkeep.host.driver import Capabilities, Download, ProcessSpec, SessionRef, SessionSpec, Upload
from sandkeep.host.layers.btrfs import create_data_directory
from sandkeep.host.native import network
from sandkeep.host.native.mode import Mode, choose_mode
from sandkeep.host.native.zygote_client import LAST_BREATH_SECONDS, ZygoteClient
from sandkeep.linux import cgroup
from sandkeep.supervisor.outputlog import Item, OutputReader
from sandkeep.supervisor.process import last_record, replace_json

_NO_ANSWER: Final = b'{"error": {"code": "internal_error", "message": "the supervisor died while starting"}}'
_ENDED: Final = ("stopped", "aborted")


def _unknown(session: str) -> NotFound:
    return NotFound(f"no session {session} on this host", kind="session", name=session)


_Answer = asyncio.Future[dict[str, Any]]
_Announcements = dict[tuple[SessionRef, str], _Answer]


class NativeDriver:
    """Sessions as Linux namespaces, below one data directory."""

    def __init__(
        self, data_dir: str, *, mode: Mode | None = None, host: str = "local", pool: int = 0
    ) -> None:
        """``pool`` is how many sessions to keep prepared, some megabytes each, so that creates are quick."""
        self.host = host
        self.data_dir = os.path.abspath(data_dir)
        self.mode: Mode = mode or choose_mode()
        self.zygote = ZygoteClient(self.data_dir, self.mode, pool)
        self._controls: dict[SessionRef, control.Control] = {}
        self._forgetting: dict[SessionRef, asyncio.Future[None]] = {}
        self._firsts: _Announcements = {}
        self._ends: _Announcements = {}
        """Of processes started from here: what their supervisor will say of first output and end."""
        self._listeners: dict[SessionRef, list[int]] = {}
        """Came with the answer to a create, and nobody has asked for them yet."""

    async def start(self) -> None:
        """Start the zygote, or do nothing if it runs. Called again by itself should the zygote have died."""
        if not os.path.isdir(f"{self.data_dir}/empty"):
            create_data_directory(self.data_dir)
            for name in ("sessions", "empty"):
                os.makedirs(f"{self.data_dir}/{name}", mode=0o755, exist_ok=True)
            os.chmod(self.data_dir, 0o700)
        await self.zygote.start()

    async def close(self) -> None:
        """Let the zygote go. Sessions stay."""
        for item in list(self._controls.values()):
            await item.close()
        self._controls.clear()
        for ref in list(self._listeners):
            self._drop_listeners(ref)
        await self.zygote.close()

    def spawn(self, argv: list[str], fd: int, environment: dict[str, str]) -> None:
        """Run a program beside the zygote, in its namespaces, with ``fd`` as its descriptor 3."""
        self.zygote.spawn(argv, fd, environment)

    def capabilities(self) -> Capabilities:
        known = self.zygote.limits
        freeze = "cgroup" if not known.get("freeze", "unknown") else "signals"
        limits = {name: known.get(name, "not probed yet") for name in ("memory", "cpu", "pids")}
        return Capabilities(tier="native", mode=self.mode, freeze=freeze, limits=limits)

    # --- sessions ----------------------------------------------------------------------------------------

    def _directory(self, session: str) -> str:
        return f"{self.data_dir}/sessions/{session}"

    async def create(self, spec: SessionSpec, *, network: bool = False) -> dict[str, Any]:
        """Start a session and return its state, with every barrier and limit in force.

        ``network`` says that ``listeners`` is asked for next: they then come with the same answer.
        """
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
                replace_json(f"{directory}/spec.json", spec.to_json())
            except OSError as error:  # the disk is full, most often
                raise path_error(error, "create", directory) from error
            data, fds = await self.zygote.ask(spec.session, network=network)
            answer = json.loads(data or _NO_ANSWER)
            if "error" in answer:
                raise from_json(answer["error"])
        except Exception:
            # Nothing ran, so nothing in there belongs to anybody but us.
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if fds:
            self._listeners[SessionRef(self.host, spec.session, spec.generation)] = fds
        state: dict[str, Any] = answer["state"]
        return state

    def control(self, ref: SessionRef) -> control.Control:
        """The connection to a session's supervisor; made when first needed, shared afterwards."""
        found = self._controls.get(ref)
        if found is None:
            found = control.Control(self._directory(ref.session), ref.generation)
            self._controls[ref] = found
        return found

    def alive(self, session: str) -> bool:
        """Whether a supervisor holds the session's lock."""
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
        """Every session that has left a directory here, running or not."""
        found = []
        for name in sorted(os.listdir(f"{self.data_dir}/sessions")):
            try:
                with open(f"{self._directory(name)}/spec.json", encoding="ascii") as handle:
                    generation = json.load(handle)["generation"]
            except (OSError, ValueError, KeyError):
                # Whoever was making it died before it could be anything.
                found.append(SessionRef(self.host, name))
            else:
                found.append(SessionRef(self.host, name, generation))
        return found

    async def state(self, ref: SessionRef) -> dict[str, Any]:
        """The session as its supervisor sees it, or as it left it. A supervisor that died is ``aborted``."""
        directory = self._directory(ref.session)
        while True:
            if self.alive(ref.session):
                try:
                    return await self.control(ref).request("session.info")
                except SessionStopped:
                    pass
            if not os.path.isdir(directory):
                raise _unknown(ref.session)
            state = control.read_state(directory)
            if state.get("generation", ref.generation) != ref.generation:
                raise SessionStopped(f"session {ref.session} has been replaced", session=ref.session)
            if state.get("status") in _ENDED:
                return state
            given_up = self._give_up(ref)
            if given_up is not None:
                return given_up
            # Its supervisor lives and does not answer yet, or not any more: either takes a moment only.
            await asyncio.sleep(LAST_BREATH_SECONDS)

    def _give_up(self, ref: SessionRef) -> dict[str, Any] | None:
        """Write down that nobody runs a session, for good; ``None`` when somebody does.

        A supervisor that was asked for by a caller who died may be on its way still. It looks for this
        record once it has the lock, and goes no further.
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
            if state.get("status") not in _ENDED:
                state |= {"status": "aborted", "reason": "supervisor died", "generation": ref.generation}
                try:
                    replace_json(f"{directory}/state.json", state)
                except OSError:
                    pass  # a full disk: it is as true unwritten, and written the next time
            return state
        finally:
            os.close(fd)

    async def stop(self, ref: SessionRef, *, reason: str, grace_ms: int = 0) -> dict[str, Any]:
        """End a session and everything in it; returns its final state. Idempotent."""
        while True:
            try:
                return await self.control(ref).request("session.stop", reason=reason, grace_ms=grace_ms)
            except SessionStopped:
                state = await self.state(ref)
            if state["status"] in _ENDED:
                return state
            # Its supervisor was only coming up when we asked.

    async def wait_stopped(self, ref: SessionRef) -> dict[str, Any]:
        try:
            return await self.control(ref).request("session.wait")
        except SessionStopped:
            return await self.state(ref)

    async def forget(self, ref: SessionRef) -> None:
        """Drop the connection to an ended session, once its supervisor is really gone."""
        under_way = self._forgetting.get(ref)
        if under_way is None:
            under_way = asyncio.ensure_future(self._forget(ref))
            self._forgetting[ref] = under_way
            under_way.add_done_callback(lambda _: self._forgetting.pop(ref, None))
        # Whoever asked first may give up; others wait for the same.
        await asyncio.shield(under_way)

    async def _forget(self, ref: SessionRef) -> None:
        if (await self.state(ref))["status"] == "running":
            raise WrongState(f"session {ref.session} is running", session=ref.session)
        self._drop_listeners(ref)
        found = self._controls.pop(ref, None)
        if found is not None:
            # Who still waits for an answer waits for that of a session that is no more.
            await found.close(SessionStopped(f"session {ref.session} has ended", session=ref.session))
        await asyncio.get_running_loop().run_in_executor(None, self._await_release, ref.session)

    def _drop_listeners(self, ref: SessionRef) -> None:
        for fd in self._listeners.pop(ref, ()):
            os.close(fd)

    def _await_release(self, session: str) -> None:
        # A supervisor that has answered may still be closing its overlay; its lock goes last.
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
        places = {name: cgroup.Place(*place) for name, place in record.items()}
        cgroup.SessionCgroup(session, places, {}).remove()

    async def set_deadline(self, ref: SessionRef, deadline_ms: int | None) -> None:
        await self.control(ref).request("session.extend", deadline_ms=deadline_ms)

    async def usage(self, ref: SessionRef) -> dict[str, Any]:
        return await self.control(ref).request("session.usage")

    async def freeze(self, ref: SessionRef) -> None:
        await self.control(ref).request("session.freeze")

    async def thaw(self, ref: SessionRef) -> None:
        await self.control(ref).request("session.thaw")

    async def checkpoint(self, ref: SessionRef, destination: str) -> dict[str, Any]:
        """Copy the running session's own files to ``destination``; it pauses only for the last pass."""
        return await self.control(ref).request("session.checkpoint", destination=destination)

    # --- network -----------------------------------------------------------------------------------------

    async def listeners(self, ref: SessionRef) -> list[int]:
        """Descriptors a session's traffic ends at, and one to see its end by; the caller owns them."""
        if ref in self._listeners:
            return self._listeners.pop(ref)
        return await self._descriptors(ref, "network.listeners")

    async def sockets(self, ref: SessionRef, *, count: int, family: int) -> list[int]:
        """Unconnected TCP sockets inside the session's network; the caller owns them."""
        return await self._descriptors(ref, "network.sockets", count=count, family=family)

    async def _descriptors(self, ref: SessionRef, op: str, **body: Any) -> list[int]:
        work = partial(network.ask, self._directory(ref.session), op, generation=ref.generation, **body)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    # --- processes ---------------------------------------------------------------------------------------

    async def start_process(self, ref: SessionRef, spec: ProcessSpec) -> dict[str, Any]:
        answer, announced = await self.control(ref).start(**spec.to_json())
        if announced is not None:
            self._announce(self._firsts, (ref, spec.process), announced.more)
            self._announce(self._ends, (ref, spec.process), announced.end)
        record: dict[str, Any] = answer["process"]
        return record

    def _announce(self, kept: _Announcements, key: tuple[SessionRef, str], answer: _Answer) -> None:
        """Keep an answer for whoever comes to wait before it is there; others ask."""

        def forget(came: _Answer) -> None:
            kept.pop(key, None)
            if not came.cancelled():
                came.exception()

        kept[key] = answer
        answer.add_done_callback(forget)

    def process_directory(self, ref: SessionRef, process: str) -> str:
        return f"{self._directory(ref.session)}/processes/{process}"

    async def process(self, ref: SessionRef, process: str) -> dict[str, Any]:
        """A process record: live, or as it was written when its session still had a supervisor."""
        try:
            answer = await self.control(ref).request("process.get", process=process)
        except SessionStopped:
            return self._saved_record(ref, process)
        record: dict[str, Any] = answer["process"]
        return record

    def _saved_record(self, ref: SessionRef, process: str) -> dict[str, Any]:
        try:
            record = last_record(self.process_directory(ref, process))
        except FileNotFoundError:
            raise NotFound(f"no process {process}", kind="process", name=process) from None
        if record["status"] == "running":
            record |= {"status": "lost", "reason": "supervisor died"}
        return record

    async def processes(self, ref: SessionRef) -> list[dict[str, Any]]:
        try:
            answer = await self.control(ref).request("process.list")
        except SessionStopped:
            directory = f"{self._directory(ref.session)}/processes"
            names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
            return [self._saved_record(ref, name) for name in names]
        records: list[dict[str, Any]] = answer["processes"]
        return records

    async def wait_process(self, ref: SessionRef, process: str) -> dict[str, Any]:
        announced = self._ends.pop((ref, process), None)
        try:
            answer = await (announced or self.control(ref).request("process.wait", process=process))
        except SessionStopped:
            return self._saved_record(ref, process)
        record: dict[str, Any] = answer["process"]
        return record

    async def output(
        self, ref: SessionRef, process: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]:
        """What a process printed, from any offset.

        With ``follow`` until it has ended; without, what is there now, which includes what its children have
        written since it ended.
        """
        reader = OutputReader(self.process_directory(ref, process), offset)
        try:
            while True:
                items = reader.read()
                for item in items:
                    yield item
                if (reader.ended and follow) or (not items and (reader.final or not follow)):
                    return
                if not items:
                    reader.final = not await self._more_output(ref, process, reader.offset)
        finally:
            reader.close()

    async def _more_output(self, ref: SessionRef, process: str, offset: int) -> bool:
        """Wait until there is more output; False when nobody is left to write any."""
        announced = self._firsts.pop((ref, process), None) if offset == 0 else None
        asking = announced or self.control(ref).request("process.output", process=process, offset=offset)
        try:
            answer = await asking
        except SessionStopped:
            self._saved_record(ref, process)
            return False
        return not answer["ended"] or answer["offset"] > offset

    async def signal(self, ref: SessionRef, number: int, process: str | None = None) -> None:
        await self.control(ref).request("process.signal", process=process, signal=number)

    async def write_stdin(
        self, ref: SessionRef, process: str, data: bytes, *, offset: int | None = None, close: bool = False
    ) -> int:
        """Give a process input; returns the total accepted so far, once its pipe has taken this piece."""
        answer = await self.control(ref).request(
            "process.stdin", data, process=process, offset=offset, close=close
        )
        accepted: int = answer["accepted"]
        return accepted

    async def resize(self, ref: SessionRef, process: str, *, rows: int, columns: int) -> None:
        await self.control(ref).request("process.resize", process=process, rows=rows, columns=columns)

    # --- files -------------------------------------------------------------------------------------------

    async def files(
        self, ref: SessionRef, operation: str, *, data: AsyncIterable[bytes] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """A file operation with a small result; ``list`` returns its entries under ``entries``."""
        answer, content = await self.control(ref).files(operation, data=data, **arguments)
        if operation == "list":
            entries: list[dict[str, Any]] = []
            for line in content.splitlines():
                entries += json.loads(line)
            answer["entries"] = entries
        return answer

    async def open_read(self, ref: SessionRef, path: str, *, direct: bool, **arguments: Any) -> Download:
        """A file to be read; ``direct`` if the content of a large one can go to a socket."""
        return await self.control(ref).open_read(direct=direct, path=path, **arguments)

    async def open_write(self, ref: SessionRef, path: str, **arguments: Any) -> Upload | None:
        """A file to be written with what is on a socket; ``None`` if its supervisor cannot do that."""
        return await self.control(ref).open_write(path=path, **arguments)

    async def read_file(self, ref: SessionRef, path: str, **arguments: Any) -> AsyncIterator[bytes]:
        opened = await self.open_read(ref, path, direct=False, **arguments)
        async with aclosing(opened):
            async for piece in opened.pieces():
                yield piece

    async def watch(
        self, ref: SessionRef, path: str, **arguments: Any
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Changes below a directory, in batches; the first, empty one says that watching has begun."""
        async for line in self.control(ref).read("watch", path=path, **arguments):
            yield json.loads(line)

    def archive(self, ref: SessionRef, paths: list[str], **arguments: Any) -> AsyncIterator[bytes]:
        """A tar stream of files and trees."""
        return self.control(ref).read("archive", paths=paths, **arguments)
