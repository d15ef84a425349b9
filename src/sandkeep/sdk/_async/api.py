"""The functions of the module: a client's, on the default client of the running event loop."""

from __future__ import annotations

from typing import Unpack

from sandkeep.sdk._async.client import Client
from sandkeep.sdk._async.paging import Listing
from sandkeep.sdk._async.sandbox import Hook, Sandbox
from sandkeep.sdk.bodies import Configuration, NewConfiguration
from sandkeep.sdk.concurrent import Opening, per_run
from sandkeep.sdk.queries import DriveQuery, SandboxQuery, SessionQuery, SnapshotQuery
from sandkeep.sdk.values import Drive, SandboxInfo, Session, Snapshot

_client = per_run(Client)


def default_client() -> Client:
    """The client the functions use: of this event loop (or process), closed when that ends.

    It is made when first needed, from the environment as it is then.
    """
    return _client()


def create_sandbox(
    name: str | None = None,
    *,
    destroy: bool = True,
    on_resume: Hook | None = None,
    **configuration: Unpack[NewConfiguration],
) -> Opening[Sandbox]:
    """Create a sandbox and start its first session; see :meth:`Client.create_sandbox`."""
    return default_client().create_sandbox(name, destroy=destroy, on_resume=on_resume, **configuration)


async def get_sandbox(name: str, *, on_resume: Hook | None = None) -> Sandbox:
    """A handle for a sandbox, without starting a session; see :meth:`Client.get_sandbox`."""
    return await default_client().get_sandbox(name, on_resume=on_resume)


def resume_sandbox(name: str, *, on_resume: Hook | None = None) -> Opening[Sandbox]:
    """A handle for a sandbox with a running session; see :meth:`Client.resume_sandbox`."""
    return default_client().resume_sandbox(name, on_resume=on_resume)


def get_or_create_sandbox(
    name: str,
    *,
    on_create: Hook | None = None,
    on_resume: Hook | None = None,
    **configuration: Unpack[NewConfiguration],
) -> Opening[Sandbox]:
    """The sandbox of that name, resumed or created; see :meth:`Client.get_or_create_sandbox`."""
    return default_client().get_or_create_sandbox(
        name, on_create=on_create, on_resume=on_resume, **configuration
    )


def fork_sandbox(
    source: str, name: str | None = None, *, destroy: bool = True, **changes: Unpack[Configuration]
) -> Opening[Sandbox]:
    """A new sandbox from the current snapshot of another; see :meth:`Client.fork_sandbox`."""
    return default_client().fork_sandbox(source, name, destroy=destroy, **changes)


def query_sandboxes(query: SandboxQuery | None = None) -> Listing[SandboxInfo]:
    """Sandboxes of the project; see :meth:`Client.query_sandboxes`."""
    return default_client().query_sandboxes(query)


def query_sessions(query: SessionQuery | None = None) -> Listing[Session]:
    """Sessions of the project; see :meth:`Client.query_sessions`."""
    return default_client().query_sessions(query)


async def get_session(session_id: str) -> Session:
    """A session, running or over; see :meth:`Client.get_session`."""
    return await default_client().get_session(session_id)


def query_snapshots(query: SnapshotQuery | None = None) -> Listing[Snapshot]:
    """Snapshots of the project; see :meth:`Client.query_snapshots`."""
    return default_client().query_snapshots(query)


async def get_snapshot(snapshot_id: str) -> Snapshot:
    """A snapshot; see :meth:`Client.get_snapshot`."""
    return await default_client().get_snapshot(snapshot_id)


async def delete_snapshot(snapshot_id: str) -> Snapshot:
    """Delete a snapshot; see :meth:`Client.delete_snapshot`."""
    return await default_client().delete_snapshot(snapshot_id)


async def get_or_create_drive(name: str, *, max_size_bytes: int | None = None) -> Drive:
    """The drive of that name, made when there is none; see :meth:`Client.get_or_create_drive`."""
    return await default_client().get_or_create_drive(name, max_size_bytes=max_size_bytes)


async def get_drive(name_or_id: str) -> Drive:
    """A drive; see :meth:`Client.get_drive`."""
    return await default_client().get_drive(name_or_id)


async def fork_drive(source: str, name: str) -> Drive:
    """A new drive with the content of another; see :meth:`Client.fork_drive`."""
    return await default_client().fork_drive(source, name)


async def delete_drive(name: str) -> Drive:
    """Delete a drive; see :meth:`Client.delete_drive`."""
    return await default_client().delete_drive(name)


def query_drives(query: DriveQuery | None = None) -> Listing[Drive]:
    """Drives of the project; see :meth:`Client.query_drives`."""
    return default_client().query_drives(query)
