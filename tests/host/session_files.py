"""A session's files for tests: an idmapped overlay as a running session has, or a plain directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandkeep.linux import syscalls
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Identity

BASE = 200_000
USER = Identity(1000, 1000, (1000, 2000), "user", "/home/user", "/bin/sh")
OTHER = Identity(1001, 1001, (1001,), "other", "/home/other", "/bin/sh")

PASSWD = b"root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/sh\n"


def id_map(base: int) -> int:
    """Descriptor of a user namespace that maps 0..65535 to ``base`` and up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(0)
    try:
        os.read(read, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {base} 65536")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def populate(root: Path) -> None:
    """A lower directory as the sandbox's image would have it, ids as on disk."""
    root.chmod(0o755)
    for name, mode, owner in (
        ("etc", 0o755, 0),
        ("root", 0o700, 0),
        ("tmp", 0o1777, 0),
        ("home/user", 0o755, 1000),
        ("home/other", 0o700, 1001),
    ):
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
        os.chown(root / name, owner, owner)
    (root / "home").chmod(0o755)
    (root / "etc/passwd").write_bytes(PASSWD)
    (root / "etc/group").write_bytes(b"root:x:0:\nuser:x:1000:\nshared:x:2000:user\n")
    (root / "etc/shadow").write_bytes(b"inside shadow")
    (root / "etc/shadow").chmod(0o600)
    (root / "etc/hostname").write_bytes(b"inside\n")


class Session:
    def __init__(self, root_fd: int, base: int, disk: Path) -> None:
        self.root_fd = root_fd
        self.base = base
        self.files = SessionFiles(root_fd, base=base)
        self.disk = disk
        """Where written files end up on the host."""

    def put(self, path: str, content: bytes = b"", who: Identity = USER, **options: object) -> int:
        return self.files.write(path, source_of(content), who, **options)  # type: ignore[arg-type]

    def get(self, path: str, who: Identity = USER) -> bytes:
        opened = self.files.open_read(path, who)
        with os.fdopen(opened.fd, "rb") as handle:
            return handle.read()


def source_of(content: bytes) -> Callable[[int], bytes]:
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        chunk = content[position : position + count]
        position += len(chunk)
        return chunk

    return read


def mount_overlay(store: Path, base: int) -> int:
    namespace = id_map(base)
    clone = syscalls.open_tree(os.fspath(store))
    syscalls.mount_setattr(clone, attr_set=syscalls.MOUNT_ATTR_IDMAP, userns_fd=namespace)
    layers = {name: os.open(name, os.O_PATH, dir_fd=clone) for name in ("lower", "upper", "work")}
    context = syscalls.fsopen("overlay")
    capabilities = syscalls.capget()
    try:
        syscalls.setfsgid(base)
        syscalls.setfsuid(base)
        syscalls.capset(*capabilities)
        syscalls.fsconfig_fd(context, "lowerdir+", layers["lower"])
        syscalls.fsconfig_fd(context, "upperdir", layers["upper"])
        syscalls.fsconfig_fd(context, "workdir", layers["work"])
        syscalls.fsconfig_string(context, "redirect_dir", "on")
        syscalls.fsconfig_create(context)
        return syscalls.fsmount(context, syscalls.MOUNT_ATTR_NODEV)
    finally:
        syscalls.setfsuid(0)
        syscalls.setfsgid(0)
        for fd in (context, clone, namespace, *layers.values()):
            os.close(fd)


@contextmanager
def open_session(kind: str, place: Path) -> Iterator[Session]:
    """``kind`` is ``overlay`` or ``plain``. Checks that nothing stays open and the thread stays itself."""
    for name in ("lower", "upper", "work"):
        (place / name).mkdir()
    (place / "upper").chmod(0o755)
    populate(place / "lower")
    if kind == "plain":
        root_fd, base, disk = os.open(place / "lower", os.O_PATH), 0, place / "lower"
    else:
        try:
            root_fd, base, disk = mount_overlay(place, BASE), BASE, place / "upper"
        except OSError as error:
            pytest.skip(f"no idmapped overlay on {place}: {error}")
    before = set(os.listdir("/proc/self/fd"))
    try:
        yield Session(root_fd, base, disk)
        assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
        assert (syscalls.setfsuid(0xFFFFFFFF), syscalls.setfsgid(0xFFFFFFFF)) == (0, 0)
    finally:
        os.close(root_fd)
