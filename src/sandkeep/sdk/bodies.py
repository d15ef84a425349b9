"""Requests as the wire spells them, from the arguments people write.

Arguments are checked here, before anything is sent: the error names the argument.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypedDict

from sandkeep.errors import InvalidRequest
from sandkeep.types import (
    GitSource,
    Mount,
    NetworkPolicy,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    Source,
    TarballSource,
    byte_length,
    check_env,
    duration,
    expect,
    milliseconds,
    refuse,
)
from sandkeep.wire.base import encode
from sandkeep.wire.policies import authored

Duration = timedelta | float
"""A duration: a ``timedelta``, or seconds."""


class Configuration(TypedDict, total=False):
    """What a sandbox can be configured with. What is not given has its default, or is inherited by a fork."""

    image: str
    """Its root filesystem: ``host``, an OCI reference, or the name of an imported one."""
    ports: Sequence[int]
    """Ports to be reached from outside; at most 15."""
    execution_time_limit: Duration
    """How long each session lives unless it is extended; five minutes by default."""
    resources: Resources
    persistent: bool
    """Keep files between sessions; the default."""
    network_policy: NetworkPolicy
    env: Mapping[str, str]
    """Variables for every process."""
    tags: Mapping[str, str]
    """Labels to find it by; at most five."""
    mounts: Mapping[str, Mount]
    """Drives, by the absolute path they are mounted at. A fork inherits none."""
    snapshot_expiration: Duration
    """How long snapshots live unless said otherwise; zero is for ever."""
    snapshot_retention: SnapshotRetention


class NewConfiguration(Configuration, total=False):
    """What a new sandbox can be configured with besides."""

    runtime: str
    """A runtime by name, instead of an image, such as ``python3.13``."""
    source: Source
    """What its files start with."""


class Unchanged:
    """Stands for "leave it as it is" where ``None`` means something else."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = Unchanged()


def _resources(value: Resources) -> dict[str, int]:
    return {"vcpus": value.vcpus, "memory": value.memory_mb}


def _retention(value: SnapshotRetention) -> dict[str, Any]:
    body: dict[str, Any] = {"count": value.count, "deleteEvicted": value.delete_evicted}
    if value.expiration is not None:
        body["expiration"] = milliseconds(value.expiration)
    return body


def _source(value: Source) -> dict[str, Any]:
    if isinstance(value, GitSource):
        optional = {
            "depth": value.depth,
            "revision": value.revision,
            "username": value.username,
            "password": value.password,
        }
        known = {name: given for name, given in optional.items() if given is not None}
        return {"type": "git", "url": value.url, **known}
    if isinstance(value, TarballSource):
        return {"type": "tarball", "url": value.url}
    return {"type": "snapshot", "snapshotId": value.snapshot_id}


def _mounts(value: Mapping[str, Mount]) -> dict[str, dict[str, str]]:
    return {path: {"drive": mount.drive, "mode": mount.mode.value} for path, mount in value.items()}


_SPELLING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", str),
    "image": ("image", str),
    "runtime": ("runtime", str),
    "source": ("source", _source),
    "ports": ("ports", list),
    "timeout": ("timeout", milliseconds),
    "resources": ("resources", _resources),
    "persistent": ("persistent", bool),
    "network_policy": ("networkPolicy", authored),
    "env": ("env", dict),
    "tags": ("tags", dict),
    "mounts": ("mounts", _mounts),
    "snapshot_expiration": ("snapshotExpiration", milliseconds),
    "retention": ("keepLastSnapshots", _retention),
}


def configuration(
    *,
    execution_time_limit: Duration | None = None,
    snapshot_expiration: Duration | None = None,
    snapshot_retention: SnapshotRetention | Unchanged | None = UNCHANGED,
    ports: Sequence[int] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The body for what was given; what is ``None`` is left out.

    Raises:
        InvalidRequest: naming the argument that cannot be.
    """
    fields = {name: value for name, value in others.items() if value is not None}
    if execution_time_limit is not None:
        fields["timeout"] = duration(execution_time_limit, "execution_time_limit")
    if snapshot_expiration is not None:
        fields["snapshot_expiration"] = duration(snapshot_expiration, "snapshot_expiration")
    if snapshot_retention is not None and not isinstance(snapshot_retention, Unchanged):
        fields["retention"] = snapshot_retention
    if ports is not None:
        expect("ports", ports, Iterable, "a sequence of numbers")
        fields["ports"] = tuple(ports)
    unknown = fields.keys() - _SPELLING.keys()
    if unknown:
        raise TypeError(f"a sandbox has no configuration {', '.join(sorted(unknown))}")
    with _as_given():
        SandboxSpec(**fields)
    body = {_SPELLING[name][0]: _SPELLING[name][1](value) for name, value in fields.items()}
    if snapshot_retention is None:
        body["keepLastSnapshots"] = None
    return body


_GIVEN = {"timeout": "execution_time_limit", "retention": "snapshot_retention"}


@contextmanager
def _as_given() -> Iterator[None]:
    """Errors name the argument as the caller knows it."""
    try:
        yield
    except InvalidRequest as error:
        name, dot, rest = str(error.details.get("field", "")).partition(".")
        if name not in _GIVEN:
            raise
        refuse(f"{_GIVEN[name]}{dot}{rest}", error.details.get("problem", error.message))


def policy(value: NetworkPolicy) -> bytes:
    """A network policy with the values it injects."""
    expect("policy", value, NetworkPolicy, "a NetworkPolicy")
    return encode(authored(value))


def process(
    command: str,
    args: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    sudo: bool,
    user: str | None,
    kill_after: Duration | None,
    stdin: bool,
) -> dict[str, Any]:
    """The body that starts a process."""
    _check_args(args)
    body: dict[str, Any] = {"command": command, "args": list(args), "sudo": sudo}
    if cwd is not None:
        body["cwd"] = cwd
    if env:
        check_env(env)
        body["env"] = dict(env)
    if user is not None:
        body["user"] = user
    if kill_after is not None:
        limit = milliseconds(duration(kill_after, "kill_after"))
        if limit < 1:
            refuse("kill_after", "must be at least a millisecond")
        body["timeout"] = limit
    if stdin:
        body["attachStdin"] = True
    return body


def terminal(
    command: str,
    args: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    columns: int,
    rows: int,
) -> dict[str, Any]:
    """The message that starts a program on a terminal; what is wrong with it nobody could tell later."""
    _check_args(args)
    words = {"command": command, **{f"args[{index}]": word for index, word in enumerate(args)}}
    if cwd is not None:
        words["cwd"] = cwd
    for name, word in words.items():
        expect(name, word, str, "text")
        if "\0" in word:
            refuse(name, "must not contain a NUL character")
        byte_length(name, word)
    if not command:
        refuse("command", "must not be empty")
    variables = {"TERM": "xterm-256color", **(env or {})}
    check_env(variables)
    check_size(columns, rows)
    return {
        "type": "start",
        "command": command,
        "args": list(args),
        "env": [f"{name}={value}" for name, value in variables.items()],
        "cwd": cwd,
        "cols": columns,
        "rows": rows,
    }


def check_size(columns: int, rows: int) -> None:
    """A size that a terminal can have."""
    for name, value in (("columns", columns), ("rows", rows)):
        expect(name, value, int, "a number")
        if not 1 <= value <= 65_535:
            refuse(name, "must be between 1 and 65535")


def _check_args(args: Sequence[str]) -> None:
    if isinstance(args, str):
        refuse("args", "is a sequence of strings, not one string")
    expect("args", args, Iterable, "a sequence of strings")


def signal_number(signal: int | str) -> int:
    """A signal by number or name, with or without ``SIG``."""
    if isinstance(signal, str):
        name = signal.upper() if signal.upper().startswith("SIG") else f"SIG{signal.upper()}"
        try:
            return int(signals.Signals[name])
        except KeyError:
            refuse("signal", f"{signal!r} is not the name of a signal")
    expect("signal", signal, int, "a number or a name")
    if not 1 <= signal <= 64:
        refuse("signal", "must be between 1 and 64")
    return int(signal)
