"""The JSON forms that pass between the native driver and its supervisors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sandkeep.errors import HostCannot
from sandkeep.host.driver import ProcessSpec, SessionSpec
from sandkeep.host.reports import SessionState, state_fields
from sandkeep.shared import protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeState(SessionState):
    """A session's state, with the fields that only this driver has."""

    supervisor_pid: int = 0
    init_pid: int = 0
    """Process ids; 0 for a session that did not get that far."""
    cgroup: Mapping[str, list[Any]] = field(default_factory=dict)
    """Fields of `sandkeep.linux.cgroup.GroupPlace`, by resource."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> NativeState:
        return cls(**state_fields(cls, body))


def session_json(spec: SessionSpec) -> dict[str, Any]:
    """Return the ``spec.json`` of a session."""
    limits = {
        "memory": spec.limits.memory_bytes,
        "cpu": spec.limits.cpus,
        "pids": spec.limits.pids,
        "disk": spec.limits.disk_bytes,
    }
    return {
        "session": spec.session,
        "generation": spec.generation,
        "image": spec.rootfs.image,
        "layer": spec.layer,
        "rootfs": spec.rootfs.to_json(),
        "limits": {part: [value, part in spec.limits.explicit] for part, value in limits.items()},
        "deadline_ms": spec.deadline_ms,
        "timeout_ms": spec.timeout_ms,
        "env": dict(spec.env),
        "user": spec.user or spec.rootfs.defaults.user,
        "cwd": spec.cwd or spec.rootfs.defaults.cwd,
        "home": spec.home,
        "hostname": spec.hostname,
        "volatile": spec.volatile,
        "accept": sorted(spec.accept),
        "shm_bytes": spec.shm_bytes,
        "log_cap_bytes": spec.log_cap_bytes,
    }


def process_json(spec: ProcessSpec) -> dict[str, Any]:
    """Return the body of a ``process.start`` request."""
    body = {
        "process": spec.process,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "env": dict(spec.env),
        "user": spec.user,
        "root": spec.root,
        "stdin": "pipe" if spec.stdin else "closed",
        "pty": list(spec.pty) if spec.pty else None,
        "kill_after_ms": spec.kill_after_ms,
        "rlimits": dict(spec.rlimits),
        "log_cap_bytes": spec.log_cap_bytes,
    }
    # Later fields are absent unless they say something, so that earlier supervisors can be used.
    recent = {"stderr": spec.stderr, "grace_ms": spec.grace_ms, "metadata": dict(spec.metadata) or None}
    return body | {name: value for name, value in recent.items() if value is not None}


_RECENT: Final = {
    "stderr": (protocol.LONG, "standard error in the pipe of standard output"),
    "grace_ms": (protocol.LONG, "a grace period"),
    "metadata": (protocol.RECORDS_INPUT, "metadata of processes"),
}
"""What supervisors of earlier protocols would ignore, by its field of a ``process.start`` request."""


def check_for_earlier(session_id: str, spoken: int, body: dict[str, Any]) -> None:
    """Refuse a ``process.start`` request that a supervisor of an earlier protocol cannot carry out."""
    lacking = [what for name, (since, what) in _RECENT.items() if name in body and spoken < since]
    if spoken < protocol.LONG:
        lacking += _too_long_for_earlier(body)
    if lacking:
        raise too_early(session_id, lacking[0])


def _too_long_for_earlier(body: dict[str, Any]) -> list[str]:
    lacking = []
    variables = [value for value in body["env"].values() if value is not None]
    if len(variables) < len(body["env"]):
        lacking.append("the removal of variables")
    room = protocol.SHORT_JSON - protocol.HEADER.size
    # Encoding is slow; a character takes at most six bytes.
    long = sum(map(len, (*body["argv"], *body["env"], *variables))) > room // 8
    if long and len(protocol.encode(body)) > room:
        lacking.append("as many arguments")
    return lacking


def too_early(session_id: str, what: str) -> HostCannot:
    """Return the error for a request that the supervisor of a session does not know."""
    return HostCannot(
        f"session {session_id} was started by an earlier version, which cannot do {what}",
        part="supervisor protocol",
        why=f"the supervisor of the session does not know {what}",
        session=session_id,
        hint="stop the sandbox: its next session has a supervisor of this version",
    )
