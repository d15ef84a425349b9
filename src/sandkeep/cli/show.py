"""Values of the SDK as the command line shows them, where that is more than their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandkeep.cli.output import camel, plain
from sandkeep.types import PolicyMode

if TYPE_CHECKING:
    from sandkeep.sync import Process, Sandbox, SandboxInfo, ShownPolicy

_SANDBOX = (
    "name",
    "status",
    "persistent",
    "image",
    "runtime",
    "resources",
    "execution_time_limit",
    "expires_at",
    "cwd",
    "tags",
    "mounts",
    "network_policy",
    "current_snapshot_id",
    "snapshot_expiration",
    "snapshot_retention",
    "created_at",
    "usage",
)
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
)


def sandbox(found: Sandbox | SandboxInfo, *, routes: bool = False) -> dict[str, Any]:
    """A sandbox for programs."""
    body = _fields(found, _SANDBOX)
    if routes:
        body["routes"] = plain(getattr(found, "routes", ()))
    return body


def process(found: Process) -> dict[str, Any]:
    """A process for programs."""
    return _fields(found, _PROCESS)


def _fields(found: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {camel(name): plain(getattr(found, name)) for name in names}


def policy(found: ShownPolicy | None) -> str:
    """A network policy in a few words."""
    if found is None:
        return "-"
    if found.mode is not PolicyMode.CUSTOM:
        return found.mode.value
    parts = [*found.domains, *found.allow_subnets, *(f"not {subnet}" for subnet in found.deny_subnets)]
    return f"restricted: {', '.join(parts)}" if parts else "restricted"
