"""``/var`` and the other top-level directories of the host image.

The package database is a copy of the host's, because ``/usr`` is the host's: with an empty one every
dependency would look missing. Directories that packages own under ``/var`` are created, but empty.
"""

from __future__ import annotations

import os
import stat

from sandkeep.host.images.tree import ImageTree
from sandkeep.host.rootfs import HOME, VENDOR_HOME, VENDOR_WORK, WORK

_DPKG_LEFT_OUT = (
    "lock",
    "lock-frontend",
    "status-old",
    "available-old",
    "diversions-old",
    "statoverride-old",
)
_APT = ("lists/partial", "mirrors/partial", "periodic")
_PACKAGE_DATABASES = ("var/lib/rpm", "var/lib/pacman/local")


def build_top(tree: ImageTree) -> None:
    for name in ("boot", "dev", "media", "mnt", "opt", "proc", "run", "run/lock", "srv", "sys"):
        tree.directory(name)
    tree.directory("run/lock", 0o1777)
    for name in ("backups", "cache", "lib", "log", "opt", "spool", "local", "mail"):
        tree.directory(f"var/{name}")
    tree.symlink("var/run", "/run")
    tree.symlink("var/lock", "/run/lock")


def build_var(tree: ImageTree) -> None:
    _package_directories(tree)
    if os.path.isdir("/var/lib/dpkg"):
        tree.copy_tree("/var/lib/dpkg", "var/lib/dpkg", skip=_DPKG_LEFT_OUT)
        for name in _APT:
            tree.directory(f"var/lib/apt/{name}")
        tree.directory("var/cache/apt/archives/partial", 0o700)
        tree.directory("var/log/apt")
        tree.directory("var/cache/debconf")
        tree.directory("var/lib/ucf")
        if os.path.isfile("/var/lib/apt/extended_states"):
            tree.copy("/var/lib/apt/extended_states", "var/lib/apt/extended_states", 0o644)
    for name in _PACKAGE_DATABASES:
        if os.path.isdir(f"/{name}"):
            tree.copy_tree(f"/{name}", name)


def _package_directories(tree: ImageTree) -> None:
    listed: set[str] = set()
    try:
        names = os.listdir("/var/lib/dpkg/info")
    except OSError:
        return
    for name in names:
        if name.endswith(".list"):
            try:
                with open(f"/var/lib/dpkg/info/{name}", encoding="utf-8", errors="surrogateescape") as lines:
                    listed.update(line.rstrip("\n") for line in lines if line.startswith("/var/"))
            except OSError:
                continue
    for path in sorted(listed):
        try:
            info = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(info.st_mode) and not tree.exists(path[1:]):
            system = info.st_uid < 1000 and info.st_gid < 1000
            uid, gid = (info.st_uid, info.st_gid) if system else (0, 0)
            tree.directory(path[1:], stat.S_IMODE(info.st_mode), uid=uid, gid=gid)


def home_directories(tree: ImageTree, *, uid: int, gid: int) -> None:
    """Create the directories where people and programs expect to write."""
    tree.directory("home")
    for name in (HOME, WORK, VENDOR_HOME, VENDOR_WORK, f"{VENDOR_HOME}/bin"):
        tree.directory(name[1:], uid=uid, gid=gid)
    tree.directory("root", 0o700)
    tree.directory("tmp", 0o1777)
    tree.directory("var/tmp", 0o1777)
