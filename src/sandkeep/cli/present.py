"""Values of the SDK as the command line shows them, if not field by field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sandkeep.cli.output import camel, plain, size, span
from sandkeep.states import PolicyMode

if TYPE_CHECKING:
    from sandkeep.sync import Process, Resources, Sandbox, SandboxInfo, ShownPolicy, Usage

_NOT_OF_HANDLES = frozenset({"current_session_id", "damage"})
"""Fields of a listed sandbox that a handle does not have."""
_PROCESS = (
    "id",
    "session_id",
    "command",
    "args",
    "cwd",
    "status",
    "returncode",
    "started_at",
    "duration",
    "reason",
    "explanation",
    "metadata",
)


def sandbox(found: Sandbox | SandboxInfo, *, routes: bool = False) -> dict[str, Any]:
    """Return a sandbox as JSON."""
    from sandkeep.sync import SandboxInfo  # which is loaded by now, and not for help texts

    body = _fields(found, (name for name in SandboxInfo.__dataclass_fields__ if name not in _NOT_OF_HANDLES))
    if routes:
        body["routes"] = plain(getattr(found, "routes", ()))
    return body


def process(found: Process) -> dict[str, Any]:
    """Return a process as JSON."""
    return _fields(found, _PROCESS)


def _fields(found: object, names: Iterable[str]) -> dict[str, Any]:
    return {camel(name): plain(getattr(found, name)) for name in names}


def policy(found: ShownPolicy | None) -> str:
    """Describe a network policy in a few words."""
    if found is None:
        return "-"
    if found.mode is not PolicyMode.CUSTOM:
        return found.mode.value
    parts = [*found.domains, *found.allow_subnets, *(f"not {subnet}" for subnet in found.deny_subnets)]
    return f"restricted: {', '.join(parts)}" if parts else "restricted"


def usage(found: Usage) -> str:
    """Describe the usage of sessions in a few words."""
    return (
        f"ran {span(found.duration)}, {span(found.cpu)} of processor time, "
        f"received {size(found.ingress_bytes)}, sent {size(found.egress_bytes)}"
    )


def resources(*found: Resources) -> str:
    """Describe processors and memory, summed."""
    cpus, memory_mb = sum(each.cpus for each in found), sum(each.memory_mb for each in found)
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'} and {memory_mb} MB of memory"
