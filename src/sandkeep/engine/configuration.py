"""A sandbox's options as columns of the store, and back. Values, and no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sandkeep.checks import milliseconds
from sandkeep.spec import OPTIONS, HostPort, Mount, Resources, SandboxSpec, SnapshotRetention, vcpus_of
from sandkeep.states import MountMode
from sandkeep.store.rows import KeepLast, Sandbox, Session, StoredHostPort, StoredMount

_OF_ITS_OWN = frozenset({"name", "source", "image", "network_policy"})
"""Options whose columns hold more than the specification has, or a sealed value: the engine fills them."""
_PLAIN = tuple(
    (name, option) for name, option in OPTIONS.items() if option.columns and name not in _OF_ITS_OWN
)


def columns(spec: SandboxSpec) -> dict[str, Any]:
    """Return a specification as columns, except name, source, image and policy."""
    found: dict[str, Any] = {}
    for name, option in _PLAIN:
        value = _stored(getattr(spec, name))
        found |= zip(option.columns, value if len(option.columns) > 1 else (value,), strict=True)
    return found


def columns_of(names: Iterable[str]) -> set[str]:
    """Return the columns that hold these options."""
    return {column for name in names for column in OPTIONS[name].columns}


def fields(row: Sandbox) -> dict[str, Any]:
    """Return the columns as arguments of a specification, except name, source, image and policy."""
    found: dict[str, Any] = {}
    for name, option in _PLAIN:
        stored = [getattr(row, column) for column in option.columns]
        if option.milliseconds:
            found[name] = _duration(stored[0])
        else:
            found[name] = resources(row) if name == "resources" else _value(stored[0])
    return found


def of_session(row: Sandbox) -> dict[str, Any]:
    """Return the columns that a new session copies from its sandbox; its image depends on more."""
    copied = (option for name, option in OPTIONS.items() if option.of_session and name != "image")
    return {column: getattr(row, column) for option in copied for column in option.session_columns}


def resources(row: Sandbox | Session) -> Resources:
    """Return the limits of a sandbox, or those that a session was started with."""
    exact = isinstance(row, Sandbox) and row.exact_resources
    if row.asked_limits is None:
        return Resources(row.vcpus, row.memory_mb, exact=exact)
    return Resources(**row.asked_limits, exact=exact)


def _stored(value: Any) -> Any:
    match value:
        case timedelta():
            return milliseconds(value)
        case Resources():
            return (vcpus_of(value), value.memory_mb, dict(value.asked), value.exact)
        case SnapshotRetention(count=count, expiration=expiration, delete_evicted=delete_evicted):
            return KeepLast(count, _stored(expiration), delete_evicted)
        case Mount():
            return StoredMount(value.drive, str(value.mode))
        case HostPort():
            return StoredHostPort(value.port, value.name)
        case tuple():
            return tuple(_stored(item) for item in value)
        case Mapping():
            return {key: _stored(item) for key, item in value.items()}
    return value


def _value(stored: Any) -> Any:
    match stored:
        case KeepLast(count=count, expiration_ms=expiration_ms, delete_evicted=delete_evicted):
            return SnapshotRetention(count, _duration(expiration_ms), delete_evicted)
        case StoredMount():
            return Mount(stored.drive, MountMode(stored.mode))
        case StoredHostPort():
            return HostPort(stored.port, stored.name)
        case Mapping():
            return {key: _value(item) for key, item in stored.items()}
        case list() | tuple():
            return tuple(_value(item) for item in stored)
    return stored


def _duration(value_ms: int | None) -> timedelta | None:
    return None if value_ms is None else timedelta(milliseconds=value_ms)
