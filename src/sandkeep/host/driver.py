"""The interface between the engine and an isolation technology on a host.

A driver starts sessions and acts on them by reference. A reference is a host, a session and a generation:
nothing in it is local, so the same calls can later go to another machine, and a call meant for a session that
has been replaced never reaches its successor.

A driver states in ``capabilities`` what it cannot do. `sandkeep.host.reports` has the values it returns.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from sandkeep.host.reports import (
    CheckpointReport,
    FileChange,
    FileLines,
    FileStat,
    InputReport,
    ProcessRecord,
    SessionOrigin,
    SessionState,
    TreeEntry,
    Usage,
)
from sandkeep.host.rootfs import Rootfs
from sandkeep.shared.outputlog import Item


class SessionRef(NamedTuple):
    """Identifies one session on one host; never reused."""

    host: str
    session: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a session. ``None`` means unlimited.

    A limit named in ``explicit`` was asked for and is enforced or refused; the others are defaults, enforced
    where the machine can and reported where it cannot.
    """

    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = 4096
    disk_bytes: int | None = None
    explicit: frozenset[str] = frozenset()
    """A subset of ``memory``, ``cpu``, ``pids``. Disk is watched, never exact."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Everything a driver needs to start a session."""

    session: str
    rootfs: Rootfs
    generation: int = 1
    layer: str | None = None
    """The layer the root filesystem was composed from, so that it is not deleted under the session."""
    limits: Limits = field(default_factory=Limits)
    deadline_ms: int | None = None
    timeout_ms: int | None = None
    """Time left until the deadline. Later changes are measured from it, however the wall clock is set."""
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    cwd: str | None = None
    home: str | None = None
    """The default user's home directory, if not the one in the image's accounts."""
    hostname: str = "sandbox"
    volatile: bool = False
    """The session's files are not kept: the kernel may skip making them durable."""
    accept: frozenset[str] = frozenset()
    """Barriers that may be absent where the machine cannot build them; the operator has agreed to that."""
    shm_bytes: int = 64 << 20
    log_cap_bytes: int = 128 << 20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start. Follows ``subprocess``: an argument vector, no shell."""

    process: str
    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    """``None`` removes a variable of the session. Values may be secrets: they are in the request that starts
    the process, and nowhere else."""
    user: str | int | None = None
    root: bool = False
    stdin: bool = False
    """Keep standard input open for ``write_stdin``; otherwise it is empty."""
    stderr: Literal["stdout"] | None = None
    """``stdout``: one pipe for both streams."""
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal to run in."""
    kill_after_ms: int | None = None
    """Time after which the driver kills the process and its descendants."""
    grace_ms: int | None = None
    """Then they get SIGTERM first, and SIGKILL this much later."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The caller's own, kept in the record."""
    rlimits: Mapping[str, int] = field(default_factory=dict)
    log_cap_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do on this machine."""

    tier: str
    mode: str
    pty: bool = True
    checkpoint: bool = True
    freeze: str = "cgroup"
    """``cgroup``, or ``signals``, which processes can notice."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Per resource: empty when it can be enforced, otherwise why not."""


@dataclass(frozen=True, slots=True)
class Created:
    """A session that has been started."""

    state: SessionState
    listeners: tuple[int, ...] = ()
    """The result of ``Driver.listeners``, if the caller asked for it; the caller owns the descriptors."""


@dataclass(frozen=True, slots=True)
class Acting:
    """The user that does a file operation, and the directory that relative paths start from."""

    user: str | int | None = None
    """By default the session's default user."""
    root: bool = False
    cwd: str | None = None
    """By default the session's working directory."""


DEFAULT_ACTING = Acting()


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a file is written."""

    mode: int | None = None
    parents: bool = False
    """Create missing directories."""
    append: bool = False
    exclusive: bool = False
    """Fail if the file exists."""
    size: int | None = None
    """Number of bytes that will come, if known."""


class ProcessHandle(Protocol):
    """A process that was started through this driver object.

    It holds the host's announcements about the process, so that the first output and the exit arrive without
    another request. A process that was started earlier is reached by its id, through the `Driver`.
    """

    record: ProcessRecord
    """The record at the time the process had started."""

    async def wait(self) -> ProcessRecord:
        """Return the record once the process has ended, as ``Driver.wait_process``."""

    def output(self, *, offset: int = 0, follow: bool = True) -> AsyncIterator[Item]:
        """Yield what the process prints, as ``Driver.output``."""


@dataclass(frozen=True, slots=True)
class HostWarning:
    """Something about a host that its operator should know."""

    what: str
    why: str
    hint: str


class Download(Protocol):
    """An open file of a session: sent to a socket if it has a ``length``, otherwise read in chunks."""

    length: int | None

    def pieces(self) -> AsyncIterator[bytes]: ...
    async def send_to(self, fd: int) -> None: ...
    async def aclose(self) -> None: ...


class Upload(Protocol):
    """A file of a session, open for content from a socket. It appears once all of the content has arrived."""

    @property
    def answered(self) -> bool: ...

    async def receive_from(self, fd: int, *, left: int, first: bytes) -> int:
        """Write ``first`` and then ``left`` bytes of a socket; return how many bytes were written."""

    def close(self) -> None: ...


class Files(Protocol):
    """The files of one running session."""

    async def stat(self, path: str, acting: Acting = ..., *, follow: bool = True) -> FileStat: ...
    async def list(self, path: str, acting: Acting = ...) -> Sequence[FileStat]: ...
    async def mkdir(
        self, path: str, acting: Acting = ..., *, mode: int = 0o755, parents: bool = False
    ) -> None: ...
    async def rename(self, path: str, target: str, acting: Acting = ..., *, replace: bool = True) -> None: ...
    async def remove(
        self, path: str, acting: Acting = ..., *, recursive: bool = False, missing_ok: bool = False
    ) -> None: ...
    async def symlink(self, path: str, target: str, acting: Acting = ...) -> None: ...
    async def readlink(self, path: str, acting: Acting = ...) -> str: ...
    async def realpath(self, path: str, acting: Acting = ..., *, strict: bool = False) -> str: ...
    async def chmod(self, path: str, mode: int, acting: Acting = ...) -> None: ...
    async def copy(self, path: str, target: str, acting: Acting = ..., *, parents: bool = False) -> int:
        """Copy a file; return its size."""

    async def write(
        self,
        path: str,
        data: AsyncIterable[bytes],
        acting: Acting = ...,
        options: WriteOptions = ...,
    ) -> int:
        """Replace a file by the content of ``data``, all of it or nothing; return the number of bytes."""

    async def extract(
        self, path: str, data: AsyncIterable[bytes], acting: Acting = ..., *, keep_owner: bool = False
    ) -> int:
        """Unpack a tar archive, plain or gzip, below ``path``; return the number of entries."""

    async def open_read(
        self,
        path: str,
        acting: Acting = ...,
        *,
        offset: int = 0,
        length: int | None = None,
        direct: bool = False,
    ) -> Download:
        """Open a file to read it; ``direct`` if the content of a large one can go to a socket."""

    async def lines(
        self, path: str, acting: Acting = ..., *, start: int, limit: int, max_bytes: int
    ) -> FileLines:
        """Return ``limit`` lines starting at line ``start`` (from 1), as many as ``max_bytes`` allows."""

    async def open_write(self, path: str, acting: Acting = ..., options: WriteOptions = ...) -> Upload | None:
        """Open a file to write content from a socket; ``None`` where that is not possible."""

    def archive(
        self, paths: Sequence[str], acting: Acting = ..., *, ignore: Sequence[str] = ()
    ) -> AsyncIterator[bytes]:
        """Yield a tar archive of files and trees."""

    def tree(
        self, path: str, acting: Acting = ..., *, ignore: Sequence[str] = (), checksum: bool = False
    ) -> AsyncIterator[Sequence[TreeEntry]]:
        """Yield everything below a directory, in batches, a directory before its contents.

        ``ignore`` has patterns as `sandkeep.shared.ignoring` describes them.
        """
        ...

    async def tree_remove(self, path: str, names: Sequence[str], acting: Acting = ...) -> Sequence[str]:
        """Remove entries below a directory, in this order; return the directories that are not empty."""
        ...

    def tree_archive(self, path: str, names: Sequence[str], acting: Acting = ...) -> AsyncIterator[bytes]:
        """Yield a tar archive of entries below a directory, with exact times."""
        ...

    async def tree_extract(self, path: str, data: AsyncIterable[bytes], acting: Acting = ...) -> int:
        """Unpack such an archive; directories get the modes of their entries, and no link is followed."""
        ...

    def watch(
        self, path: str, acting: Acting = ..., *, recursive: bool = True
    ) -> AsyncIterator[Sequence[FileChange]]:
        """Yield changes below a directory, in batches; an empty first batch says that watching began."""


class Driver(Protocol):
    """An isolation technology on one host."""

    host: str

    async def start(self) -> None:
        """Prepare the host for sessions, unless it is prepared."""

    async def close(self) -> None:
        """Disconnect. Sessions keep running."""

    def capabilities(self) -> Capabilities: ...

    def warnings(self) -> Sequence[HostWarning]:
        """Return what the operator should know about this host, once the driver has started."""

    # --- sessions

    async def create(self, spec: SessionSpec, *, network: bool = False) -> Created:
        """Start a session, with every barrier and limit in force; ``network`` if listeners are wanted.

        Raises `WrongState` if the id was used before. On any error nothing of the session is left.
        """

    async def state(self, ref: SessionRef) -> SessionState:
        """Return the state of a session, running or ended. Raises `NotFound` if the host does not know it."""

    async def stop(self, ref: SessionRef, *, reason: str, grace_ms: int = 0) -> SessionState:
        """End a session and everything in it; return its final state. Safe to repeat."""

    async def wait_stopped(self, ref: SessionRef) -> SessionState:
        """Return the final state of a session once it has ended."""

    async def set_deadline(
        self, ref: SessionRef, deadline_ms: int | None, *, timeout_ms: int | None = None
    ) -> int | None:
        """Change when a session ends; return that time by the wall clock.

        ``timeout_ms``, the total time from the session's start, takes precedence over ``deadline_ms``.
        """

    async def usage(self, ref: SessionRef) -> Usage: ...
    async def freeze(self, ref: SessionRef) -> None: ...
    async def thaw(self, ref: SessionRef) -> None: ...

    async def checkpoint(self, ref: SessionRef, destination: str) -> CheckpointReport:
        """Copy the files that a running session wrote to a directory that does not exist yet."""

    async def forget(self, ref: SessionRef) -> None:
        """Return once nothing of an ended session is in use, so that its files can be moved or deleted."""

    async def sessions(self) -> Sequence[SessionRef]:
        """Return every session that has files or processes on this host, running or not."""

    async def origin(self, ref: SessionRef) -> SessionOrigin | None:
        """Return what a session was started with; ``None`` once its files are published or discarded.

        Raises `LayerError` if the host's record of it is damaged.
        """

    # --- network

    async def listeners(self, ref: SessionRef) -> Sequence[int]:
        """Return the descriptors that a session's traffic arrives on, and the leash to its supervisor.

        The caller owns them. Raises `HostCannot` if the session has no network.
        """

    # --- processes

    async def start_process(self, ref: SessionRef, spec: ProcessSpec) -> ProcessHandle:
        """Start a process.

        Raises `InvalidRequest` about the field ``process`` if the id is or was in use.
        """

    async def process(self, ref: SessionRef, process_id: str) -> ProcessRecord: ...
    async def processes(self, ref: SessionRef) -> Sequence[ProcessRecord]: ...

    async def wait_process(self, ref: SessionRef, process_id: str) -> ProcessRecord:
        """Return the record of a process once it has ended."""

    async def signal(
        self, ref: SessionRef, number: int, process_id: str | None = None, *, grace_ms: int | None = None
    ) -> None:
        """Send a signal to a process's group, or to every process of the session.

        ``grace_ms``: this much later SIGKILL follows, for the process and every remaining descendant.
        """

    async def write_stdin(
        self, ref: SessionRef, process_id: str, data: bytes, *, offset: int | None = None, close: bool = False
    ) -> int:
        """Write to a process's input; return the total accepted, once its pipe has taken this chunk."""

    async def input(self, ref: SessionRef, process_id: str) -> InputReport:
        """Return how much input a process has been given; of an ended one, all that it was.

        Raises `StdinUnavailable` if its input is not a pipe.
        """

    async def resize(self, ref: SessionRef, process_id: str, *, rows: int, columns: int) -> None: ...

    def has_output(self, ref: SessionRef, process_id: str) -> bool:
        """Return whether the output of a process can be read: that of an ended session may be deleted."""

    def output(
        self, ref: SessionRef, process_id: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]:
        """Yield what a process printed, from any offset.

        With ``follow`` it ends when the process has ended; without, it yields what has been written by now,
        including what children have written since the process ended.
        """

    # --- files

    def files(self, ref: SessionRef) -> Files: ...
