"""Sandboxes and sessions in the SDK: the keywords of callers, and the values and properties of responses.

An option of a sandbox has its keyword in `SandboxOptions`, its field in `SandboxInfo` and its property in
`SandboxState`, and a field in `Session` if sessions have their own copy. `sandkeep.spec` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypedDict

from msgspec import UnsetType

from sandkeep.dataclass import dataclass
from sandkeep.errors import InvalidRequest
from sandkeep.frozen import Frozen
from sandkeep.policy import NetworkPolicy
from sandkeep.sdk.values import Route, ShownPolicy, Snapshot, Usage, given, moment, span
from sandkeep.spec import (
    DEFAULT_CPUS,
    DEFAULT_MEMORY_MB,
    HostPort,
    Mount,
    Resources,
    SnapshotRetention,
    Source,
)
from sandkeep.states import SessionStatus, Tier

if TYPE_CHECKING:
    from sandkeep.wire.objects import RetentionObject, SandboxObject, SessionObject
    from sandkeep.wire.responses import SandboxStarted


Duration = timedelta | float
"""A duration: a ``timedelta``, or seconds."""


class SandboxOptions(TypedDict, total=False):
    """What a sandbox can be configured with, and what can be changed later."""

    ports: Sequence[int]
    """Ports that can be reached from outside; at most 15."""
    execution_time_limit: Duration
    """How long each session lives unless it is extended; five minutes by default."""
    idle_timeout: Duration
    """How long each session may be unused before the server stops it, as :meth:`Sandbox.stop` does; zero, the
    default, is for ever."""
    resources: Resources
    """Processors, memory, disk space and processes, each optional. The server refuses limits that its host
    can neither enforce nor watch, with `LimitUnenforceable`, unless they are not ``exact``. A change replaces
    all of them: what the new value leaves out has its default."""
    persistent: bool
    """Keep files between sessions; the default."""
    destroy_on_stop: bool
    """Let the server destroy the sandbox, with its snapshots, when its session ends for any reason: a stop,
    its time limit, its idle timeout, a crash, a restart of the machine. Refused together with options that
    keep something: ``persistent=True``, ``snapshot_retention``, ``snapshot_expiration``."""
    delete_after: Duration
    """How long after its creation the server destroys the sandbox, running or stopped, whether a client is
    connected or not; zero, the default, is never. A change counts from the moment of the change."""
    network_policy: NetworkPolicy
    host_ports: Sequence[HostPort]
    """Ports of the server's machine that programs inside reach by a name, under every network policy; none by
    default. Only the local user of that machine may give them, and tokens those that the operator lists."""
    env: Mapping[str, str]
    """Environment variables for every process."""
    tags: Mapping[str, str]
    """Labels to find it by; at most five."""
    mounts: Mapping[str, Mount]
    """Drives, by the absolute path they are mounted at. A fork inherits no mounts."""
    snapshot_expiration: Duration
    """How long snapshots live unless said otherwise; zero is for ever. The current snapshot, from which the
    sandbox would start, never expires."""


class Configuration(SandboxOptions, total=False):
    """What a sandbox can be configured with. What is not given has its default, or is inherited by a fork."""

    image: str
    """Its root filesystem: ``host``, an OCI reference, or the name of an imported one."""
    snapshot_retention: SnapshotRetention


class ConfigurationChanges(SandboxOptions, total=False):
    """What can be changed of a sandbox. What is not given stays as it is."""

    snapshot_retention: SnapshotRetention | None
    """``None`` keeps every snapshot."""


class NewConfiguration(Configuration, total=False):
    """Options of a new sandbox."""

    runtime: str
    """A runtime by name and version instead of an image, such as ``python3.13``; refused if not installed."""
    source: Source
    """Where its first files come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One execution of a sandbox, running or ended."""

    id: str
    sandbox: str
    """The name of the sandbox it belongs to."""
    status: SessionStatus
    resources: Resources
    execution_time_limit: timedelta
    idle_timeout: timedelta | None
    """How long it may be unused before the server stops it; ``None`` is for ever."""
    cwd: str
    created_at: datetime
    started_at: datetime | None
    stopped_at: datetime | None
    stop_reason: str | None
    """Why it ended, such as ``idle`` after its idle timeout; known once it has ended."""
    source_snapshot_id: str | None
    """The snapshot that its files started from."""
    network_policy: ShownPolicy | None
    usage: Usage | None
    """Set once it has ended."""
    tier: Tier | None
    barriers: Mapping[str, str]
    """Names of the barriers between it and the host."""
    limits: Mapping[str, str]
    """Which resource limits are enforced, watched or missing."""

    @property
    def is_running(self) -> bool:
        """Whether it was running when the server sent this."""
        return self.status is SessionStatus.RUNNING

    @classmethod
    def of(cls, shown: SessionObject) -> Session:
        """Return the value for an object of a response."""
        transfer = given(shown.network_transfer)
        usage = None
        if transfer is not None:
            usage = Usage(
                cpu=span(shown.active_cpu_duration_ms) or timedelta(),
                duration=span(shown.duration) or timedelta(),
                ingress_bytes=transfer.ingress,
                egress_bytes=transfer.egress,
            )
        return cls(
            id=shown.id,
            sandbox=given(shown.source_sandbox_name) or "",
            status=shown.status,
            resources=_resources(shown),
            execution_time_limit=timedelta(milliseconds=shown.timeout),
            idle_timeout=span(shown.idle_timeout),
            cwd=shown.cwd,
            created_at=moment(shown.created_at),
            started_at=moment(shown.started_at),
            stopped_at=moment(shown.stopped_at) or moment(shown.aborted_at),
            stop_reason=given(shown.stop_reason),
            source_snapshot_id=given(shown.source_snapshot_id),
            network_policy=None
            if isinstance(shown.network_policy, UnsetType)
            else ShownPolicy.of(shown.network_policy),
            usage=usage,
            tier=given(shown.tier),
            barriers=Frozen(given(shown.barriers) or {}),
            limits=Frozen(given(shown.limits) or {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A sandbox as the server last described it."""

    name: str
    status: SessionStatus
    current_session_id: str
    persistent: bool
    image: str | None
    runtime: str | None
    resources: Resources
    execution_time_limit: timedelta
    """Of each new session."""
    idle_timeout: timedelta | None
    """How long each new session may be unused before the server stops it; ``None`` is for ever."""
    expires_at: datetime | None
    """When the server will stop the running session."""
    destroy_on_stop: bool
    """Whether the server destroys it when its session ends."""
    delete_after: timedelta | None
    """The lifetime it was given; ``None`` is for ever."""
    delete_at: datetime | None
    """When the server will destroy it."""
    cwd: str
    tags: Mapping[str, str]
    mounts: Mapping[str, Mount]
    network_policy: ShownPolicy | None
    host_ports: tuple[HostPort, ...]
    """Ports of the server's machine that it may reach by a name."""
    current_snapshot_id: str | None
    snapshot_expiration: timedelta | None
    snapshot_retention: SnapshotRetention | None
    created_at: datetime
    updated_at: datetime
    status_updated_at: datetime
    """Since when it has its status: of a stopped sandbox, when it stopped."""
    usage: Usage
    """Resources used by all its ended sessions."""
    tier: Tier | None
    """How its latest session is isolated."""
    region: str | None = None
    """The region that was requested; sandboxes run where their server is."""
    damage: str | None = None
    """Why it cannot be resumed, if its files are damaged."""

    @classmethod
    def of(cls, shown: SandboxObject) -> SandboxInfo:
        """Return the value for an object of a response."""
        mounts = given(shown.mounts) or {}
        return cls(
            name=shown.name,
            status=shown.status,
            current_session_id=shown.current_session_id,
            persistent=shown.persistent,
            image=given(shown.image),
            runtime=given(shown.runtime),
            resources=_resources(shown, exact=given(shown.exact_resources) or False),
            execution_time_limit=span(shown.timeout) or timedelta(),
            idle_timeout=span(shown.idle_timeout),
            expires_at=moment(shown.expires_at),
            destroy_on_stop=given(shown.destroy_on_stop) or False,
            delete_after=span(shown.delete_after),
            delete_at=moment(shown.delete_at),
            cwd=given(shown.cwd) or "/",
            tags=Frozen(given(shown.tags) or {}),
            mounts=Frozen({path: Mount(m.drive, m.mode) for path, m in mounts.items()}),
            network_policy=None
            if isinstance(shown.network_policy, UnsetType)
            else ShownPolicy.of(shown.network_policy),
            host_ports=tuple(HostPort(each.port, each.name) for each in given(shown.host_ports) or ()),
            current_snapshot_id=given(shown.current_snapshot_id),
            snapshot_expiration=span(shown.snapshot_expiration),
            snapshot_retention=_retention(shown.keep_last_snapshots),
            created_at=moment(shown.created_at),
            updated_at=moment(shown.updated_at),
            status_updated_at=moment(shown.status_updated_at) or moment(shown.updated_at),
            usage=Usage(
                cpu=span(shown.total_active_cpu_duration_ms) or timedelta(),
                duration=span(shown.total_duration_ms) or timedelta(),
                ingress_bytes=given(shown.total_ingress_bytes) or 0,
                egress_bytes=given(shown.total_egress_bytes) or 0,
            ),
            tier=given(shown.tier),
            region=given(shown.region),
            damage=given(shown.damage),
        )


def _resources(shown: SandboxObject | SessionObject, *, exact: bool = True) -> Resources:
    asked = given(shown.resources)
    if asked is not None:
        return Resources(
            given(asked.cpus), given(asked.memory_mb), given(asked.disk_mb), given(asked.pids), exact=exact
        )
    vcpus, memory = given(shown.vcpus), given(shown.memory)
    if not exact and (vcpus, memory) == (DEFAULT_CPUS, DEFAULT_MEMORY_MB):
        return Resources(exact=False)
    return Resources(vcpus, memory, exact=exact)


def _retention(shown: RetentionObject | UnsetType) -> SnapshotRetention | None:
    if isinstance(shown, UnsetType):
        return None
    return SnapshotRetention(shown.count, span(shown.expiration), shown.delete_evicted)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Result of a stop: the ended session, and the snapshot of a persistent sandbox."""

    session: Session
    snapshot: Snapshot | None


class SandboxState:
    """The state of a sandbox, its latest session and the URLs of its ports."""

    _state: SandboxInfo
    _session: Session
    _routes: tuple[Route, ...]
    _project: str | None

    def _adopt(self, started: SandboxStarted) -> None:
        self._state = SandboxInfo.of(started.sandbox)
        self._session = Session.of(started.session)
        self._routes = tuple(Route.of(route) for route in started.routes)
        self._project = given(started.sandbox.project_id)

    @property
    def name(self) -> str:
        """Name, unique in the project; never changes."""
        return self._state.name

    @property
    def status(self) -> SessionStatus:
        """Status of its latest session."""
        return self._state.status

    @property
    def current_session(self) -> Session:
        """Its latest session, running or ended."""
        return self._session

    @property
    def image(self) -> str | None:
        """Image of its sessions."""
        return self._state.image

    @property
    def runtime(self) -> str | None:
        """Runtime that was requested by name."""
        return self._state.runtime

    @property
    def resources(self) -> Resources:
        """Processors, memory, disk space and processes of new sessions."""
        return self._state.resources

    @property
    def persistent(self) -> bool:
        """Whether its files are kept between sessions."""
        return self._state.persistent

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels to find it by."""
        return self._state.tags

    @property
    def mounts(self) -> Mapping[str, Mount]:
        """Drives of new sessions, by mount path."""
        return self._state.mounts

    @property
    def cwd(self) -> str:
        """Directory that relative paths and processes start in."""
        return self._state.cwd

    @property
    def network_policy(self) -> ShownPolicy | None:
        """What new sessions may reach, without the values that rules inject."""
        return self._state.network_policy

    @property
    def host_ports(self) -> tuple[HostPort, ...]:
        """Ports of the server's machine that it may reach by a name."""
        return self._state.host_ports

    @property
    def execution_time_limit(self) -> timedelta:
        """Lifetime of each new session."""
        return self._state.execution_time_limit

    @property
    def idle_timeout(self) -> timedelta | None:
        """How long each new session may be unused before the server stops it; ``None`` is for ever."""
        return self._state.idle_timeout

    @property
    def expires_at(self) -> datetime | None:
        """When the server will stop the running session."""
        return self._state.expires_at

    @property
    def destroy_on_stop(self) -> bool:
        """Whether the server destroys it when its session ends."""
        return self._state.destroy_on_stop

    @property
    def delete_after(self) -> timedelta | None:
        """The lifetime it was given; ``None`` is for ever."""
        return self._state.delete_after

    @property
    def delete_at(self) -> datetime | None:
        """When the server will destroy it."""
        return self._state.delete_at

    @property
    def current_snapshot_id(self) -> str | None:
        """Snapshot that the next session starts from."""
        return self._state.current_snapshot_id

    @property
    def snapshot_expiration(self) -> timedelta | None:
        """Default lifetime of its snapshots; zero means for ever."""
        return self._state.snapshot_expiration

    @property
    def snapshot_retention(self) -> SnapshotRetention | None:
        """How many snapshots are kept."""
        return self._state.snapshot_retention

    @property
    def created_at(self) -> datetime:
        """Creation time."""
        return self._state.created_at

    @property
    def updated_at(self) -> datetime:
        """Time of the last change."""
        return self._state.updated_at

    @property
    def status_updated_at(self) -> datetime:
        """Since when it has its status: of a stopped sandbox, when it stopped."""
        return self._state.status_updated_at

    @property
    def tier(self) -> Tier | None:
        """How its latest session is isolated."""
        return self._state.tier

    @property
    def region(self) -> str | None:
        """The region that was requested; sandboxes run where their server is."""
        return self._state.region

    @property
    def routes(self) -> tuple[Route, ...]:
        """URLs of its ports."""
        return self._routes

    def url(self, port: int) -> str:
        """Return the URL of a port: the same in every session of the sandbox.

        Any program on the server's machine can use it. Clients on other machines can if the operator has set
        ``network.ingress_domain``; without it the URL has a loopback address of the server's machine.

        Raises:
            InvalidRequest: the port is not one of the sandbox's ``ports``.
        """
        for route in self._routes:
            if route.port == port:
                return route.url
        known = ", ".join(str(route.port) for route in self._routes) or "none"
        raise InvalidRequest(
            f"port {port} of {self.name} is not open; open ports: {known}",
            hint=f"pass ports=[{port}] to create_sandbox() or update()",
            field="port",
        )

    @property
    def usage(self) -> Usage:
        """Resources used by its sessions that had ended when this handle was last refreshed."""
        return self._state.usage
