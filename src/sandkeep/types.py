"""Values the SDK, the engine and the wire share: what a sandbox is made from, and the words for its states.

Every value is frozen and checks itself once, when it is built; whoever holds one need not check again. A
value that cannot be is refused with :class:`~sandkeep.errors.InvalidRequest`, whose ``field`` is the path
to the offending part (``env["A=B"]``) and whose ``problem`` says what is wrong with it.

Durations are :class:`~datetime.timedelta`, memory is in megabytes. Nothing here knows how JSON spells it.
Every client imports this first, so the parsers only some checks need (``ipaddress``, ``urllib.parse``) are
imported by those checks.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import NoReturn

from sandkeep.errors import InvalidRequest

DEFAULT_VCPUS = 2
MEMORY_PER_VCPU_MB = 2048
DEFAULT_TIMEOUT = timedelta(minutes=5)
DEFAULT_REGION = "iad1"

MAX_VCPUS = 512
MAX_NAME_LENGTH = 128
MAX_PORTS = 15
MAX_TAGS = 5
MAX_MOUNTS = 4
MAX_MOUNT_PATH = 256
MAX_DURATION = timedelta(days=3653)
MAX_ENV_ENTRY = 131_071
"""Bytes of one ``NAME=value``: the kernel takes 128 KiB for a single string, its terminating NUL included."""
MAX_ENV_TOTAL = 524_288
MAX_RETAINED = 100
MAX_REGEX = 1024

RESERVED_NAMES = frozenset({"sessions", "snapshots", "drives"})
"""Words that follow ``/v2/sandboxes/`` in a route, so no sandbox can be called that."""

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_TOKEN_CHARACTERS = _NAME_CHARACTERS | frozenset("!#$%&'*+.^`|~")
_MOUNT_FORBIDDEN = ("/proc", "/sys", "/dev", "/run/cell", "/run/vercel/share")
_GIT_SCHEMES = frozenset({"http", "https", "git", "ssh"})
_PROXY_MANAGED = frozenset({"connection", "content-length", "transfer-encoding"})
_BODILESS = frozenset({204, 205, 304})


class SessionStatus(StrEnum):
    """A session's life; a sandbox has the status of its latest session."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    SNAPSHOTTING = "snapshotting"
    STOPPED = "stopped"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)


class SnapshotStatus(StrEnum):
    """Whether a snapshot can be started from."""

    CREATED = "created"
    DELETED = "deleted"
    FAILED = "failed"


class SnapshotMethod(StrEnum):
    """How a snapshot came to be: on stop, on request (ending the session), or while the session went on."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    CHECKPOINT = "checkpoint"


class ProcessStatus(StrEnum):
    """A process's life; ``lost`` is one whose session ended under it."""

    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"


class OutputStream(StrEnum):
    """What a process prints to."""

    STDOUT = "stdout"
    STDERR = "stderr"


class MountMode(StrEnum):
    """How a drive is mounted: writable by one session, or as it was when the session started."""

    READ_WRITE = "read-write"
    SNAPSHOT = "snapshot"


class PolicyMode(StrEnum):
    """The kinds of network policy."""

    ALLOW_ALL = "allow-all"
    DENY_ALL = "deny-all"
    CUSTOM = "custom"


class FileKind(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    BLOCK_DEVICE = "block_device"
    CHARACTER_DEVICE = "character_device"


class Tier(StrEnum):
    """The isolation technology around a session."""

    NATIVE = "native"
    OCI = "oci"
    MICROVM = "microvm"


class SortOrder(StrEnum):
    """Smallest or oldest first, or last."""

    ASC = "asc"
    DESC = "desc"


class SandboxSort(StrEnum):
    """What sandboxes are ordered by."""

    CREATED_AT = "createdAt"
    NAME = "name"
    STATUS_UPDATED_AT = "statusUpdatedAt"
    CURRENT_SNAPSHOT_ID = "currentSnapshotId"


class DriveSort(StrEnum):
    """What drives are ordered by."""

    CREATED_AT = "createdAt"
    UPDATED_AT = "updatedAt"
    NAME = "name"


def refuse(field_path: str, problem: str) -> NoReturn:
    """Raise the one kind of error this module knows."""
    message = f"{field_path}: {problem}" if field_path else problem
    raise InvalidRequest(message, field=field_path, problem=problem)


@contextmanager
def within(prefix: str) -> Iterator[None]:
    """Put ``prefix`` before the field of whatever is refused inside."""
    try:
        yield
    except InvalidRequest as error:
        inner = error.details.get("field", "")
        joined = f"{prefix}{inner}" if not inner or inner.startswith("[") else f"{prefix}.{inner}"
        message = f"{joined}: {error.details.get('problem', error.message)}"
        details = {**error.details, "field": joined}
        raise InvalidRequest(message, hint=error.hint, **details) from None


def expect(field_path: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of another kind than its field's; ``True`` is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        refuse(field_path, f"must be {what}, not {type(value).__name__}")


def duration(value: timedelta | float, field_path: str = "duration") -> timedelta:
    """A duration given as a ``timedelta`` or as seconds."""
    if isinstance(value, timedelta):
        return value
    expect(field_path, value, (int, float), "a timedelta or a number of seconds")
    try:
        return timedelta(seconds=value)
    except (OverflowError, ValueError):
        refuse(field_path, f"cannot be {value} seconds")


def milliseconds(value: timedelta) -> int:
    """Whole milliseconds, rounded down."""
    return value // timedelta(milliseconds=1)


def byte_length(field_path: str, text: str) -> int:
    """How many bytes the kernel is given; ``\\udcXX`` in the text stands for a byte that is no text."""
    try:
        return len(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        refuse(field_path, "has half of a surrogate pair in it, which is no text")


def check_name(name: str, *, field_path: str = "name", reserved: frozenset[str] = RESERVED_NAMES) -> str:
    """A name that can be one segment of a path everywhere."""
    expect(field_path, name, str, "text")
    if not name:
        refuse(field_path, "must not be empty")
    if len(name) > MAX_NAME_LENGTH:
        refuse(field_path, f"must have at most {MAX_NAME_LENGTH} characters")
    if not _NAME_CHARACTERS.issuperset(name):
        refuse(field_path, "may contain only letters, digits, '-' and '_'")
    if name in reserved:
        refuse(field_path, f"{name!r} is a reserved word")
    return name


def _check_duration(field_path: str, value: timedelta, *, zero: bool = False) -> None:
    expect(field_path, value, timedelta, "a timedelta")
    smallest = timedelta(0) if zero else timedelta(milliseconds=1)
    if not smallest <= value <= MAX_DURATION:
        refuse(field_path, f"must be between {smallest} and {MAX_DURATION.days} days")


def _check_text(field_path: str, value: str, *, limit: int, empty: bool = False) -> None:
    expect(field_path, value, str, "text")
    if not value and not empty:
        refuse(field_path, "must not be empty")
    if len(value) > limit:
        refuse(field_path, f"must have at most {limit} characters")
    if not value.isprintable():
        refuse(field_path, "must not contain control characters")


@dataclass(frozen=True, slots=True, init=False)
class Resources:
    """Processors and memory of a session. Memory follows the processors, 2048 MB for each."""

    vcpus: int
    memory_mb: int

    def __init__(self, vcpus: int | None = None, memory_mb: int | None = None) -> None:
        for name, value in (("vcpus", vcpus), ("memory_mb", memory_mb)):
            if value is not None:
                expect(name, value, int, "a whole number")
        if vcpus is None:
            vcpus = DEFAULT_VCPUS if memory_mb is None else memory_mb // MEMORY_PER_VCPU_MB
        if memory_mb is None:
            memory_mb = vcpus * MEMORY_PER_VCPU_MB
        if not 1 <= vcpus <= MAX_VCPUS or (vcpus != 1 and vcpus % 2):
            refuse("vcpus", f"must be 1 or an even number up to {MAX_VCPUS}")
        if memory_mb != vcpus * MEMORY_PER_VCPU_MB:
            refuse("memory_mb", f"must be {MEMORY_PER_VCPU_MB} for each of the {vcpus} vcpus")
        object.__setattr__(self, "vcpus", vcpus)
        object.__setattr__(self, "memory_mb", memory_mb)


@dataclass(frozen=True, slots=True, init=False)
class SnapshotRetention:
    """Keep the newest ``count`` snapshots of a sandbox."""

    count: int
    expiration: timedelta | None = None
    """How long the kept ones live; zero is for ever, ``None`` the sandbox's own default."""
    delete_evicted: bool = True
    """Delete a snapshot as soon as a newer one pushes it out, rather than when it expires."""

    def __init__(
        self, count: int, expiration: timedelta | float | None = None, delete_evicted: bool = True
    ) -> None:
        expect("count", count, int, "a whole number")
        if not 1 <= count <= MAX_RETAINED:
            refuse("count", f"must be between 1 and {MAX_RETAINED}")
        if expiration is not None:
            expiration = duration(expiration, "expiration")
            _check_duration("expiration", expiration, zero=True)
        expect("delete_evicted", delete_evicted, bool, "True or False")
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "expiration", expiration)
        object.__setattr__(self, "delete_evicted", delete_evicted)


def _check_url(field_path: str, url: str, schemes: Iterable[str], *, bare: bool = False) -> None:
    from urllib.parse import urlsplit

    _check_text(field_path, url, limit=4096)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        refuse(field_path, "is not a URL")
    if parts.scheme not in schemes or not parts.hostname:
        refuse(field_path, f"must be a URL with scheme {' or '.join(sorted(schemes))}")
    if bare and (parts.query or parts.fragment):
        refuse(field_path, "must not have a query string or a fragment")


@dataclass(frozen=True, slots=True)
class GitSource:
    """Start with a clone. The credentials are used once and never stored."""

    url: str
    depth: int | None = None
    revision: str | None = None
    """Branch, tag or commit."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_url("url", self.url, _GIT_SCHEMES)
        if self.depth is not None and not 1 <= self.depth <= 2**31 - 1:
            refuse("depth", "must be at least 1")
        if self.revision is not None:
            _check_text("revision", self.revision, limit=1024)
            # git would read it as an option.
            if self.revision.startswith("-"):
                refuse("revision", "must not start with '-'")


@dataclass(frozen=True, slots=True)
class TarballSource:
    """Start with the content of a tar archive."""

    url: str

    def __post_init__(self) -> None:
        _check_url("url", self.url, ("http", "https"))


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
    """A drive as a sandbox sees it: read-write by one session, or as it is now by any number of them."""

    drive: str
    mode: MountMode = MountMode.READ_WRITE

    def __post_init__(self) -> None:
        check_name(self.drive, field_path="drive", reserved=frozenset())
        expect("mode", self.mode, MountMode, "a MountMode")


@dataclass(frozen=True, slots=True, init=False)
class Matcher:
    """Compare one text in one way."""

    kind: str
    """``exact``, ``starts_with`` or ``regex``."""
    value: str

    def __init__(
        self, *, exact: str | None = None, starts_with: str | None = None, regex: str | None = None
    ) -> None:
        given = {"exact": exact, "starts_with": starts_with, "regex": regex}
        chosen = [(kind, value) for kind, value in given.items() if value is not None]
        if len(chosen) != 1:
            refuse("", "needs exactly one of exact, starts_with and regex")
        kind, value = chosen[0]
        if kind == "regex" and len(value) > MAX_REGEX:
            refuse("regex", f"must have at most {MAX_REGEX} characters")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "value", value)


@dataclass(frozen=True, slots=True)
class PairMatcher:
    """Compare a header or query parameter by name, by value, or both."""

    key: Matcher | None = None
    value: Matcher | None = None

    def __post_init__(self) -> None:
        if self.key is None and self.value is None:
            refuse("", "needs a key or a value")


@dataclass(frozen=True, slots=True)
class RequestMatch:
    """Which requests a rule is for: every dimension given must match."""

    path: Matcher | None = None
    methods: tuple[str, ...] = ()
    """Any of them."""
    query: tuple[PairMatcher, ...] = ()
    """All of them."""
    headers: tuple[PairMatcher, ...] = ()
    """All of them; names without regard to case."""

    def __post_init__(self) -> None:
        for index, method in enumerate(self.methods):
            if not method or not _TOKEN_CHARACTERS.issuperset(method):
                refuse(f"methods[{index}]", "is not an HTTP method")


Headers = tuple[tuple[str, str], ...]


def _check_headers(headers: Headers) -> None:
    seen: set[str] = set()
    for name, value in headers:
        path = f'headers["{name}"]'
        if not name or not _TOKEN_CHARACTERS.issuperset(name):
            refuse(path, "is not a header name")
        if name.lower() in seen:
            refuse(path, "is there twice")
        # A value is sent as it is, so a line break in it would start another header.
        if any(character in value for character in "\r\n\0") or not _is_latin1(value):
            refuse(path, "is not a header value")
        seen.add(name.lower())


def _is_latin1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)


@dataclass(frozen=True, slots=True)
class Transform:
    """Set headers on the request before it leaves."""

    headers: Headers = field(repr=False)

    def __post_init__(self) -> None:
        _check_headers(self.headers)

    @classmethod
    def set_headers(cls, headers: Mapping[str, str]) -> Transform:
        return cls(tuple(headers.items()))


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the request to another URL, with the original one described in its headers."""

    url: str

    def __post_init__(self) -> None:
        _check_url("url", self.url, ("http", "https"), bare=True)


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer the request without contacting the destination."""

    status_code: int
    headers: Headers = field(default=(), repr=False)
    body: str | None = None
    content_type: str | None = None

    def __post_init__(self) -> None:
        if not 200 <= self.status_code <= 599:
            refuse("status_code", "must be between 200 and 599")
        if self.body is not None and self.status_code in _BODILESS:
            refuse("body", f"is not allowed with status {self.status_code}")
        if self.body is not None and self.content_type is None:
            refuse("content_type", "is needed with a body")
        if self.content_type is not None:
            _check_text("content_type", self.content_type, limit=256)
        _check_headers(self.headers)
        for name, _ in self.headers:
            if name.lower() in _PROXY_MANAGED:
                refuse(f'headers["{name}"]', "is set by the proxy itself")


Action = Transform | Forward | Respond


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to the requests a match describes; without a match, to every request."""

    action: Action
    match: RequestMatch | None = None


@dataclass(frozen=True, slots=True)
class Domain:
    """A name that may be reached, and the rules for requests to it, first match first.

    ``*`` alone is every name, a leading ``*.`` stands for one or more labels, ``*`` elsewhere for one.
    """

    pattern: str
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        problem = _domain_problem(self.pattern)
        if problem:
            refuse("", problem)


def _domain_problem(pattern: str) -> str | None:
    if pattern == "*":
        return None
    if not pattern or len(pattern) > 253:
        return "is not a domain name"
    if not pattern.isascii():
        return "must be in its ASCII (punycode) form"
    from ipaddress import ip_address

    try:
        ip_address(pattern.strip("[]"))
    except ValueError:
        pass
    else:
        return "is an address; list it under subnets"
    for label in pattern.removesuffix(".").split("."):
        if label == "*":
            continue
        if not 1 <= len(label) <= 63 or not _NAME_CHARACTERS.issuperset(label):
            return "is not a domain name ('*' may only stand for whole labels)"
    return None


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a session may reach. Build one with :meth:`allow_all`, :meth:`deny_all` or :meth:`custom`."""

    mode: PolicyMode
    domains: tuple[Domain, ...] = ()
    allow_subnets: tuple[str, ...] = ()
    deny_subnets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode is not PolicyMode.CUSTOM and (self.domains or self.allow_subnets or self.deny_subnets):
            refuse("mode", f"{self.mode.value} takes no domains or subnets")
        seen: set[str] = set()
        for domain in self.domains:
            normal = domain.pattern.lower().removesuffix(".")
            if normal in seen:
                refuse(f'domains["{domain.pattern}"]', "is there twice")
            seen.add(normal)
        if not (self.allow_subnets or self.deny_subnets):
            return
        from ipaddress import ip_network

        for name, subnets in (("allow_subnets", self.allow_subnets), ("deny_subnets", self.deny_subnets)):
            for index, subnet in enumerate(subnets):
                try:
                    ip_network(subnet, strict=False)
                except ValueError:
                    refuse(f"{name}[{index}]", f"{subnet!r} is not an address range")

    @classmethod
    def allow_all(cls) -> NetworkPolicy:
        return cls(PolicyMode.ALLOW_ALL)

    @classmethod
    def deny_all(cls) -> NetworkPolicy:
        return cls(PolicyMode.DENY_ALL)

    @classmethod
    def custom(
        cls,
        domains: Mapping[str, Sequence[Rule]] | Iterable[str] = (),
        *,
        allow_subnets: Iterable[str] = (),
        deny_subnets: Iterable[str] = (),
    ) -> NetworkPolicy:
        """Only what is listed: names (with rules for their requests), and address ranges.

        Denied ranges beat everything; allowed ranges need no name.
        """
        named = domains if isinstance(domains, Mapping) else dict.fromkeys(domains, ())
        built = []
        for pattern, rules in named.items():
            with within(f'domains["{pattern}"]'):
                built.append(Domain(pattern, tuple(rules)))
        return cls(PolicyMode.CUSTOM, tuple(built), tuple(allow_subnets), tuple(deny_subnets))


def _frozen(mapping: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(mapping))


def check_env(env: Mapping[str, str], *, field_path: str = "env") -> None:
    """Variables the kernel will pass on to a process."""
    expect(field_path, env, Mapping, "a mapping of names to values")
    total = 0
    for name, value in env.items():
        path = f'{field_path}["{name}"]'
        expect(path, name, str, "text")
        expect(path, value, str, "text")
        if not name or "=" in name or "\0" in name:
            refuse(path, "is not a variable name")
        if "\0" in value:
            refuse(path, "must not contain a NUL character")
        size = byte_length(path, name) + 1 + byte_length(path, value)
        if size > MAX_ENV_ENTRY:
            refuse(path, f"must be at most {MAX_ENV_ENTRY} bytes with its name")
        total += size + 1
    if total > MAX_ENV_TOTAL:
        refuse(field_path, f"must be at most {MAX_ENV_TOTAL} bytes in all")


def _check_tags(tags: Mapping[str, str]) -> None:
    expect("tags", tags, Mapping, "a mapping of keys to values")
    if len(tags) > MAX_TAGS:
        refuse("tags", f"at most {MAX_TAGS} are allowed")
    for key, value in tags.items():
        path = f'tags["{key}"]'
        _check_text(path, key, limit=128)
        if ":" in key:
            refuse(path, "must not contain ':', which ends the key when tags are searched")
        _check_text(path, value, limit=256, empty=True)


def _check_ports(ports: tuple[int, ...]) -> None:
    if len(ports) > MAX_PORTS:
        refuse("ports", f"at most {MAX_PORTS} are allowed")
    for index, port in enumerate(ports):
        expect(f"ports[{index}]", port, int, "a number")
        if not 1 <= port <= 65535:
            refuse(f"ports[{index}]", "must be between 1 and 65535")
        if port in ports[:index]:
            refuse(f"ports[{index}]", f"{port} is there twice")


def _check_mounts(mounts: Mapping[str, Mount]) -> None:
    expect("mounts", mounts, Mapping, "a mapping of paths to Mount")
    if len(mounts) > MAX_MOUNTS:
        refuse("mounts", f"at most {MAX_MOUNTS} are allowed")
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
    ("network_policy", NetworkPolicy),
    ("retention", SnapshotRetention),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything a sandbox is created from; ``dataclasses.replace`` makes a changed one, checked again."""

    name: str | None = None
    """``None``: one is generated."""
    source: Source | None = None
    image: str | None = None
    runtime: str | None = None
    ports: tuple[int, ...] = ()
    timeout: timedelta = DEFAULT_TIMEOUT
    """How long each session lives unless it is extended."""
    resources: Resources = field(default_factory=Resources)
    persistent: bool = True
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy.allow_all)
    network_id: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    tags: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Mount] = field(default_factory=dict)
    snapshot_expiration: timedelta | None = None
    """Default life of its snapshots; zero is for ever, ``None`` the server's default."""
    retention: SnapshotRetention | None = None
    region: str = DEFAULT_REGION
    failover_regions: tuple[str, ...] = ()
    interactive: bool = False
    """The first session must say which port serves terminals."""

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
                _check_text(name, value, limit=512)
        _check_ports(self.ports)
        _check_duration("timeout", self.timeout)
        check_env(self.env)
        _check_tags(self.tags)
        _check_mounts(self.mounts)
        if self.snapshot_expiration is not None:
            _check_duration("snapshot_expiration", self.snapshot_expiration, zero=True)
        _check_text("region", self.region, limit=64)
        for index, region in enumerate(self.failover_regions):
            _check_text(f"failover_regions[{index}]", region, limit=64)
            if region == self.region:
                refuse(f"failover_regions[{index}]", "must not be the sandbox's own region")
            if region in self.failover_regions[:index]:
                refuse(f"failover_regions[{index}]", "is there twice")
        object.__setattr__(self, "env", _frozen(self.env))
        object.__setattr__(self, "tags", _frozen(self.tags))
        object.__setattr__(self, "mounts", MappingProxyType(dict(self.mounts)))
