"""What a sandbox is made from: resources, sources, mounts, retention, and the specification that holds them.

Every value is frozen and checks itself once, when it is built. Durations are :class:`~datetime.timedelta`,
memory is in megabytes. Nothing here knows how JSON spells it.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from sandkeep.checks import (
    byte_length,
    check_duration,
    check_name,
    check_text,
    check_url,
    duration,
    expect,
    refuse,
)
from sandkeep.dataclass import dataclass
from sandkeep.frozen import Frozen
from sandkeep.policy import NetworkPolicy
from sandkeep.states import MountMode, Paths

DEFAULT_CPUS = 2
DEFAULT_MEMORY_MB = 4096
MEMORY_PER_VCPU_MB = 2048
"""In the words of official clients, where memory follows from processors."""
DEFAULT_TIMEOUT = timedelta(minutes=5)
SHORTEST_IDLE_TIMEOUT = timedelta(seconds=5)
"""The server looks that often; netd tells it every two seconds which sessions have open requests."""
SHORTEST_LIFETIME = timedelta(seconds=1)
"""Of a sandbox. The server looks every five seconds for sandboxes to destroy."""
DEFAULT_REGION = "iad1"
LEAST_CPUS = 0.05
MAX_VCPUS = 512
LIMITS: Final = ("cpus", "memory_mb", "disk_mb", "pids")
_DEFAULTS: Final = {"cpus": DEFAULT_CPUS, "memory_mb": DEFAULT_MEMORY_MB}
_BOUNDS: Final = {"memory_mb": (64, 16 << 20), "disk_mb": (1, 1 << 30), "pids": (16, 4_194_304)}
"""Least and most. The kernel has no more ids of processes than that."""
MAX_PORTS = 15
MAX_TAGS = 64
MAX_COMMENT = 1024
MAX_BATCH = 100
"""Sandboxes that one request can make."""
MAX_MOUNTS = 4
MAX_HOST_PORTS = 16
MAX_MOUNT_PATH = 256
MAX_ENV_ENTRY = 131_071
"""Bytes of one ``NAME=value``: the kernel takes 128 KiB for a single string, its terminating NUL included."""
MAX_ENV_TOTAL = 524_288
MAX_RETAINED = 100
_MOUNT_FORBIDDEN = ("/proc", "/sys", "/dev", "/run/cell", "/run/vercel/share")
_GIT_SCHEMES = frozenset({"http", "https", "git", "ssh"})
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(?:{_LABEL}\.)*(?=[a-z_]){_LABEL}")
_LONGEST_HOST_NAME = 253


@dataclass(frozen=True, slots=True, init=False)
class Resources:
    """Processors, memory, disk space and processes of a session: each limit is independent of the others."""

    cpus: float
    """Processors, also parts of one: 0.5 is half the time of one. 2 by default."""
    memory_mb: int
    """Memory of all processes together. 4096 by default."""
    disk_mb: int | None
    """Disk space for what a session writes; the files it starts from do not count, and drives have sizes of
    their own. A session that needs more is stopped as ``disk full``, and what it wrote is kept. ``None``: the
    server's setting, by default no limit."""
    pids: int | None
    """Processes and threads at the same time. ``None``: the server's setting, by default 4096."""
    exact: bool = field(default=True, compare=False, repr=False)
    """Refuse to start a session where the host can neither enforce nor watch the limits that are given here.
    With ``False`` it starts there with those that the host can hold, and ``limits`` of the session says which
    these are."""
    asked: Mapping[str, float] = field(init=False, compare=False, repr=False)
    """The limits that were given, by name. The others have their defaults, and are best effort."""

    def __init__(
        self,
        cpus: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        pids: int | None = None,
        *,
        exact: bool = True,
    ) -> None:
        if cpus is not None:
            cpus = _check_cpus(cpus)
        for name, value in (("memory_mb", memory_mb), ("disk_mb", disk_mb), ("pids", pids)):
            if value is not None:
                expect(name, value, int, "a whole number")
                least, most = _BOUNDS[name]
                if not least <= value <= most:
                    refuse(name, f"must be between {least} and {most}, not {value}")
        expect("exact", exact, bool, "True or False")
        asked = {"cpus": cpus, "memory_mb": memory_mb, "disk_mb": disk_mb, "pids": pids}
        for name, default in asked.items():
            object.__setattr__(self, name, _DEFAULTS.get(name) if default is None else default)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "asked", Frozen({k: v for k, v in asked.items() if v is not None}))


def _check_cpus(value: float) -> float:
    """Return a number of processors; a whole number is an ``int``, so that it is spelled like one."""
    expect("cpus", value, (int, float), "a number")
    if not LEAST_CPUS <= value <= MAX_VCPUS:
        refuse("cpus", f"must be between {LEAST_CPUS} and {MAX_VCPUS}, not {value}")
    return int(value) if value == int(value) else value


def vcpus_of(resources: Resources) -> int:
    """Return the number of processors that official clients read: whole, rounded up."""
    return math.ceil(resources.cpus)


def in_vendor_words(resources: Resources) -> bool:
    """Return whether ``vcpus`` and ``memory`` alone say what was asked for."""
    if not resources.asked:
        return True
    whole = resources.cpus == 1 or resources.cpus % 2 == 0
    return (
        resources.asked.keys() == {"cpus", "memory_mb"}
        and whole
        and resources.memory_mb == resources.cpus * MEMORY_PER_VCPU_MB
    )


def vendor_resources(vcpus: int | None, memory: int | None, *, exact: bool = False) -> Resources:
    """Return what official clients ask for with their words: memory is 2048 MB for each processor."""
    if vcpus is None:
        vcpus = DEFAULT_CPUS if memory is None else memory // MEMORY_PER_VCPU_MB
    if memory is None:
        memory = vcpus * MEMORY_PER_VCPU_MB
    if not 1 <= vcpus <= MAX_VCPUS or (vcpus != 1 and vcpus % 2):
        refuse("vcpus", f"must be 1 or an even number up to {MAX_VCPUS}, not {vcpus}")
    if memory != vcpus * MEMORY_PER_VCPU_MB:
        refuse("memory", f"must be {vcpus * MEMORY_PER_VCPU_MB} for {vcpus} vcpus, not {memory}")
    return Resources(vcpus, memory, exact=exact)


@dataclass(frozen=True, slots=True, init=False)
class SnapshotRetention:
    """Keep the newest ``count`` snapshots of a sandbox."""

    count: int
    expiration: timedelta | None = None
    """Lifetime of the kept snapshots; zero means for ever, ``None`` the sandbox's own default. The current
    snapshot, from which the sandbox would start, never expires."""
    delete_evicted: bool = True
    """Delete a snapshot as soon as a newer one pushes it out, rather than when it expires."""

    def __init__(
        self, count: int, expiration: timedelta | float | None = None, delete_evicted: bool = True
    ) -> None:
        expect("count", count, int, "a whole number")
        if not 1 <= count <= MAX_RETAINED:
            refuse("count", f"must be between 1 and {MAX_RETAINED}, not {count}")
        if expiration is not None:
            expiration = duration(expiration, "expiration")
            check_duration("expiration", expiration, zero=True)
        expect("delete_evicted", delete_evicted, bool, "True or False")
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "expiration", expiration)
        object.__setattr__(self, "delete_evicted", delete_evicted)


@dataclass(frozen=True, slots=True)
class GitSource:
    """Start with a clone of a git repository. The credentials are used once and never stored."""

    url: str
    depth: int | None = None
    revision: str | None = None
    """Branch, tag or commit."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_url("url", self.url, _GIT_SCHEMES)
        if self.depth is not None and not 1 <= self.depth <= 2**31 - 1:
            refuse("depth", "must be at least 1")
        if self.revision is not None:
            check_text("revision", self.revision, limit=1024)
            # git would parse it as an option.
            if self.revision.startswith("-"):
                refuse("revision", "must not start with '-'")


@dataclass(frozen=True, slots=True)
class TarballSource:
    """Start with the content of a tar archive."""

    url: str

    def __post_init__(self) -> None:
        check_url("url", self.url, ("http", "https"))


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Start from the filesystem of a snapshot."""

    snapshot_id: str

    def __post_init__(self) -> None:
        check_name(self.snapshot_id, field_path="snapshot_id", reserved=frozenset())


Source = GitSource | TarballSource | SnapshotSource
_SOURCES = (GitSource, TarballSource, SnapshotSource)


@dataclass(frozen=True, slots=True)
class Mount:
    """A drive mounted in a sandbox: read-write by one session, or as a read-only copy by any number."""

    drive: str
    mode: MountMode = MountMode.READ_WRITE

    def __post_init__(self) -> None:
        check_name(self.drive, field_path="drive", reserved=frozenset())
        expect("mode", self.mode, MountMode, "a MountMode")


@dataclass(frozen=True, slots=True, init=False)
class HostPort:
    """A TCP port of the server's machine that a sandbox reaches by a name, at the same number.

    Inside, ``name`` leads to 127.0.0.1 of the server's machine, at this port and at no other.
    """

    port: int
    name: str

    def __init__(self, port: int, name: str) -> None:
        expect("port", port, int, "a number")
        if not 1 <= port <= 65535:
            refuse("port", f"must be between 1 and 65535, not {port}")
        expect("name", name, str, "text")
        name = name.lower()
        if len(name) > _LONGEST_HOST_NAME or _HOST_NAME.fullmatch(name) is None:
            refuse("name", f"must be a host name such as model.internal, not {name!r}")
        if name.rpartition(".")[2] in ("localhost", "arpa"):
            refuse("name", f"must not be {name}, which has a meaning of its own inside")
        object.__setattr__(self, "port", port)
        object.__setattr__(self, "name", name)


def _frozen(mapping: Mapping[str, str]) -> Mapping[str, str]:
    return Frozen(mapping)


def check_env(env: Mapping[str, str | None], *, field_path: str = "env", removal: bool = False) -> None:
    """Check that the kernel can pass these variables to a process; with ``removal`` they may be ``None``."""
    expect(field_path, env, Mapping, "a mapping of names to values")
    total = 0
    for name, value in env.items():
        path = f'{field_path}["{name}"]'
        expect(path, name, str, "text")
        if value is None and removal:
            value = ""
        expect(path, value, str, "text")
        assert value is not None
        if not name or "=" in name or "\0" in name:
            refuse(path, "is not a valid variable name")
        if "\0" in value:
            refuse(path, "must not contain a NUL character")
        size = byte_length(path, name) + 1 + byte_length(path, value)
        if size > MAX_ENV_ENTRY:
            refuse(path, f"must be at most {MAX_ENV_ENTRY} bytes with its name")
        total += size + 1
    if total > MAX_ENV_TOTAL:
        refuse(field_path, f"must be at most {MAX_ENV_TOTAL} bytes in total")


def check_comment(comment: str) -> None:
    """Check what a caller says of a snapshot: one line of text."""
    check_text("comment", comment, limit=MAX_COMMENT)


def check_secrets(secrets: Mapping[str, str], env: Mapping[str, str | None]) -> None:
    """Check variables that get values of secrets: the kernel can pass them, and ``env`` has none of them."""
    expect("secrets", secrets, Mapping, "a mapping of variables to names of secrets")
    for variable, name in secrets.items():
        path = f'secrets["{variable}"]'
        expect(path, variable, str, "text")
        expect(path, name, str, "the name of a secret")
        if not variable or "=" in variable or "\0" in variable:
            refuse(path, "is not a valid variable name")
        if not name:
            refuse(path, "must name a secret")
        if variable in env:
            refuse(path, "is also in env, and only one can be its value")


def check_tags(tags: Mapping[str, str]) -> None:
    """Check that a sandbox can have these tags."""
    expect("tags", tags, Mapping, "a mapping of keys to values")
    if len(tags) > MAX_TAGS:
        refuse("tags", f"at most {MAX_TAGS} are allowed, not {len(tags)}")
    for key, value in tags.items():
        path = f'tags["{key}"]'
        check_text(path, key, limit=128)
        if ":" in key:
            refuse(path, "must not contain ':', which separates key and value in tag searches")
        check_text(path, value, limit=256, empty=True)


def _check_ports(ports: tuple[int, ...]) -> None:
    if len(ports) > MAX_PORTS:
        refuse("ports", f"at most {MAX_PORTS} are allowed, not {len(ports)}")
    for index, port in enumerate(ports):
        expect(f"ports[{index}]", port, int, "a number")
        if not 1 <= port <= 65535:
            refuse(f"ports[{index}]", f"must be between 1 and 65535, not {port}")
        if port in ports[:index]:
            refuse(f"ports[{index}]", f"{port} is listed twice")


def _check_host_ports(granted: tuple[HostPort, ...]) -> None:
    if len(granted) > MAX_HOST_PORTS:
        refuse("host_ports", f"at most {MAX_HOST_PORTS} are allowed, not {len(granted)}")
    for index, each in enumerate(granted):
        expect(f"host_ports[{index}]", each, HostPort, "a HostPort")
        if each in granted[:index]:
            refuse(f"host_ports[{index}]", f"port {each.port} as {each.name} is listed twice")


def _check_mounts(mounts: Mapping[str, Mount]) -> None:
    expect("mounts", mounts, Mapping, "a mapping of paths to Mount")
    if len(mounts) > MAX_MOUNTS:
        refuse("mounts", f"at most {MAX_MOUNTS} are allowed, not {len(mounts)}")
    paths: list[str] = []
    for path, mount in mounts.items():
        where = f'mounts["{path}"]'
        expect(where, path, str, "a path")
        expect(where, mount, Mount, "a Mount")
        canonical = path.startswith("/") and not path.startswith("//") and posixpath.normpath(path) == path
        if not canonical or path == "/" or "\0" in path:
            refuse(where, "must be a canonical absolute path below /")
        if len(path) > MAX_MOUNT_PATH:
            refuse(where, f"must have at most {MAX_MOUNT_PATH} characters")
        for taken in _MOUNT_FORBIDDEN:
            if _overlap(path, taken):
                refuse(where, f"{taken} is not available for mounts")
        for other in paths:
            if _overlap(path, other):
                refuse(where, f"overlaps the mount at {other}")
        paths.append(path)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("source", _SOURCES),
    ("resources", Resources),
    ("persistent", bool),
    ("destroy_on_stop", bool),
    ("network_policy", NetworkPolicy),
    ("retention", SnapshotRetention),
)


class Option(NamedTuple):
    """One thing a sandbox can be configured with: how each layer spells it, and when a change of it counts.

    Wire bodies, wire objects, store columns and SDK requests are converted by this description. Where type
    checkers need an option spelled out, ``tests/unit/test_options.py`` compares that place with it.
    """

    body: str | None
    """The field of request bodies, in JSON in camel case."""
    shown: tuple[str, ...]
    """The fields of the sandbox object in responses."""
    columns: tuple[str, ...]
    """The columns of the store's ``sandboxes``."""
    keyword: str | None
    """The keyword of the SDK; ``None``: the SDK does not offer it."""
    cli: tuple[str, ...]
    """The parameters of the command line that set it, in snake case."""
    update: Literal["at once", "next session"] | None
    """From when on a change counts; ``None``: it is fixed when the sandbox is created."""
    inherited: bool
    """Whether a fork has it from its source."""
    of_session: bool
    """Whether a session keeps its own copy, in columns of the same names."""
    milliseconds: bool
    """Whether bodies, objects and columns hold a duration as a number of milliseconds."""
    zero_is_none: bool
    """Whether a zero in a body means ``None``."""
    sandbox_only: tuple[str, ...] = ()
    """The columns that sessions have no copy of: the sandbox decides at every start."""

    @property
    def session_columns(self) -> tuple[str, ...]:
        """The columns that a session copies from its sandbox."""
        return tuple(c for c in self.columns if c not in self.sandbox_only) if self.of_session else ()


_OPTION: Final = "option"
_SAME: Final = ""


def _option(
    *,
    body: str | None = _SAME,
    shown: tuple[str, ...] = (_SAME,),
    columns: tuple[str, ...] = (_SAME,),
    keyword: str | None = _SAME,
    cli: tuple[str, ...] = (),
    update: Literal["at once", "next session"] | None = "next session",
    inherited: bool = True,
    of_session: bool = False,
    milliseconds: bool = False,
    zero_is_none: bool = False,
    sandbox_only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the metadata of a field of `SandboxSpec`. What is not given is spelled like the field."""
    described = (
        body,
        shown,
        columns,
        keyword,
        cli,
        update,
        inherited,
        of_session,
        milliseconds,
        zero_is_none,
        sandbox_only,
    )
    return {_OPTION: Option(*described)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything a sandbox is created from. ``dataclasses.replace`` returns a changed copy, checked again."""

    name: str | None = field(default=None, metadata=_option(update=None, inherited=False))
    """``None``: one is generated."""
    source: Source | None = field(
        default=None, metadata=_option(shown=(), cli=("snapshot",), update=None, inherited=False)
    )
    image: str | None = field(default=None, metadata=_option(cli=("image",), update=None, of_session=True))
    runtime: str | None = field(default=None, metadata=_option(cli=("runtime",), of_session=True))
    ports: tuple[int, ...] = field(
        default=(), metadata=_option(shown=(), cli=("ports",), update="at once", of_session=True)
    )
    host_ports: tuple[HostPort, ...] = field(
        default=(), metadata=_option(cli=("host_ports",), update="at once")
    )
    """Ports of the server's machine that it may reach, each by a name; under every network policy."""
    timeout: timedelta = field(
        default=DEFAULT_TIMEOUT,
        metadata=_option(
            keyword="execution_time_limit", cli=("timeout",), of_session=True, milliseconds=True
        ),
    )
    """How long each session lives unless it is extended."""
    idle_timeout: timedelta | None = field(
        default=None,
        metadata=_option(cli=("idle_timeout",), of_session=True, milliseconds=True, zero_is_none=True),
    )
    """How long each session may be unused before the server stops it; ``None``, or zero, is for ever."""
    resources: Resources = field(
        default_factory=lambda: Resources(exact=False),
        metadata=_option(
            shown=("vcpus", "memory", "resources", "exact_resources"),
            columns=("vcpus", "memory_mb", "asked_limits", "exact_resources"),
            cli=("cpus", "memory", "disk", "pids", "best_effort"),
            of_session=True,
            sandbox_only=("exact_resources",),
        ),
    )
    """Limits that the caller did not ask for are best effort."""
    persistent: bool = field(default=True, metadata=_option(cli=("non_persistent",), of_session=True))
    destroy_on_stop: bool = field(default=False, metadata=_option(cli=("destroy_on_stop",), update="at once"))
    """Whether the server destroys it, with its snapshots, when its session ends."""
    delete_after: timedelta | None = field(
        default=None,
        metadata=_option(cli=("delete_after",), update="at once", milliseconds=True, zero_is_none=True),
    )
    """How long after its creation, or a change of this, the server destroys it; ``None`` or zero is never."""
    network_policy: NetworkPolicy = field(
        default_factory=NetworkPolicy.allow_all,
        metadata=_option(
            cli=("network_policy", "allowed_domain", "allowed_cidr", "denied_cidr"), of_session=True
        ),
    )
    network_id: str | None = field(default=None, metadata=_option(keyword=None, of_session=True))
    env: Mapping[str, str] = field(default_factory=dict, repr=False, metadata=_option(shown=(), cli=("env",)))
    tags: Mapping[str, str] = field(default_factory=dict, metadata=_option(cli=("tags",), update="at once"))
    mounts: Mapping[str, Mount] = field(
        default_factory=dict, metadata=_option(cli=("mounts",), inherited=False, of_session=True)
    )
    snapshot_expiration: timedelta | None = field(
        default=None, metadata=_option(cli=("snapshot_expiration",), update="at once", milliseconds=True)
    )
    """Default life of its snapshots; zero is for ever, ``None`` the server's default."""
    retention: SnapshotRetention | None = field(
        default=None,
        metadata=_option(
            body="keep_last_snapshots",
            shown=("keep_last_snapshots",),
            columns=("keep_last_snapshots",),
            keyword="snapshot_retention",
            cli=("keep_last_snapshots", "keep_last_snapshots_for", "delete_evicted_snapshots"),
            update="at once",
        ),
    )
    region: str = field(
        default=DEFAULT_REGION, metadata=_option(keyword=None, cli=("region",), of_session=True)
    )
    failover_regions: tuple[str, ...] = field(
        default=(), metadata=_option(keyword=None, cli=("failover_regions",))
    )
    interactive: bool = field(
        default=False, metadata=_option(shown=(), columns=(), keyword=None, update=None, inherited=False)
    )
    """The first session must say which port serves terminals."""
    paths: Paths | None = field(
        default=None, metadata=_option(shown=(), columns=(), keyword=None, update=None)
    )
    """Whose home and working directory it has; ``None``: the vendor's, or a snapshot's own."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name)
        for name, kind in _KINDS:
            value = getattr(self, name)
            if value is not None:
                named = [part.__name__ for part in (kind if isinstance(kind, tuple) else (kind,))]
                expect(name, value, kind, "True or False" if kind is bool else "a " + " or ".join(named))
        if self.image is not None and self.runtime is not None:
            refuse("runtime", "cannot be given together with an image")
        for name in ("image", "runtime", "network_id"):
            value = getattr(self, name)
            if value is not None:
                check_text(name, value, limit=512)
        _check_ports(self.ports)
        _check_host_ports(self.host_ports)
        check_duration("timeout", self.timeout)
        if self.idle_timeout is not None:
            check_duration("idle_timeout", self.idle_timeout, zero=True)
            if timedelta(0) < self.idle_timeout < SHORTEST_IDLE_TIMEOUT:
                refuse("idle_timeout", f"must be zero or at least {SHORTEST_IDLE_TIMEOUT.seconds} seconds")
            object.__setattr__(self, "idle_timeout", self.idle_timeout or None)
        if self.delete_after is not None:
            check_duration("delete_after", self.delete_after, zero=True)
            if timedelta(0) < self.delete_after < SHORTEST_LIFETIME:
                refuse("delete_after", f"must be zero or at least {SHORTEST_LIFETIME.seconds} second")
            object.__setattr__(self, "delete_after", self.delete_after or None)
        check_env(self.env)
        check_tags(self.tags)
        _check_mounts(self.mounts)
        if self.snapshot_expiration is not None:
            check_duration("snapshot_expiration", self.snapshot_expiration, zero=True)
        check_text("region", self.region, limit=64)
        for index, region in enumerate(self.failover_regions):
            check_text(f"failover_regions[{index}]", region, limit=64)
            if region == self.region:
                refuse(f"failover_regions[{index}]", "must not be the sandbox's own region")
            if region in self.failover_regions[:index]:
                refuse(f"failover_regions[{index}]", "is listed twice")
        object.__setattr__(self, "env", _frozen(self.env))
        object.__setattr__(self, "tags", _frozen(self.tags))
        object.__setattr__(self, "mounts", Frozen(self.mounts))


def _described() -> dict[str, Option]:
    found: dict[str, Option] = {}
    for each in fields(SandboxSpec):
        option: Option = each.metadata[_OPTION]
        column = f"{each.name}_ms" if option.milliseconds else each.name
        found[each.name] = option._replace(
            body=each.name if option.body == _SAME else option.body,
            keyword=each.name if option.keyword == _SAME else option.keyword,
            shown=(each.name,) if option.shown == (_SAME,) else option.shown,
            columns=(column,) if option.columns == (_SAME,) else option.columns,
        )
    return found


OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(_described())
"""Every option of a sandbox, by its field of `SandboxSpec`."""


def check_together(given: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, if one caller gives them at the same time.

    Of an option that was inherited, or set earlier, the other one simply takes precedence.
    """
    if given.get("destroy_on_stop"):
        for name in ("persistent", "retention", "snapshot_expiration"):
            if given.get(name) not in (None, False):
                refuse("destroy_on_stop", f"contradicts {OPTIONS[name].keyword}: nothing is kept")
