"""Ask systemd for a scope: a control group of its own for the zygote and every session.

The group of the service or login session that started the server does not suit sessions: systemd starts a
service's next main process in the service's own group, which the kernel refuses while that group passes
controllers on, and an ordinary user's login session is not delegated at all. So the zygote is moved into a
transient, delegated scope, one per zygote, and everything it forks is in there too. systemd keeps the scope
as long as a process lives in it and removes it, groups and all, with the last one. The server stays in its
group.

``busctl``, which comes with systemd, speaks D-Bus. Root asks the system's manager; other users ask their own,
which has PID 1 move processes that it may not move itself.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from sandkeep.linux.cgroup import groupfs, units

_CONTROLLERS: Final = "/sys/fs/cgroup/cgroup.controllers"
_SYSTEMD_RUNS: Final = "/run/systemd/system"
_SYSTEM_BUS: Final = "/run/dbus/system_bus_socket"
_USER_RUNTIME: Final = "/run/user/{uid}"
_SECONDS: Final = 20.0
_PAUSE: Final = 0.005
_INFINITY: Final = str(2**64 - 1)
_MANAGER: Final = (
    "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1.Manager",
)

Property = tuple[str, str, str]
"""Name, D-Bus signature and value, as busctl takes them."""


class SystemdScope(NamedTuple):
    """Result of asking systemd for a scope. Without systemd on cgroup v2 ``unit`` and ``why`` are empty."""

    unit: str = ""
    why: str = ""
    """Why systemd, although it runs this machine, made no scope."""
    fix: str = ""


class _Refused(Exception):
    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.scope = SystemdScope("", why, fix)


def prefix(group: str) -> str:
    """Return what the names of all scopes of one data directory begin with."""
    return f"{group}-"


def enter(pid: int, group: str) -> SystemdScope:
    """Have systemd move a child of this process into a new scope whose name begins with ``group``."""
    if not os.path.exists(_CONTROLLERS):
        return SystemdScope()
    if not units.path_in(units.FIRST) and os.path.isdir(_SYSTEMD_RUNS):
        why = "systemd cannot be asked for a scope: PID 1 is hidden from this process"
        return SystemdScope("", why, "leave out ProtectProc= of the unit, and hidepid= of /proc")
    if not units.systemd_runs():
        return SystemdScope()
    name = f"{prefix(group)}{secrets.token_hex(4)}.scope"
    try:
        bus = _Bus(os.geteuid())
        bus.start_scope(name, pid)
        bus.await_move(name, pid)
    except _Refused as refused:
        return refused.scope
    return SystemdScope(name)


class _Bus:
    """One systemd manager, reached through busctl."""

    def __init__(self, uid: int) -> None:
        self._user = uid or None
        program = shutil.which("busctl")
        if program is None:
            raise _Refused(
                "busctl, which asks systemd for a scope, is not installed", "install busctl (systemd)"
            )
        # No user is there to answer an authorisation prompt of this process.
        options = ["--allow-interactive-authorization=no", f"--timeout={_SECONDS:.0f}"]
        self._environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
        if self._user is None:
            socket = _SYSTEM_BUS
            self._fix = "is the system's message bus running (package dbus)?"
            self._command = [program, "--system", *options, "call", *_MANAGER]
        else:
            runtime = _USER_RUNTIME.format(uid=uid)
            socket = f"{runtime}/bus"
            self._fix = f"as root: loginctl enable-linger {_name_of(uid)} (and install dbus-user-session)"
            self._environment["XDG_RUNTIME_DIR"] = runtime
            self._environment["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={socket}"
            self._command = [program, "--user", *options, "call", *_MANAGER]
        if not os.path.exists(socket):
            whose = "the system" if self._user is None else f"the user {_name_of(uid)}"
            raise _Refused(f"systemd cannot be asked for a scope: {whose} has no bus ({socket})", self._fix)

    def _call(self, method: str, *arguments: str) -> str:
        """Return why the call failed; empty when it succeeded."""
        try:
            done = subprocess.run(
                [*self._command, method, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS + 5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else done.stderr.strip() or f"busctl ended with {done.returncode}"

    def start_scope(self, name: str, pid: int) -> None:
        own = units.path_in("/proc/self/cgroup")
        slice_ = units.slice_of(own, user=self._user)
        properties: list[Property] = [
            ("Description", "s", "sessions of sandkeep"),
            ("Delegate", "b", "true"),
            ("TasksMax", "t", _INFINITY),
            ("CollectMode", "s", "inactive-or-failed"),
            *([("Slice", "s", slice_)] if slice_ else []),
            *inherited(f"/sys/fs/cgroup{units.unit_of(own)}"),
        ]
        listed = [part for item in properties for part in item]
        failure = self._call(
            "StartTransientUnit",
            "ssa(sv)a(sa(sv))",
            *(name, "fail"),
            str(len(properties) + 1),
            *("PIDs", "au", "1", str(pid)),
            *listed,
            "0",
        )
        if failure:
            raise _Refused(f"systemd gave no scope: {failure}", self._fix)

    def await_move(self, name: str, pid: int) -> None:
        """Wait until systemd has moved the process, which ``start_scope`` only requests."""
        deadline = time.monotonic() + _SECONDS
        while not units.path_in(f"/proc/{pid}/cgroup").endswith(f"/{name}"):
            # The start fails where the process may not be moved, and systemd then unloads the unit.
            gone = self._call("GetUnit", "s", name)
            if gone or time.monotonic() > deadline:
                raise _Refused(f"systemd made {name} but put no process into it", "see 'journalctl -e'")
            time.sleep(_PAUSE)


def inherited(group: str) -> list[Property]:
    """Return limits on memory and CPU that the machine's owner set on this process's unit.

    The limit on tasks is left out: every unit has one by default, and all sessions would share it.
    """
    found: list[Property] = []
    for file, name in _INHERITED.items():
        value = groupfs.read_int(f"{group}/{file}")
        if value is not None:
            found.append((name, "t", str(value)))
    try:
        quota, period = groupfs.read(f"{group}/cpu.max").split()
        found.append(("CPUQuotaPerSecUSec", "t", str(int(quota) * 1_000_000 // int(period))))
    except (OSError, ValueError):
        pass  # no such controller, or "max"
    return found


_INHERITED: Final[Mapping[str, str]] = {
    "memory.max": "MemoryMax",
    "memory.high": "MemoryHigh",
    "memory.swap.max": "MemorySwapMax",
}


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
