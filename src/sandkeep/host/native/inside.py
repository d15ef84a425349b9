"""Turn a bare clone into an isolated PID 1: the first steps of init.

Runs in the child of ``clone3``, in its new namespaces, before anything of the sandbox has run. The order is
forced by the kernel: proc and sysfs can only be mounted while the host's are still visible, masks before the
root is switched, the bounding set and the filter last because they take away what the steps before need.

Every step names the barrier it builds. When a step fails, init reports that name, so that the caller can say
exactly what this machine refused.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from typing import Any, Final

from sandkeep.host.native import inotify
from sandkeep.linux import capabilities, netlink, sockets, syscalls
from sandkeep.linux.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REC, MS_REMOUNT

CAPABILITIES: Final = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod
audit_write setfcap: what package managers and servers need, none of it effective outside the namespace."""

DEVICES: Final = (
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
)
DEVICE_LINKS: Final = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
DEVICE_DIRECTORIES: Final = ("pts", "shm", "mqueue")

_QUIET: Final = MS_NOSUID | MS_NODEV | MS_NOEXEC
_HIDDEN_FILES: Final = ("proc/kcore", "proc/keys", "proc/timer_list", "proc/sysrq-trigger")
_READ_ONLY: Final = ("proc/sys", "proc/bus", "proc/fs", "proc/irq")
_HIDDEN_DIRECTORIES: Final = ("proc/acpi", "proc/scsi", "sys/firmware")
_SOCKET_MEMORY: Final = (
    ("proc/sys/net/ipv4/tcp_rmem", b"4096 131072 1048576"),
    ("proc/sys/net/ipv4/tcp_wmem", b"4096 16384 1048576"),
)
"""Least, usual and most bytes that one connection has buffered in each direction. All connections end on
this machine, so a mebibyte is plenty; with the kernel's defaults some hundred of them hold gigabytes."""
MOST_OPEN_FILES: Final = 8192
"""Open files of one process: this bounds the queues, one per descriptor, that no control group counts."""


class BarrierError(Exception):
    """A barrier that could not be built: its name, and the kernel's error."""

    def __init__(self, barrier: str, error: OSError) -> None:
        super().__init__(f"{barrier}: {error}")
        self.barrier = barrier
        self.error = error


class SetupSteps:
    """Runs set-up steps by barrier name; records failures that the operator agreed to accept."""

    def __init__(self, accepted: frozenset[str]) -> None:
        self._accepted = accepted
        self.absent: dict[str, str] = {}

    def run(self, barrier: str, step: Any, *args: Any) -> Any:
        try:
            return step(*args)
        except OSError as error:
            if barrier not in self._accepted:
                raise BarrierError(barrier, error) from error
            self.absent[barrier] = str(error)
            return None


def prepare(request: dict[str, Any]) -> tuple[dict[str, str], list[int]]:
    """Set up everything that needs no root filesystem: identity, namespaces, network, capabilities.

    Returns the accepted barriers that are absent, with reasons, and the listeners all traffic is steered to.
    Capabilities go from the bounding set only, so the mounts that follow are still possible.
    """
    steps = SetupSteps(frozenset(request["accept"]))
    steps.run("id-range", _become_root, request["switch_ids"])
    # Not private: a prepared session may wait for long, and would keep mounts that the host unmounts alive.
    steps.run("mount-namespace", syscalls.mount, None, "/", None, MS_REC | syscalls.MS_SLAVE)
    steps.run("cgroup-namespace", syscalls.unshare, syscalls.CLONE_NEWCGROUP)
    steps.run("network-namespace", netlink.loopback_up)
    listeners: list[int] = steps.run("network-steering", netlink.steer) or []
    steps.run("capabilities", _drop_bounding_set)
    return steps.absent, listeners


def enter_rootfs(setup: dict[str, Any], fds: list[int]) -> dict[str, str]:
    """Enter the session's root filesystem. Return the accepted barriers that are absent, with reasons.

    ``fds`` are, in the order ``setup`` lists them: one mount per slot, one per bind, the device tree if any.
    """
    steps = SetupSteps(frozenset(setup["accept"]))
    slots = setup["slots"]
    mounts, binds = iter(fds[: len(slots)]), fds[len(slots) : len(slots) + len(setup["binds"])]
    steps.run("root-filesystem", _attach_root, next(mounts), setup["anchor"])
    for path in ("dev", "proc", "sys"):
        steps.run("root-filesystem", _require_directory, path)
    for slot in slots[1:]:
        steps.run("root-filesystem", _attach, next(mounts), slot["target"].lstrip("/"), slot["make"])
    steps.run("proc", syscalls.mount, "proc", "proc", "proc", _QUIET)
    if setup["device_tree"]:
        steps.run("devices", syscalls.move_mount, fds[-1], "dev")
    else:
        steps.run("devices", _bind_devices)
    steps.run("devices", _mount_terminals_and_memory, setup["shm_bytes"], setup["gid_tty"])
    steps.run("sys", syscalls.mount, "sysfs", "sys", "sysfs", MS_RDONLY | _QUIET)
    _show_cgroups(setup["cgroups"])
    steps.run("nested-namespaces", _forbid_nested_namespaces)
    steps.run("user-namespace", inotify.bound, setup["inotify"], "proc")
    steps.run("network-namespace", _bound_socket_memory)
    steps.run("masks", _mask)
    for target, bind in zip(setup["binds"], binds, strict=True):
        steps.run("root-filesystem", _attach, bind, target.lstrip("/"))
    steps.run("mount-namespace", _switch_root)
    steps.run("devices", _leave_null_of_host)
    steps.run("uts-namespace", syscalls.sethostname, setup["hostname"])
    _bound_open_files()
    if setup["max_processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (setup["max_processes"],) * 2)
    for fd in fds:
        os.close(fd)
    return steps.absent


def _become_root(switch: bool) -> None:
    if switch:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _attach_root(mount_fd: int, anchor: str) -> None:
    syscalls.move_mount(mount_fd, anchor)
    os.chdir(anchor)


def _require_directory(path: str) -> None:
    """Require a real directory to mount on; make it when missing. A link could lead out of the new root."""
    try:
        os.close(_open_place(path))
    except FileNotFoundError:
        os.mkdir(path, 0o755)
    except OSError as error:
        raise OSError(error.errno or errno.ELOOP, f"/{path} of the image is not a plain directory") from error


def _open_place(path: str) -> int:
    resolve = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS
    return syscalls.openat2(syscalls.AT_FDCWD, path, os.O_PATH | os.O_DIRECTORY, resolve=resolve)


def _attach(mount_fd: int, path: str, make: bool = False) -> None:
    if make:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            _require_directory("/".join(parts[:depth]))
    place = _open_place(path)
    try:
        both_empty = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
        syscalls.move_mount(mount_fd, b"", place, both_empty)
    finally:
        os.close(place)


def _bind_devices() -> None:
    """Bind the host's devices, read-only, on a private tmpfs, where mknod is not permitted."""
    syscalls.mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k")
    for name, _, _ in DEVICES:
        os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_CLOEXEC, 0o666))
        syscalls.mount(f"/dev/{name}", f"dev/{name}", None, MS_BIND)
        # Devices stay writable; the read-only mount protects the host's times and modes.
        syscalls.mount_setattr(syscalls.AT_FDCWD, f"dev/{name}", 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)
    for name in DEVICE_DIRECTORIES:
        os.mkdir(f"dev/{name}")
    for name, target in DEVICE_LINKS:
        os.symlink(target, f"dev/{name}")
    syscalls.mount(None, "dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)


def _mount_terminals_and_memory(shm_bytes: int, gid_tty: int) -> None:
    # Without max= one sandbox could take every pseudo-terminal of the host.
    options = f"newinstance,ptmxmode=0666,mode=0620,gid={gid_tty},max=64"
    syscalls.mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    syscalls.mount("shm", "dev/shm", "tmpfs", _QUIET, f"mode=1777,size={shm_bytes}")
    syscalls.mount("mqueue", "dev/mqueue", "mqueue", _QUIET)


def _show_cgroups(groups: list[list[str]]) -> None:
    """Mount the session's own control groups, read-only, for runtimes that size themselves by their limits.

    A convenience, not a barrier: where the kernel refuses, programs see the machine's totals.
    """
    try:
        if not groups or groups[0][0] == "":
            for _, fstype, options in groups:
                syscalls.mount(fstype, "sys/fs/cgroup", fstype, MS_RDONLY | _QUIET, options or None)
            return
        syscalls.mount("tmpfs", "sys/fs/cgroup", "tmpfs", _QUIET, "size=4k,mode=755")
        for name, fstype, options in groups:
            os.mkdir(f"sys/fs/cgroup/{name}")
            syscalls.mount(fstype, f"sys/fs/cgroup/{name}", fstype, MS_RDONLY | _QUIET, options or None)
        syscalls.mount(None, "sys/fs/cgroup", None, MS_REMOUNT | MS_BIND | MS_RDONLY | _QUIET)
    except OSError:
        pass


def _forbid_nested_namespaces() -> None:
    # This holds even where the filter is absent.
    _set("proc/sys/user/max_user_namespaces", b"0")


def _bound_socket_memory() -> None:
    for path, value in _SOCKET_MEMORY:
        _set(path, value)


def _set(path: str, value: bytes) -> None:
    """Set a variable of the session's own namespaces; must come before /proc/sys turns read-only."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def _bound_open_files() -> None:
    # Inherited by every later process: raising a hard limit needs a capability in the host's namespace.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most) if soft >= 0 else most, most))


def _mask() -> None:
    _hide_files()
    for path in _READ_ONLY:
        if os.path.isdir(path):
            syscalls.mount(path, path, None, MS_BIND | MS_REC)
            syscalls.mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | _QUIET)
    for path in _HIDDEN_DIRECTORIES:
        if os.path.isdir(path):
            syscalls.mount("tmpfs", path, "tmpfs", MS_RDONLY | _QUIET, "size=0,mode=555")


def _hide_files() -> None:
    """Bind an empty file of the session's own over each: a visible host file could be locked and watched."""
    stage = "dev"
    syscalls.mount("tmpfs", stage, "tmpfs", _QUIET, "size=4k,mode=755")
    try:
        empty = f"{stage}/empty"
        os.close(os.open(empty, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        # A bind copies the read-only flag of its source.
        syscalls.mount_setattr(syscalls.AT_FDCWD, stage, 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)
        for path in _HIDDEN_FILES:
            if os.path.exists(path):
                syscalls.mount(empty, path, None, MS_BIND)
    finally:
        syscalls.umount2(stage, syscalls.MNT_DETACH)


def _switch_root() -> None:
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _leave_null_of_host() -> None:
    """Reopen /dev/null as the session's own: processes inherit init's descriptor as their input."""
    null = os.open("/dev/null", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if os.fstat(null).st_rdev != os.makedev(1, 3):
            raise OSError(errno.ENXIO, "/dev/null is something else")
        os.set_blocking(null, True)
        for target in (0, 1, 2):
            os.dup2(null, target)
    finally:
        os.close(null)


def _drop_bounding_set() -> None:
    # From the bounding set only: init keeps its permitted set, which it needs to switch users. Processes it
    # starts as root get exactly this set, those of other users get none.
    capabilities.drop_bounding_set(keep=CAPABILITIES)


def scrub(control: socket.socket) -> socket.socket:
    """Close every descriptor except /dev/null as 0 to 2 and the control socket as 3."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for target in (0, 1, 2):
        os.dup2(null, target)
    keep = control.detach()
    if keep != 3:
        os.dup2(keep, 3, inheritable=False)
    syscalls.close_range(4)
    return socket.socket(fileno=3)


def receive_setup(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, fds = sockets.receive(control)
    if not data:
        os._exit(0)
    body: dict[str, Any] = json.loads(data)
    return body, fds
