"""Boot a session: turn a specification into a running init, in the supervisor, before it supervises.

Runs in a fresh fork of the zygote, single-threaded, in two steps. ``prepare`` does everything that needs no
specification: ids, control groups, namespaces, network. The zygote can have it done ahead, so that a create
is quicker. ``activate`` does the rest. Each step either succeeds or raises and leaves nothing: the child is
killed, control groups are removed, descriptors closed.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from contextlib import suppress
from typing import Any, Final

from sandkeep.errors import InternalError, IsolationUnavailable, NotFound, SandkeepError
from sandkeep.host.native import idrange, init, inotify, inside, mounts, ways
from sandkeep.linux import cgroup, overlay, sockets, syscalls
from sandkeep.linux.overlay import Way
from sandkeep.linux.syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
)
from sandkeep.shared.copying import own_attributes
from sandkeep.shared.locks import is_locked

BARRIERS: Final = (
    "user-namespace",
    "id-range",
    "mount-namespace",
    "pid-namespace",
    "network-namespace",
    "network-steering",
    "ipc-namespace",
    "uts-namespace",
    "cgroup-namespace",
    "root-filesystem",
    "proc",
    "sys",
    "devices",
    "masks",
    "nested-namespaces",
    "capabilities",
    "seccomp",
)
OPTIONAL: Final = frozenset(
    {
        "cgroup-namespace",
        "sys",
        "masks",
        "nested-namespaces",
        "id-range",
        "seccomp",
        "devices",
        "network-steering",
    }
)
"""Barriers an operator may agree to do without; the others have no fallback. A session whose traffic cannot
be steered to netd has no network at all."""

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
DEFAULT_USER: Final = 1000
_NAMESPACES: Final = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
_HINT: Final = "run 'sandkeep doctor' to see what this machine offers and how to enable it"


class SharedSetup:
    """State that the zygote prepared once and every session shares."""

    def __init__(self, data_dir: str, mode: str, way: Way | None = None, scope: str = "") -> None:
        """Prepare this process. ``way`` is how overlays are mounted, by default the newest that works.

        ``scope`` is the name of the scope that systemd gave the zygote, if any.
        """
        self.data_dir = data_dir
        self.mode = mode
        """``root``, ``subuid`` or ``single``."""
        self.way: Way = ways.choose(data_dir, mode, way)
        # A time namespace shared with the host would be an inode that sessions could take locks on.
        self.namespaces = _NAMESPACES | (CLONE_NEWTIME if os.path.exists("/proc/self/ns/time") else 0)
        self._group = cgroup.group_name(data_dir)
        # On pure v2 only a group without processes of its own can pass controllers on, so this process moves
        # to a leaf beside the sessions where that is permitted. The server is not in the zygote's scope.
        ours = [os.getpid()] if scope else [os.getpid(), os.getppid()]
        self.hierarchy = cgroup.detect(parent=self._group).prepare(ours)
        above = self.hierarchy.ceilings().get("pids")
        self._most_processes = None if above is None else max(above.value // 2, 1)
        self._sweep()
        self.filter = init_filter(mode)
        self.inotify = {} if mode == "root" else inotify.half(inotify.allowed())
        """inotify limits for each user of a session; the zygote has limited all sessions together."""
        self.counter = 0

    def share_of_processes(self, default: int) -> int:
        """Return the default limit of one session: at most half of what a parent group allows all of them."""
        return default if self._most_processes is None else min(default, self._most_processes)

    def _sweep(self) -> None:
        """Remove control groups of supervisors that died before they could remove them."""
        for group in (*self.hierarchy.open_leftovers(), *self.hierarchy.beside(f"{self._group}-")):
            if not any(
                is_locked(lock)
                for lock in (
                    f"{self.data_dir}/sessions/{group.name}/lock",
                    f"{self.data_dir}/ready/{group.name}",
                )
            ):
                with suppress(OSError):  # the next zygote removes groups whose processes die slowly
                    _remove_group(group)
        # After the groups: these files name the owners of the groups.
        self.sweep_ready()

    def sweep_ready(self) -> None:
        """Remove what killed supervisors of the pool left."""
        ready = f"{self.data_dir}/ready"
        for name in os.listdir(ready) if os.path.isdir(ready) else ():
            self.remove_ready(name)

    def remove_ready(self, name: str) -> bool:
        """Remove the control groups, then the file, of a dead supervisor; return whether they are gone."""
        path = f"{self.data_dir}/ready/{name}"
        if is_locked(path):
            return False
        try:
            _remove_group(self.hierarchy.open(name))
        except NotFound:
            pass  # boot did not get that far, or the server has already cleaned up
        except OSError:
            return False  # processes are still in it
        with suppress(FileNotFoundError):
            os.unlink(path)
        return True


def _remove_group(group: cgroup.SessionCgroup) -> None:
    if group.capabilities["kill"].usable:
        group.kill()
    group.remove()


def init_filter(mode: str) -> bytes | None:
    from sandkeep.linux import seccomp

    try:
        return seccomp.build(syscalls.MACHINE, fake_ids=mode == "single")
    except SandkeepError:
        return None


class BootState:
    """A session's namespaces, init and descriptors, as the supervisor holds them."""

    def __init__(self) -> None:
        self.pid = 0
        self.pidfd = -1
        self.control: socket.socket | None = None
        self.root_fd = -1
        self.slot_fds: list[int] = []
        self.devices = -1
        self.cgroup: cgroup.SessionCgroup | None = None
        self.base = 0
        self.range_fd = -1
        self.barriers: dict[str, Any] = {}
        self.limits: dict[str, Any] = {}
        self.listeners: list[int] = []
        self.netns = -1
        self.userns = -1
        self.absent: dict[str, str] = {}

    def abandon(self) -> None:
        """Undo everything, from any step of the boot."""
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
            os.close(self.pidfd)
        if self.control is not None:
            self.control.close()
        for fd in (*self.slot_fds, *self.listeners):
            os.close(fd)
        for fd in (self.netns, self.userns, self.devices):
            if fd >= 0:
                os.close(fd)
        if self.cgroup is not None:
            self.cgroup.remove()
        if self.range_fd >= 0:
            os.close(self.range_fd)


def prepare(host: SharedSetup, name: str, accept: frozenset[str] = frozenset()) -> BootState:
    """Do everything up to the root filesystem; ``name`` is that of the control groups."""
    booted = BootState()
    try:
        if host.mode == "root":
            booted.base, booted.range_fd = idrange.take(host.counter)
            booted.devices = _device_tree(booted.base)
        booted.cgroup = host.hierarchy.create(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        booted.control = ours
        _clone(host, booted, theirs)
        theirs.close()
        booted.userns = _map_ids(host, booted)
        # Before init enters a cgroup namespace of its own, so that its root there is the session's group.
        booted.cgroup.attach(booted.pid, cgroup2=False)
        request = {"accept": sorted(accept & OPTIONAL), "switch_ids": host.mode != "single"}
        ours.send(json.dumps(request).encode())
        booted.absent, booted.listeners = _await_report(ours)
    except BaseException:
        booted.abandon()
        raise
    return booted


def activate(host: SharedSetup, booted: BootState, spec: dict[str, Any], directory: str) -> None:
    """Give a prepared session its limits and its root filesystem, with private state below ``directory``."""
    try:
        _activate(host, booted, spec, directory)
    except BaseException:
        booted.abandon()
        raise


def _activate(host: SharedSetup, booted: BootState, spec: dict[str, Any], directory: str) -> None:
    assert booted.cgroup is not None
    assert booted.control is not None
    for slot in spec["rootfs"]["slots"]:
        upper = f"{directory}/fs/{slot['name']}"
        os.makedirs(upper, exist_ok=True)
        os.makedirs(f"{directory}/work/{slot['name']}", exist_ok=True)
        if slot["lowers"] and slot["lowers"][0][0].startswith(f"{host.data_dir}/layers/"):
            _take_after(upper, slot["lowers"][0][0])
        elif slot["drive"] and not slot["lowers"] and host.mode != "single":
            os.chown(upper, DEFAULT_USER, DEFAULT_USER)
    booted.limits = apply_limits(host, booted.cgroup, spec)
    root_mode = host.mode == "root"
    builder = mounts.Builder(
        host.data_dir,
        userns=booted.userns if root_mode else -1,
        base=booted.base,
        way=host.way,
        anchor=f"{directory}/work",
    )
    try:
        setup, fds = _setup(host, spec, directory, booted, builder)
        sockets.send(booted.control, json.dumps(setup).encode(), fds)
        for fd in fds[len(booted.slot_fds) :]:
            os.close(fd)
        booted.devices = -1
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise _unavailable("root-filesystem", error) from error
    finally:
        builder.close()
    absent, _ = _await_report(booted.control)
    os.close(booted.userns)
    booted.userns = -1
    booted.root_fd = booted.slot_fds[0]
    absent |= booted.absent
    booted.barriers = {
        name: {"state": "absent", "why": absent[name]} if name in absent else {"state": "in force"}
        for name in BARRIERS
    }
    booted.barriers["root-filesystem"]["how"] = overlay.HOW[host.way]
    if not root_mode:
        why = "rootless sessions of one user share that user's ids"
        booted.barriers["id-range"] = {"state": "shared", "why": why}


def _take_after(upper: str, layer: str) -> None:
    """Copy the attributes of a layer's root to the upper, because an overlay's root shows the upper's own."""
    before = os.stat(layer)
    os.chown(upper, before.st_uid, before.st_gid)
    for name, value in own_attributes(layer).items():
        os.setxattr(upper, name, value)
    os.chmod(upper, before.st_mode & 0o7777)
    os.utime(upper, ns=(before.st_atime_ns, before.st_mtime_ns))


def _clone(host: SharedSetup, booted: BootState, theirs: socket.socket) -> None:
    assert booted.cgroup is not None
    group = booted.cgroup.cgroup2_fd()
    base = booted.base
    try:
        if base:
            # The creator of a user namespace is charged for what is used inside (inotify instances and the
            # like). Created as the session's own first id, sessions do not use up each other's limits.
            os.setresgid(base, base, 0)
            os.setresuid(base, base, 0)
        else:
            # Until its maps are written the child's /proc entries must belong to the supervisor, not to the
            # owner of this interpreter's memory.
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        try:
            pid, pidfd = syscalls.clone3(host.namespaces, group)
            if pid == 0:
                _child(host, theirs)
        finally:
            if base:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
    except OSError as error:
        raise _unavailable("user-namespace", error) from error
    finally:
        if group >= 0:
            os.close(group)
    booted.pid, booted.pidfd = pid, pidfd


def _device_tree(base: int) -> int:
    try:
        return mounts.device_tree(base)
    except OSError as error:
        raise _unavailable("devices", error) from error


def _child(host: SharedSetup, control: socket.socket) -> None:
    """Run init; never return. An error is sent over the control socket first."""
    try:
        control = inside.scrub(control)
        request, _ = inside.receive_setup(control)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.scrub_command_line("sandkeep-init")
        absent, listeners = inside.prepare(request)
        sockets.send(control, json.dumps({"ready": absent}).encode(), listeners)
        for fd in listeners:
            os.close(fd)
        setup, fds = inside.receive_setup(control)
        absent = inside.enter_rootfs(setup, fds)
        steps = inside.SetupSteps(frozenset(setup["accept"]))
        steps.run("seccomp", _install_filter, host.filter)
        control.send(json.dumps({"ready": {**absent, **steps.absent}}).encode())
        init.Init(control, switch_ids=request["switch_ids"]).run()
    except inside.BarrierError as error:
        report = {"barrier": error.barrier, "errno": error.error.errno, "why": str(error.error)}
        control.send(json.dumps({"error": report}).encode())
    except BaseException as error:
        control.send(json.dumps({"crash": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


def _install_filter(program: bytes | None) -> None:
    if program is None:
        raise OSError(errno.ENOSYS, f"no filter is known for {syscalls.MACHINE}")
    syscalls.seccomp_set_filter(program)


def _map_ids(host: SharedSetup, booted: BootState) -> int:
    """Write the child's id maps; return a descriptor of its user namespace."""
    # A line may not cross a line of the outer map, and rootless that map lists the user's own id separately.
    ids = {
        "root": f"0 {booted.base} {idrange.SIZE}",
        "subuid": f"0 0 1\n1 1 {idrange.SIZE - 1}",
        "single": "0 0 1",
    }
    try:
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{booted.pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, ids[host.mode].encode())
            finally:
                os.close(fd)
        namespace = os.open(f"/proc/{booted.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        booted.netns = os.open(f"/proc/{booted.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    except OSError as error:
        raise _unavailable("id-range", error) from error
    return namespace


def _setup(
    host: SharedSetup, spec: dict[str, Any], directory: str, booted: BootState, builder: mounts.Builder
) -> tuple[dict[str, Any], list[int]]:
    rootfs = spec["rootfs"]
    plans = [
        mounts.SlotPlan(
            [(path, store) for path, store in slot["lowers"]],
            upper=f"{directory}/fs/{slot['name']}",
            work=f"{directory}/work/{slot['name']}",
            read_only=slot["read_only"],
            volatile=spec["volatile"] and not slot["drive"],
        )
        for slot in rootfs["slots"]
    ]
    shown = [source for source, _ in rootfs["binds"]]
    builder.overlays(plans, booted.slot_fds, flavour=rootfs["flavour"], shown=shown)
    fds = [*booted.slot_fds, *([booted.devices] if booted.devices >= 0 else [])]
    accepted = frozenset(spec["accept"]) & OPTIONAL
    setup = {
        "accept": sorted(accepted),
        "anchor": _anchor(),
        "slots": [{"target": s["target"], "make": s["drive"]} for s in rootfs["slots"]],
        "binds": [target for _, target in rootfs["binds"]],
        "device_tree": booted.devices >= 0,
        "gid_tty": 5 if host.mode != "single" else 0,
        "cgroups": _visible_groups(host),
        "max_processes": booted.limits["pids"].get("per_user"),
        "inotify": host.inotify,
        "shm_bytes": spec["shm_bytes"],
        "hostname": spec["hostname"],
    }
    return setup, fds


def _visible_groups(host: SharedSetup) -> list[list[str]]:
    """Return the control group mounts for inside: a name (empty for all of v2), a type, options."""
    limited = {name: host.hierarchy.capabilities[name] for name in ("memory", "cpu", "pids")}
    if not any(item.usable for item in limited.values()):
        return []
    if host.hierarchy.layout == "v2":
        return [["", "cgroup2", ""]]
    return [[name, "cgroup", name] for name, item in limited.items() if item.version == "v1"]


def _anchor() -> str:
    """Return a directory to attach the new root to briefly, in the child's private mount namespace."""
    return next(path for path in ("/mnt", "/tmp", "/usr") if os.path.isdir(path))


def _await_report(control: socket.socket) -> tuple[dict[str, str], list[int]]:
    """Return the accepted barriers that init lacks, with reasons, and the descriptors it sends."""
    control.settimeout(30)
    data, fds = sockets.receive(control)
    control.settimeout(None)
    report: dict[str, Any] = json.loads(data) if data else {"crash": "init exited without a report"}
    if "ready" in report:
        return report["ready"], fds
    for fd in fds:
        os.close(fd)
    if "error" in report:
        failure = report["error"]
        error = OSError(failure["errno"], failure["why"])
        if failure["barrier"] == "root-filesystem" and error.errno in NO_ROOM:
            raise error
        raise _unavailable(failure["barrier"], error)
    raise InternalError(f"init failed while starting: {report.get('crash')}")


def _unavailable(barrier: str, error: OSError) -> IsolationUnavailable:
    why = str(error)
    message = f"cannot build the {barrier} barrier: {why}"
    return IsolationUnavailable(message, part=barrier, why=why, hint=_HINT)


def apply_limits(host: SharedSetup, group: cgroup.SessionCgroup, spec: dict[str, Any]) -> dict[str, Any]:
    """Enforce every limit that can be enforced; refuse an explicit limit that cannot.

    A limit the kernel cannot enforce is ``watched`` by the supervisor (memory, disk), else ``absent``.
    """
    report: dict[str, Any] = {}
    if spec["limits"]["memory"][0] is None:
        group.limit_sockets()
    for part, (value, explicit) in spec["limits"].items():
        if value is None:
            report[part] = {"state": "unlimited"}
        elif part == "disk":
            report[part] = {"state": "watched", "value": value, "how": "the supervisor checks periodically"}
        elif group.capabilities[part].usable:
            if part == "pids" and not explicit:
                value = host.share_of_processes(value)
            group.limit(**{part: value})
            how = f"cgroup {group.capabilities[part].version}"
            report[part] = {"state": "enforced", "value": value, "how": how}
        else:
            report[part] = _without_cgroup(host, group, part, value, explicit)
    return report


def _without_cgroup(
    host: SharedSetup, group: cgroup.SessionCgroup, part: str, value: Any, explicit: bool
) -> dict[str, Any]:
    why = group.capabilities[part].why
    if part == "pids":
        # The kernel counts processes per user and user namespace. With a single id, that count is the
        # session's.
        if host.mode == "single" or not explicit:
            state = "enforced" if host.mode == "single" else "per user"
            return {"state": state, "value": value, "how": "RLIMIT_NPROC", "per_user": value}
    elif part == "memory" and not explicit:
        return {"state": "watched", "value": value, "how": "the supervisor checks periodically", "why": why}
    if explicit:
        group.limit(**{part: value})  # raises with the reason
    return {"state": "absent", "asked": value, "why": why}
