"""Facts that can be read on the machine: versions, the data directory's filesystem, the kernel's limits."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator

from sandkeep.host.doctor.finding import Finding

_ARCHITECTURES = ("x86_64", "aarch64")
_TESTED = (6, 1)
_GIB = 1 << 30


def python() -> Finding:
    return Finding("python", "works", f"{sys.version.split()[0]} ({sys.executable})", required=True)


def kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split("+")[0].split(".")[:2])
    if numbers >= _TESTED:
        return Finding("kernel", "works", release, required=True)
    why = f"{release} is older than 6.1, the oldest that sessions are tested on"
    # Not judged by the number: distributions backport new calls to old kernels. Other probes try the calls.
    return Finding("kernel", "degraded", why, "what it lacks shows below; Linux 6.1 or later is better")


def architecture() -> Finding:
    name = os.uname().machine
    if name in _ARCHITECTURES:
        return Finding("architecture", "works", name, required=True)
    why = f"no system call filter is written for {name}"
    return Finding("architecture", "missing", why, f"use one of {', '.join(_ARCHITECTURES)}", required=True)


# --- the data directory --------------------------------------------------------------------------------


def _mount_of(path: str) -> tuple[str, str, str]:
    """Return type, device number and options of the filesystem of a path, which may not exist yet."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best = ("unknown", wanted, "")
    longest = -1
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            fields, (fstype, _, options) = left.split(" "), right.strip().split(" ", 2)
            point = fields[4].rstrip("/")
            inside = path == point or path.startswith(f"{point}/")
            # btrfs files have another device number than their mount, so the longest prefix is also compared.
            if inside and (fields[2] == wanted or fstype == "btrfs") and len(point) > longest:
                best, longest = (fstype, fields[2], f"{fields[5]},{options}"), len(point)
    return best


def _journal_less(device: str) -> bool:
    """Return whether an ext4 device has no journal; jbd2 names its entry of each journal after the device."""
    try:
        name = os.path.basename(os.readlink(f"/sys/dev/block/{device}"))
        return not any(entry.startswith(f"{name}-") for entry in os.listdir("/proc/fs/jbd2"))
    except OSError:
        return False


def data_directory(data_dir: str) -> Iterator[Finding]:
    fstype, device, options = _mount_of(data_dir)
    yield _filesystem(data_dir, fstype, device)
    yield _space(data_dir)
    yield _quota(fstype, options)


def _filesystem(data_dir: str, fstype: str, device: str) -> Finding:
    name = "data directory"
    where = f"{data_dir} on {fstype}"
    if fstype == "ext4" and _journal_less(device):
        return Finding(
            name,
            "degraded",
            f"{where} without a journal: creating files turns slow for minutes after mass deletion",
            "add a journal (tune2fs -O has_journal, unmounted), or set SANDKEEP_HOME to another filesystem",
        )
    if fstype == "btrfs":
        return Finding(name, "works", f"{where}: checkpoints use subvolume snapshots")
    if fstype in ("tmpfs", "ramfs"):
        return Finding(name, "degraded", f"{where}: everything is lost at reboot", "set SANDKEEP_HOME")
    if fstype in ("nfs", "nfs4", "cifs", "9p", "fuse", "overlay"):
        return Finding(name, "degraded", f"{where} may not carry layers", "set SANDKEEP_HOME to a local disk")
    return Finding(name, "works", where)


def _space(data_dir: str) -> Finding:
    place = data_dir
    while not os.path.exists(place):
        place = os.path.dirname(place)
    facts = os.statvfs(place)
    free = facts.f_bavail * facts.f_frsize
    text = f"{free / _GIB:.1f} GiB free"
    if facts.f_files and facts.f_favail < 100_000:
        return Finding("disk space", "degraded", f"{text}, {facts.f_favail} inodes free", "free some inodes")
    if free < 2 * _GIB:
        return Finding("disk space", "degraded", text, "free some space, or move SANDKEEP_HOME")
    return Finding("disk space", "works", text)


def _quota(fstype: str, options: str) -> Finding:
    if fstype in ("ext4", "xfs", "f2fs") and ("prjquota" in options or "pquota" in options):
        return Finding("disk quotas", "works", f"project quotas are on ({fstype})")
    return Finding(
        "disk quotas",
        "degraded",
        "disk use is watched, not enforced by the filesystem",
        "for hard limits keep the data directory on ext4 or xfs mounted with prjquota",
    )


def merged_usr() -> Finding:
    split = [name for name in ("bin", "sbin", "lib") if not os.path.islink(f"/{name}")]
    if not split:
        return Finding("merged /usr", "works", "the host image can be built from this machine's /usr")
    why = f"/{', /'.join(split)} are not links into /usr, so no host image can be built"
    return Finding("merged /usr", "degraded", why, "use an image, or merge with the package usrmerge")


# --- limits --------------------------------------------------------------------------------------------


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def limits() -> Iterator[Finding]:
    for name, sysctl, enough, meaning in (
        ("limit: inotify instances", "fs.inotify.max_user_instances", 128, "per user"),
        ("limit: inotify watches", "fs.inotify.max_user_watches", 8192, "per user"),
        ("limit: terminals", "kernel.pty.max", 1024, "on the whole machine"),
        ("limit: user namespaces", "user.max_user_namespaces", 1000, "per user, one per session"),
    ):
        value = _number("/proc/sys/" + sysctl.replace(".", "/"))
        if value is None:
            yield Finding(name, "degraded", f"{sysctl} cannot be read", "is /proc mounted?")
        elif value < enough:
            yield Finding(name, "degraded", f"{value} {meaning}", f"as root: sysctl -w {sysctl}={enough}")
        else:
            yield Finding(name, "works", f"{value} {meaning}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 4096:
        shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield Finding("limit: open files", "works", f"{shown} per process")
    else:
        yield Finding("limit: open files", "degraded", f"{hard} per process", "raise it: ulimit -Hn 65536")
