"""Named Linux sandboxes that keep their files between runs.

::

    import sandkeep                            # for asyncio and trio
    from sandkeep import sync as sandkeep      # the same, blocking

    async with sandkeep.create_sandbox() as box:
        done = await box.run_process("python3", ["-c", "print('hi')"], capture_output=True, check=True)
        print(done.stdout_text)

Without a server named by ``SANDKEEP_URL``, one is started in the background on this machine. Every error is a
:class:`SandkeepError`; the tree is drawn in :mod:`sandkeep.errors`.

Importing the package imports nothing else: what is named here is loaded when it is first used. The zygote and
every supervisor import from below it and must stay small.
"""

TYPE_CHECKING = False  # what checkers read as True; importing typing for it would cost more than all the rest

if TYPE_CHECKING:
    from sandkeep.errors import SandkeepError
    from sandkeep.policy import (
        Domain,
        Forward,
        Matcher,
        NetworkPolicy,
        PairMatcher,
        RequestMatch,
        Respond,
        Rule,
        Transform,
    )
    from sandkeep.sdk._async.api import (
        bind,
        create_many,
        create_sandbox,
        default_client,
        delete_drive,
        delete_snapshot,
        fork_drive,
        fork_sandbox,
        get_drive,
        get_or_create_drive,
        get_or_create_sandbox,
        get_sandbox,
        get_session,
        get_snapshot,
        query_drives,
        query_sandboxes,
        query_sessions,
        query_snapshots,
        resume_sandbox,
    )
    from sandkeep.sdk._async.batch import Batch
    from sandkeep.sdk._async.client import Client
    from sandkeep.sdk._async.files import Files
    from sandkeep.sdk._async.forwarding import PortForward
    from sandkeep.sdk._async.images import Images
    from sandkeep.sdk._async.many import SandboxBatch
    from sandkeep.sdk._async.openfile import BinaryReader, BinaryWriter, TextFileReader, TextFileWriter
    from sandkeep.sdk._async.paging import Listing, Page
    from sandkeep.sdk._async.process import Process
    from sandkeep.sdk._async.running import SandboxUser
    from sandkeep.sdk._async.sandbox import Sandbox
    from sandkeep.sdk._async.secrets import Secrets
    from sandkeep.sdk._async.streams import ByteReader, StdinWriter, TextReader
    from sandkeep.sdk._async.terminal import Terminal
    from sandkeep.sdk._compat_async import Pending
    from sandkeep.sdk.events import Event
    from sandkeep.sdk.image_config import AuthorConfig, Healthcheck
    from sandkeep.sdk.images import Image, Pulled
    from sandkeep.sdk.network import NetworkEvent, Secret
    from sandkeep.sdk.queries import (
        DriveQuery,
        DriveQueryByCreated,
        DriveQueryByName,
        DriveQueryByUpdated,
        SandboxQuery,
        SandboxQueryByCreated,
        SandboxQueryByName,
        SandboxQueryByStatusUpdated,
        SessionQuery,
        SnapshotQuery,
    )
    from sandkeep.sdk.references import ProcessReference, SandboxReference
    from sandkeep.sdk.repairs import Damage, Repaired
    from sandkeep.sdk.sandboxes import (
        Configuration,
        ConfigurationChanges,
        Duration,
        NewConfiguration,
        SandboxInfo,
        SandboxOptions,
        Session,
        Stopped,
    )
    from sandkeep.sdk.sinks import OutputTarget
    from sandkeep.sdk.values import (
        CompletedProcess,
        Drive,
        FileChange,
        FileLines,
        FileStat,
        OutputChunk,
        OutputGap,
        ProcessInfo,
        Route,
        SandboxGroup,
        ShownPolicy,
        Snapshot,
        SnapshotNode,
        Synced,
        Transferred,
        Usage,
    )
    from sandkeep.spec import (
        GitSource,
        HostPort,
        Mount,
        Resources,
        SnapshotRetention,
        SnapshotSource,
        TarballSource,
    )
    from sandkeep.states import (
        EndReason,
        FileKind,
        MountMode,
        OutputStream,
        PolicyMode,
        ProcessStatus,
        SessionStatus,
        SnapshotMethod,
        SnapshotStatus,
        SortOrder,
        Tier,
    )
    from sandkeep.version import __version__

_WHERE = {
    "version": "__version__",
    "errors": "SandkeepError",
    "sdk._async.api": "bind create_many create_sandbox default_client delete_drive delete_snapshot "
    "fork_drive fork_sandbox get_drive get_or_create_drive get_or_create_sandbox get_sandbox get_session "
    "get_snapshot query_drives query_sandboxes query_sessions query_snapshots resume_sandbox",
    "sdk._async.client": "Client",
    "sdk._async.batch": "Batch",
    "sdk._async.files": "Files",
    "sdk._async.images": "Images",
    "sdk._async.openfile": "BinaryReader BinaryWriter TextFileReader TextFileWriter",
    "sdk._async.paging": "Listing Page",
    "sdk._async.process": "Process",
    "sdk._async.running": "SandboxUser",
    "sdk._async.many": "SandboxBatch",
    "sdk._async.sandbox": "Sandbox",
    "sdk._async.secrets": "Secrets",
    "sdk._async.streams": "ByteReader StdinWriter TextReader",
    "sdk._async.forwarding": "PortForward",
    "sdk._async.terminal": "Terminal",
    "sdk._compat_async": "Pending",
    "sdk.events": "Event",
    "sdk.image_config": "Healthcheck AuthorConfig",
    "sdk.images": "Image Pulled",
    "sdk.network": "NetworkEvent Secret",
    "sdk.sandboxes": "Configuration ConfigurationChanges Duration NewConfiguration SandboxInfo "
    "SandboxOptions Session Stopped",
    "sdk.sinks": "OutputTarget",
    "sdk.references": "ProcessReference SandboxReference",
    "sdk.repairs": "Damage Repaired",
    "sdk.queries": "DriveQuery DriveQueryByCreated DriveQueryByName DriveQueryByUpdated SandboxQuery "
    "SandboxQueryByCreated SandboxQueryByName SandboxQueryByStatusUpdated SessionQuery SnapshotQuery",
    "sdk.values": "CompletedProcess Drive FileChange FileLines FileStat OutputChunk OutputGap ProcessInfo "
    "Route SandboxGroup ShownPolicy Snapshot SnapshotNode Synced Transferred Usage",
    "policy": "Domain Forward Matcher NetworkPolicy PairMatcher RequestMatch Respond Rule Transform",
    "spec": "GitSource HostPort Mount Resources SnapshotRetention SnapshotSource TarballSource",
    "states": "EndReason FileKind MountMode OutputStream PolicyMode ProcessStatus SessionStatus "
    "SnapshotMethod SnapshotStatus SortOrder Tier",
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = [
    "AuthorConfig",
    "Batch",
    "BinaryReader",
    "BinaryWriter",
    "ByteReader",
    "Client",
    "CompletedProcess",
    "Configuration",
    "ConfigurationChanges",
    "Damage",
    "Domain",
    "Drive",
    "DriveQuery",
    "DriveQueryByCreated",
    "DriveQueryByName",
    "DriveQueryByUpdated",
    "Duration",
    "EndReason",
    "Event",
    "FileChange",
    "FileKind",
    "FileLines",
    "FileStat",
    "Files",
    "Forward",
    "GitSource",
    "Healthcheck",
    "HostPort",
    "Image",
    "Images",
    "Listing",
    "Matcher",
    "Mount",
    "MountMode",
    "NetworkEvent",
    "NetworkPolicy",
    "NewConfiguration",
    "OutputChunk",
    "OutputGap",
    "OutputStream",
    "OutputTarget",
    "Page",
    "PairMatcher",
    "Pending",
    "PolicyMode",
    "PortForward",
    "Process",
    "ProcessInfo",
    "ProcessReference",
    "ProcessStatus",
    "Pulled",
    "Repaired",
    "RequestMatch",
    "Resources",
    "Respond",
    "Route",
    "Rule",
    "Sandbox",
    "SandboxBatch",
    "SandboxGroup",
    "SandboxInfo",
    "SandboxOptions",
    "SandboxQuery",
    "SandboxQueryByCreated",
    "SandboxQueryByName",
    "SandboxQueryByStatusUpdated",
    "SandboxReference",
    "SandboxUser",
    "SandkeepError",
    "Secret",
    "Secrets",
    "Session",
    "SessionQuery",
    "SessionStatus",
    "ShownPolicy",
    "Snapshot",
    "SnapshotMethod",
    "SnapshotNode",
    "SnapshotQuery",
    "SnapshotRetention",
    "SnapshotSource",
    "SnapshotStatus",
    "SortOrder",
    "StdinWriter",
    "Stopped",
    "Synced",
    "TarballSource",
    "Terminal",
    "TextFileReader",
    "TextFileWriter",
    "TextReader",
    "Tier",
    "Transferred",
    "Transform",
    "Usage",
    "__version__",
    "bind",
    "create_many",
    "create_sandbox",
    "default_client",
    "delete_drive",
    "delete_snapshot",
    "fork_drive",
    "fork_sandbox",
    "get_drive",
    "get_or_create_drive",
    "get_or_create_sandbox",
    "get_sandbox",
    "get_session",
    "get_snapshot",
    "query_drives",
    "query_sandboxes",
    "query_sessions",
    "query_snapshots",
    "resume_sandbox",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"sandkeep.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
