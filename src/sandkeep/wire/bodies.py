"""What requests carry, and the values they mean.

Bodies that configure a sandbox turn into keyword arguments of :class:`~sandkeep.types.SandboxSpec`:
``create`` builds a spec from them, ``fork`` and ``update`` give them to ``dataclasses.replace``. A field the
client did not send is not among them, so it is inherited or left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.types import (
    GitSource,
    Mount,
    MountMode,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    Source,
    TarballSource,
    byte_length,
    check_env,
    check_name,
    refuse,
    within,
)
from sandkeep.wire.base import MAX_SAFE, Body, Count, Milliseconds, Whole, given
from sandkeep.wire.policies import PolicyBody

LEGACY_RUNTIME = "node24"
"""What the older create route means when it names neither a runtime nor an image."""

MAX_ARGUMENT = 131_071
"""Bytes of one argument: the kernel takes 128 KiB, the terminating NUL included."""
MAX_ARGUMENTS = 1 << 20
"""Bytes of all arguments together."""
MAX_PATH = 4095


class ResourcesBody(Body, kw_only=True, frozen=True):
    vcpus: Whole | UnsetType = UNSET
    memory: Whole | UnsetType = UNSET

    def resources(self) -> Resources:
        return Resources(given(self.vcpus, None), given(self.memory, None))


class RetentionBody(Body, kw_only=True, frozen=True):
    count: Whole
    expiration: Milliseconds | UnsetType = UNSET
    delete_evicted: bool = True

    def retention(self) -> SnapshotRetention:
        expiration = None if isinstance(self.expiration, UnsetType) else _duration(self.expiration)
        return SnapshotRetention(self.count, expiration, self.delete_evicted)


class MountBody(Body, kw_only=True, frozen=True):
    drive: str
    mode: MountMode = MountMode.READ_WRITE


class GitSourceBody(Body, tag_field="type", tag="git", kw_only=True, frozen=True):
    url: str
    depth: Whole | UnsetType = UNSET
    revision: str | UnsetType = UNSET
    username: str | UnsetType = UNSET
    password: str | UnsetType = UNSET

    def source(self) -> Source:
        return GitSource(
            self.url,
            depth=given(self.depth, None),
            revision=given(self.revision, None),
            username=given(self.username, None),
            password=given(self.password, None),
        )


class TarballSourceBody(Body, tag_field="type", tag="tarball", kw_only=True, frozen=True):
    url: str

    def source(self) -> Source:
        return TarballSource(self.url)


class SnapshotSourceBody(Body, tag_field="type", tag="snapshot", kw_only=True, frozen=True):
    snapshot_id: str

    def source(self) -> Source:
        return SnapshotSource(self.snapshot_id)


class _Configuration(Body, kw_only=True, frozen=True):
    """What create, fork and update have in common."""

    ports: list[Whole] | UnsetType = UNSET
    timeout: Milliseconds | UnsetType = UNSET
    resources: ResourcesBody | UnsetType = UNSET
    persistent: bool | UnsetType = UNSET
    network_policy: PolicyBody | UnsetType = UNSET
    env: dict[str, str] | UnsetType = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    mounts: dict[str, MountBody] | UnsetType = UNSET
    snapshot_expiration: Milliseconds | UnsetType = UNSET
    region: str | UnsetType = UNSET
    failover_regions: list[str] | UnsetType = UNSET

    def changes(self) -> dict[str, Any]:
        """The fields that were sent, as arguments for a :class:`SandboxSpec`."""
        found: dict[str, Any] = {}
        for name, read in _READERS.items():
            value = getattr(self, name, UNSET)
            if value is not UNSET:
                target = "retention" if name == "keep_last_snapshots" else name
                with within(target):
                    found[target] = read(value)
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

    def spec(self, *, legacy: bool = False) -> SandboxSpec:
        """What to create. ``legacy``: by the older route, which means a runtime unless an image is named."""
        changes = self.changes()
        from_snapshot = isinstance(changes.get("source"), SnapshotSource)
        if legacy and not from_snapshot and not {"runtime", "image"} & changes.keys():
            changes["runtime"] = LEGACY_RUNTIME
        return SandboxSpec(**changes)


class ForkBody(_NewSandbox, kw_only=True, frozen=True):
    """Everything sent replaces what would be inherited; mounts never are."""

    def changes(self) -> dict[str, Any]:
        return {"mounts": {}, "interactive": False, "name": None, **super().changes()}


class UpdateBody(_Configuration, kw_only=True, frozen=True):
    runtime: str | UnsetType = UNSET
    network_id: str | UnsetType | None = UNSET
    keep_last_snapshots: RetentionBody | UnsetType | None = UNSET
    current_snapshot_id: str | UnsetType = UNSET
    """Not part of the configuration: where the next session starts."""


class RunBody(Body, kw_only=True, frozen=True):
    command: str
    args: list[str] = field(default_factory=list)
    cwd: str | UnsetType = UNSET
    env: dict[str, str] = field(default_factory=dict)
    sudo: bool = False
    user: str | UnsetType = UNSET
    """An account of the sandbox to run as; official clients do not know it."""
    wait: bool = False
    logs: bool = False
    """Only with ``wait``: put the output into the answer."""
    timeout: Annotated[int, Meta(ge=1, le=MAX_SAFE)] | UnsetType = UNSET
    attach_stdin: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            refuse("command", "must not be empty")
        _check_argument("command", self.command)
        total = len(self.command)
        for index, argument in enumerate(self.args):
            total += _check_argument(f"args[{index}]", argument)
        if total > MAX_ARGUMENTS:
            refuse("args", f"must be at most {MAX_ARGUMENTS} bytes in all")
        check_env(self.env)
        _check_path("cwd", self.cwd)


class StdinBody(Body, kw_only=True, frozen=True):
    data: bytes = b""
    """Base64 on the wire."""
    offset: Count | UnsetType = UNSET
    """Where in the stream ``data`` begins, so that what arrived before is not written again."""
    close: bool = False


class KillBody(Body, kw_only=True, frozen=True):
    signal: Annotated[int, Meta(ge=1, le=64)]


class ReadBody(Body, kw_only=True, frozen=True):
    path: str
    cwd: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        _check_path("path", self.path)
        _check_path("cwd", self.cwd)


class MkdirBody(ReadBody, kw_only=True, frozen=True):
    recursive: bool = True


class SnapshotBody(Body, kw_only=True, frozen=True):
    expiration: Milliseconds | UnsetType = UNSET
    """Zero: never. Absent: the sandbox's default."""


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


def _mounts(bodies: dict[str, MountBody]) -> dict[str, Mount]:
    mounts = {}
    for path, body in bodies.items():
        with within(f'["{path}"]'):
            mounts[path] = Mount(body.drive, body.mode)
    return mounts


def _same(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _same,
    "source": lambda body: body.source(),
    "image": _same,
    "runtime": _same,
    "ports": tuple,
    "timeout": _duration,
    "resources": lambda body: body.resources(),
    "persistent": _same,
    "network_policy": lambda body: body.policy(),
    "network_id": _same,
    "env": _same,
    "tags": _same,
    "mounts": _mounts,
    "snapshot_expiration": _duration,
    "keep_last_snapshots": lambda body: None if body is None else body.retention(),
    "region": _same,
    "failover_regions": tuple,
    "interactive": _same,
}


def _check_argument(field_path: str, value: str) -> int:
    if "\0" in value:
        refuse(field_path, "must not contain a NUL character")
    size = byte_length(field_path, value)
    if size > MAX_ARGUMENT:
        refuse(field_path, f"must be at most {MAX_ARGUMENT} bytes")
    return size


def _check_path(field_path: str, path: str | UnsetType) -> None:
    if isinstance(path, UnsetType):
        return
    if not path:
        refuse(field_path, "must not be empty")
    if "\0" in path:
        refuse(field_path, "must not contain a NUL character")
    if byte_length(field_path, path) > MAX_PATH:
        refuse(field_path, f"must be at most {MAX_PATH} bytes")
