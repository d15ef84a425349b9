"""The client: everything that can be asked of one server, in one project."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

from sandkeep.errors import NameTaken, NotFound, SnapshotGone
from sandkeep.sdk import bodies
from sandkeep.sdk._async.events import events
from sandkeep.sdk._async.images import Images
from sandkeep.sdk._async.listing import fetch_drives, fetch_sessions, fetch_snapshots, with_cursor
from sandkeep.sdk._async.paging import Listing, Page
from sandkeep.sdk._async.sandbox import BOOT_SECONDS, Hook, Sandbox, start_fork
from sandkeep.sdk._async.secrets import Secrets
from sandkeep.sdk._async.transport import Transport, read, segment
from sandkeep.sdk.bodies import Configuration, Duration, NewConfiguration
from sandkeep.sdk.concurrent import Opening
from sandkeep.sdk.history import Event
from sandkeep.sdk.queries import (
    DriveQuery,
    DriveQueryByCreated,
    SandboxQuery,
    SandboxQueryByCreated,
    SessionQuery,
    SnapshotQuery,
)
from sandkeep.sdk.target import resolve
from sandkeep.sdk.values import Drive, SandboxInfo, Session, Snapshot
from sandkeep.types import RESERVED_NAMES, duration, refuse
from sandkeep.wire.responses import DriveShown, SandboxPage, SandboxStarted, SessionShown, SnapshotShown

_ATTEMPTS = 5
"""How often a sandbox is looked for and created in turn, while others create and destroy it."""


class Client:
    """A connection to a server, acting in one project.

    Making one does no I/O. It can be shared by any number of tasks (or threads) and keeps connections for
    them; close it, or use ``async with``. It belongs to the event loop it is first used in.

    The functions of the module do the same on a client of their own, one per event loop, that is closed with
    the loop.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        team: str | None = None,
        project: str | None = None,
        timeout: Duration = 60.0,
    ) -> None:
        """
        Args:
            url: ``http://…``, ``https://…`` or ``unix:///path``; ``SANDKEEP_URL`` when not given, and without
                that the embedded server of the data directory, which is started when none runs.
            token: who asks; ``SANDKEEP_TOKEN`` when not given. The embedded server needs none.
            team: whose projects; ``SANDKEEP_TEAM`` when not given, else the token's own, else ``local``.
            project: where names are looked up; ``SANDKEEP_PROJECT`` when not given, else the token's own.
            timeout: how long to wait for an answer to a request that should be quick.

        Raises:
            InvalidRequest: an argument cannot be; ``field`` names it.
        """
        target = resolve(url, token, team, project)
        seconds = duration(timeout, "timeout").total_seconds()
        if seconds <= 0:
            refuse("timeout", "must be more than nothing")
        self._transport = Transport(target, timeout=seconds)
        self.images: Images = Images(self._transport)
        """What sandboxes start from."""
        self.secrets: Secrets = Secrets(self._transport)
        """Values that rules of network policies inject."""

    def __repr__(self) -> str:
        target = self._transport.target
        return f"<Client {target.socket or target.url}>"

    async def aclose(self) -> None:
        """Close the connections. Sandboxes are not affected. Can be repeated."""
        await self._transport.aclose()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- sandboxes ---------------------------------------------------------------------------------------

    def create_sandbox(
        self,
        name: str | None = None,
        *,
        destroy: bool = True,
        on_resume: Hook | None = None,
        **configuration: Unpack[NewConfiguration],
    ) -> Opening[Sandbox]:
        """Create a sandbox and start its first session.

        Args:
            name: unique in the project; generated when not given.
            destroy: whether leaving ``async with`` destroys the sandbox and its snapshots, or only stops it.
            on_resume: called with the handle whenever it has started a new session later on.
            configuration: see :class:`~sandkeep.NewConfiguration`.

        Returns:
            The sandbox. By itself this cleans nothing up; ``async with`` stops the session on exit and
            destroys the sandbox unless told otherwise, also when the body failed or was cancelled. A creation
            that is cancelled in ``async with`` is finished and cleaned up; elsewhere it may leave a sandbox.

        Raises:
            NameTaken: there is one of that name.
            InvalidRequest: an argument cannot be; ``field`` names it.
            LimitReached: the project has as many as it may.
            ImageError: the image cannot be had.
        """
        body = bodies.configuration(name=name, **configuration)

        async def start() -> Sandbox:
            return await self._create(body, destroy=destroy, on_resume=on_resume)

        return Opening(start)

    async def get_sandbox(self, name: str, *, on_resume: Hook | None = None) -> Sandbox:
        """A handle for a sandbox. Never starts a session.

        Args:
            name: which one.
            on_resume: called with the handle whenever it has started a new session later on.

        Raises:
            NotFound: there is none.
        """
        return await self._get(name, resume=False, on_resume=on_resume)

    def resume_sandbox(self, name: str, *, on_resume: Hook | None = None) -> Opening[Sandbox]:
        """A handle for a sandbox that has a running session, started from its latest snapshot if need be.

        Args:
            name: which one.
            on_resume: called with the handle when this, or an operation later on, started a new session.

        Returns:
            The sandbox. By itself this cleans nothing up; ``async with`` stops the session on exit. Inside,
            the handle is for that session: when another scope has stopped it, operations raise
            ``SessionStopped`` instead of starting a new one.

        Raises:
            NotFound: there is none.
            SnapshotGone: the snapshot it would start from was deleted or has expired.
        """

        async def start() -> Sandbox:
            box = await self._get(name, resume=True, on_resume=on_resume)
            box._pin_inside = True
            return box

        return Opening(start)

    def get_or_create_sandbox(
        self,
        name: str,
        *,
        on_create: Hook | None = None,
        on_resume: Hook | None = None,
        **configuration: Unpack[NewConfiguration],
    ) -> Opening[Sandbox]:
        """The sandbox of that name with a running session: resumed, or created when there is none.

        One whose snapshot is gone cannot be resumed; it is replaced by a new one of that name. Of any number
        of callers one creates.

        Args:
            name: which one.
            on_create: called with the handle when this created the sandbox.
            on_resume: called with the handle when this, or an operation later on, started a new session of a
                sandbox that was there.
            configuration: of a new one, see :class:`~sandkeep.NewConfiguration`; an existing one is not
                changed.

        Returns:
            The sandbox. By itself this cleans nothing up; ``async with`` stops the session on exit.
        """
        body = bodies.configuration(name=name, **configuration)

        async def start() -> Sandbox:
            return await self._get_or_create(name, body, on_create, on_resume)

        return Opening(start)

    def fork_sandbox(
        self,
        source: str,
        name: str | None = None,
        *,
        destroy: bool = True,
        **changes: Unpack[Configuration],
    ) -> Opening[Sandbox]:
        """A new sandbox with the configuration of another, which starts from that one's current snapshot.

        Args:
            source: the name of that one. What its running session changed since is not in the fork; see
                :meth:`Sandbox.fork`.
            name: of the new one; generated when not given.
            destroy: whether leaving ``async with`` destroys the new one, or only stops it.
            changes: what replaces what would be inherited; see :class:`~sandkeep.Configuration`.

        Returns:
            The new sandbox; as for :meth:`create_sandbox`.

        Raises:
            NotFound: there is no such source.
            NameTaken: there is one of that name.
        """
        body = bodies.configuration(name=name, **changes)
        return start_fork(self._transport, source, body, destroy=destroy)

    def query_sandboxes(self, query: SandboxQuery | None = None) -> Listing[SandboxInfo]:
        """Sandboxes of the project, newest first unless the query says otherwise."""
        parameters = (query or SandboxQueryByCreated()).parameters()

        async def fetch(cursor: str | None) -> Page[SandboxInfo]:
            answer = await self._transport.request(
                "GET", "/v2/sandboxes", query=with_cursor(parameters, cursor)
            )
            shown = read(SandboxPage, answer)
            return Page(tuple(SandboxInfo.of(sandbox) for sandbox in shown.sandboxes), shown.pagination.next)

        return Listing(fetch)

    # --- sessions and snapshots --------------------------------------------------------------------------

    def query_sessions(self, query: SessionQuery | None = None) -> Listing[Session]:
        """Sessions of the project, newest first unless the query says otherwise."""
        return Listing(fetch_sessions(self._transport, query or SessionQuery()))

    async def get_session(self, session_id: str) -> Session:
        """A session, running or over.

        Raises:
            NotFound: there is none.
        """
        path = f"/v2/sandboxes/sessions/{segment(session_id, 'session_id')}"
        return Session.of(read(SessionShown, await self._transport.request("GET", path)).session)

    def query_snapshots(self, query: SnapshotQuery | None = None) -> Listing[Snapshot]:
        """Snapshots of the project, newest first unless the query says otherwise."""
        return Listing(fetch_snapshots(self._transport, query or SnapshotQuery()))

    async def get_snapshot(self, snapshot_id: str) -> Snapshot:
        """A snapshot, or what is remembered of a deleted one.

        Raises:
            NotFound: there never was one.
        """
        path = f"/v2/sandboxes/snapshots/{segment(snapshot_id, 'snapshot_id')}"
        return Snapshot.of(read(SnapshotShown, await self._transport.request("GET", path)).snapshot)

    async def delete_snapshot(self, snapshot_id: str) -> Snapshot:
        """Delete a snapshot, also one that a sandbox would start from. Returns what is remembered of it.

        Raises:
            NotFound: there never was one.
        """
        path = f"/v2/sandboxes/snapshots/{segment(snapshot_id, 'snapshot_id')}"
        answer = await self._transport.request("DELETE", path, replay=True)
        return Snapshot.of(read(SnapshotShown, answer).snapshot)

    # --- drives ------------------------------------------------------------------------------------------

    async def get_or_create_drive(self, name: str, *, max_size_bytes: int | None = None) -> Drive:
        """The drive of that name, made when there is none.

        Args:
            name: unique in the project.
            max_size_bytes: of a new one.
        """
        body: dict[str, Any] = {"projectId": self._project()}
        if max_size_bytes is not None:
            body["maxSizeBytes"] = max_size_bytes
        return await self._drive("POST", name, body=body)

    async def get_drive(self, name_or_id: str) -> Drive:
        """A drive.

        Raises:
            NotFound: there is none.
        """
        return await self._drive("GET", name_or_id)

    async def fork_drive(self, source: str, name: str) -> Drive:
        """A new drive that starts with the content another one has now.

        Raises:
            NotFound: there is no such source.
            NameTaken: there is a drive of that name.
            DriveNotInitialized: nothing was ever written to the source.
        """
        return await self._drive("POST", source, "/fork", body={"name": name})

    async def delete_drive(self, name: str) -> Drive:
        """Delete a drive and its content. Returns what it was.

        Raises:
            NotFound: there is none.
            DriveAttached: a session has it mounted.
        """
        return await self._drive("DELETE", name)

    def query_drives(self, query: DriveQuery | None = None) -> Listing[Drive]:
        """Drives of the project, newest first unless the query says otherwise."""
        return Listing(fetch_drives(self._transport, query or DriveQueryByCreated()))

    # --- events ------------------------------------------------------------------------------------------

    async def events(self, *, kind: str | None = None, follow: bool = False) -> AsyncGenerator[Event, None]:
        """What happened in the project, and who had it done, oldest first.

        Args:
            kind: only events whose kind begins so: ``sandbox.`` or ``secret.set``.
            follow: go on as things happen, until you stop iterating; otherwise stop at what is there.
        """
        found = events(self._transport, kind=kind, follow=follow)
        async with aclosing(found):
            async for event in found:
                yield Event.of(event)

    # --- how ---------------------------------------------------------------------------------------------

    def _project(self) -> str:
        return self._transport.target.project or ""

    async def _create(self, body: dict[str, Any], *, destroy: bool, on_resume: Hook | None) -> Sandbox:
        answer = await self._transport.request(
            "POST", "/v3/sandboxes", json={**body, "projectId": self._project()}, timeout=BOOT_SECONDS
        )
        box = Sandbox(self._transport, read(SandboxStarted, answer), on_resume=on_resume)
        box._destroy_on_exit = destroy
        return box

    async def _get(self, name: str, *, resume: bool, on_resume: Hook | None) -> Sandbox:
        if name in RESERVED_NAMES:
            # At their place in the API is something else.
            raise NotFound(f"no sandbox named {name}", kind="sandbox", name=name)
        answer = await self._transport.request(
            "GET",
            f"/v2/sandboxes/{segment(name)}",
            query={"resume": "true" if resume else "false"},
            timeout=BOOT_SECONDS if resume else None,
        )
        started = read(SandboxStarted, answer)
        box = Sandbox(self._transport, started, on_resume=on_resume)
        if started.resumed and on_resume is not None:
            await on_resume(box)
        return box

    async def _get_or_create(
        self, name: str, body: dict[str, Any], on_create: Hook | None, on_resume: Hook | None
    ) -> Sandbox:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._get(name, resume=True, on_resume=on_resume)
            except SnapshotGone:
                await self._forget(name)
            except NotFound:
                pass
            try:
                box = await self._create(body, destroy=False, on_resume=on_resume)
            except NameTaken:
                if attempt == _ATTEMPTS:
                    raise
                continue  # somebody else was faster
            if on_create is not None:
                await on_create(box)
            return box

    async def _forget(self, name: str) -> None:
        try:
            await self._transport.request("DELETE", f"/v2/sandboxes/{segment(name)}", replay=True)
        except NotFound:
            pass

    async def _drive(
        self, method: str, name: str, below: str = "", *, body: dict[str, Any] | None = None
    ) -> Drive:
        path = f"/v2/sandboxes/drives/{segment(name)}{below}"
        return Drive.of(read(DriveShown, await self._transport.request(method, path, json=body)).drive)
