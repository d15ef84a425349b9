"""Real overlay mounts, forked children and tree listings for the layer tests."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandkeep.host.rootfs import Flavour, Lower, Rootfs, Slot
from sandkeep.linux import syscalls

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts trusted overlays: needs root")


def for_anybody(directory: Path) -> Path:
    """A new directory that every user can reach and write to."""
    directory.mkdir()
    directory.chmod(0o777)
    for parent in directory.parents:
        if parent.stat().st_mode & 0o111 != 0o111:
            parent.chmod(parent.stat().st_mode | 0o111)
    return directory


def run_forked(function: Callable[[], object], *, user_namespace: bool = False) -> None:
    """Run in a child with a private mount namespace; with ``user_namespace``, as an ordinary user's uid 0.

    The child first becomes uid 65534 when we are root, so that nothing it can do is due to being root.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if user_namespace:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setresgid(65534, 65534, 65534)
                    os.setresuid(65534, 65534, 65534)
                    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
                uid, gid = os.geteuid(), os.getegid()
                syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
                Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
            else:
                syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            function()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, code = os.waitpid(pid, 0)
    assert code == 0, f"the child failed with {code}"


@contextmanager
def mounted(
    lowers: list[str], upper: str | None = None, work: str | None = None, *, flavour: Flavour = "trusted"
) -> Iterator[str]:
    """A detached overlay, as a path through its descriptor."""
    fs = syscalls.fsopen("overlay")
    try:
        for lower in lowers:
            syscalls.fsconfig_string(fs, "lowerdir+", lower)
        if upper is not None and work is not None:
            os.makedirs(work, exist_ok=True)
            syscalls.fsconfig_string(fs, "upperdir", upper)
            syscalls.fsconfig_string(fs, "workdir", work)
        if flavour == "user":
            syscalls.fsconfig_flag(fs, "userxattr")
        else:
            syscalls.fsconfig_string(fs, "redirect_dir", "on")
        syscalls.fsconfig_create(fs)
        root = syscalls.fsmount(fs)
    finally:
        os.close(fs)
    try:
        yield f"/proc/self/fd/{root}"
    finally:
        os.close(root)


def listing(root: str) -> dict[str, tuple[Any, ...]]:
    """Everything visible about a tree: kinds, modes, owners, times, contents, links, attributes."""
    found: dict[str, tuple[Any, ...]] = {}
    groups: dict[tuple[int, int], list[str]] = {}
    pending = [""]
    while pending:
        relative = pending.pop()
        for name in os.listdir(os.path.join(root, relative)):
            inner = os.path.join(relative, name)
            path = os.path.join(root, inner)
            status = os.lstat(path)
            content: bytes | str = b""
            if stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                pending.append(inner)
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                groups.setdefault((status.st_dev, status.st_ino), []).append(inner)
            xattrs = {
                x: os.getxattr(path, x, follow_symlinks=False)
                for x in sorted(os.listxattr(path, follow_symlinks=False))
            }
            whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            found[inner] = (
                oct(status.st_mode),
                status.st_uid,
                status.st_gid,
                0 if whiteout else status.st_mtime_ns,
                status.st_rdev,
                content,
                xattrs,
            )
    for number, names in enumerate(sorted(sorted(g) for g in groups.values() if len(g) > 1)):
        found[f"\0links{number}"] = tuple(names)
    return found


class Fixture:
    """A data directory with an image, and sessions that write through real mounts."""

    def __init__(self, data: Path, *, flavour: Flavour = "trusted") -> None:
        self.data = data
        self.flavour: Flavour = flavour
        self.image = data / "images" / "base"
        self.image.mkdir(parents=True)
        (data / "sessions").mkdir()

    @property
    def rootfs(self) -> Rootfs:
        return Rootfs("base", self.flavour, (Slot("root", "/", (Lower(str(self.image)),)),))

    def session(self, name: str, layer: str | None = None) -> Path:
        directory = self.data / "sessions" / name
        (directory / "fs" / "root").mkdir(parents=True)
        (directory / "spec.json").write_text(json.dumps({"layer": layer}))
        (directory / "lock").touch()
        return directory

    def write(self, session: str, lowers: Rootfs, change: Callable[[str], object]) -> None:
        directory = self.data / "sessions" / session
        upper, work = str(directory / "fs/root"), str(directory / "work/root")
        paths = [lower.path for lower in lowers.slots[0].lowers]
        with mounted(paths, upper, work, flavour=self.flavour) as root:
            change(root)

    def view(self, lowers: Rootfs) -> dict[str, tuple[Any, ...]]:
        empty = self.data / "empty"
        empty.mkdir(exist_ok=True)
        paths = [str(empty), *(lower.path for lower in lowers.slots[0].lowers)]
        with mounted(paths, flavour=self.flavour) as root:
            return listing(root)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def write(root: str, name: str, text: str = "") -> None:
    path = Path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or name)


OPERATIONS = {
    "write": 4,
    "unlink": 2,
    "mkdir": 4,
    "rmtree": 1,
    "replace": 1,
    "rename": 6,
    "chmod": 1,
    "link": 2,
    "symlink": 1,
    "xattr": 1,
}
NAMES = ("a", "b", "c", "d", "e")


def plant(root: str, rng: random.Random, depth: int = 3) -> None:
    """A dense tree to start from."""
    for name in NAMES:
        path = f"{root}/{name}"
        if depth and rng.random() < 0.6:
            os.mkdir(path)
            plant(path, rng, depth - 1)
        elif rng.random() < 0.7:
            write(root, name, path)


def shake(root: str, rng: random.Random, amount: int) -> None:
    """Random changes; those the tree does not allow fail like they do for anybody."""
    for _ in range(amount):
        there = [os.path.join(at, name) for at, ds, fs in os.walk(root) for name in sorted(ds) + sorted(fs)]
        path = rng.choice(sorted(there) or [f"{root}/a"])
        parent = rng.choice([root, *(p for p in sorted(there) if os.path.isdir(p) and not os.path.islink(p))])
        new = os.path.join(parent, rng.choice(NAMES))
        try:
            match rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]:
                case "write":
                    Path(rng.choice((path, new))).write_text(str(rng.random()))
                case "unlink":
                    os.unlink(path)
                case "mkdir":
                    os.mkdir(new)
                    write(new, rng.choice(NAMES))
                case "rmtree":
                    shutil.rmtree(path)
                case "rename":
                    os.rename(path, new)
                case "chmod":
                    os.chmod(path, rng.choice((0o700, 0o755, 0o750)))
                case "link":
                    os.link(path, new, follow_symlinks=False)
                case "symlink":
                    os.symlink("a/b", new)
                case "xattr":
                    os.setxattr(path, "user.x", rng.randbytes(4), follow_symlinks=False)
                case "replace":
                    shutil.rmtree(path)
                    os.mkdir(path)
                    write(path, rng.choice(NAMES))
        except OSError:
            pass
