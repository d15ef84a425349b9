"""No file of the host or of another session can be changed, locked or watched through a session."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import NotRegularFile, PathError
from sandkeep.host.driver import SessionRef, SessionSpec
from sandkeep.host.rootfs import Bind
from tests.driver_lab import Box, Lab, created
from tests.mode_runner import MODES, Ask, everywhere, in_modes, opened

IDS = 65_536
DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero")
MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger")


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _kept(path: str) -> tuple[int, int, int, int]:
    """What changing a file would change."""
    found = os.stat(path)
    return found.st_mode, found.st_uid, found.st_gid, found.st_ctime_ns


@everywhere
def test_file_operations_cannot_change_what_hides_a_file_of_the_kernel(lab: Lab) -> None:
    box = lab.box()
    box.sh("ln -s /proc/keys /tmp/run.sh", root=True)
    there = [path for path in (*MASKED, "/tmp/run.sh") if box.sh(f"test -e {path}").code == 0]
    assert len(there) > 1
    before = _kept("/dev/null")
    # What would change nothing of the host's if it were let through.
    operations: list[dict[str, Any]] = [{"operation": "chmod", "mode": 0o666}]
    if lab.driver.mode != "single":  # where there is one owner, chown has no effect
        operations.append({"operation": "chown", "uid": 0, "gid": 0})
    for path in there:
        for operation in operations:
            with pytest.raises(PathError) as refused:
                box.files(path=path, root=True, **operation)
            assert refused.value.errno in (errno.EROFS, errno.EPERM), (path, operation, str(refused.value))
        with pytest.raises(PathError):
            box.write(path, b"x", root=True)
        assert box.sh(f"chmod 600 {path} || touch {path} || echo x >{path}", root=True).code != 0
    assert _kept("/dev/null") == before


@everywhere
def test_file_operations_change_the_mode_and_owner_of_files_directories_and_links_only(lab: Lab) -> None:
    box = lab.box()
    box.sh("mkfifo /tmp/fifo; ln -s fifo /tmp/link", root=True)
    operations: list[dict[str, Any]] = [
        {"operation": "chmod", "mode": 0o600},
        {"operation": "chown", "uid": 0, "gid": 0},
    ]
    for path in ("/dev/null", "/dev/tty", "/tmp/fifo", "/tmp/link"):
        for operation in operations:
            with pytest.raises(PathError) as refused:
                box.files(path=path, root=True, **operation)
            assert isinstance(refused.value, NotRegularFile), (path, str(refused.value))
    box.files("chown", path="/tmp/link", uid=0, gid=0, follow=False, root=True)
    box.files("mkdir", path="/tmp/directory", root=True)
    box.files("chmod", path="/tmp/directory", mode=0o700, root=True)
    box.files("chmod", path="/dev/shm", mode=0o1777, root=True)


# --- what is there to be locked or watched --------------------------------------------------------------

# Locks and watches are an inode's. In an overlay every inode is that overlay's own, whatever is below it.
WALK = """
import json, os, sys
mounts = {}
for line in open("/proc/self/mountinfo"):
    before, after = line.split(" - ")
    mounts[before.split()[4]] = after.split()[0]  # the topmost at a place is the last
found = []
def note(path, kind):
    info = os.stat(path, follow_symlinks=False)
    found.append([path, kind, info.st_dev, info.st_ino, info.st_uid])
for place, kind in mounts.items():
    note(place, kind)
    if kind in ("overlay", "proc", "sysfs") or kind.startswith("cgroup"):
        continue
    device = os.stat(place).st_dev
    for directory, directories, files in os.walk(place):
        directories[:] = [n for n in directories if os.stat(f"{directory}/{n}").st_dev == device]
        for name in (*directories, *files):
            if f"{directory}/{name}" not in mounts:
                note(f"{directory}/{name}", kind)
for name in os.listdir("/proc/self/ns"):
    info = os.stat(f"/proc/self/ns/{name}")
    found.append([f"/proc/self/ns/{name}", "nsfs", info.st_dev, info.st_ino, 0])
for number in (0, 1, 2):
    info = os.fstat(number)
    found.append([f"descriptor {number}", "open", info.st_dev, info.st_ino, 0])
print(json.dumps(found))
"""


def _inodes(box: Box, *, root: bool) -> dict[str, tuple[str, int, int, int]]:
    done = box.run("python3", "-I", "-c", WALK, root=root)
    assert done.code == 0, done.stderr
    return {path: (kind, device, inode, uid) for path, kind, device, inode, uid in json.loads(done.stdout)}


def _host_inodes() -> set[tuple[int, int]]:
    """Every mount of this machine, its devices and namespaces."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    places += [f"/proc/self/ns/{name}" for name in os.listdir("/proc/self/ns")]
    places += [f"/dev/{name}" for name in os.listdir("/dev")]
    found = set()
    for place in places:
        try:
            info = os.stat(place)
        except OSError:
            continue
        found.add((info.st_dev, info.st_ino))
    return found


@everywhere
def test_no_mount_of_a_session_shows_a_file_of_the_host_or_of_another_session(lab: Lab) -> None:
    first, second = _inodes(lab.box(), root=True), _inodes(lab.box(), root=False)
    assert {"/", "/proc", "/sys", "/dev", "/dev/null", "/dev/pts", "/dev/shm", "/proc/keys"} <= first.keys()
    host = _host_inodes()
    others = {(device, inode) for _, device, inode, _ in second.values()}
    shared = {path for path, (_, device, inode, _) in first.items() if (device, inode) in host | others}
    if lab.driver.mode == "root":
        assert shared == set()
        # The kernel's own file systems belong to the kernel, and there nobody may change anything.
        kernel = ("proc", "sysfs", "cgroup", "cgroup2", "nsfs", "open")
        strange = {path for path, (kind, _, _, uid) in first.items() if kind not in kernel and uid >= IDS - 2}
        assert strange == set()
    else:
        # The kernel lets nobody but root make device nodes, so these are the host's.
        assert shared == {*DEVICES, "descriptor 0"}


HOLD = """
import fcntl, os, sys, time
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
"""
TAKE = """
import fcntl, os, sys
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@in_modes("root", why="device nodes are the host's, because only root can make others")
def test_a_lock_on_a_device_or_mask_keeps_nobody_else_waiting(lab: Lab) -> None:
    places = ["/dev/zero", "/dev/null", "/proc/keys", "/usr/bin/env"]
    if os.path.exists("/proc/self/ns/time"):
        places.append("/proc/self/ns/time")
    first, second = lab.box(), lab.box()
    holder = first.start("python3", "-I", "-c", HOLD, *places)
    while not first.output(holder):
        pass
    # Its /dev/null is taken by what it has as input.
    done = second.run("python3", "-I", "-c", TAKE, *(place for place in places if place != "/dev/null"))
    assert done.code == 0, done.stderr
    with open("/dev/null") as null, open("/dev/zero") as zero:
        for node in (null, zero):
            fcntl.flock(node, fcntl.LOCK_EX | fcntl.LOCK_NB)


@everywhere
def test_a_directory_of_the_host_that_is_shown_inside_is_not_the_hosts_to_lock(lab: Lab) -> None:
    """An interpreter outside /usr is shown that way."""
    shown = f"{lab.data_dir}/shown"
    os.makedirs(shown, exist_ok=True)
    Path(shown, "file").write_text("of the host\n")
    os.chmod(Path(shown, "file"), 0o644)
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    spec = SessionSpec(session="shown", rootfs=replace(rootfs, binds=(*rootfs.binds, Bind(shown, "/mnt"))))
    box = Box(lab, SessionRef(lab.driver.host, "shown"), created(lab.do(lab.driver.create(spec))), rootfs)
    lab.boxes.append(box)
    assert box.sh("cat /mnt/file").stdout == "of the host\n"
    holder = box.start("python3", "-I", "-c", HOLD, "/mnt/file", "/mnt")
    while not box.output(holder):
        pass
    for path in (shown, f"{shown}/file"):
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    assert "Read-only file system" in box.sh("touch /mnt/file", root=True).stderr
    box.remove()


@everywhere
def test_the_times_of_a_device_cannot_be_set(lab: Lab) -> None:
    box = lab.box()
    before = [_kept(path) for path in DEVICES]
    for path in DEVICES:
        assert box.sh(f"touch {path}", root=True).code != 0, path
    assert box.sh("echo x >/dev/null && head -c 1 /dev/zero | wc -c; cat").stdout == "1\n"
    assert [_kept(path) for path in DEVICES] == before
