"""Check a client's request to start a process and turn it into the message for init."""

from __future__ import annotations

import errno
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
    """Parses requests to start a process, with one session's specification and accounts."""

    def __init__(self, spec: dict[str, Any], accounts: Accounts) -> None:
        self._spec = spec
        self._accounts = accounts

    def identity(self, user: str | int | None, *, root: bool = False) -> Identity:
        if root:
            return self._accounts.resolve("root")
        return self._accounts.resolve(user, default=self._spec["user"])

    def parse_start_request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Check a request to start a process and return the message for init."""
        _check(body)
        size = body.get("pty")
        root = bool(body.get("root"))
        identity = self.identity(body.get("user"), root=root)
        cwd = os.path.join(self._spec["cwd"], body.get("cwd") or "")
        environment = self._environment(identity, body.get("env") or {}, root=root)
        return {
            "id": body["process"],
            "argv": body["argv"],
            "cwd": cwd,
            "user": identity.name,
            "uid": identity.uid,
            "gid": identity.gid,
            "groups": list(identity.groups),
            "env": [f"{key}={value}" for key, value in environment.items()],
            "path": environment.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "pty": [int(edge) for edge in size] if size else None,
            "stdin": body.get("stdin", "closed"),
            "stderr": body.get("stderr"),
            "rlimits": _limits(body.get("rlimits") or {}),
            "kill_after_ms": body.get("kill_after_ms"),
            "grace_ms": body.get("grace_ms"),
            "metadata": body.get("metadata") or {},
            "cap": int(body.get("log_cap_bytes") or self._spec["log_cap_bytes"]),
        }

    def _environment(self, identity: Identity, given: dict[str, str | None], *, root: bool) -> dict[str, str]:
        """Return the defaults of image and session, overridden by the user's, then by the request's.

        A variable that the request gives as ``None`` is removed.
        """
        environment: dict[str, str] = dict(self._spec["rootfs"]["defaults"]["env"])
        home = identity.home
        if identity.name == self._spec["user"]:
            home = self._spec.get("home") or self._spec["rootfs"]["defaults"].get("home") or home
        environment.update({"HOME": home, "USER": identity.name, "LOGNAME": identity.name})
        environment.update(self._spec["env"])
        if root:
            environment.update({"HOME": "/root", "USER": "root", "LOGNAME": "root"})
            environment["SUDO_USER"] = self._spec["user"]
        for key, value in given.items():
            if not isinstance(key, str) or not isinstance(value, str | None) or not key or "=" in key:
                raise InvalidRequest(f"not an environment variable: {key!r}", field="env")
            if "\0" in key or "\0" in (value or ""):
                raise InvalidRequest(f"NUL byte in environment variable {key!r}", field="env")
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = value
        return environment


def _check(body: dict[str, Any]) -> None:
    argv = body["argv"]
    if not isinstance(argv, list) or not argv or not all(isinstance(item, str) for item in argv):
        raise InvalidRequest("argv must be a list of strings, the command first", field="argv")
    name = body["process"]
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise InvalidRequest("process must be letters, digits, - and _", field="process")
    if body.get("stdin", "closed") not in ("closed", "pipe"):
        raise InvalidRequest("stdin must be 'closed' or 'pipe'", field="stdin")
    if body.get("stderr") not in (None, "stdout"):
        raise InvalidRequest("stderr must be 'stdout' or absent", field="stderr")
    size = body.get("pty")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(0 < int(edge) < 65_536 for edge in size)
    ):
        raise InvalidRequest("pty must be [rows, columns]", field="pty")
    for field in ("kill_after_ms", "grace_ms"):
        check_milliseconds(field, body.get(field))


def check_milliseconds(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, int) and value >= 0):
        raise InvalidRequest(f"{field} must be a number of milliseconds", field=field)


def start_error(request: dict[str, Any], answer: dict[str, Any]) -> SandkeepError:
    """Return the error for a process that init could not start."""
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
    if step == "exec" and number == errno.E2BIG:
        return _too_long(request)
    if step == "exec":
        return ExecutableRefused(f"{command}: {reason}", command=command, errno=number)
    return ProcessError(f"{command}: cannot set up its {step}: {reason}", command=command, errno=number)


def _too_long(request: dict[str, Any]) -> InvalidRequest:
    """Return the error for arguments and variables that are longer than the kernel takes."""
    sizes = {
        name: sum(len(os.fsencode(text)) + 1 for text in request[key])
        for name, key in (("args", "argv"), ("env", "env"))
    }
    field = "args" if sizes["args"] >= sizes["env"] else "env"
    problem = f"the kernel takes fewer: {sizes['args']} bytes of arguments and {sizes['env']} of variables"
    return InvalidRequest(f"{field}: {problem}", field=field, problem=problem, errno=errno.E2BIG)


_RLIMITS: Final = {"cpu": 0, "fsize": 1, "core": 4, "nofile": 7, "as": 9}


def _limits(asked: dict[str, int]) -> list[list[int]]:
    try:
        return [[_RLIMITS[name], int(value), int(value)] for name, value in asked.items()]
    except (KeyError, ValueError, TypeError):
        raise InvalidRequest(f"rlimits must map {', '.join(_RLIMITS)} to numbers", field="rlimits") from None
