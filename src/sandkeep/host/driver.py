"""The interface between whoever manages sandboxes and an isolation technology on a host.

A driver starts sessions and answers for them by reference. A reference is a host, a session and a
generation: nothing in it is local, so the same calls can later go to another machine, and a call meant for a
session that has been replaced never reaches its successor.

Values here survive JSON. What a driver cannot do it says in ``capabilities`` before being asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sandkeep.host.rootfs import Rootfs
from sandkeep.supervisor.outputlog import Item


class SessionRef(NamedTuple):
    """Names one session for good."""

    host: str
    session: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a session. ``None`` is no limit.

    Those named in ``explicit`` were asked for and are enforced or refused; the others are defaults, enforced
    where the machine can and reported where it cannot.
    """

    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = 4096
    disk_bytes: int | None = None
    explicit: frozenset[str] = frozenset()
    """Of ``memory``, ``cpu``, ``pids``. Disk is watched, never exact."""


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
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    cwd: str | None = None
    hostname: str = "sandbox"
    volatile: bool = False
    """Nothing will be kept: let the kernel skip making the session's files durable."""
    accept: frozenset[str] = frozenset()
    """Barriers the operator agreed to do without where the machine cannot build them."""
    shm_bytes: int = 64 << 20
    log_cap_bytes: int = 128 << 20

    def to_json(self) -> dict[str, Any]:
        limits = {
            "memory": self.limits.memory_bytes,
            "cpu": self.limits.cpus,
            "pids": self.limits.pids,
            "disk": self.limits.disk_bytes,
        }
        return {
            "session": self.session,
            "generation": self.generation,
            "image": self.rootfs.image,
            "layer": self.layer,
            "rootfs": self.rootfs.to_json(),
            "limits": {part: [value, part in self.limits.explicit] for part, value in limits.items()},
            "deadline_ms": self.deadline_ms,
            "env": dict(self.env),
            "user": self.user or self.rootfs.defaults.user,
            "cwd": self.cwd or self.rootfs.defaults.cwd,
            "hostname": self.hostname,
            "volatile": self.volatile,
            "accept": sorted(self.accept),
            "shm_bytes": self.shm_bytes,
            "log_cap_bytes": self.log_cap_bytes,
        }


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. Follows ``subprocess``: an argument vector, no shell."""

    process: str
    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | int | None = None
    root: bool = False
    stdin: bool = False
    """Keep standard input open for ``write_stdin``; otherwise it is empty."""
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal to run in."""
    kill_after_ms: int | None = None
    """After this long the process and every descendant of it die."""
    rlimits: Mapping[str, int] = field(default_factory=dict)
    log_cap_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "process": self.process,
            "argv": list(self.argv),
            "cwd": self.cwd,
            "env": dict(self.env),
            "user": self.user,
            "root": self.root,
            "stdin": "pipe" if self.stdin else "closed",
            "pty": list(self.pty) if self.pty else None,
            "kill_after_ms": self.kill_after_ms,
            "rlimits": dict(self.rlimits),
            "log_cap_bytes": self.log_cap_bytes,
        }


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do on this machine."""

    tier: str
    mode: str
    pty: bool = True
    checkpoint: bool = True
    freeze: str = "cgroup"
    """``cgroup``, or ``signals`` where processes can notice."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Per resource: empty when it can be enforced, otherwise why not."""


class Download(Protocol):
    """A file of a session, open: sent to a socket if it has a ``length``, otherwise taken in pieces."""

    length: int | None

    def pieces(self) -> AsyncIterator[bytes]: ...
    async def send_to(self, fd: int) -> None: ...
    async def aclose(self) -> None: ...


class Upload(Protocol):
    """A file of a session, open for content on a socket. It appears when all of that is there."""

    @property
    def answered(self) -> bool: ...
    async def receive_from(self, fd: int, *, left: int, first: bytes) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """An isolation technology on one host."""

    host: str

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SessionSpec, *, network: bool = False) -> dict[str, Any]: ...
    async def state(self, ref: SessionRef) -> dict[str, Any]: ...
    async def stop(self, ref: SessionRef, *, reason: str, grace_ms: int = 0) -> dict[str, Any]: ...
    async def wait_stopped(self, ref: SessionRef) -> dict[str, Any]: ...
    async def set_deadline(self, ref: SessionRef, deadline_ms: int | None) -> None: ...
    async def usage(self, ref: SessionRef) -> dict[str, Any]: ...
    async def freeze(self, ref: SessionRef) -> None: ...
    async def thaw(self, ref: SessionRef) -> None: ...
    async def checkpoint(self, ref: SessionRef, destination: str) -> dict[str, Any]: ...
    async def forget(self, ref: SessionRef) -> None: ...
    async def sessions(self) -> list[SessionRef]: ...

    async def listeners(self, ref: SessionRef) -> list[int]: ...
    async def sockets(self, ref: SessionRef, *, count: int, family: int) -> list[int]: ...

    async def start_process(self, ref: SessionRef, spec: ProcessSpec) -> dict[str, Any]: ...
    async def process(self, ref: SessionRef, process: str) -> dict[str, Any]: ...
    async def processes(self, ref: SessionRef) -> list[dict[str, Any]]: ...
    async def wait_process(self, ref: SessionRef, process: str) -> dict[str, Any]: ...
    async def signal(self, ref: SessionRef, number: int, process: str | None = None) -> None: ...
    async def write_stdin(
        self, ref: SessionRef, process: str, data: bytes, *, offset: int | None = None, close: bool = False
    ) -> int: ...
    async def resize(self, ref: SessionRef, process: str, *, rows: int, columns: int) -> None: ...
    def output(
        self, ref: SessionRef, process: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]: ...

    async def files(self, ref: SessionRef, operation: str, **arguments: Any) -> dict[str, Any]: ...
    async def open_read(self, ref: SessionRef, path: str, *, direct: bool, **arguments: Any) -> Download: ...
    async def open_write(self, ref: SessionRef, path: str, **arguments: Any) -> Upload | None: ...
    def read_file(self, ref: SessionRef, path: str, **arguments: Any) -> AsyncIterator[bytes]: ...
    def watch(self, ref: SessionRef, path: str, **arguments: Any) -> AsyncIterator[list[dict[str, Any]]]: ...
    def archive(self, ref: SessionRef, paths: list[str], **arguments: Any) -> AsyncIterator[bytes]: ...
