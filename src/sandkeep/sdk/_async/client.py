"""The client: all operations on one server, in one project."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack, get_args, overload

from sandkeep.checks import RESERVED_NAMES, duration, refuse
from sandkeep.errors import ConfigurationDiffers, NameTaken, NotFound, SnapshotGone
from sandkeep.sdk import bodies, references
from sandkeep.sdk._async.events import events
from sandkeep.sdk._async.images import Images
from sandkeep.sdk._async.listing import fetch_drives, fetch_sessions, fetch_snapshots, with_cursor
from sandkeep.sdk._async.many import SandboxBatch
from sandkeep.sdk._async.paging import Listing, Page
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.recovery import checked_auto_resume
from sandkeep.sdk._async.sandbox import Fork, Hook, Sandbox, get_process, made
from sandkeep.sdk._async.secrets import Secrets
from sandkeep.sdk._async.transport import Transport, decode, new_key, segment
from sandkeep.sdk._compat_async import OwnWith, Pending
from sandkeep.sdk.events import Event
from sandkeep.sdk.images import Pulled, PullPolicy
from sandkeep.sdk.queries import (
    DriveQuery,
    DriveQueryByCreated,
    SandboxQuery,
    SandboxQueryByCreated,
    SessionQuery,
    SnapshotQuery,
)
from sandkeep.sdk.references import ProcessReference, SandboxReference
from sandkeep.sdk.repairs import Repaired
from sandkeep.sdk.sandboxes import Configuration, Duration, NewConfiguration, SandboxInfo, Session
from sandkeep.sdk.target import resolve
from sandkeep.sdk.values import Drive, Snapshot
from sandkeep.states import Paths
from sandkeep.wire.repairs import RepairShown
from sandkeep.wire.responses import (
    DriveShown,
    SandboxesStarted,
    SandboxPage,
    SandboxStarted,
    SessionShown,
    SnapshotShown,
)

_ATTEMPTS = 5
"""How often to alternate between finding and creating a sandbox that other clients create and destroy."""


class Client(OwnWith):
    """A connection to a server, acting in one project.

    Making one does no I/O. Any number of tasks (or threads) can share it and its connections; close it, or
    use ``async with``. It belongs to the event loop it is first used in.

    The functions of the module do the same on a default client, one per event loop, that is closed with the
    loop.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        team: str | None = None,
        project: str | None = None,
        timeout: Duration = 60.0,
        auto_resume: bool | None = None,
    ) -> None:
        """
        Args:
            url: ``http://…``, ``https://…`` or ``unix:///path``; default ``SANDKEEP_URL``, else the embedded
                server of the data directory, which is started if none runs.
            token: credentials; default ``SANDKEEP_TOKEN``. The embedded server needs none.
            team: owner of the projects; default ``SANDKEEP_TEAM``, else the token's team, else ``local``.
            project: where names are looked up; default ``SANDKEEP_PROJECT``, else the token's project.
            timeout: how long to wait for the response to a short request.
            auto_resume: for every handle that is made with no other: whether an operation starts a session if
                the sandbox's has ended. By default it does if the files of the ended session were kept, as
                those of a persistent sandbox are. ``True``: always, if need be without files. ``False``:
                never. Where no session is started, the operation raises ``SessionStopped``.

        Raises:
            InvalidRequest: an argument is invalid; ``field`` names it.
        """
        target = resolve(url, token, team, project)
        seconds = duration(timeout, "timeout").total_seconds()
        if seconds <= 0:
            refuse("timeout", "must be greater than zero")
        self._auto_resume = checked_auto_resume(auto_resume)
        self._transport = Transport(target, timeout=seconds)
        self.images: Images = Images(self._transport)
        """Images that sandboxes start from."""
        self.secrets: Secrets = Secrets(self._transport)
        """Secrets that rules of network policies inject."""

    def __repr__(self) -> str:
        target = self._transport.target
        return f"<Client {target.socket or target.url}>"

    @property
    def url(self) -> str:
        """URL of the server: ``http://…``, ``https://…`` or ``unix:///path``."""
        return self._transport.target.address

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
        auto_resume: bool | None = None,
        pull: PullPolicy = "missing",
        on_pull: Callable[[Pulled], object] | None = None,
        **configuration: Unpack[NewConfiguration],
    ) -> Pending[Sandbox]:
        """Create a sandbox and start its first session.

        Args:
            name: unique in the project; generated by default.
            destroy: whether leaving ``async with`` destroys the sandbox and its snapshots, or only stops it.
            on_resume: called with the handle after each later session that it starts.
            auto_resume: whether operations start a session when this one has ended; see :class:`Client`.
            pull: when to fetch ``image`` from its registry: ``missing``, if the project does not have it;
                ``always``, so that a tag means what it means there now; ``never``.
            on_pull: called from time to time with the progress of each part of that image.
            configuration: see :class:`~sandkeep.NewConfiguration`.

        Returns:
            The sandbox. ``await`` does no clean-up; ``async with`` stops the session on exit and destroys the
            sandbox unless ``destroy=False``, also if the block failed or was cancelled. If a creation in
            ``async with`` is cancelled, it is finished and cleaned up; otherwise it may leave a sandbox.

        Raises:
            NameTaken: a sandbox of that name exists.
            InvalidRequest: an argument is invalid; ``field`` names it.
            LimitReached: the project has the maximum number of sandboxes.
            ImageError: the image cannot be fetched or used.
        """
        body = bodies.configuration(name=name, **configuration)
        chosen = self._chosen(auto_resume)

        async def start() -> Sandbox:
            return await self._create_pulling(
                body, pull, on_pull, destroy=destroy, on_resume=on_resume, auto_resume=chosen
            )

        return Pending(start)

    def create_many(
        self,
        count: int,
        name: str | None = None,
        *,
        destroy: bool = True,
        on_resume: Hook | None = None,
        auto_resume: bool | None = None,
        **configuration: Unpack[NewConfiguration],
    ) -> Pending[SandboxBatch]:
        """Create several sandboxes of the same configuration in one request: all of them or none.

        Args:
            count: how many, up to 100.
            name: they are called ``NAME-1``, ``NAME-2`` and so on; generated names by default.
            destroy: whether leaving ``async with`` destroys them and their snapshots, or only stops them.
            on_resume: called with a handle after each later session that it starts.
            auto_resume: whether operations start a session when one has ended; see :class:`Client`.
            configuration: see :class:`~sandkeep.NewConfiguration`.

        Returns:
            The sandboxes, in the order of their names; as for :meth:`create_sandbox`.

        Raises:
            SandkeepError: one cannot be created, as for :meth:`create_sandbox`; there is none of them then.
        """
        bodies.check_count(count)
        body = {**bodies.configuration(name=name, **configuration), "count": count}
        chosen, key = self._chosen(auto_resume), new_key()

        async def create_many() -> SandboxBatch:
            sent = {**body, "paths": Paths.SANDKEEP, "projectId": self._project()}
            response = await self._transport.start("POST", "/v1/sandboxes", json=sent, key=key)
            return SandboxBatch(
                [
                    made(self._transport, each, destroy=destroy, auto_resume=chosen, on_resume=on_resume)
                    for each in decode(SandboxesStarted, response).sandboxes
                ]
            )

        return Pending(create_many)

    async def get_sandbox(
        self, name: str, *, on_resume: Hook | None = None, auto_resume: bool | None = None
    ) -> Sandbox:
        """Return a handle for a sandbox. Never starts a session.

        Args:
            name: name of the sandbox.
            on_resume: called with the handle after each later session that it starts.
            auto_resume: whether operations start a session if none runs; see :class:`Client`.

        Raises:
            NotFound: it does not exist.
        """
        return await self._get(name, resume=False, on_resume=on_resume, auto_resume=self._chosen(auto_resume))

    @overload
    async def bind(
        self,
        reference: SandboxReference,
        *,
        on_resume: Hook | None = None,
        auto_resume: bool | None = None,
    ) -> Sandbox: ...

    @overload
    async def bind(self, reference: ProcessReference) -> Process: ...

    async def bind(
        self,
        reference: SandboxReference | ProcessReference,
        *,
        on_resume: Hook | None = None,
        auto_resume: bool | None = None,
    ) -> Sandbox | Process:
        """Return a handle for a reference made by ``reference()``, here or elsewhere. Never starts a session.

        Args:
            reference: to a sandbox or a process on this client's server.
            on_resume: for a sandbox: called with the handle after each later session that it starts.
            auto_resume: for a sandbox: whether operations start a session; see :class:`Client`.

        Returns:
            An ordinary handle that uses this client's connections and credentials.

        Raises:
            NotFound: it no longer exists, or this client may not see it. InvalidRequest: it is on another
                server, or in another team or project than the client's; ``field`` says which.
        """
        references.check(reference, self._transport.target)
        if isinstance(reference, ProcessReference):
            return await get_process(self._transport, reference.session_id, reference.id)
        box = await self._get(
            reference.name, resume=False, on_resume=on_resume, auto_resume=self._chosen(auto_resume)
        )
        references.check_project(reference, box._project)
        return box

    def resume_sandbox(
        self, name: str, *, on_resume: Hook | None = None, auto_resume: bool | None = None
    ) -> Pending[Sandbox]:
        """Return a handle for a sandbox with a running session; if there is none, start one.

        A new session starts from the sandbox's current snapshot.

        Args:
            name: name of the sandbox. on_resume: called with the handle when this call, or an operation later
                on, started a new session. If it raises during this call, that session is stopped.
                auto_resume: whether operations start a session when this one has ended; see :class:`Client`.

        Returns:
            The sandbox. ``await`` does no clean-up; ``async with`` stops the session on exit. Inside it the
            handle is bound to that session: if the session is stopped elsewhere, operations raise
            ``SessionStopped`` instead of starting a new one.

        Raises:
            NotFound: the sandbox does not exist.
            SnapshotGone: the snapshot it would start from was deleted or has expired.
        """

        chosen = self._chosen(auto_resume)

        async def start() -> Sandbox:
            box = await self._get(name, resume=True, on_resume=on_resume, auto_resume=chosen)
            box._pin_inside = True
            return box

        return Pending(start)

    def get_or_create_sandbox(
        self,
        name: str | None = None,
        *,
        on_create: Hook | None = None,
        on_resume: Hook | None = None,
        auto_resume: bool | None = None,
        pull: PullPolicy = "missing",
        on_pull: Callable[[Pulled], object] | None = None,
        **configuration: Unpack[NewConfiguration],
    ) -> Pending[Sandbox]:
        """Return a sandbox with a running session: resumed, or created if it does not exist.

        A sandbox whose snapshot is gone cannot be resumed; it is replaced by a new one of that name. If
        several callers do this at the same time, one of them creates the sandbox.

        Args:
            name: name of the sandbox; without one, a sandbox with a generated name is created.
            on_create: called with the handle if this call created the sandbox.
            on_resume: called with the handle if this call, or an operation later on, started a new session of
                an existing sandbox. If a hook raises during this call, the session that was started is
                stopped.
            auto_resume: whether operations start a session when this one has ended; see :class:`Client`.
            pull: when to fetch the image of a new sandbox; see :meth:`create_sandbox`.
            on_pull: called with the progress of that; see :meth:`create_sandbox`.
            configuration: options of a new sandbox, see :class:`~sandkeep.NewConfiguration`. An existing
                sandbox is not changed: it must have the options given here, and may have anything for the
                others.

        Returns:
            The sandbox. ``await`` does no clean-up; ``async with`` stops the session on exit.

        Raises:
            ConfigurationDiffers: the sandbox exists with other options; ``field``, ``found`` and ``asked``
                say which. :meth:`Sandbox.update` changes it. Nothing was started.
        """
        body = bodies.configuration(name=name, **configuration)
        chosen = self._chosen(auto_resume)

        async def start() -> Sandbox:
            return await self._get_or_create(name, body, on_create, on_resume, chosen, pull, on_pull)

        return Pending(start)

    @overload
    def fork_sandbox(
        self,
        source: str,
        name: str | None = None,
        *,
        live: bool = False,
        count: None = None,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[Sandbox]: ...

    @overload
    def fork_sandbox(
        self,
        source: str,
        name: str | None = None,
        *,
        live: bool = False,
        count: int,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[SandboxBatch]: ...

    def fork_sandbox(
        self,
        source: str,
        name: str | None = None,
        *,
        live: bool = False,
        count: int | None = None,
        destroy: bool = True,
        auto_resume: bool | None = None,
        **changes: Unpack[Configuration],
    ) -> Pending[Sandbox] | Pending[SandboxBatch]:
        """Create a sandbox with the configuration of another, starting from that one's current snapshot.

        Args:
            source: name of the sandbox to fork. Changes that its running session made since the snapshot are
                not in the fork, whose ``left_out`` then names that session; see :meth:`Sandbox.fork`.
            name: name of the new sandbox; generated by default.
            live: start from the running session's present files, by a checkpoint.
            count: make so many forks in one request, all of them or none; see :meth:`Sandbox.fork`.
            destroy: whether leaving ``async with`` destroys the new sandbox, or only stops it.
            auto_resume: whether operations start a session when this one has ended; see :class:`Client`.
            changes: options that replace inherited ones; see :class:`~sandkeep.Configuration`.

        Returns:
            The new sandbox; as for :meth:`create_sandbox`.

        Raises:
            NotFound: the source does not exist.
            NameTaken: a sandbox of that name exists.
        """
        body = bodies.configuration(name=name, **changes)
        chosen = self._chosen(auto_resume)
        fork = Fork(self._transport, source, body, live=live, destroy=destroy, auto_resume=chosen)
        return fork.one() if count is None else fork.many(count)

    def query_sandboxes(self, query: SandboxQuery | None = None) -> Listing[SandboxInfo]:
        """List sandboxes of the project, newest first unless the query says otherwise."""
        parameters = (query or SandboxQueryByCreated()).parameters()

        async def fetch(cursor: str | None) -> Page[SandboxInfo]:
            response = await self._transport.request(
                "GET", "/v2/sandboxes", query=with_cursor(parameters, cursor)
            )
            shown = decode(SandboxPage, response)
            return Page(tuple(SandboxInfo.of(sandbox) for sandbox in shown.sandboxes), shown.pagination.next)

        return Listing(fetch)

    # --- sessions and snapshots --------------------------------------------------------------------------

    def query_sessions(self, query: SessionQuery | None = None) -> Listing[Session]:
        """List sessions of the project, newest first unless the query says otherwise."""
        return Listing(fetch_sessions(self._transport, query or SessionQuery()))

    async def get_session(self, session_id: str) -> Session:
        """Return a session, running or ended.

        Raises:
            NotFound: it does not exist.
        """
        path = f"/v2/sandboxes/sessions/{segment(session_id, 'session_id')}"
        return Session.of(decode(SessionShown, await self._transport.request("GET", path)).session)

    def query_snapshots(self, query: SnapshotQuery | None = None) -> Listing[Snapshot]:
        """List snapshots of the project, newest first unless the query says otherwise."""
        return Listing(fetch_snapshots(self._transport, query or SnapshotQuery()))

    async def get_snapshot(self, snapshot_id: str) -> Snapshot:
        """Return a snapshot, or the record of a deleted one.

        Raises:
            NotFound: it never existed.
        """
        path = f"/v2/sandboxes/snapshots/{segment(snapshot_id, 'snapshot_id')}"
        return Snapshot.of(decode(SnapshotShown, await self._transport.request("GET", path)).snapshot)

    async def delete_snapshot(self, snapshot_id: str) -> Snapshot:
        """Delete a snapshot, even one that a sandbox would start from. Returns its record.

        Raises:
            NotFound: it never existed.
        """
        path = f"/v2/sandboxes/snapshots/{segment(snapshot_id, 'snapshot_id')}"
        response = await self._transport.request("DELETE", path, replay=True)
        return Snapshot.of(decode(SnapshotShown, response).snapshot)

    # --- drives ------------------------------------------------------------------------------------------

    async def get_or_create_drive(self, name: str, *, max_size_bytes: int | None = None) -> Drive:
        """Return the drive of that name; create it if it does not exist.

        Args:
            name: unique in the project. max_size_bytes: capacity; an existing drive must have the same. A
                session that writes more to it is stopped within seconds, and what it wrote is kept.

        Raises:
            ConfigurationDiffers: it exists with another ``max_size_bytes``.
        """
        body: dict[str, Any] = {"projectId": self._project()}
        if max_size_bytes is not None:
            body["maxSizeBytes"] = max_size_bytes
        drive = await self._drive("POST", name, body=body, replay=True)
        if max_size_bytes not in (None, drive.max_size_bytes):
            raise ConfigurationDiffers(
                f"drive {name} holds up to {drive.max_size_bytes} bytes, not the requested {max_size_bytes}",
                name=name,
                field="max_size_bytes",
                found=drive.max_size_bytes,
                asked=max_size_bytes,
            )
        return drive

    async def get_drive(self, name_or_id: str) -> Drive:
        """Return a drive.

        Raises:
            NotFound: it does not exist.
        """
        return await self._drive("GET", name_or_id)

    async def fork_drive(self, source: str, name: str) -> Drive:
        """Create a drive with the content of another one.

        The content is what ended sessions left on it. Writes of a running session are not in the fork,
        because they may be incomplete.

        Raises:
            NotFound: the source does not exist.
            NameTaken: a drive of that name exists.
            DriveNotInitialized: nothing was ever written to the source.
        """
        return await self._drive("POST", source, "/fork", body={"name": name})

    async def delete_drive(self, name: str) -> Drive:
        """Delete a drive and its content. Returns its record.

        Raises:
            NotFound: it does not exist.
            DriveAttached: a session has it mounted, or a sandbox is configured to mount it as a snapshot and
                could not be resumed without it.
        """
        return await self._drive("DELETE", name)

    def query_drives(self, query: DriveQuery | None = None) -> Listing[Drive]:
        """List drives of the project, newest first unless the query says otherwise."""
        return Listing(fetch_drives(self._transport, query or DriveQueryByCreated()))

    # --- events ------------------------------------------------------------------------------------------

    async def events(self, *, kind: str | None = None, follow: bool = False) -> AsyncGenerator[Event, None]:
        """Yield events of the project and who caused them, oldest first.

        Args:
            kind: only events whose kind starts with this: ``sandbox.`` or ``secret.set``.
            follow: continue with new events until you stop iterating; otherwise stop at the last recorded
                one.
        """
        found = events(self._transport, kind=kind, follow=follow)
        async with aclosing(found):
            async for event in found:
                yield Event.of(event)

    # --- how ---------------------------------------------------------------------------------------------

    # --- damage ------------------------------------------------------------------------------------------

    async def repair(
        self, name: str | None = None, *, use_older: bool = False, drop: bool = False
    ) -> Repaired:
        """Find damage on the server's disk, repair what can be repaired, and report the rest.

        Args:
            name: one sandbox; by default all of the project.
            use_older: let damaged sandboxes continue from their newest intact snapshot.
            drop: delete snapshots that cannot be read and that no sandbox starts from.

        Raises:
            NotFound: the sandbox does not exist.
        """
        body: dict[str, Any] = {"useOlder": use_older, "drop": drop}
        if name is not None:
            body["name"] = name
        response = await self._transport.request("POST", "/v1/repair", json=body, replay=True)
        return Repaired.of(decode(RepairShown, response))

    def _project(self) -> str:
        return self._transport.target.project or ""

    def _chosen(self, auto_resume: bool | None) -> bool | None:
        """Return what a new handle does: as its caller says, else as the client's."""
        return self._auto_resume if auto_resume is None else checked_auto_resume(auto_resume)

    async def _create_pulling(
        self,
        body: dict[str, Any],
        pull: PullPolicy,
        on_pull: Callable[[Pulled], object] | None,
        *,
        destroy: bool,
        on_resume: Hook | None,
        auto_resume: bool | None,
    ) -> Sandbox:
        """Create a sandbox; fetch its image before, or if the server does not have it."""
        if pull not in get_args(PullPolicy):
            refuse("pull", f"must be one of {', '.join(get_args(PullPolicy))}, not {pull!r}")
        image = body.get("image")
        if pull != "always" or image in (None, "host"):
            try:
                return await self._create(body, destroy=destroy, on_resume=on_resume, auto_resume=auto_resume)
            except NotFound as error:
                if pull == "never" or image is None or error.details.get("image") != image:
                    raise
        await self.images.pull(str(image), progress=on_pull)
        return await self._create(body, destroy=destroy, on_resume=on_resume, auto_resume=auto_resume)

    async def _create(
        self, body: dict[str, Any], *, destroy: bool, on_resume: Hook | None, auto_resume: bool | None
    ) -> Sandbox:
        response = await self._transport.start(
            "POST",
            "/v3/sandboxes",
            json={**body, "paths": Paths.SANDKEEP, "projectId": self._project()},
            key=new_key(),
        )
        started = decode(SandboxStarted, response)
        return made(self._transport, started, destroy=destroy, auto_resume=auto_resume, on_resume=on_resume)

    async def _get(
        self,
        name: str,
        *,
        resume: bool,
        on_resume: Hook | None,
        auto_resume: bool | None,
        asked: dict[str, Any] | None = None,
    ) -> Sandbox:
        if name in RESERVED_NAMES:
            # These names are other routes of the API.
            raise NotFound(f"no sandbox named {name}", kind="sandbox", name=name)
        if asked is not None and asked.keys() - {"name"}:
            response = await self._transport.start(
                "POST",
                f"/v1/sandboxes/{segment(name)}/resume",
                json={**asked, "projectId": self._project()},
                replay=True,
            )
        else:
            ask = self._transport.start if resume else self._transport.request
            query = {"resume": "true" if resume else "false"}
            response = await ask("GET", f"/v2/sandboxes/{segment(name)}", query=query)
        started = decode(SandboxStarted, response)
        box = Sandbox(self._transport, started, on_resume=on_resume, auto_resume=auto_resume)
        if started.resumed and on_resume is not None:
            await self._call(on_resume, box)
        return box

    async def _get_or_create(
        self,
        name: str | None,
        body: dict[str, Any],
        on_create: Hook | None,
        on_resume: Hook | None,
        auto_resume: bool | None,
        pull: PullPolicy,
        on_pull: Callable[[Pulled], object] | None,
    ) -> Sandbox:
        attempt = 0
        while True:
            attempt += 1
            if name is not None:
                try:
                    return await self._get(
                        name, resume=True, on_resume=on_resume, auto_resume=auto_resume, asked=body
                    )
                except SnapshotGone:
                    await self._forget(name)
                except NotFound:
                    pass
            try:
                box = await self._create_pulling(
                    body, pull, on_pull, destroy=False, on_resume=on_resume, auto_resume=auto_resume
                )
            except NameTaken:
                if attempt == _ATTEMPTS:
                    raise
                continue  # another client created it first
            if on_create is not None:
                await self._call(on_create, box)
            return box

    async def _call(self, hook: Hook, box: Sandbox) -> None:
        """Call a hook; if it fails, end the session that was started, because the caller gets no handle."""
        try:
            await hook(box)
        except BaseException as error:
            await box.__aexit__(type(error), error, error.__traceback__)
            raise

    async def _forget(self, name: str) -> None:
        try:
            await self._transport.request("DELETE", f"/v2/sandboxes/{segment(name)}", replay=True)
        except NotFound:
            pass

    async def _drive(
        self,
        method: str,
        name: str,
        below: str = "",
        *,
        body: dict[str, Any] | None = None,
        replay: bool = False,
    ) -> Drive:
        path = f"/v2/sandboxes/drives/{segment(name)}{below}"
        response = await self._transport.request(method, path, json=body, replay=replay)
        return Drive.of(decode(DriveShown, response).drive)
