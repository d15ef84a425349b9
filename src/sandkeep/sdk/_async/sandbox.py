"""Sandboxes: the handle with most operations."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Unpack, overload

from sandkeep.checks import duration, expect, milliseconds
from sandkeep.errors import (
    NotFound,
    RequestTimeout,
    SandkeepError,
    SessionSnapshotting,
    SessionStopped,
    SessionStopping,
    TransportError,
    WrongState,
)
from sandkeep.policy import NetworkPolicy
from sandkeep.sdk import bodies, retry
from sandkeep.sdk._async import accounts
from sandkeep.sdk._async.events import events
from sandkeep.sdk._async.forwarding import PortForward
from sandkeep.sdk._async.listing import fetch_sessions, fetch_snapshots, snapshot_tree
from sandkeep.sdk._async.many import SandboxBatch
from sandkeep.sdk._async.paging import Listing
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.recovery import Recovery, checked_auto_resume
from sandkeep.sdk._async.running import Runner, SandboxUser
from sandkeep.sdk._async.terminal import SCROLLBACK, Terminal
from sandkeep.sdk._async.transport import Transport, decode, new_key, segment
from sandkeep.sdk._compat_async import OwnWith, Pending, shielded
from sandkeep.sdk.events import Event
from sandkeep.sdk.network import NetworkEvent
from sandkeep.sdk.queries import SessionQuery, SnapshotQuery
from sandkeep.sdk.references import SandboxReference
from sandkeep.sdk.sandboxes import (
    Configuration,
    ConfigurationChanges,
    Duration,
    SandboxInfo,
    SandboxState,
    Session,
    Stopped,
)
from sandkeep.sdk.values import Route, SandboxGroup, Snapshot, SnapshotNode, Usage
from sandkeep.spec import check_comment
from sandkeep.states import SessionStatus
from sandkeep.wire import responses
from sandkeep.wire.base import encode
from sandkeep.wire.objects import SnapshotObject
from sandkeep.wire.responses import (
    CommandList,
    CommandShown,
    SandboxesStarted,
    SandboxStarted,
    SandboxUpdated,
    SessionChanged,
    SnapshotShown,
    SnapshotTaken,
)
from sandkeep.wire.v1 import UsageShown

Hook = Callable[["Sandbox"], Awaitable[None]]
"""Called with the sandbox when it was created, or when a session of it was started."""

CLEAN_UP_SECONDS = 60.0
STOP_SECONDS = 300.0


class Sandbox(SandboxState, Runner, OwnWith):
    """A named sandbox. Made by ``create_sandbox``, ``get_sandbox`` and similar functions, never directly.

    The properties have the state that the server last sent to this handle; :meth:`refresh` updates them.
    Operations that need a running session start one if none runs (with the files that the last session left)
    and continue in it; concurrent operations share one session. If the files of the last session were not
    kept, because the sandbox is not persistent, or if the handle was made with ``auto_resume=False``, they
    raise ``SessionStopped`` instead, and :meth:`resume` starts a session. A handle works as long as the
    sandbox exists.

    What ``async with`` does on exit depends on how the handle was made: a created sandbox is stopped and
    destroyed, a resumed one is stopped.
    """

    def __init__(
        self,
        transport: Transport,
        started: SandboxStarted,
        *,
        on_resume: Hook | None = None,
        auto_resume: bool | None = None,
    ) -> None:
        recovery = Recovery(started.session.id, self._resume_for_operation, self._allow_resume)
        super().__init__(transport, recovery, user=None)
        self._on_resume = on_resume
        self._auto_resume = auto_resume
        self._destroy_on_exit = False
        self._pin_inside = False
        self.left_out: str | None = started.left_out if isinstance(started.left_out, str) else None
        """Of a fork: the running session of its source, whose changes are not in the fork."""
        self._adopt(started)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} {self.status.value}>"

    # --- what is known -----------------------------------------------------------------------------------

    async def current_usage(self) -> Usage:
        """Return the resources used by all its sessions, including the running one. Asks the server."""
        response = await self._transport.request("GET", f"/v1/sandboxes/{segment(self.name)}/usage")
        shown = decode(UsageShown, response).usage
        return Usage(
            cpu=timedelta(milliseconds=shown.active_cpu_duration_ms),
            duration=timedelta(milliseconds=shown.duration_ms),
            ingress_bytes=shown.ingress_bytes,
            egress_bytes=shown.egress_bytes,
        )

    async def refresh(self) -> Sandbox:
        """Get the latest state. Never starts a session. Returns the handle itself."""
        response = await self._transport.request("GET", self._path(), query={"resume": "false"})
        self._adopt(decode(SandboxStarted, response))
        return self

    # --- processes and users -----------------------------------------------------------------------------

    async def get_process(self, process_id: str, *, session_id: str | None = None) -> Process:
        """Return a handle for a process, running or ended, started by any client. Never starts a session.

        Args:
            process_id: its ``id``.
            session_id: its session; by default the sessions are searched, latest first.

        Raises:
            NotFound: no session of this sandbox has such a process.
        """
        if session_id is not None:
            return await get_process(self._transport, session_id, process_id)
        tried = self._recovery.session
        try:
            return await get_process(self._transport, tried, process_id)
        except NotFound:
            pass
        for session in await self.sessions().all():
            if session.id != tried:
                try:
                    return await get_process(self._transport, session.id, process_id)
                except NotFound:
                    continue
        raise NotFound(
            f"no process {process_id} in sandbox {self.name}",
            kind="process",
            name=process_id,
            sandbox=self.name,
        )

    async def processes(
        self, *, session_id: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> list[Process]:
        """Return the processes of the current or another session, newest first. Never starts a session.

        Args:
            session_id: the session, if not the current one.
            metadata: return only processes that have all of these keys and values.
        """
        session = self._recovery.session if session_id is None else segment(session_id, "session_id")
        path = f"/v2/sandboxes/sessions/{session}/cmd"
        shown = decode(CommandList, await self._transport.request("GET", path))
        wanted = dict(metadata or {}).items()
        found = [Process(self._transport, command) for command in shown.commands]
        return [process for process in found if wanted <= process.metadata.items()]

    def attach_terminal(
        self,
        process_id: str,
        *,
        columns: int | None = None,
        rows: int | None = None,
        scrollback: int | None = SCROLLBACK,
        extend_timeout: bool = True,
    ) -> Pending[Terminal]:
        """Attach to a program on a terminal, opened by any client. Never starts a session.

        Any number of clients can be attached: each gets the output, and what each one writes goes in.

        Args:
            process_id: the terminal's ``process_id``.
            columns: width that the terminal gets; with ``rows``. By default its size does not change.
            rows: its height. scrollback: most bytes of earlier output to read first; ``None`` for all of
                it. extend_timeout: as of :meth:`open_interactive`.

        Returns:
            The terminal. Closing it does not affect the program.

        Raises:
            NotFound: no session of this sandbox has such a process.
            InvalidRequest: the process has no terminal.
            SessionStopped: its session has ended; :meth:`Process.output` has what it printed.
        """
        message = bodies.attachment(process_id, columns=columns, rows=rows, scrollback=scrollback)

        async def start() -> Terminal:
            found = await self.get_process(process_id)
            terminal = Terminal(self._transport)
            await terminal._open(found.session_id, message, user=None, extend=extend_timeout)
            return terminal

        return Pending(start)

    def as_user(self, name: str) -> SandboxUser:
        """Act as an account of the sandbox. The account is first checked when it is used."""
        return SandboxUser(self._transport, self._recovery, name)

    async def create_user(self, name: str) -> SandboxUser:
        """Create an account, with a home directory and a group of its own.

        Raises:
            PathExists: an account of that name exists.
            ProcessFailed: the sandbox's ``useradd`` failed.
            HostCannot: every account is root inside, because the server's user has no subordinate ids.
        """
        await accounts.create_user(self, name)
        return self.as_user(name)

    async def create_group(self, name: str) -> SandboxGroup:
        """Create a group, with a directory that its members share: ``/shared/NAME``.

        Files made in it belong to the group. The sandbox's own user owns the directory, and can be added to
        the group like any other account.

        Raises:
            PathExists: a group of that name exists.
            InvalidRequest: the name is not valid for a group.
            ProcessFailed: the sandbox's ``groupadd`` failed.
            HostCannot: every account is root inside, because the server's user has no subordinate ids.
        """
        return await accounts.create_group(self, name)

    async def add_user_to_group(self, user: SandboxUser | str, group: SandboxGroup | str) -> None:
        """Add an account to a group; applies to processes started from now on.

        Raises:
            NotFound: the account or group does not exist; ``kind`` says which.
            HostCannot: every account is root inside.
        """
        await accounts.add_to_group(self, user, group)

    async def remove_user_from_group(self, user: SandboxUser | str, group: SandboxGroup | str) -> None:
        """Remove an account from a group; applies to processes started from now on.

        Raises:
            NotFound: the account or group does not exist, or the account is not in it; ``kind`` says which.
            HostCannot: every account is root inside.
        """
        await accounts.remove_from_group(self, user, group)

    # --- sessions ----------------------------------------------------------------------------------------

    async def resume(self) -> Sandbox:
        """Start a session unless one runs; returns the handle itself.

        Raises:
            SnapshotGone: the snapshot it would start from was deleted or has expired.
        """
        await self._resume()
        self._recovery.session = self._session.id
        return self

    async def stop(self) -> Stopped:
        """End the current session and, if the sandbox is persistent, keep its files. Waits for the end.

        Returns:
            The ended session and the snapshot that was taken; the same result again if it had already ended.
        """
        self._recovery.pinned = False
        stopped = await self._stop(self._recovery.session)
        if stopped.session.id != self._state.current_session_id and not self.status.is_final:
            # Another client has started a session since.
            self._recovery.session = self._state.current_session_id
            stopped = await self._stop(self._recovery.session)
        return stopped

    async def destroy(self, *, delete_snapshots: bool = True, only_stopped: bool = False) -> None:
        """Stop and delete the sandbox in any state. Its name is free afterwards.

        Args:
            delete_snapshots: delete its snapshots too, except those that are in use elsewhere.
            only_stopped: refuse to if a session runs.

        Raises:
            NotFound: it no longer exists.
            WrongState: with ``only_stopped``: a session runs; nothing has changed.
        """
        query = {"deleteOrphanSnapshots": "true"} if delete_snapshots else {}
        if only_stopped:
            query["onlyStopped"] = "true"
        try:
            await self._transport.request("DELETE", self._path(), query=query, timeout=STOP_SECONDS)
        except TransportError as error:
            if not retry.response_lost(error):
                raise
            # It may be destroyed, and the name may belong to a new sandbox, which must stay.
            query["session"] = self._session.id
            try:
                await self._transport.request(
                    "DELETE", self._path(), query=query, replay=True, timeout=STOP_SECONDS
                )
            except NotFound:
                pass  # the request whose response was lost did it

    async def extend_execution_time_limit(self, by: Duration) -> Session:
        """Extend the time limit of the running session. Does not affect new sessions.

        Raises:
            TimeoutInvalid: a session may not live that long.
        """
        body = {"duration": milliseconds(duration(by, "by"))}
        return await self._change_session("extend-timeout", encode(body))

    async def update_network_policy(self, policy: NetworkPolicy) -> Session:
        """Change what the running session may reach. :meth:`update` does so for new sessions."""
        return await self._change_session("network-policy", bodies.policy(policy))

    async def update(self, **changes: Unpack[ConfigurationChanges]) -> Sandbox:
        """Change the configuration, from the next session on; all of it or nothing.

        An option that is given replaces its old value entirely; others stay. A network policy also applies to
        the running session. ``snapshot_retention=None`` keeps every snapshot; the current snapshot, from
        which the sandbox would start, never expires. ``persistent=False`` loses nothing that the running
        session wrote: its stop still keeps that. With ``persistent=True`` its files are kept too.

        Returns:
            The handle itself, with the new state.
        """
        await self._patch(bodies.changes(**changes))
        network_policy = changes.get("network_policy")
        if network_policy is not None and self.status is SessionStatus.RUNNING:
            try:
                await self._set_session(
                    self._state.current_session_id, "network-policy", bodies.policy(network_policy)
                )
            except (SessionStopped, SessionStopping):
                pass  # the next session starts with it
        return self

    def forward_port(
        self,
        remote: int,
        local: int = 0,
        *,
        address: str = "127.0.0.1",
        on_failure: Callable[[SandkeepError], object] | None = None,
    ) -> PortForward:
        """Make a port of the sandbox, published or not, a port of this machine, for any protocol over TCP.

        Each connection goes over one to the server, wherever that is, and starts a session if none runs. It
        ends when the server restarts; later ones work again.

        Args:
            remote: the port inside.
            local: the port to listen on; 0 for any that is free.
            address: the address to listen on.
            on_failure: called with the reason if a connection cannot be made, such as `NotFound` because no
                program listens inside. Otherwise it is just closed.

        Returns:
            What listens, and where, while it is entered with ``async with``.

        Raises:
            InvalidRequest: an argument is invalid, or the local port is not free; ``field`` names it.
        """
        return PortForward(self._transport, self._recovery, remote, local, address, on_failure)

    async def network_events(self, *, follow: bool = False) -> AsyncGenerator[NetworkEvent, None]:
        """Yield events of its network, of all its sessions, oldest first. Never starts a session.

        Args:
            follow: continue with new events until you stop iterating; otherwise stop at the last recorded
                one.

        Yields:
            Decisions about names, connections and requests, and closed connections with their bytes.
        """
        found = events(self._transport, sandbox=self.name, kind="network.", follow=follow)
        async with aclosing(found):
            async for event in found:
                yield NetworkEvent.of(event)

    async def events(self, *, kind: str | None = None, follow: bool = False) -> AsyncGenerator[Event, None]:
        """Yield events of the sandbox and who caused them, oldest first. Never starts a session.

        Args:
            kind: only events whose kind starts with this: ``process.`` or ``session.ended``.
            follow: continue with new events until you stop iterating; otherwise stop at the last recorded
                one.
        """
        found = events(self._transport, sandbox=self.name, kind=kind, follow=follow)
        async with aclosing(found):
            async for event in found:
                yield Event.of(event)

    def sessions(self, query: SessionQuery | None = None) -> Listing[Session]:
        """List its sessions, newest first."""
        return Listing(fetch_sessions(self._transport, query or SessionQuery(), sandbox=self.name))

    # --- snapshots ---------------------------------------------------------------------------------------

    async def snapshot(self, *, expiration: Duration | None = None, comment: str | None = None) -> Snapshot:
        """Take a snapshot and end the session; the next session starts from it.

        Args:
            expiration: lifetime; zero means for ever, the default is the sandbox's own. The current snapshot,
                from which the sandbox would start, never expires.
            comment: what it is for, in one line of up to 1024 characters; lists show it.
        """
        body = _of_snapshot(expiration, comment)

        async def send(session: str) -> Snapshot:
            try:
                return await self._snapshot(session, body)
            except TransportError as error:
                if not retry.response_lost(error):
                    raise
            try:
                return await self._snapshot(session, body, replay=True)
            except (SessionStopped, SessionStopping, SessionSnapshotting):
                # The lost request has ended the session; a stop returns what it left.
                taken = (await self._stop(session)).snapshot
                if taken is None:
                    raise
                return taken

        return await self._taken(send)

    async def checkpoint(self, *, expiration: Duration | None = None, comment: str | None = None) -> Snapshot:
        """Take a snapshot while the session goes on. The session pauses for a moment.

        Args:
            expiration: lifetime; zero means for ever, the default is the sandbox's own. The current snapshot,
                from which the sandbox would start, never expires.
            comment: what it is for, in one line of up to 1024 characters; lists show it.
        """
        body, key = _of_snapshot(expiration, comment), new_key()

        async def send(session: str) -> Snapshot:
            path = f"/v1/sessions/{session}/checkpoint"
            response = await self._transport.request("POST", path, json=body, key=key, timeout=STOP_SECONDS)
            return Snapshot.of(decode(SnapshotTaken, response).snapshot)

        return await self._taken(send)

    async def rollback(self, snapshot: Snapshot | str) -> Sandbox:
        """Let the next session start from another snapshot of the project. Stops a running session first.

        Nothing is lost: the stop of a persistent sandbox takes a snapshot of what its session had changed.

        Raises:
            NotFound: the snapshot does not exist; nothing has changed.
            SnapshotGone: it was deleted or has expired; nothing has changed.
        """
        expect("snapshot", snapshot, (Snapshot, str), "a Snapshot or its id")
        chosen = snapshot if isinstance(snapshot, str) else snapshot.id
        # Choose first, so that an invalid choice stops nothing. The stop keeps the choice.
        await self._patch({"currentSnapshotId": chosen})
        await self.refresh()
        if not self.status.is_final:
            await self.stop()
        return self

    @overload
    def fork(
        self,
        name: str | None = None,
        *,
        live: bool = False,
        count: None = None,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[Sandbox]: ...

    @overload
    def fork(
        self,
        name: str | None = None,
        *,
        live: bool = False,
        count: int,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[SandboxBatch]: ...

    def fork(
        self,
        name: str | None = None,
        *,
        live: bool = False,
        count: int | None = None,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[Sandbox] | Pending[SandboxBatch]:
        """Create a sandbox with this one's configuration, starting from its current snapshot.

        That is :attr:`current_snapshot_id`: the files that its latest ended session left or that a rollback
        chose; its image if there is none. Changes that a running session made since are not in the fork, and
        the fork's ``left_out`` names that session. With ``live`` they are.

        Args:
            name: name of the fork; generated by default.
            live: start from the running session's present files. This takes a checkpoint, which pauses the
                session for a moment and stays among this sandbox's snapshots, but does not become its current
                one. Without a running session it makes no difference.
            count: make so many forks, up to 100, of one snapshot in one request: all of them or, if one
                cannot be made, none. They are called ``NAME-1``, ``NAME-2`` and so on.
            destroy: whether leaving ``async with`` destroys the fork.
            auto_resume: whether operations of the fork start a session; by default as this handle's do.
            changes: options that replace inherited ones; see :class:`~sandkeep.Configuration`.

        Returns:
            The fork, or with ``count`` the forks as a :class:`SandboxBatch`.

        Raises:
            InvalidRequest: ``live`` cannot be combined with another image.
        """
        body = bodies.configuration(name=name, **changes)
        chosen = self._auto_resume if auto_resume is None else checked_auto_resume(auto_resume)
        fork = Fork(self._transport, self.name, body, live=live, destroy=destroy, auto_resume=chosen)
        return fork.one() if count is None else fork.many(count)

    def snapshots(self, query: SnapshotQuery | None = None) -> Listing[Snapshot]:
        """List its snapshots, newest first."""
        return Listing(fetch_snapshots(self._transport, query or SnapshotQuery(), sandbox=self.name))

    async def snapshot_tree(
        self, snapshot: Snapshot | str | None = None, *, descendants: bool = False
    ) -> list[SnapshotNode]:
        """Return a snapshot with its ancestors up to the root, or with its newest descendants, itself first.

        Args:
            snapshot: where to begin; by default the current one.
            descendants: go down instead of up.

        Raises:
            NotFound: the snapshot does not exist, or the sandbox has none yet.
        """
        anchor = snapshot.id if isinstance(snapshot, Snapshot) else snapshot or self.current_snapshot_id
        if anchor is None:
            raise NotFound(f"sandbox {self.name} has no snapshot yet", kind="snapshot", name=self.name)
        return await snapshot_tree(self._transport, anchor, descendants=descendants)

    def reference(self) -> SandboxReference:
        """Return a plain value that names this sandbox, which can be stored and sent, for ``bind`` elsewhere.

        It names the server, the project and the sandbox, and holds no token. If another sandbox gets the name
        later, the reference names that one.
        """
        target = self._transport.target
        return SandboxReference(
            url=target.address, team=target.team, project=self._project or target.project, name=self.name
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a sandbox handle cannot be pickled: pickle its reference() for bind(), "
            "or its name for get_sandbox()"
        )

    # --- scopes ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Sandbox:
        self._recovery.pinned = self._pin_inside
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recovery.pinned = False
        failure: SandkeepError | None = RequestTimeout("the sandbox did not stop in time")

        async def leave() -> None:
            nonlocal failure
            try:
                await self._leave()
                failure = None
            except SandkeepError as refused:
                failure = refused

        try:
            await shielded(leave, CLEAN_UP_SECONDS)
        except BaseException as interrupted:
            if failure is not None:
                self._note_failed_cleanup(failure, interrupted)
            raise
        if failure is None:
            return
        if error is None:
            raise self._left(failure)
        self._note_failed_cleanup(failure, error)

    async def _leave(self) -> None:
        try:
            if self._destroy_on_exit:
                await self.destroy()
            else:
                await self._stop(self._recovery.session)
        except NotFound:
            pass  # another client destroyed it

    def _left(self, failure: SandkeepError) -> SandkeepError:
        """Return the failure of a clean-up with a hint that says what is left and what to do about it."""
        done, command = ("destroyed", "rm") if self._destroy_on_exit else ("stopped", "stop")
        if isinstance(failure, TransportError):
            failure.hint = (
                f"sandbox {self.name} may still exist as it was; once the server responds, "
                f"make sure it is {done}: sandkeep {command} {self.name}"
            )
        failure.details["sandbox"] = self.name
        return failure

    def _note_failed_cleanup(self, failure: SandkeepError, error: BaseException) -> None:
        """Report a failed clean-up beside the first error; notes of a cancelled task may never be seen."""
        text = f"cleaning up sandbox {self.name} failed: {self._left(failure)}"
        error.add_note(text)
        if not isinstance(error, Exception):
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    # --- how ---------------------------------------------------------------------------------------------

    async def _resume(self) -> bool:
        """Resume the sandbox; return whether this started a session."""
        response = await self._transport.start("GET", self._path(), query={"resume": "true"})
        started = decode(SandboxStarted, response)
        self._adopt(started)
        if started.resumed and self._on_resume is not None:
            self._recovery.session = self._session.id
            await self._on_resume(self)
        return started.resumed

    async def _resume_for_operation(self) -> str:
        await self._resume()
        return self._session.id

    async def _allow_resume(self, refused: WrongState) -> None:
        """Raise ``SessionStopped`` if an operation that was refused may not start a session."""
        if self._auto_resume:
            return
        how = "resume() starts a session, and so do operations of handles made with auto_resume=True"
        if self._auto_resume is False:
            raise self._ended(refused, f"operations of this handle start no session: {how}") from refused
        if not self.persistent and not await self._kept(refused):
            raise self._ended(refused, f"the files of its last session were not kept; {how}") from refused

    async def _kept(self, refused: WrongState) -> bool:
        """Return whether a new session would have the files of the one that refused an operation."""
        if isinstance(refused, SessionSnapshotting):
            return True
        await self.refresh()
        if self.current_snapshot_id is None:
            return False
        path = f"/v2/sandboxes/snapshots/{segment(self.current_snapshot_id)}"
        shown = decode(SnapshotShown, await self._transport.request("GET", path)).snapshot
        return shown.source_session_id == self._recovery.session

    def _ended(self, refused: WrongState, hint: str) -> SessionStopped:
        message = f"the session of sandbox {self.name} has ended; nothing was run"
        details = {"session": self._recovery.session, **refused.details, "sandbox": self.name}
        return SessionStopped(message, hint=hint, **details)

    async def _stop(self, session: str) -> Stopped:
        response = await self._transport.request(
            "POST",
            f"/v2/sandboxes/sessions/{session}/stop",
            json={},
            replay=True,
            timeout=STOP_SECONDS,
        )
        shown = decode(responses.SessionStopped, response)
        stopped = Session.of(shown.session)
        if stopped.id == shown.sandbox.current_session_id:
            self._session = stopped
        self._state = SandboxInfo.of(shown.sandbox)
        snapshot = shown.snapshot
        return Stopped(stopped, Snapshot.of(snapshot) if isinstance(snapshot, SnapshotObject) else None)

    async def _change_session(self, what: str, body: bytes) -> Session:
        async def send(session: str) -> Session:
            return await self._set_session(session, what, body)

        return await self._recovery.run(send)

    async def _set_session(self, session: str, what: str, body: bytes) -> Session:
        path = f"/v2/sandboxes/sessions/{session}/{what}"
        headers = {"Content-Type": "application/json"}
        # A policy replaces the previous one, so it can be sent twice; time would be added twice.
        replay = what == "network-policy"
        response = await self._transport.request("POST", path, body=body, headers=headers, replay=replay)
        self._session = Session.of(decode(SessionChanged, response).session)
        return self._session

    async def _snapshot(self, session: str, body: dict[str, Any], *, replay: bool = False) -> Snapshot:
        path = f"/v2/sandboxes/sessions/{session}/snapshot"
        response = await self._transport.request("POST", path, json=body, replay=replay, timeout=STOP_SECONDS)
        return Snapshot.of(decode(SnapshotTaken, response).snapshot)

    async def _taken(self, send: Callable[[str], Awaitable[Snapshot]]) -> Snapshot:
        taken = await self._recovery.run(send)
        await self.refresh()
        return taken

    async def _patch(self, body: dict[str, Any]) -> None:
        response = await self._transport.request("PATCH", self._path(), json=body, replay=True)
        shown = decode(SandboxUpdated, response)
        self._state = SandboxInfo.of(shown.sandbox)
        if isinstance(shown.routes, list):
            self._routes = tuple(Route.of(route) for route in shown.routes)

    def _path(self) -> str:
        return f"/v2/sandboxes/{segment(self.name)}"


def _of_snapshot(expiration: Duration | None, comment: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if expiration is not None:
        body["expiration"] = milliseconds(duration(expiration, "expiration"))
    if comment is not None:
        check_comment(comment)
        body["comment"] = comment
    return body


async def get_process(transport: Transport, session: str, process: str) -> Process:
    """Return a handle for a process of a session."""
    below = segment(process, "process_id")
    path = f"/v2/sandboxes/sessions/{segment(session, 'session_id')}/cmd/{below}"
    shown = decode(CommandShown, await transport.request("GET", path))
    return Process(transport, shown.command)


def made(
    transport: Transport,
    started: SandboxStarted,
    *,
    destroy: bool,
    auto_resume: bool | None,
    on_resume: Hook | None = None,
) -> Sandbox:
    """Return the handle of a sandbox that was made."""
    box = Sandbox(transport, started, on_resume=on_resume, auto_resume=auto_resume)
    box._destroy_on_exit = destroy
    return box


class Fork:
    """A request to fork a sandbox by name, once or several times."""

    def __init__(
        self,
        transport: Transport,
        source: str,
        body: dict[str, Any],
        *,
        live: bool,
        destroy: bool,
        auto_resume: bool | None,
    ) -> None:
        expect("live", live, bool, "True or False")
        self._transport = transport
        self._path = f"{segment(source, 'source')}/fork"
        self._body = {**body, "live": True} if live else body
        self._destroy = destroy
        self._auto_resume = auto_resume

    def one(self) -> Pending[Sandbox]:
        """Return the request for one fork."""
        key = new_key()

        async def fork() -> Sandbox:
            path = f"/v2/sandboxes/{self._path}"
            response = await self._transport.start("POST", path, json=self._body, key=key)
            return self._made(decode(SandboxStarted, response))

        return Pending(fork)

    def many(self, count: int) -> Pending[SandboxBatch]:
        """Return the request for several forks."""
        bodies.check_count(count)
        key = new_key()

        async def fork() -> SandboxBatch:
            path, body = f"/v1/sandboxes/{self._path}", {**self._body, "count": count}
            response = await self._transport.start("POST", path, json=body, key=key)
            return SandboxBatch([self._made(each) for each in decode(SandboxesStarted, response).sandboxes])

        return Pending(fork)

    def _made(self, started: SandboxStarted) -> Sandbox:
        return made(self._transport, started, destroy=self._destroy, auto_resume=self._auto_resume)
