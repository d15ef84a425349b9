"""The functions of the module: those of a client, on the default client of the running event loop."""

from __future__ import annotations

from typing import Unpack, overload

from sandkeep.sdk._async.client import Client
from sandkeep.sdk._async.many import SandboxBatch
from sandkeep.sdk._async.paging import Listing
from sandkeep.sdk._async.process import Process
from sandkeep.sdk._async.sandbox import Hook, Sandbox
from sandkeep.sdk._compat_async import Pending, per_run
from sandkeep.sdk.queries import DriveQuery, SandboxQuery, SessionQuery, SnapshotQuery
from sandkeep.sdk.references import ProcessReference, SandboxReference
from sandkeep.sdk.sandboxes import Configuration, NewConfiguration, SandboxInfo, Session
from sandkeep.sdk.values import Drive, Snapshot

_client = per_run(Client)


def default_client() -> Client:
    """Return the client that the functions use: that of this event loop (or process), closed when it ends.

    It is made when first used, from the environment at that time.
    """
    return _client()


def create_sandbox(
    name: str | None = None,
    *,
    destroy: bool = True,
    on_resume: Hook | None = None,
    auto_resume: bool | None = None,
    **configuration: Unpack[NewConfiguration],
) -> Pending[Sandbox]:
    """Create a sandbox and start its first session; see :meth:`Client.create_sandbox`."""
    return default_client().create_sandbox(
        name, destroy=destroy, on_resume=on_resume, auto_resume=auto_resume, **configuration
    )


def create_many(
    count: int,
    name: str | None = None,
    *,
    destroy: bool = True,
    on_resume: Hook | None = None,
    auto_resume: bool | None = None,
    **configuration: Unpack[NewConfiguration],
) -> Pending[SandboxBatch]:
    """Create several sandboxes of the same configuration, all or none; see :meth:`Client.create_many`."""
    return default_client().create_many(
        count, name, destroy=destroy, on_resume=on_resume, auto_resume=auto_resume, **configuration
    )


async def get_sandbox(
    name: str, *, on_resume: Hook | None = None, auto_resume: bool | None = None
) -> Sandbox:
    """Return a handle for a sandbox without starting a session; see :meth:`Client.get_sandbox`."""
    return await default_client().get_sandbox(name, on_resume=on_resume, auto_resume=auto_resume)


@overload
async def bind(
    reference: SandboxReference, *, on_resume: Hook | None = None, auto_resume: bool | None = None
) -> Sandbox: ...


@overload
async def bind(reference: ProcessReference) -> Process: ...


async def bind(
    reference: SandboxReference | ProcessReference,
    *,
    on_resume: Hook | None = None,
    auto_resume: bool | None = None,
) -> Sandbox | Process:
    """Return a handle for a reference; see :meth:`Client.bind`."""
    client = default_client()
    if isinstance(reference, ProcessReference):
        return await client.bind(reference)
    return await client.bind(reference, on_resume=on_resume, auto_resume=auto_resume)


def resume_sandbox(
    name: str, *, on_resume: Hook | None = None, auto_resume: bool | None = None
) -> Pending[Sandbox]:
    """Return a handle for a sandbox with a running session; see :meth:`Client.resume_sandbox`."""
    return default_client().resume_sandbox(name, on_resume=on_resume, auto_resume=auto_resume)


def get_or_create_sandbox(
    name: str | None = None,
    *,
    on_create: Hook | None = None,
    on_resume: Hook | None = None,
    auto_resume: bool | None = None,
    **configuration: Unpack[NewConfiguration],
) -> Pending[Sandbox]:
    """Resume or create a sandbox; see :meth:`Client.get_or_create_sandbox`."""
    return default_client().get_or_create_sandbox(
        name, on_create=on_create, on_resume=on_resume, auto_resume=auto_resume, **configuration
    )


@overload
def fork_sandbox(
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
    source: str,
    name: str | None = None,
    *,
    live: bool = False,
    count: int | None = None,
    destroy: bool = True,
    auto_resume: bool | None = None,
    **changes: Unpack[Configuration],
) -> Pending[Sandbox] | Pending[SandboxBatch]:
    """Create a sandbox from the current snapshot of another, or several; see :meth:`Client.fork_sandbox`."""
    client = default_client()
    if count is None:
        return client.fork_sandbox(
            source, name, live=live, destroy=destroy, auto_resume=auto_resume, **changes
        )
    return client.fork_sandbox(
        source, name, live=live, count=count, destroy=destroy, auto_resume=auto_resume, **changes
    )


def query_sandboxes(query: SandboxQuery | None = None) -> Listing[SandboxInfo]:
    """List sandboxes of the project; see :meth:`Client.query_sandboxes`."""
    return default_client().query_sandboxes(query)


def query_sessions(query: SessionQuery | None = None) -> Listing[Session]:
    """List sessions of the project; see :meth:`Client.query_sessions`."""
    return default_client().query_sessions(query)


async def get_session(session_id: str) -> Session:
    """Return a session, running or ended; see :meth:`Client.get_session`."""
    return await default_client().get_session(session_id)


def query_snapshots(query: SnapshotQuery | None = None) -> Listing[Snapshot]:
    """List snapshots of the project; see :meth:`Client.query_snapshots`."""
    return default_client().query_snapshots(query)


async def get_snapshot(snapshot_id: str) -> Snapshot:
    """Return a snapshot; see :meth:`Client.get_snapshot`."""
    return await default_client().get_snapshot(snapshot_id)


async def delete_snapshot(snapshot_id: str) -> Snapshot:
    """Delete a snapshot; see :meth:`Client.delete_snapshot`."""
    return await default_client().delete_snapshot(snapshot_id)


async def get_or_create_drive(name: str, *, max_size_bytes: int | None = None) -> Drive:
    """Return a drive, creating it if needed; see :meth:`Client.get_or_create_drive`."""
    return await default_client().get_or_create_drive(name, max_size_bytes=max_size_bytes)


async def get_drive(name_or_id: str) -> Drive:
    """Return a drive; see :meth:`Client.get_drive`."""
    return await default_client().get_drive(name_or_id)


async def fork_drive(source: str, name: str) -> Drive:
    """Create a drive with the content of another; see :meth:`Client.fork_drive`."""
    return await default_client().fork_drive(source, name)


async def delete_drive(name: str) -> Drive:
    """Delete a drive; see :meth:`Client.delete_drive`."""
    return await default_client().delete_drive(name)


def query_drives(query: DriveQuery | None = None) -> Listing[Drive]:
    """List drives of the project; see :meth:`Client.query_drives`."""
    return default_client().query_drives(query)
