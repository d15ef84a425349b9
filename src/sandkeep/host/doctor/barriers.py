"""The isolation barriers and the session's root filesystem, each tried the way sessions use it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from sandkeep.errors import IsolationUnavailable
from sandkeep.host.doctor.finding import Finding
from sandkeep.host.doctor.trial import Steps, attempt
from sandkeep.host.native import mode
from sandkeep.linux import netlink
from sandkeep.linux import syscalls as sc

_IDS = 65536
_TRIAL_BASE = 1 << 30
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_NOBODY, _CONNECT_SECONDS = ("192.0.2.1", 80), 2.0
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
        namespaces = attempt(lambda steps: _try_namespaces(steps, scratch, overlay=not root))
        yield _user_namespaces(namespaces.failure("user namespace", "id map"))
        yield _required("mount namespace", namespaces.failure("mount namespace", "tmpfs"), "")
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
            idmapped = attempt(lambda steps: _try_idmapped(steps, scratch))
            yield _required(
                "idmapped layers",
                idmapped.failure("id range", "private mounts", "clone", "idmap"),
                "keep the data directory on ext4, xfs, btrfs or tmpfs, on Linux 5.19 or later",
            )
            yield _required(
                "overlay filesystem",
                idmapped.failure("overlay", "write through overlay", "ids on disk"),
                "needs Linux 5.19 or later with overlayfs (modprobe overlay)",
            )
            yield Finding(
                "subordinate ids", "works", "not needed: root gives each session a range of its own"
            )
        else:
            yield _required(
                "overlay filesystem",
                namespaces.failure("overlay", "write through overlay", "remove lower directory"),
                "needs Linux 5.11 or later and a local data directory that keeps user extended attributes",
            )
            yield _subordinate_ids()


@contextmanager
def _scratch(data_dir: str) -> Iterator[str | None]:
    """A directory on the data directory's filesystem, which itself need not exist yet."""
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


def _try_namespaces(steps: Steps, scratch: str, *, overlay: bool) -> None:
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
    if overlay:
        _try_user_overlay(steps, scratch)
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
    # Only a process of the new pid namespace may mount its /proc.
    child = os.fork()
    if child == 0:
        try:
            with steps.step("proc", essential=False):
                sc.mount("proc", f"{scratch}/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _try_user_overlay(steps: Steps, scratch: str) -> None:
    for name in ("lower/there", "upper", "work", "merged"):
        os.makedirs(f"{scratch}/{name}")
    mounted = False
    with steps.step("overlay", essential=False):
        layers = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work,userxattr"
        sc.mount("overlay", f"{scratch}/merged", "overlay", 0, layers)
        mounted = True
    if not mounted:
        return
    with steps.step("write through overlay", essential=False):
        _write(f"{scratch}/merged/there/file", "x")
    with steps.step("remove lower directory", essential=False):
        os.unlink(f"{scratch}/merged/there/file")
        os.rmdir(f"{scratch}/merged/there")
        os.mkdir(f"{scratch}/merged/there")
    sc.umount2(f"{scratch}/merged", sc.MNT_DETACH)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _try_steering(steps: Steps) -> None:
    listeners: list[int] = []
    with steps.step("steering", essential=False):
        listeners = netlink.steer()
    if listeners:
        # Nobody is there, so only a listener of ours can have answered.
        with steps.step("steered connection", essential=False):
            socket.create_connection(_NOBODY, _CONNECT_SECONDS).close()


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
    """Whether our root directory is the root of its mount namespace, judged by the mount table."""
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
    def tries(steps: Steps) -> None:
        with steps.step("no_new_privs"):
            sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        with steps.step("seccomp"):
            sc.seccomp_set_filter(_ALLOW_EVERYTHING)

    failure = attempt(tries).failure("no_new_privs", "seccomp")
    return _required("seccomp filters", failure, "the kernel needs CONFIG_SECCOMP_FILTER")


# --- root mode -----------------------------------------------------------------------------------------


def _id_space() -> Finding:
    """Root of a container may own only a slice of the ids, too few to give sessions ranges of their own."""
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


def _mapped_namespace() -> tuple[int, int]:
    """A user namespace with a range of its own: the process that holds it open, and its descriptor."""
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
    os.read(read, 1)
    os.close(read)
    for kind in ("uid", "gid"):
        _write(f"/proc/{pid}/{kind}_map", f"0 {_TRIAL_BASE} {_IDS}")
    return pid, os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _try_idmapped(steps: Steps, scratch: str) -> None:
    for name in ("lower/there", "upper", "work"):
        os.makedirs(f"{scratch}/{name}")
    with steps.step("id range"):
        holder, namespace = _mapped_namespace()
    try:
        with steps.step("private mounts"):
            sc.unshare(sc.CLONE_NEWNS)
            sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
        with steps.step("clone"):
            store = sc.open_tree(scratch)
        with steps.step("idmap"):
            sc.mount_setattr(store, attr_set=sc.MOUNT_ATTR_IDMAP, userns_fd=namespace)
        with steps.step("overlay"):
            merged = _detached_overlay(store)
        with steps.step("write through overlay"):
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=merged))
            os.rmdir("there", dir_fd=merged)
        with steps.step("ids on disk"):
            owner = os.stat(f"{scratch}/upper/file").st_uid
            if owner != 0:
                raise OSError(0, f"a file of the session's root belongs to {owner} on disk, not to 0")
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _detached_overlay(store: int) -> int:
    # The overlay works with the ids of whoever mounts it, and only mapped ids can own files in the store;
    # the secure bit keeps root's rights over files while its file-system ids are not 0.
    sc.prctl(sc.PR_SET_SECUREBITS, sc.SECBIT_NO_SETUID_FIXUP)
    sc.setfsgid(_TRIAL_BASE)
    sc.setfsuid(_TRIAL_BASE)
    context = sc.fsopen("overlay")
    for key, name in (("lowerdir+", "lower"), ("upperdir", "upper"), ("workdir", "work")):
        layer = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=store)
        sc.fsconfig_fd(context, key, layer)
    sc.fsconfig_string(context, "redirect_dir", "on")
    sc.fsconfig_create(context)
    return sc.fsmount(context, sc.MOUNT_ATTR_NODEV)


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
