"""Sandboxes: the handle everything else hangs on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from types import TracebackType
from typing import Any, Unpack

from sandkeep.errors import (
    NotFound,
    PathExists,
    SandkeepError,
    SessionStopped,
    SessionStopping,
)
from sandkeep.sdk import bodies
from sandkeep.sdk._async.events import events
from sandkeep.sdk._async.listing import fetch_sessions, fetch_snapshots, snapshot_tree
from sandkeep.sdk._async.paging import Listing
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.running import Runner, SandboxUser
from sandkeep.sdk._async.transport import Transport, read, segment
from sandkeep.sdk.bodies import UNCHANGED, Configuration, Duration, Unchanged
from sandkeep.sdk.concurrent import Opening, shielded
from sandkeep.sdk.history import Event
from sandkeep.sdk.known import KnownSandbox
from sandkeep.sdk.network import NetworkEvent
from sandkeep.sdk.queries import SessionQuery, SnapshotQuery
from sandkeep.sdk.values import (
    Route,
    SandboxInfo,
    Session,
    Snapshot,
    SnapshotNode,
    Stopped,
    Usage,
)
from sandkeep.types import (
    Mount,
    NetworkPolicy,
    Resources,
    SessionStatus,
    SnapshotRetention,
    duration,
    expect,
    milliseconds,
)
from sandkeep.wire import responses
from sandkeep.wire.additions import UsageShown
from sandkeep.wire.base import encode
from sandkeep.wire.objects import SnapshotObject
from sandkeep.wire.responses import (
    CommandList,
    CommandShown,
    SandboxStarted,
    SandboxUpdated,
    SessionChanged,
    SnapshotTaken,
)

Hook = Callable[["Sandbox"], Awaitable[None]]
"""Called with the sandbox when it, or a session of it, has come to be."""

CLEAN_UP_SECONDS = 60.0
BOOT_SECONDS = 600.0
"""A session may have to wait for an image or a stop under way."""
STOP_SECONDS = 300.0


class Sandbox(KnownSandbox, Runner):
    """A named sandbox. Made by ``create_sandbox``, ``get_sandbox`` and their kin, never directly.

    What the properties say is what the server last told this handle; :meth:`refresh` asks again. Operations
    that need a running session start one when there is none (the sandbox's files are as the last session left
    them) and go on; any number of them at once start one session. Old handles work as well as new ones.

    As a context manager it does on exit what the way it was got promises: one that was created is stopped and
    destroyed, one that was resumed is stopped.
    """

    def __init__(
        self, transport: Transport, started: SandboxStarted, *, on_resume: Hook | None = None
    ) -> None:
        recovery = Recovery(started.session.id, self._resume_for_operation)
        super().__init__(transport, recovery, user=None)
        self._on_resume = on_resume
        self._destroy_on_exit = False
        self._pin_inside = False
        self._adopt(started)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} {self.status.value}>"

    # --- what is known -----------------------------------------------------------------------------------

    async def current_usage(self) -> Usage:
        """What all its sessions used, the running one included. Asks the server."""
        answer = await self._transport.request("GET", f"/v1/sandboxes/{segment(self.name)}/usage")
        shown = read(UsageShown, answer).usage
        return Usage(
            cpu=timedelta(milliseconds=shown.active_cpu_duration_ms),
            duration=timedelta(milliseconds=shown.duration_ms),
            ingress_bytes=shown.ingress_bytes,
            egress_bytes=shown.egress_bytes,
        )

    async def refresh(self) -> Sandbox:
        """Get the latest state. Never starts a session. Returns the handle itself."""
        answer = await self._transport.request("GET", self._path(), query={"resume": "false"})
        self._adopt(read(SandboxStarted, answer))
        return self

    # --- processes and users -----------------------------------------------------------------------------

    async def get_process(self, process_id: str, *, session_id: str | None = None) -> Process:
        """A handle for a process that was started by anybody, running or over. Never starts a session.

        Args:
            process_id: its ``id``.
            session_id: its session; found out when not given, latest first.

        Raises:
            NotFound: no session of this sandbox has such a process.
        """
        if session_id is not None:
            return await self._process(session_id, process_id)
        tried = self._recovery.session
        try:
            return await self._process(tried, process_id)
        except NotFound:
            pass
        for session in await self.sessions().all():
            if session.id != tried:
                try:
                    return await self._process(session.id, process_id)
                except NotFound:
                    continue
        raise NotFound(
            f"no process {process_id} in sandbox {self.name}",
            kind="process",
            name=process_id,
            sandbox=self.name,
        )

    async def processes(self, *, session_id: str | None = None) -> list[Process]:
        """The processes of the current session, or of another one, newest first. Never starts a session."""
        session = self._recovery.session if session_id is None else segment(session_id, "session_id")
        path = f"/v2/sandboxes/sessions/{session}/cmd"
        shown = read(CommandList, await self._transport.request("GET", path))
        return [Process(self._transport, command, stdin=False) for command in shown.commands]

    def as_user(self, name: str) -> SandboxUser:
        """Act as an account of the sandbox. Whether it exists shows when it is used."""
        return SandboxUser(self._transport, self._recovery, name)

    async def create_user(self, name: str) -> SandboxUser:
        """Make an account, with a home directory and a group of its own.

        Raises:
            PathExists: there is one of that name.
            ProcessFailed: the sandbox's ``useradd`` would not.
            HostCannot: everybody is root inside, the server's user having no subordinate ids.
        """
        await self.as_user("1").fs.exists("/")  # refused where there are no others
        made = await self.run_process(
            "useradd",
            ["--create-home", "--user-group", "--shell", "/bin/bash", "--", name],
            sudo=True,
            capture_output=True,
        )
        if made.returncode == 9:
            raise PathExists(f"there is an account {name}", path=name, operation="useradd")
        made.check_returncode()
        return self.as_user(name)

    # --- sessions ----------------------------------------------------------------------------------------

    async def resume(self) -> Sandbox:
        """See that a session runs; returns the handle itself. Nothing happens when one does.

        Raises:
            SnapshotGone: the snapshot it would start from was deleted or has expired.
        """
        await self._resume()
        self._recovery.session = self._session.id
        return self

    async def stop(self) -> Stopped:
        """End the current session and, when the sandbox is persistent, keep its files. Waits until done.

        Returns:
            The session as it ended, and the snapshot that was taken. The same again when it had ended before.
        """
        self._recovery.pinned = False
        stopped = await self._stop(self._recovery.session)
        if stopped.session.id != self._state.current_session_id and not self.status.is_final:
            # Somebody else has started another one since.
            self._recovery.session = self._state.current_session_id
            stopped = await self._stop(self._recovery.session)
        return stopped

    async def destroy(self, *, delete_snapshots: bool = True) -> None:
        """End and forget the sandbox, whatever its state. Its name is free afterwards.

        Args:
            delete_snapshots: delete its snapshots too, except those that something else uses.

        Raises:
            NotFound: it does not exist any more.
        """
        query = {"deleteOrphanSnapshots": "true"} if delete_snapshots else {}
        await self._transport.request("DELETE", self._path(), query=query, timeout=STOP_SECONDS)

    async def extend_execution_time_limit(self, by: Duration) -> Session:
        """Let the running session live longer. New sessions are not changed.

        Raises:
            TimeoutInvalid: no session may live that long.
        """
        body = {"duration": milliseconds(duration(by, "by"))}
        return await self._change_session("extend-timeout", encode(body))

    async def update_network_policy(self, policy: NetworkPolicy) -> Session:
        """Change what the running session may reach. For new sessions there is :meth:`update`."""
        return await self._change_session("network-policy", bodies.policy(policy))

    async def update(
        self,
        *,
        execution_time_limit: Duration | None = None,
        resources: Resources | None = None,
        persistent: bool | None = None,
        ports: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        mounts: Mapping[str, Mount] | None = None,
        network_policy: NetworkPolicy | None = None,
        snapshot_expiration: Duration | None = None,
        snapshot_retention: SnapshotRetention | Unchanged | None = UNCHANGED,
    ) -> Sandbox:
        """Change the configuration, from the next session on; all of it or nothing.

        What is given replaces what was there entirely; what is not stays. A network policy reaches the
        running session too. ``snapshot_retention=None`` keeps every snapshot.

        Returns:
            The handle itself, with the new state.
        """
        body = bodies.configuration(
            execution_time_limit=execution_time_limit,
            resources=resources,
            persistent=persistent,
            ports=ports,
            env=env,
            tags=tags,
            mounts=mounts,
            network_policy=network_policy,
            snapshot_expiration=snapshot_expiration,
            snapshot_retention=snapshot_retention,
        )
        await self._patch(body)
        if network_policy is not None and self.status is SessionStatus.RUNNING:
            try:
                await self._set_session(
                    self._state.current_session_id, "network-policy", bodies.policy(network_policy)
                )
            except (SessionStopped, SessionStopping):
                pass  # the next one starts with it
        return self

    async def network_events(self, *, follow: bool = False) -> AsyncGenerator[NetworkEvent, None]:
        """What happened on its network, in all its sessions, oldest first. Never starts a session.

        Args:
            follow: go on as things happen, until you stop iterating; otherwise stop at what is there.

        Yields:
            Decisions about names, connections and requests, and connections that were closed, with bytes.
        """
        found = events(self._transport, sandbox=self.name, kind="network.", follow=follow)
        async with aclosing(found):
            async for event in found:
                yield NetworkEvent.of(event)

    async def events(self, *, kind: str | None = None, follow: bool = False) -> AsyncGenerator[Event, None]:
        """What happened to it, and who had it done, oldest first. Never starts a session.

        Args:
            kind: only events whose kind begins so: ``process.`` or ``session.ended``.
            follow: go on as things happen, until you stop iterating; otherwise stop at what is there.
        """
        found = events(self._transport, sandbox=self.name, kind=kind, follow=follow)
        async with aclosing(found):
            async for event in found:
                yield Event.of(event)

    def sessions(self, query: SessionQuery | None = None) -> Listing[Session]:
        """Its sessions, newest first."""
        return Listing(fetch_sessions(self._transport, query or SessionQuery(), sandbox=self.name))

    # --- snapshots ---------------------------------------------------------------------------------------

    async def snapshot(self, *, expiration: Duration | None = None) -> Snapshot:
        """Take a snapshot, which ends the session; the next one starts from it.

        Args:
            expiration: how long it lives; zero is for ever, and the sandbox's own default when not given.
        """
        return await self._take("/v2/sandboxes/sessions/{session}/snapshot", expiration)

    async def checkpoint(self, *, expiration: Duration | None = None) -> Snapshot:
        """Take a snapshot while the session goes on. It pauses for a moment."""
        return await self._take("/v1/sessions/{session}/checkpoint", expiration)

    async def rollback(self, snapshot: Snapshot | str) -> Sandbox:
        """Let the next session start from another snapshot of the project. A running one is stopped first.

        Nothing is lost: what a persistent sandbox's session had changed is in the snapshot its stop takes.

        Raises:
            NotFound: there is no such snapshot; nothing has changed.
            SnapshotGone: it was deleted or has expired; nothing has changed, unless it was the snapshot of
                the stop that pushed it out, as ``snapshot_retention`` has it.
        """
        expect("snapshot", snapshot, (Snapshot, str), "a Snapshot or its id")
        chosen = snapshot if isinstance(snapshot, str) else snapshot.id
        # Chosen first, so that what cannot be chosen stops nothing; again, since the stop chooses its own.
        await self._patch({"currentSnapshotId": chosen})
        await self.refresh()
        if not self.status.is_final:
            await self.stop()
            await self._patch({"currentSnapshotId": chosen})
        return self

    def fork(
        self, name: str | None = None, *, destroy: bool = True, **changes: Unpack[Configuration]
    ) -> Opening[Sandbox]:
        """A new sandbox with this one's configuration, which starts from its current snapshot.

        That is the one :attr:`current_snapshot_id` names: what its latest ended session left, or a rollback
        chose; its image when there is none. What a running session changed since is not in the fork, and a
        checkpoint does not become current. To begin with that, create a sandbox from one:
        ``create_sandbox(source=SnapshotSource((await box.checkpoint()).id))``.

        Args:
            name: its name; generated when not given.
            destroy: whether leaving ``async with`` destroys it.
            changes: what replaces what would be inherited; see :class:`~sandkeep.Configuration`.
        """
        body = bodies.configuration(name=name, **changes)
        return start_fork(self._transport, self.name, body, destroy=destroy)

    def snapshots(self, query: SnapshotQuery | None = None) -> Listing[Snapshot]:
        """Its snapshots, newest first."""
        return Listing(fetch_snapshots(self._transport, query or SnapshotQuery(), sandbox=self.name))

    async def snapshot_tree(
        self, snapshot: Snapshot | str | None = None, *, descendants: bool = False
    ) -> list[SnapshotNode]:
        """The line of a snapshot, itself first: its ancestors up to the root, or its newest descendants.

        Args:
            snapshot: where to begin; the current one when not given.
            descendants: go down instead of up.

        Raises:
            NotFound: there is no such snapshot, or none at all yet.
        """
        anchor = snapshot.id if isinstance(snapshot, Snapshot) else snapshot or self.current_snapshot_id
        if anchor is None:
            raise NotFound(f"sandbox {self.name} has no snapshot yet", kind="snapshot", name=self.name)
        return await snapshot_tree(self._transport, anchor, descendants=descendants)

    # --- scopes ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Sandbox:
        self._recovery.pinned = self._pin_inside
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recovery.pinned = False
        try:
            await shielded(self._leave, CLEAN_UP_SECONDS)
        except SandkeepError as failure:
            if error is None:
                raise
            # What went wrong first matters more.
            error.add_note(f"cleaning up sandbox {self.name} failed: {failure}")

    async def _leave(self) -> None:
        try:
            if self._destroy_on_exit:
                await self.destroy()
            else:
                await self._stop(self._recovery.session)
        except NotFound:
            pass  # somebody destroyed it meanwhile

    # --- how ---------------------------------------------------------------------------------------------

    async def _resume(self) -> bool:
        """Whether this started a session."""
        answer = await self._transport.request(
            "GET", self._path(), query={"resume": "true"}, timeout=BOOT_SECONDS
        )
        started = read(SandboxStarted, answer)
        self._adopt(started)
        if started.resumed and self._on_resume is not None:
            self._recovery.session = self._session.id
            await self._on_resume(self)
        return started.resumed

    async def _resume_for_operation(self) -> str:
        await self._resume()
        return self._session.id

    async def _stop(self, session: str) -> Stopped:
        answer = await self._transport.request(
            "POST",
            f"/v2/sandboxes/sessions/{session}/stop",
            json={},
            replay=True,
            timeout=STOP_SECONDS,
        )
        shown = read(responses.SessionStopped, answer)
        stopped = Session.of(shown.session)
        if stopped.id == shown.sandbox.current_session_id:
            self._session = stopped
        self._state = SandboxInfo.of(shown.sandbox)
        snapshot = shown.snapshot
        return Stopped(stopped, Snapshot.of(snapshot) if isinstance(snapshot, SnapshotObject) else None)

    async def _process(self, session: str, process: str) -> Process:
        below = segment(process, "process_id")
        path = f"/v2/sandboxes/sessions/{segment(session, 'session_id')}/cmd/{below}"
        shown = read(CommandShown, await self._transport.request("GET", path))
        return Process(self._transport, shown.command, stdin=False)

    async def _change_session(self, what: str, body: bytes) -> Session:
        async def send(session: str) -> Session:
            return await self._set_session(session, what, body)

        return await self._recovery.run(send)

    async def _set_session(self, session: str, what: str, body: bytes) -> Session:
        path = f"/v2/sandboxes/sessions/{session}/{what}"
        headers = {"Content-Type": "application/json"}
        answer = await self._transport.request("POST", path, body=body, headers=headers)
        self._session = Session.of(read(SessionChanged, answer).session)
        return self._session

    async def _take(self, path: str, expiration: Duration | None) -> Snapshot:
        body = {} if expiration is None else {"expiration": milliseconds(duration(expiration, "expiration"))}

        async def send(session: str) -> SnapshotTaken:
            where = path.format(session=session)
            answer = await self._transport.request("POST", where, json=body, timeout=STOP_SECONDS)
            return read(SnapshotTaken, answer)

        taken = await self._recovery.run(send)
        await self.refresh()
        return Snapshot.of(taken.snapshot)

    async def _patch(self, body: dict[str, Any]) -> None:
        shown = read(SandboxUpdated, await self._transport.request("PATCH", self._path(), json=body))
        self._state = SandboxInfo.of(shown.sandbox)
        if isinstance(shown.routes, list):
            self._routes = tuple(Route.of(route) for route in shown.routes)

    def _path(self) -> str:
        return f"/v2/sandboxes/{segment(self.name)}"


def start_fork(transport: Transport, source: str, body: dict[str, Any], *, destroy: bool) -> Opening[Sandbox]:
    """Fork a sandbox by name."""

    async def start() -> Sandbox:
        path = f"/v2/sandboxes/{segment(source, 'source')}/fork"
        answer = await transport.request("POST", path, json=body, timeout=BOOT_SECONDS)
        box = Sandbox(transport, read(SandboxStarted, answer))
        box._destroy_on_exit = destroy
        return box

    return Opening(start)
