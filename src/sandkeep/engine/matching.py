"""Compare the configuration of an existing sandbox with what a caller asks for. Values, and no I/O.

Every difference is an error, which names the first field that differs, and both values. Values that are not
shown elsewhere (variables, headers that a policy adds) are not shown here either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from sandkeep.checks import milliseconds
from sandkeep.engine.policies import Policies
from sandkeep.errors import ConfigurationDiffers
from sandkeep.policy import NetworkPolicy
from sandkeep.policy_json import shown
from sandkeep.spec import GitSource, Resources, SandboxSpec, SnapshotSource, Source, TarballSource
from sandkeep.store.rows import ACTIVE, Sandbox, Session

_UNSHOWN = "the same but for values that are not shown"


def origin_of(source: Source | None) -> dict[str, Any] | None:
    """Return the source of a sandbox's files to store and show: no credentials."""
    match source:
        case SnapshotSource(snapshot_id):
            return {"type": "snapshot", "snapshotId": snapshot_id}
        case GitSource(url=url, depth=depth, revision=revision):
            more = {"depth": depth, "revision": revision}
            return {"type": "git", "url": _public(url), **{k: v for k, v in more.items() if v is not None}}
        case TarballSource(url=url):
            return {"type": "tarball", "url": _public(url)}
    return None


def _public(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def require(
    sandbox: Sandbox,
    session: Session,
    found: SandboxSpec,
    asked: Mapping[str, Any],
    *,
    image: str,
    policies: Policies,
) -> None:
    """Raise `ConfigurationDiffers` for the first field of ``asked`` that the sandbox has differently.

    Args:
        found: the sandbox's configuration.
        image: the local image that the requested name resolves to.
        policies: opens the policy of a running session.
    """
    has: Any
    for field, wanted in asked.items():
        match field:
            case "name":
                continue
            case "image":
                has, wanted = sandbox.image, image
            case "source":
                has, wanted = sandbox.source, origin_of(wanted)
            case "interactive":
                has = session.interactive_port is not None
            case "host_ports":
                has, wanted = set(found.host_ports), set(wanted)
            case "ports":
                has, wanted = sorted(found.ports), sorted(wanted)
            case _:
                has = getattr(found, field)
        if isinstance(wanted, Resources):
            _require_resources(sandbox, has, wanted)
        elif has != wanted:
            _refuse(sandbox, field, has, wanted)
    policy = asked.get("network_policy")
    if policy is not None and session.status in ACTIVE:
        now = policies.policy(session.project, session.network_policy)
        if now != policy:
            _refuse(sandbox, "network_policy", now, policy, running=True)


def _require_resources(sandbox: Sandbox, has: Resources, wanted: Resources) -> None:
    """Compare the limits that were asked for; those that were left out may be anything."""
    for name in wanted.asked:
        found, asked = getattr(has, name), getattr(wanted, name)
        if found != asked:
            _refuse(sandbox, f"resources.{name}", found, asked)


def _refuse(sandbox: Sandbox, field: str, has: Any, wanted: Any, *, running: bool = False) -> None:
    found, asked = _plain(field, has), _plain(field, wanted)
    if found == asked:
        asked = _UNSHOWN
    owner = f"the running session of {sandbox.name}" if running else f"sandbox {sandbox.name}"
    raise ConfigurationDiffers(
        f"{owner} has {_text(found)}, and {_text(asked)} was asked for",
        name=sandbox.name,
        field=field,
        found=found,
        asked=asked,
        problem=f"{owner} has {_text(found)}, and {_text(asked)} was asked for",
        hint="change the sandbox first, ask for what it has, or use another name",
    )


def _plain(field: str, value: Any) -> Any:
    """Return a value as it may be shown, in JSON."""
    if field == "env":
        return sorted(value)
    if isinstance(value, NetworkPolicy):
        policy = msgspec.to_builtins(shown(value))
        return policy["mode"] if len(policy) == 1 else policy
    if isinstance(value, timedelta):
        return milliseconds(value)
    if field == "host_ports":
        return sorted(f"{each.port}={each.name}" for each in value)
    if field == "mounts":
        return {path: {"drive": mount.drive, "mode": str(mount.mode)} for path, mount in value.items()}
    if field == "retention" and value is not None:
        expiration = None if value.expiration is None else milliseconds(value.expiration)
        return {"count": value.count, "expiration": expiration, "deleteEvicted": value.delete_evicted}
    return dict(value) if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
