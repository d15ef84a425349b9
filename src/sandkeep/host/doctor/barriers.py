"""The isolation barriers and the session's root filesystem, each tried the way sessions use it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sandkeep.errors import IsolationUnavailable
from sandkeep.host.doctor.finding import Finding
from sandkeep.host.doctor.trial import Outcome, TrialSteps, attempt
from sandkeep.host.native import mode, mounts, ways
from sandkeep.linux import netlink
from sandkeep.linux import syscalls as sc
from sandkeep.linux.overlay import HOW, WAYS

_IDS = 65536
_WHERE_IDS_CAN_BE_MAPPED = "keep the data directory on ext4, xfs or btrfs (tmpfs from Linux 6.3)"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_NO_HOST, _CONNECT_SECONDS = ("192.0.2.1", 80), 2.0
_ALLOW_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)


def findings(data_dir: str) -> Iterator[Finding]:
    with _scratch(data_dir) as scratch:
        if scratch is None:
            yield Finding(
                "data directory access",
                "missing",
                f"nothing can be created at {data_dir}",
                "choose a writable place with SANDKEEP_HOME",
                required=True,
            )
            return
        root = os.geteuid() == 0
        namespaces = attempt(lambda steps: _try_namespaces(steps, scratch))
        yield _user_namespaces(namespaces.failure("user namespace", "id map"))
        yield _required(
            "mount namespace",
            namespaces.failure("mount namespace", "tmpfs"),
            "inside a container, mounting must be allowed (--security-opt seccomp=unconfined)",
        )
        yield _required(
            "pid namespace with /proc",
            namespaces.failure("pid namespace", "proc"),
            "inside a container, /proc must not be masked (--security-opt systempaths=unconfined)",
        )
        yield _network(namespaces.failure("network namespace", "loopback"))
        yield _steering(namespaces.failure("network namespace", "loopback", "steering", "steered connection"))
        yield _optional_sysfs(namespaces.failure("sysfs"))
        yield _seccomp()
        if root:
            yield _id_space()
            tried = attempt(lambda steps: _try_root_overlays(steps, scratch))
            yield _required(
                "idmapped layers",
                tried.failure("id range", "private mounts", "idmap"),
                f"run as an ordinary user, or {_WHERE_IDS_CAN_BE_MAPPED}",
            )
            yield _overlays(tried, "run as an ordinary user, or use Linux 5.19 or later")
            yield _devices(tried)
            yield Finding(
                "subordinate ids", "works", "not needed: root gives each session a range of its own"
            )
        else:
            hint = "needs Linux 5.12 or later and a local data directory that keeps user extended attributes"
            yield _overlays(attempt(lambda steps: _try_rootless_overlays(steps, scratch)), hint)
            yield _subordinate_ids()


@contextmanager
def _scratch(data_dir: str) -> Iterator[str | None]:
    """Yield a directory on the filesystem of the data directory, which need not exist yet."""
    place = data_dir
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    try:
        scratch = tempfile.mkdtemp(prefix=".sandkeep-doctor-", dir=place)
    except OSError:
        yield None
        return
    try:
        yield scratch
    finally:
        # overlayfs leaves a directory without any permission bits in its work directory
        for directory, names, _ in os.walk(scratch):
            for name in names:
                os.chmod(os.path.join(directory, name), 0o700)
        shutil.rmtree(scratch)


def _required(name: str, failure: str, fix: str) -> Finding:
    if failure:
        return Finding(name, "missing", failure, fix, required=True)
    return Finding(name, "works", "tried", required=True)


# --- namespaces ----------------------------------------------------------------------------------------


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _try_rootless_overlays(steps: TrialSteps, scratch: str) -> None:
    _enter_namespaces(steps)
    _try_overlays(steps, scratch, userns=-1, base=0)


def _enter_namespaces(steps: TrialSteps) -> None:
    uid, gid = os.geteuid(), os.getegid()
    with steps.step("user namespace"):
        sc.unshare(sc.CLONE_NEWUSER)
    with steps.step("id map"):
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    with steps.step("mount namespace"):
        sc.unshare(sc.CLONE_NEWNS)
        sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)


def _try_namespaces(steps: TrialSteps, scratch: str) -> None:
    _enter_namespaces(steps)
    with steps.step("tmpfs"):
        sc.mount("tmpfs", scratch, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV)
    for name in ("proc", "sys"):
        os.mkdir(f"{scratch}/{name}")
    inside = False
    with steps.step("network namespace", essential=False):
        sc.unshare(sc.CLONE_NEWNET)
        inside = True
    with steps.step("loopback", essential=False):
        _loopback_up()
    if inside:
        _try_steering(steps)
    with steps.step("sysfs", essential=False):
        sc.mount("sysfs", f"{scratch}/sys", "sysfs", sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
    with steps.step("pid namespace"):
        sc.unshare(sc.CLONE_NEWPID)
    # Only a process of the new pid namespace can mount its /proc.
    child = os.fork()
    if child == 0:
        try:
            with steps.step("proc", essential=False):
                sc.mount("proc", f"{scratch}/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _try_steering(steps: TrialSteps) -> None:
    listeners: list[int] = []
    with steps.step("steering", essential=False):
        listeners = netlink.steer()
    if listeners:
        # No host has this address, so only a listener of sandkeep can have accepted the connection.
        with steps.step("steered connection", essential=False):
            socket.create_connection(_NO_HOST, _CONNECT_SECONDS).close()


def _user_namespaces(failure: str) -> Finding:
    if not failure:
        return Finding("user namespaces", "works", "tried", required=True)
    return Finding("user namespaces", "missing", failure, _user_namespace_hint(), required=True)


def _sysctl(name: str) -> str | None:
    try:
        with open("/proc/sys/" + name.replace(".", "/"), encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _user_namespace_hint() -> str:
    for name, refusing, allowing in (
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("user.max_user_namespaces", "0", "63000"),
    ):
        if _sysctl(name) == refusing:
            return f"as root: sysctl -w {name}={allowing} (and keep it in /etc/sysctl.d)"
    if not _same_root():
        return "a chroot cannot create user namespaces: start from a real root (pivot_root)"
    return "inside a container its seccomp profile or security module must allow unshare and mount"


def _same_root() -> bool:
    """Return whether this process's root directory is the root of its mount namespace, by the mount table."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return any(line.split(" ")[4] == "/" for line in file)
    except OSError:
        return True


def _network(failure: str) -> Finding:
    return _required(
        "network namespace", failure, "the kernel needs CONFIG_NET_NS, and a policy that allows it"
    )


def _steering(failure: str) -> Finding:
    return _required(
        "network steering",
        failure,
        "the kernel needs nftables with NAT and redirection (modprobe nft_redir, or CONFIG_NF_TABLES, "
        "CONFIG_NFT_NAT and CONFIG_NFT_REDIR), and a policy that allows it",
    )


def _optional_sysfs(failure: str) -> Finding:
    if failure:
        return Finding("sysfs", "degraded", failure, "sessions get an empty /sys; rarely needed")
    return Finding("sysfs", "works", "tried")


def _seccomp() -> Finding:
    def tries(steps: TrialSteps) -> None:
        with steps.step("no_new_privs"):
            sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        with steps.step("seccomp"):
            sc.seccomp_set_filter(_ALLOW_EVERYTHING)

    failure = attempt(tries).failure("no_new_privs", "seccomp")
    return _required("seccomp filters", failure, "the kernel needs CONFIG_SECCOMP_FILTER")


# --- root mode -----------------------------------------------------------------------------------------


def _id_space() -> Finding:
    """Check that root has enough ids: in a container it may own too few to give each session a range."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        owned = sum(int(line.split()[2]) for line in file)
    if owned >= 1 << 31:
        return Finding(
            "id ranges", "works", f"room for {owned // _IDS} sessions of {_IDS} ids", required=True
        )
    return Finding(
        "id ranges",
        "missing",
        f"this root owns {owned} ids only",
        "run as an ordinary user, or outside the container that limits the ids",
        required=True,
    )


def _try_root_overlays(steps: TrialSteps, scratch: str) -> None:
    with ExitStack() as held:
        with steps.step("id range"):
            userns = held.enter_context(ways.trial_namespace())
        with steps.step("private mounts"):
            sc.unshare(sc.CLONE_NEWNS)
            sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
            # Keeps root's rights over files while its filesystem ids are not 0.
            sc.prctl(sc.PR_SET_SECUREBITS, sc.SECBIT_NO_SETUID_FIXUP)
        with steps.step("idmap"):
            ways.require_idmap(scratch, userns)
        with steps.step("device tree", essential=False):
            os.close(mounts.device_tree(ways.TRIAL_BASE))
        _try_overlays(steps, scratch, userns=userns, base=ways.TRIAL_BASE)


# --- overlays ------------------------------------------------------------------------------------------


def _try_overlays(steps: TrialSteps, scratch: str, *, userns: int, base: int) -> None:
    """Do what sessions do, each way of mounting: mount, write, remove lower files, be owned by 0 on disk."""
    with steps.step("mount_setattr"):
        ways.require_mount_setattr()
    for way in WAYS:
        place = f"{scratch}/{way}"
        for name in ("lower/there", "fs", "work"):
            os.makedirs(f"{place}/{name}")
        with steps.step(way, essential=False):
            builder = mounts.Builder(scratch, userns=userns, base=base, way=way, anchor=place)
            _use_overlay(place, builder, base, "user" if userns < 0 else "trusted")


def _use_overlay(place: str, builder: mounts.Builder, base: int, flavour: str) -> None:
    made: list[int] = []
    try:
        plan = mounts.SlotPlan([(f"{place}/lower", True)], f"{place}/fs", f"{place}/work", volatile=True)
        builder.overlays([plan], made, flavour=flavour)
        # Only ids of the session's range can own files there.
        sc.setfsgid(base)
        sc.setfsuid(base)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=made[0]))
        os.rmdir("there", dir_fd=made[0])
        os.mkdir("there", dir_fd=made[0])
    finally:
        sc.setfsuid(0)
        sc.setfsgid(0)
        builder.close()
        for fd in made:
            os.close(fd)
    owner = os.stat(f"{place}/fs/file").st_uid
    if owner != 0:
        raise OSError(errno.EOVERFLOW, f"a file of the session's root belongs to {owner} on disk, not to 0")


def _overlays(tried: Outcome, fix: str) -> Finding:
    """Report the way that sessions will use: the newest that works, as the zygote chooses."""
    failures = {way: tried.failure(way) for way in WAYS}
    for way in WAYS:
        if not failures[way]:
            newer = "; ".join(failures[before] for before in WAYS[: WAYS.index(way)])
            return Finding(
                "overlay filesystem", "works", HOW[way] + (f"; not {newer}" if newer else ""), required=True
            )
    return Finding("overlay filesystem", "missing", failures[WAYS[-1]], fix, required=True)


def _devices(tried: Outcome) -> Finding:
    failure = tried.failure("device tree")
    if failure:
        return Finding("device nodes", "missing", failure, "the kernel needs tmpfs and mknod", required=True)
    return Finding("device nodes", "works", "made for each session", required=True)


# --- subordinate ids -----------------------------------------------------------------------------------


def _subordinate_ids() -> Finding:
    name = mode.own_name()
    single = "sessions have one id only: no other users, no chown inside"
    missing_tools = [tool for tool in ("newuidmap", "newgidmap") if not shutil.which(tool)]
    if missing_tools:
        return Finding(
            "subordinate ids",
            "degraded",
            f"{single} ({' and '.join(missing_tools)} not installed)",
            "install the package uidmap (shadow-utils elsewhere)",
        )
    add = f"as root: usermod --add-subuids START-END --add-subgids START-END {name} (at least {_IDS} ids)"
    ranges = [mode.range_in(file) for file in mode.SUBORDINATE_FILES]
    for found, file in zip(ranges, mode.SUBORDINATE_FILES, strict=True):
        if found is None:
            return Finding("subordinate ids", "degraded", f"{single} (no range for {name} in {file})", add)
    failure = _try_newidmap()
    if failure:
        return Finding(
            "subordinate ids", "degraded", f"{single} ({failure})", "newuidmap must be setuid root"
        )
    assert ranges[0] is not None
    return Finding("subordinate ids", "works", f"{len(ranges[0])} ids from {ranges[0].start}, tried")


def _try_newidmap() -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sc.unshare(sc.CLONE_NEWUSER)
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        if not os.read(read, 1):
            return "no user namespace to map"
        mode.map_ids(pid)
        return ""
    except IsolationUnavailable as error:
        return error.message
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
