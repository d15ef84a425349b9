"""Find out what control groups will do for sessions, as the zygote does: in a scope of its own where systemd
gives one, otherwise in this process's group, without changing anything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandkeep.host.doctor.finding import Finding, FindingStatus
from sandkeep.host.native.mode import Mode, choose_mode, own_name
from sandkeep.host.native.scope import SystemdScope, enter
from sandkeep.linux import cgroup
from sandkeep.linux.cgroup import units

_GIB = 1 << 30
_LIMITS = ("memory", "pids", "cpu")
_MOUNT = "/sys/fs/cgroup"
_LINGER = "/var/lib/systemd/linger"


@dataclass(frozen=True, slots=True)
class Groups:
    """What a session started now would get from control groups."""

    scope: SystemdScope
    layout: str
    works: dict[str, str]
    """Each capability that works, and how."""
    absent: dict[str, str]
    """Each capability that is missing, and why."""
    ceilings: dict[str, cgroup.Ceiling]


def probe(data_dir: str) -> Groups:
    """Fork a child, move it into a scope as the zygote is moved, and probe from there."""
    name = cgroup.group_name(data_dir)
    go, start = os.pipe()
    answer, reply = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(start)
            scoped = os.read(go, 1) == b"s"
            os.write(reply, json.dumps(_probe(name, scoped=scoped)).encode())
        finally:
            os._exit(0)
    os.close(go)
    os.close(reply)
    try:
        scope = enter(pid, name)
        os.write(start, b"s" if scope.unit else b"h")
        with os.fdopen(answer, "rb", closefd=False) as reader:
            found = json.loads(reader.read())
    finally:
        for fd in (start, answer):
            os.close(fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ceilings = {part: cgroup.Ceiling(*value) for part, value in found.pop("ceilings").items()}
    return Groups(scope=scope, ceilings=ceilings, **found)


def _probe(name: str, *, scoped: bool) -> dict[str, Any]:
    hierarchy = cgroup.detect(parent=name)
    within_reach: list[str] = []
    if scoped:
        hierarchy.prepare([os.getpid()])
    else:
        # The processes to move: the zygote's, and the server's, whose place doctor takes here.
        within_reach = hierarchy.preparable([os.getpid(), os.getppid()])
    works, absent = {}, {}
    for part in (*_LIMITS, "freeze", "kill"):
        found = hierarchy.capabilities[part]
        if found.usable:
            where = ", in a scope of its own" if scoped else ""
            works[part] = f"{found.version} ({hierarchy.layout} layout){where}"
        elif part in within_reach:
            works[part] = "v2, handed on to sessions when the first one starts"
        else:
            absent[part] = found.why
    return {"layout": hierarchy.layout, "works": works, "absent": absent, "ceilings": hierarchy.ceilings()}


# --- findings ------------------------------------------------------------------------------------------


def findings(data_dir: str) -> Iterator[Finding]:
    groups = probe(data_dir)
    yield from _scope(groups.scope)
    mode = choose_mode()
    for part in (*_LIMITS, "freeze", "kill"):
        label = f"control groups: {part}"
        if part in groups.works:
            yield Finding(label, "works", groups.works[part])
        else:
            status, without = _without(part, mode)
            yield Finding(label, status, f"{without} ({groups.absent[part]})", _fix(groups, part))
    yield _processes(groups.ceilings.get("pids"))
    yield _memory(groups.ceilings.get("memory"))


def _scope(scope: SystemdScope) -> Iterator[Finding]:
    """Report how sessions and systemd work together; nothing where systemd does not run."""
    label = "systemd scope"
    if scope.why:
        why = f"sessions share the group of the process that starts the server ({scope.why})"
        yield Finding(label, "degraded", why, scope.fix)
    elif scope.unit and os.geteuid() != 0 and not os.path.exists(f"{_LINGER}/{own_name()}"):
        why = f"sessions get one from {own_name()}'s systemd, which ends them with {own_name()}'s last login"
        yield Finding(label, "degraded", why, f"to keep them: loginctl enable-linger {own_name()}")
    elif scope.unit:
        yield Finding(label, "works", "sessions get one, so the server can be restarted while they run")


def _without(part: str, mode: Mode) -> tuple[FindingStatus, str]:
    """Return what sessions get instead of a limit; ``boot.apply_limits`` decides it."""
    if part == "memory":
        return "degraded", (
            "memory is watched: every two seconds the supervisor ends the largest process of a session "
            "that has more than its limit"
        )
    if part == "pids" and mode == "single":
        return "degraded", "processes are limited by RLIMIT_NPROC, which works as well with one id"
    if part == "pids":
        return "degraded", "processes are counted per user instead of per session (RLIMIT_NPROC)"
    if part == "cpu":
        return "missing", "a session can use all CPUs"
    if part == "freeze":
        return "degraded", "sessions are stopped by signals while a checkpoint is taken"
    return "degraded", "processes are ended through the session's PID 1, more slowly"


def _fix(groups: Groups, part: str) -> str:
    root = os.geteuid() == 0
    if os.path.isdir(_MOUNT) and os.statvfs(_MOUNT).f_flag & os.ST_RDONLY:
        return f"make {_MOUNT} writable (of a container; in a unit: ProtectControlGroups=no)"
    if groups.scope.unit:
        if root or part not in _offered():
            return f"cgroup v2 has no {part} controller here: see cgroup_disable= and mounts of cgroup v1"
        return "as root: systemctl edit user@.service, with [Service] and Delegate=cpu memory pids"
    if groups.scope.why:
        return groups.scope.fix
    if _in_container():
        return f"give this container a writable {_MOUNT} with the controllers, or run outside of it"
    if groups.layout in ("v1", "hybrid") and not root:
        return "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or run as root"
    if root or groups.layout == "none":
        return f"{'' if root else 'as root: '}mount control groups at {_MOUNT}, writable"
    return "as root: give this user a control group of its own, or run as root"


def _offered() -> list[str]:
    """Return the controllers of the topmost group that is visible."""
    try:
        with open(f"{_MOUNT}/cgroup.controllers", encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []


def _in_container() -> bool:
    """Return whether this is a container: its manager leaves one of these files, or PID 1 is not an init."""
    marks = ("/run/.containerenv", "/.dockerenv", "/run/systemd/container")
    return any(map(os.path.exists, marks)) or not _on_the_machine()


def _on_the_machine() -> bool:
    return os.stat("/proc/self/ns/cgroup").st_ino == _FIRST_CGROUP_NAMESPACE or units.systemd_runs()


_FIRST_CGROUP_NAMESPACE = 0xEFFFFFFB
"""The inode number of the kernel's initial cgroup namespace."""


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _processes(ceiling: cgroup.Ceiling | None) -> Finding:
    """Report the limit in force: the lower of the kernel's two and of every group above."""
    label = "limit: processes"
    known = {name: _number(f"/proc/sys/kernel/{name}") for name in ("pid_max", "threads-max")}
    limits = [(value, "on the whole machine") for value in known.values() if value is not None]
    if ceiling is not None:
        limits.append((ceiling.value, f"for all sessions together (pids.max of {ceiling.group})"))
    if not limits:
        return Finding(label, "degraded", "kernel.pid_max cannot be read", "is /proc mounted?")
    value, whose = min(limits)
    if value >= _ENOUGH_PROCESSES:
        return Finding(label, "works", f"{value} {whose}")
    fix = "as root: sysctl -w kernel.pid_max=32768"
    if ceiling is not None and value == ceiling.value:
        unit = os.path.basename(ceiling.group)
        fix = f"raise it: TasksMax= of {unit} in systemd, or the pids limit of a container"
    return Finding(label, "degraded", f"{value} {whose}", fix)


_ENOUGH_PROCESSES = 8192
"""Twice the default limit of one session."""


def _memory(ceiling: cgroup.Ceiling | None) -> Finding:
    label = "limit: memory"
    if ceiling is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Finding(label, "works", f"{total / _GIB:.1f} GiB, all of the machine's")
    text = f"{ceiling.value / _GIB:.1f} GiB for all sessions together (memory.max of {ceiling.group})"
    return Finding(label, "works", text)
