"""Request bodies, and the values they stand for.

Bodies that configure a sandbox turn into keyword arguments of :class:`~sandkeep.spec.SandboxSpec`:
``create`` builds a spec from them, ``fork`` and ``update`` give them to ``dataclasses.replace``. A field the
client did not send is not among them, so it is inherited or left unchanged.
"""

from __future__ import annotations

import errno
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.checks import byte_length, check_metadata, check_name, refuse, within
from sandkeep.errors import InvalidRequest
from sandkeep.spec import (
    DEFAULT_REGION,
    LIMITS,
    MAX_BATCH,
    OPTIONS,
    GitSource,
    HostPort,
    Mount,
    Option,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    Source,
    TarballSource,
    check_comment,
    check_env,
    check_secrets,
    check_together,
    vendor_resources,
)
from sandkeep.states import MountMode, Paths
from sandkeep.wire.base import MAX_SAFE, Body, Count, Milliseconds, Whole, given
from sandkeep.wire.objects import SandboxSettings
from sandkeep.wire.paths import ReadBody, check_path
from sandkeep.wire.policies import PolicyBody

if TYPE_CHECKING:
    from sandkeep.process_options import ProcessOptions

LEGACY_RUNTIME = "node24"
"""The runtime that the older create route uses if neither a runtime nor an image is given."""

MAX_ARGUMENT = 131_071
"""Bytes of one argument: the kernel accepts 128 KiB, including the terminating NUL."""
MAX_ARGUMENTS = 6 << 20
"""Bytes of all arguments together: the kernel accepts no more, however large a stack may be. With the usual
limit of 8 MiB for a stack it accepts 2 MiB, variables included; init reports what it refuses."""
_POINTER = 8
"""Bytes that the kernel counts for each argument besides its text and the terminating NUL."""


class ResourcesBody(Body, kw_only=True, frozen=True):
    """Limits of sessions. Official clients know the first two fields, and the others do not go with those."""

    vcpus: Whole | UnsetType = UNSET
    """1 or an even number."""
    memory: Whole | UnsetType = UNSET
    """2048 for each of ``vcpus``."""
    cpus: float | UnsetType = UNSET
    """Processors, also parts of one."""
    memory_mb: Whole | UnsetType = UNSET
    disk_mb: Whole | UnsetType = UNSET
    """Disk space for what a session writes."""
    pids: Whole | UnsetType = UNSET
    """Processes and threads at the same time."""
    exact: bool = False
    """Refuse what the host can neither enforce nor watch; official clients do not know it, and always send
    processors and memory, which for them are best effort."""

    def value(self) -> Resources:
        ours = {name: value for name in LIMITS if (value := getattr(self, name)) is not UNSET}
        vendor = [name for name in ("vcpus", "memory") if getattr(self, name) is not UNSET]
        if vendor and ours:
            refuse(vendor[0], "cannot be given together with cpus, memoryMb, diskMb or pids")
        if vendor:
            return vendor_resources(given(self.vcpus, None), given(self.memory, None), exact=self.exact)
        return Resources(**ours, exact=self.exact)


class RetentionBody(Body, kw_only=True, frozen=True):
    count: Whole
    expiration: Milliseconds | UnsetType = UNSET
    delete_evicted: bool = True

    def value(self) -> SnapshotRetention:
        expiration = None if isinstance(self.expiration, UnsetType) else _duration(self.expiration)
        return SnapshotRetention(self.count, expiration, self.delete_evicted)


class MountBody(Body, kw_only=True, frozen=True):
    drive: str
    mode: MountMode = MountMode.READ_WRITE


class HostPortBody(Body, kw_only=True, frozen=True):
    port: Whole
    name: str

    def value(self) -> HostPort:
        return HostPort(self.port, self.name)


class GitSourceBody(Body, tag_field="type", tag="git", kw_only=True, frozen=True):
    url: str
    depth: Whole | UnsetType = UNSET
    revision: str | UnsetType = UNSET
    username: str | UnsetType = UNSET
    password: str | UnsetType = UNSET

    def value(self) -> Source:
        return GitSource(
            self.url,
            depth=given(self.depth, None),
            revision=given(self.revision, None),
            username=given(self.username, None),
            password=given(self.password, None),
        )


class TarballSourceBody(Body, tag_field="type", tag="tarball", kw_only=True, frozen=True):
    url: str

    def value(self) -> Source:
        return TarballSource(self.url)


class SnapshotSourceBody(Body, tag_field="type", tag="snapshot", kw_only=True, frozen=True):
    snapshot_id: str

    def value(self) -> Source:
        return SnapshotSource(self.snapshot_id)


class _Configuration(SandboxSettings, Body, kw_only=True, frozen=True):
    """The common part of create, fork and update: options whose requests differ from what responses show."""

    ports: list[Whole] | UnsetType = UNSET
    resources: ResourcesBody | UnsetType = UNSET
    persistent: bool | UnsetType = UNSET
    network_policy: PolicyBody | UnsetType = UNSET
    host_ports: list[HostPortBody] | UnsetType = UNSET
    """Ports of the server's machine that it may reach by a name; official clients omit it."""
    env: dict[str, str] | UnsetType = UNSET
    mounts: dict[str, MountBody] | UnsetType = UNSET

    def changes(self) -> dict[str, Any]:
        """Return the fields that were sent, as arguments for a :class:`SandboxSpec`."""
        found: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            value = UNSET if option.body is None else getattr(self, option.body, UNSET)
            if value is not UNSET:
                with within(name):
                    found[name] = _read(option, value)
        check_together(found)
        return found


class _NewSandbox(_Configuration, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    image: str | UnsetType = UNSET
    network_id: str | UnsetType = UNSET
    keep_last_snapshots: RetentionBody | UnsetType = UNSET
    interactive: bool | UnsetType = field(default=UNSET, name="__interactive")


class CreateBody(_NewSandbox, kw_only=True, frozen=True):
    project_id: str
    source: GitSourceBody | TarballSourceBody | SnapshotSourceBody | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    paths: Paths | UnsetType = UNSET
    """Whose conventions for home and working directory; official clients omit it, and get their vendor's."""

    def spec(self, *, legacy: bool = False) -> SandboxSpec:
        """Return what to create. ``legacy``: the older route, with a runtime unless an image is given."""
        changes = self.changes()
        from_snapshot = isinstance(changes.get("source"), SnapshotSource)
        if legacy and not from_snapshot and not {"runtime", "image"} & changes.keys():
            changes["runtime"] = LEGACY_RUNTIME
        if "region" not in changes and "failover_regions" in changes:
            # Without a region the client need not know the default one, which is not a failover of itself.
            others = tuple(name for name in changes["failover_regions"] if name != DEFAULT_REGION)
            changes["failover_regions"] = others
        return SandboxSpec(**changes)


class CreateManyBody(CreateBody, kw_only=True, frozen=True):
    """Several of the same: called ``NAME-1``, ``NAME-2`` and so on, or by generated names."""

    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)]


_NOT_INHERITED = {
    name: getattr(SandboxSpec(), name) for name, option in OPTIONS.items() if not option.inherited
}
"""What a fork has instead, unless it is sent."""


class ForkBody(_NewSandbox, kw_only=True, frozen=True):
    """Fields that were sent replace inherited ones; mounts are never inherited."""

    live: bool = False
    """Start from the running session's present files, by a checkpoint; official clients omit it."""

    def changes(self) -> dict[str, Any]:
        return {**_NOT_INHERITED, **super().changes()}


class ForkManyBody(ForkBody, kw_only=True, frozen=True):
    """Several forks, of one snapshot."""

    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)]


class UpdateBody(_Configuration, kw_only=True, frozen=True):
    runtime: str | UnsetType = UNSET
    network_id: str | UnsetType | None = UNSET
    keep_last_snapshots: RetentionBody | UnsetType | None = UNSET
    current_snapshot_id: str | UnsetType = UNSET
    """Not part of the configuration: the snapshot that the next session starts from."""


class RunBody(Body, kw_only=True, frozen=True):
    command: str
    args: list[str] = field(default_factory=list)
    cwd: str | UnsetType = UNSET
    env: dict[str, str | None] = field(default_factory=dict)
    """Null removes a variable of the sandbox; official clients send text only."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Names of secrets, by the variable that gets the value; official clients omit it."""
    sudo: bool = False
    user: str | UnsetType = UNSET
    """The account to run as; official clients omit it."""
    wait: bool = False
    logs: bool = False
    """Only with ``wait``: put the output into the response."""
    timeout: Annotated[int, Meta(ge=1, le=MAX_SAFE)] | UnsetType = UNSET
    grace: Milliseconds | UnsetType = UNSET
    """Milliseconds between SIGTERM and SIGKILL at the timeout; without it SIGKILL is sent at once."""
    attach_stdin: bool = False
    stderr: Literal["stdout"] | UnsetType = UNSET
    """Put standard error into the pipe of standard output; official clients omit it."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Keys and values that the record of the process keeps; official clients omit it."""

    def __post_init__(self) -> None:
        if not self.command:
            refuse("command", "must not be empty")
        _check_argument("command", self.command)
        total = len(self.command)
        for index, argument in enumerate(self.args):
            total += _check_argument(f"args[{index}]", argument) + 1 + _POINTER
        if total > MAX_ARGUMENTS:
            _refuse_size("args", f"must be at most {MAX_ARGUMENTS} bytes in total, not {total}")
        check_env(self.env, removal=True)
        check_secrets(self.secrets, self.env)
        check_path("cwd", self.cwd)
        check_metadata(self.metadata)

    def options(self) -> ProcessOptions:
        """Return what to run."""
        from sandkeep.process_options import PROCESS_OPTIONS, ProcessOptions  # which clients do without

        found = {
            name: getattr(self, option.body)
            for name, option in PROCESS_OPTIONS.items()
            if option.body is not None and getattr(self, option.body) is not UNSET
        }
        return ProcessOptions(**found)


class StdinBody(Body, kw_only=True, frozen=True):
    data: bytes = b""
    """Base64 on the wire."""
    offset: Count | UnsetType = UNSET
    """Offset of ``data`` in the stream, so that bytes which arrived before are not written again."""
    close: bool = False


class KillBody(Body, kw_only=True, frozen=True):
    signal: Annotated[int, Meta(ge=1, le=64)]
    grace: Milliseconds | UnsetType = UNSET
    """Milliseconds after which SIGKILL follows, for the process and every descendant that is left."""


class MkdirBody(ReadBody, kw_only=True, frozen=True):
    recursive: bool = True


class SnapshotBody(Body, kw_only=True, frozen=True):
    expiration: Milliseconds | UnsetType = UNSET
    """Zero: never. Absent: the sandbox's default."""
    comment: str | UnsetType = UNSET
    """What the snapshot is for, as lists show it; official clients omit it."""

    def __post_init__(self) -> None:
        if not isinstance(self.comment, UnsetType):
            check_comment(self.comment)


class ExtendBody(Body, kw_only=True, frozen=True):
    duration: Annotated[int, Meta(ge=1000, le=MAX_SAFE)]


class DriveBody(Body, kw_only=True, frozen=True):
    project_id: str
    region: str | UnsetType = UNSET
    max_size_bytes: Annotated[int, Meta(ge=1, le=MAX_SAFE)] | UnsetType = UNSET


class DriveForkBody(Body, kw_only=True, frozen=True):
    name: str

    def __post_init__(self) -> None:
        check_name(self.name, reserved=frozenset())


class ProjectBody(Body, kw_only=True, frozen=True):
    name: str


def _duration(value: int) -> timedelta:
    try:
        return timedelta(milliseconds=value)
    except OverflowError:
        refuse("", "is too long")


def _read(option: Option, value: Any) -> Any:
    """Return what a field of a body means, as a field of :class:`SandboxSpec`."""
    if option.milliseconds:
        return None if option.zero_is_none and value == 0 else _duration(value)
    if isinstance(value, list):
        return tuple(_item(index, item) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {
            key: _mount(key, item) if isinstance(item, MountBody) else item for key, item in value.items()
        }
    if isinstance(value, PolicyBody):
        return value.policy()
    return value.value() if isinstance(value, _VALUES) else value


_VALUES = (ResourcesBody, RetentionBody, GitSourceBody, TarballSourceBody, SnapshotSourceBody)


def _item(index: int, item: Any) -> Any:
    if not isinstance(item, HostPortBody):
        return item
    with within(f"[{index}]"):
        return item.value()


def _mount(path: str, body: MountBody) -> Mount:
    with within(f'["{path}"]'):
        return Mount(body.drive, body.mode)


def _check_argument(field_path: str, value: str) -> int:
    if "\0" in value:
        refuse(field_path, "must not contain a NUL character")
    size = byte_length(field_path, value)
    if size > MAX_ARGUMENT:
        _refuse_size(field_path, f"must be at most {MAX_ARGUMENT} bytes, not {size}")
    return size


def _refuse_size(field_path: str, problem: str) -> NoReturn:
    """Refuse what the kernel would refuse, with its error number."""
    raise InvalidRequest(f"{field_path}: {problem}", field=field_path, problem=problem, errno=errno.E2BIG)
