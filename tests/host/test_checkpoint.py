"""The checkpoint copier: one instant of a running session's upper, with everything overlays care about."""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import LimitReached, PathNotFound, WrongState
from sandkeep.host.layers.tree import remove_tree
from sandkeep.shared.copying import open_beneath
from sandkeep.supervisor.checkpoint import CheckpointResult, copy_upper
from tests.host.overlay_mounts import for_anybody, listing, mounted, needs_root, plant, run_forked, shake


def nothing() -> None:
    """A session that need not be frozen."""


def copy(
    source: Path,
    dest: Path,
    *,
    freeze: Callable[[], None] = nothing,
    thaw: Callable[[], None] = nothing,
    cancelled: Callable[[], bool] = lambda: False,
) -> CheckpointResult:
    return copy_upper(str(source), str(dest), freeze=freeze, thaw=thaw, cancelled=cancelled)


def test_what_is_to_be_left_out_is_left_out_at_the_top_only(tmp_path: Path) -> None:
    for name in ("root/drive0", "drive0/inner", "drive1"):
        (tmp_path / "source" / name).mkdir(parents=True)
    copy_upper(
        str(tmp_path / "source"),
        str(tmp_path / "dest"),
        freeze=nothing,
        thaw=nothing,
        cancelled=lambda: False,
        leave_out=["drive0", "drive1"],
    )
    assert os.listdir(tmp_path / "dest") == ["root"]
    assert os.listdir(tmp_path / "dest/root") == ["drive0"]


def everything(upper: Path) -> None:
    """One of each kind of entry an upper can hold, short of what only root can make."""
    upper.mkdir(parents=True)
    (upper / "small").write_bytes(b"small")
    (upper / "large").write_bytes(os.urandom(3 << 20))
    (upper / "setuid").write_bytes(b"#!")
    (upper / "setuid").chmod(0o4755)
    (upper / "empty").touch(0o640)
    with open(upper / "sparse", "wb") as handle:
        handle.seek(64 << 20)
        handle.write(b"end")
        handle.truncate(96 << 20)
    (upper / "dir/inner").mkdir(parents=True)
    (upper / "dir/inner/file").write_bytes(b"inner")
    os.link(upper / "small", upper / "dir/small-too")
    os.link(upper / "dir/inner/file", upper / "dir/inner/again")
    os.symlink("dir/inner", upper / "link")
    os.symlink(b"\xff\xfe", upper / "dangling")
    os.mkfifo(upper / "pipe", 0o620)
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(upper, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/socket")
        finally:
            os.close(here)
    (upper / os.fsdecode(b"bytes-\xff\n")).write_bytes(b"name")
    os.setxattr(upper / "small", "user.note", b"\0binary")
    os.setxattr(upper / "dir", "user.note", b"of a directory")
    for name in ("dir/inner", "dir", "."):
        os.utime(upper / name, ns=(1_000_000_001, 2_000_000_003))


def privileged(upper: Path) -> None:
    """What only root can put into an upper."""
    os.mknod(upper / "whiteout", stat.S_IFCHR, 0)
    os.link(upper / "whiteout", upper / "dir/whiteout")
    os.setxattr(upper / "dir", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "dir/inner", "trusted.overlay.redirect", b"/elsewhere")
    os.setxattr(upper / "link", "trusted.overlay.origin", b"\0\1", follow_symlinks=False)
    os.chown(upper / "setuid", 1000, 1001)
    (upper / "setuid").chmod(0o6755)
    capability = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
    os.setxattr(upper / "large", "security.capability", capability)
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, perm, who)
        for tag, perm, who in (
            (1, 6, 0xFFFFFFFF),
            (2, 7, 1000),
            (4, 4, 0xFFFFFFFF),
            (16, 7, 0xFFFFFFFF),
            (32, 0, 0xFFFFFFFF),
        )
    )
    os.setxattr(upper / "empty", "system.posix_acl_access", acl)
    os.chown(upper / "dangling", 7, 8, follow_symlinks=False)
    os.utime(upper / "dir", ns=(1, 2))


def test_a_copy_shows_everything_the_upper_does(tmp_path: Path) -> None:
    everything(tmp_path / "upper")
    report = copy(tmp_path / "upper", tmp_path / "copy/fs")
    assert listing(str(tmp_path / "copy/fs")) == listing(str(tmp_path / "upper"))
    assert os.lstat(tmp_path / "copy/fs").st_mtime_ns == 2_000_000_003
    assert os.lstat(tmp_path / "copy/fs/sparse").st_blocks * 512 < 1 << 20, "holes stay holes"
    assert report.passes == 3
    assert report.copied_bytes >= 96 << 20


@needs_root
def test_a_copy_keeps_owners_capabilities_acls_and_overlay_marks(tmp_path: Path) -> None:
    everything(tmp_path / "upper")
    privileged(tmp_path / "upper")
    copy(tmp_path / "upper", tmp_path / "copy")
    assert listing(str(tmp_path / "copy")) == listing(str(tmp_path / "upper"))
    assert os.lstat(tmp_path / "copy/whiteout").st_nlink == 2


def test_a_copy_in_an_unprivileged_user_namespace_keeps_whiteouts_and_opaque(tmp_path: Path) -> None:
    shared = for_anybody(tmp_path / "rootless")

    def scenario() -> None:
        for name in ("image/dir", "upper", "copy"):
            (shared / name).mkdir(parents=True)
        (shared / "image/dir/old").touch()
        (shared / "image/gone").touch()
        lowers = [str(shared / "image")]
        with mounted(lowers, str(shared / "upper"), str(shared / "work"), flavour="user") as root:
            os.unlink(f"{root}/dir/old")
            os.rmdir(f"{root}/dir")
            os.mkdir(f"{root}/dir")
            os.unlink(f"{root}/gone")
            everything(Path(root, "data"))
            copy(shared / "upper", shared / "copy")
        assert listing(str(shared / "copy")) == listing(str(shared / "upper"))
        assert os.getxattr(shared / "copy/dir", "user.overlay.opaque") == b"y"
        assert stat.S_ISCHR(os.lstat(shared / "copy/gone").st_mode)

    run_forked(scenario, user_namespace=True)


def test_changes_between_the_passes_are_in_the_copy(tmp_path: Path) -> None:
    """Made just before the freeze, so every one of them must be caught by the frozen pass."""
    upper = tmp_path / "upper"
    everything(upper)
    (upper / "replaced/deep/er").mkdir(parents=True)
    (upper / "replaced/deep/er/file").write_text("x")
    (upper / "moved").mkdir()
    (upper / "moved/file").write_text("moved")
    (upper / "becomes-dir").write_text("file")

    def change() -> None:
        (upper / "small").write_bytes(b"SMALL")
        (upper / "large").write_bytes(b"now short")
        os.unlink(upper / "empty")
        os.unlink(upper / "dir/inner/again")
        os.link(upper / "setuid", upper / "dir/setuid-too")
        subprocess.run(["rm", "-r", str(upper / "replaced")], check=True)
        (upper / "replaced").write_text("a file now")
        os.rename(upper / "moved", upper / "moved-away")
        os.unlink(upper / "becomes-dir")
        (upper / "becomes-dir").mkdir()
        (upper / "becomes-dir/file").touch()
        os.removexattr(upper / "small", "user.note")
        os.setxattr(upper / "dir/inner", "user.new", b"1")
        os.unlink(upper / "link")
        os.symlink("dir", upper / "link")
        with open(upper / "sparse", "r+b") as handle:
            handle.seek(1 << 20)
            handle.write(b"middle")

    copy(upper, tmp_path / "copy", freeze=change)
    assert listing(str(tmp_path / "copy")) == listing(str(upper))
    assert os.lstat(tmp_path / "copy/sparse").st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("seed", range(10))
def test_random_changes_all_along_are_in_the_copy(tmp_path: Path, seed: int) -> None:
    """Changes come while the walk runs and, last, just before the frozen pass."""
    rng = random.Random(seed)
    upper = tmp_path / "upper"
    upper.mkdir()
    plant(str(upper), rng, 2)
    frozen = False
    asked = 0

    def freeze() -> None:
        nonlocal frozen
        shake(str(upper), rng, 20)
        frozen = True

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        if not frozen and asked % 7 == 0:
            shake(str(upper), rng, 3)
        return False

    copy(upper, tmp_path / "copy", freeze=freeze, cancelled=cancelled)
    assert listing(str(tmp_path / "copy")) == listing(str(upper))


def test_an_inode_number_used_again_for_something_else_is_no_rewrite(tmp_path: Path) -> None:
    """Many at once, so that some numbers do come back, as another kind of entry."""
    upper = tmp_path / "upper"
    upper.mkdir()
    for number in range(40):
        (upper / f"{number}").mkdir()
        os.symlink("/etc/passwd", upper / f"link{number}")

    def change() -> None:
        for number in range(40):
            (upper / f"{number}").rmdir()
            os.unlink(upper / f"link{number}")
        for number in range(40):
            (upper / f"{number}").write_text("a file")
            (upper / f"link{number}").write_text("a file too")

    copy(upper, tmp_path / "copy", freeze=change)
    assert listing(str(tmp_path / "copy")) == listing(str(upper))


def test_stores_through_a_mapping_are_in_the_copy(tmp_path: Path) -> None:
    """A page already dirty is written again without any timestamp moving."""
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "mapped").write_bytes(b"a" * 8192)
    with open(upper / "mapped", "r+b") as handle, mmap.mmap(handle.fileno(), 8192) as memory:
        memory[0:1] = b"b"
        time.sleep(0.05)

        def store() -> None:
            memory[1:2] = b"c"

        copy(upper, tmp_path / "copy", freeze=store)
        assert (tmp_path / "copy/mapped").read_bytes()[:3] == b"bca"


def test_files_on_tmpfs_open_for_writing_are_copied_again(tmp_path: Path) -> None:
    directory = Path("/dev/shm", f"sandkeep-{os.getpid()}")
    directory.mkdir()
    try:
        test_stores_through_a_mapping_are_in_the_copy(directory)
    finally:
        subprocess.run(["rm", "-r", str(directory)], check=True)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
def test_times_that_no_clock_shows_are_kept() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as area:
        inner = Path(area, "upper", "inner")
        inner.mkdir(parents=True)
        for seconds in (1 << 40, -(1 << 40)):
            os.utime(inner, ns=(seconds * 10**9 + 7, seconds * 10**9 + 9))
            copy(Path(area, "upper"), Path(area, str(seconds)))
            assert Path(area, str(seconds), "inner").stat().st_mtime_ns == seconds * 10**9 + 9


_WRITER = """
import os, sys
os.chdir(sys.argv[1])
number = 0
while True:
    number += 1
    text = str(number)
    with open("a", "w") as a:
        a.write(text)
    with open(f"many{number % 50}", "w") as many:
        many.write(text * 100)
    os.makedirs(f"dir{number % 7}/sub", exist_ok=True)
    if number % 3 == 0:
        try:
            os.rename(f"dir{number % 7}", f"dir{(number + 1) % 7}")
        except OSError:
            pass
    if os.path.islink("swap"):
        os.unlink("swap"); os.mkdir("swap")
    else:
        if os.path.isdir("swap"):
            os.rmdir("swap")
        os.symlink("/etc", "swap")
    with open("b", "w") as b:
        b.write(text)
    if number == 20:
        print("going", flush=True)
"""


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(directory)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            yield process
        finally:
            process.kill()


def test_the_copy_is_one_instant_of_a_busy_session(tmp_path: Path) -> None:
    """Files are rewritten, directories renamed and swapped with links to the outside throughout."""
    upper = tmp_path / "upper"
    upper.mkdir()
    with writer(upper) as process:

        def stop() -> None:
            os.kill(process.pid, signal.SIGSTOP)
            while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
                time.sleep(0.001)
            frozen.append(listing(str(upper)))

        for number in range(5):
            frozen: list[dict[str, Any]] = []
            dest = tmp_path / f"copy{number}"
            copy(upper, dest, freeze=stop, thaw=lambda: os.kill(process.pid, signal.SIGCONT))
            assert listing(str(dest)) == frozen[0]


def test_the_session_is_thawed_however_the_copy_ends(tmp_path: Path) -> None:
    everything(tmp_path / "upper")
    calls: list[str] = []

    def freeze() -> None:
        calls.append("freeze")

    def thaw() -> None:
        calls.append("thaw")

    with pytest.raises(WrongState, match="cancelled"):
        copy(
            tmp_path / "upper",
            tmp_path / "cancelled",
            freeze=freeze,
            thaw=thaw,
            cancelled=lambda: "freeze" in calls,
        )
    assert calls == ["freeze", "thaw"]

    def fails() -> None:
        raise RuntimeError("cannot freeze")

    with pytest.raises(RuntimeError):
        copy(tmp_path / "upper", tmp_path / "failed", freeze=fails, thaw=thaw)
    assert calls == ["freeze", "thaw", "thaw"]
    with pytest.raises(PathNotFound):
        copy(tmp_path / "missing", tmp_path / "none")


def test_a_tree_deeper_than_any_path_is_copied(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    fd = os.open(upper, os.O_RDONLY)
    name = "n" * 200
    for _ in range(60):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    copy(upper, tmp_path / "copy")
    root = os.open(tmp_path / "copy", os.O_RDONLY)
    try:
        bottom = open_beneath(root, b"/".join([name.encode()] * 60))
        assert os.listdir(bottom) == ["bottom"]
        os.close(bottom)
    finally:
        os.close(root)
    for _ in range(30):
        os.rename(upper, tmp_path / "inner")
        upper.mkdir()
        os.rename(tmp_path / "inner", upper / name)
    with pytest.raises(LimitReached) as caught:
        copy(upper, tmp_path / "refused")
    assert caught.value.limit == "path_bytes"
    for tree in ("upper", "copy", "refused"):
        remove_tree(str(tmp_path / tree))
