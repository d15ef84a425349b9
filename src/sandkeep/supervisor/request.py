"""From what a client asks to run to what init is told: checked, with user and environment worked out."""

from __future__ import annotations

import os
from typing import Any, Final

from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    ProcessError,
    SandkeepError,
    path_error,
)
from sandkeep.supervisor.identity import Accounts, Identity


class Requests:
    """Reads requests to start a process in the light of one session's specification and accounts."""

    def __init__(self, spec: dict[str, Any], accounts: Accounts, *, tracks_trees: bool) -> None:
        self._spec = spec
        self._accounts = accounts
        self._tracks_trees = tracks_trees

    def identity(self, user: str | int | None, *, root: bool = False) -> Identity:
        if root:
            return self._accounts.resolve("root")
        return self._accounts.resolve(user, default=self._spec["user"])

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        argv = body["argv"]
        if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
            raise InvalidRequest("argv must be a list of strings, the command first", field="argv")
        name = body["process"]
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
            raise InvalidRequest("process must be letters, digits, - and _", field="process")
        if body.get("stdin", "closed") not in ("closed", "pipe"):
            raise InvalidRequest("stdin is 'closed' or 'pipe'", field="stdin")
        size = body.get("pty")
        if size is not None and not (
            isinstance(size, list) and len(size) == 2 and all(0 < int(edge) < 65_536 for edge in size)
        ):
            raise InvalidRequest("pty is [rows, columns]", field="pty")
        root = bool(body.get("root"))
        identity = self.identity(body.get("user"), root=root)
        cwd = os.path.join(self._spec["cwd"], body.get("cwd") or "")
        environment = self._environment(identity, body.get("env") or {}, root=root)
        kill_after = body.get("kill_after_ms")
        if kill_after is not None and not (isinstance(kill_after, int) and kill_after >= 0):
            raise InvalidRequest("kill_after_ms is a number of milliseconds", field="kill_after_ms")
        return {
            "id": name,
            "argv": argv,
            "cwd": cwd,
            "user": identity.name,
            "uid": identity.uid,
            "gid": identity.gid,
            "groups": list(identity.groups),
            "env": [f"{key}={value}" for key, value in environment.items()],
            "path": environment.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "pty": [int(edge) for edge in size] if size else None,
            "stdin": body.get("stdin", "closed"),
            "rlimits": _limits(body.get("rlimits") or {}),
            "shim": kill_after is not None and not self._tracks_trees,
            "kill_after_ms": kill_after,
            "cap": int(body.get("log_cap_bytes") or self._spec["log_cap_bytes"]),
        }

    def _environment(self, identity: Identity, given: dict[str, str], *, root: bool) -> dict[str, str]:
        """Image and session defaults, then who is asking, then the request's own."""
        environment: dict[str, str] = dict(self._spec["rootfs"]["defaults"]["env"])
        environment.update({"HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name})
        environment.update(self._spec["env"])
        if root:
            environment.update({"HOME": "/root", "USER": "root", "LOGNAME": "root"})
            environment["SUDO_USER"] = self._spec["user"]
        for key, value in given.items():
            if not isinstance(key, str) or not isinstance(value, str) or not key or "=" in key:
                raise InvalidRequest(f"not an environment variable: {key!r}", field="env")
            if "\0" in key or "\0" in value:
                raise InvalidRequest(f"NUL byte in environment variable {key!r}", field="env")
            environment[key] = value
        return environment


def start_error(request: dict[str, Any], answer: dict[str, Any]) -> SandkeepError:
    """Why init could not start a process, in the caller's terms."""
    command, number = request["argv"][0], int(answer["errno"])
    reason = os.strerror(number)
    step = answer["step"]
    if step == "cwd":
        return path_error(OSError(number, reason), "enter", request["cwd"])
    if step == "find" or (step == "exec" and number in (2, 20)):
        if number == 13:
            return ExecutableRefused(f"{command}: {reason}", command=command, errno=number)
        hint = None
        if " " in command:
            hint = "No shell is involved: give the program and each of its arguments on their own."
        return ExecutableNotFound(f"{command}: executable not found", command=command, hint=hint)
    if step == "interpreter":
        return ExecutableRefused(f"{command}: its interpreter is missing", command=command, errno=number)
    if step == "exec":
        return ExecutableRefused(f"{command}: {reason}", command=command, errno=number)
    return ProcessError(f"{command}: cannot set up its {step}: {reason}", command=command, errno=number)


_RLIMITS: Final = {"cpu": 0, "fsize": 1, "core": 4, "nofile": 7, "as": 9}


def _limits(asked: dict[str, int]) -> list[list[int]]:
    try:
        return [[_RLIMITS[name], int(value), int(value)] for name, value in asked.items()]
    except (KeyError, ValueError, TypeError):
        raise InvalidRequest(f"rlimits are {', '.join(_RLIMITS)} with numbers", field="rlimits") from None
