"""File operations from outside, on a real idmapped overlay and on a plain directory, with real races."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep import errors
from sandkeep.linux import syscalls
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import ROOT, Accounts, ActingAs, Identity
from tests.host.session_files import BASE, OTHER, PASSWD, USER, Session, open_session, source_of
from tests.polling import ENOUGH

if os.geteuid() != 0:
    pytest.skip("acting as other users needs root", allow_module_level=True)


@pytest.fixture(params=["overlay", "plain"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with open_session(request.param, tmp_path) as opened:
        yield opened


# --- acting as a user ----------------------------------------------------------------------------------


def test_files_belong_to_the_acting_user_and_disk_keeps_inside_ids(session: Session) -> None:
    assert session.put("/home/user/a", b"hello", USER) == 5
    info = session.files.stat("/home/user/a", USER)
    assert (info.kind, info.size, info.uid, info.gid, info.mode) == ("file", 5, 1000, 1000, 0o644)
    assert (session.disk / "home/user/a").stat().st_uid == 1000


def test_a_user_cannot_read_or_list_what_is_private_to_others(session: Session) -> None:
    for path in ("/etc/shadow", "/root/x", "/home/other/x"):
        with pytest.raises(errors.PathPermission):
            session.files.open_read(path, USER)
    with pytest.raises(errors.PathPermission):
        session.files.listdir("/home/other", USER)
    with pytest.raises(errors.PathPermission):
        session.put("/etc/new", b"", USER)
    with pytest.raises(errors.PathPermission):
        session.files.chown("/home/user", 0, 0, USER)
    assert session.get("/etc/shadow", ROOT) == b"inside shadow"


def test_a_group_directory_is_open_to_its_members_only(session: Session) -> None:
    session.files.mkdir("/srv", ROOT, mode=0o770)
    session.files.chown("/srv", 0, 2000, ROOT)
    session.put("/srv/a", b"by group", USER)
    assert session.get("/srv/a", USER) == b"by group"
    with pytest.raises(errors.PathPermission):
        session.put("/srv/b", b"", OTHER)


def test_the_thread_is_itself_again_after_success_and_failure(session: Session) -> None:
    before = (syscalls.capget(), os.getgroups())
    session.put("/home/user/a", b"")
    with pytest.raises(errors.PathNotFound):
        session.files.stat("/missing", USER)
    assert (syscalls.capget(), os.getgroups()) == before


def test_acting_changes_no_other_thread(session: Session) -> None:
    inside, checked = threading.Event(), threading.Event()

    def act() -> None:
        with ActingAs(USER, base=session.base):
            inside.set()
            checked.wait(ENOUGH)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        assert inside.wait(ENOUGH)
        assert syscalls.setfsuid(0xFFFFFFFF) == 0
        assert syscalls.capget()[0] != 0
        assert session.get("/etc/shadow", ROOT) == b"inside shadow"
    finally:
        checked.set()
        thread.join()


def test_root_acts_with_file_capabilities_only() -> None:
    with ActingAs(ROOT, base=BASE):
        effective = syscalls.capget()[0]
    assert effective & ~0x8000001B == 0
    assert effective & 0b11 == 0b11


# --- accounts ------------------------------------------------------------------------------------------


def test_users_are_those_of_the_sandbox(session: Session) -> None:
    accounts = Accounts(session.root_fd)
    assert accounts.resolve("user") == USER
    assert accounts.resolve(1000) == accounts.resolve("1000") == USER
    assert accounts.resolve(None) == Identity(0, 0, (0,), "root", "/root", "/bin/bash")
    assert accounts.resolve("user:shared") == USER._replace(gid=2000, groups=(2000,))
    assert accounts.resolve(4242) == Identity(4242, 4242, (4242,), "4242", "/", "/bin/sh")
    for unknown, kind in (("nobody-here", "user"), ("user:nogroup", "group"), ("", "user"), ("-1", "user")):
        with pytest.raises(errors.NotFound) as caught:
            accounts.resolve(unknown)
        assert caught.value.kind == kind
    with pytest.raises(errors.InvalidRequest):
        accounts.resolve(65536)


def test_accounts_notice_a_changed_file(session: Session) -> None:
    accounts = Accounts(session.root_fd)
    with pytest.raises(errors.NotFound):
        accounts.resolve("late")
    session.put("/etc/passwd", PASSWD + b"late:x:1500:1500::/home/late:/bin/zsh\n", ROOT)
    assert accounts.resolve("late") == Identity(1500, 1500, (1500,), "late", "/home/late", "/bin/zsh")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"evil:x:-1:0:::\nevil:x:99999999999999999999:0::/:\nevil:x:70000:0::/:\nevil:x::::",
        b"evil\xff:x:1\xb2:0::/:/bin/sh\n" + bytes(range(256)),
        b"evil:x:0:0:a\0b:/:/bin/sh",
        b":::::::" * 1000,
    ],
)
def test_hostile_account_files_name_nobody(session: Session, content: bytes) -> None:
    session.put("/etc/passwd", content, ROOT)
    session.put("/etc/group", content, ROOT)
    accounts = Accounts(session.root_fd)
    with pytest.raises(errors.NotFound):
        accounts.resolve("evil")
    assert accounts.resolve("root").uid == 0
    assert accounts.resolve(1000).groups == (1000,)


@given(st.binary(max_size=400), st.binary(max_size=400))
@settings(max_examples=60)
def test_account_files_of_random_bytes_raise_nothing_unexpected(passwd: bytes, group: bytes) -> None:
    place = Path("/dev/shm") / f"sandkeep-test-accounts-{os.getpid()}"
    (place / "etc").mkdir(parents=True, exist_ok=True)
    try:
        (place / "etc/passwd").write_bytes(passwd + b"\nuser:x:1000:1000::/home/user:/bin/sh\n")
        (place / "etc/group").write_bytes(group + b"\nshared:x:2000:user\n")
        fd = os.open(place, os.O_PATH)
        try:
            found = Accounts(fd).resolve("user")
        finally:
            os.close(fd)
        assert found.home.startswith("/")
        assert set(found.groups) >= {found.gid, 2000}
        assert all(0 <= number < 65536 for number in (found.uid, *found.groups))
    finally:
        shutil.rmtree(place)


def test_account_files_that_are_no_files_are_not_waited_for(session: Session) -> None:
    session.files.remove("/etc/passwd", ROOT)
    with session.files.acting_as(ROOT):
        fd = session.files.tree.open(b"/etc", os.O_PATH)
        os.mkfifo("passwd", dir_fd=fd)
        os.close(fd)
    assert Accounts(session.root_fd).resolve("root").uid == 0
    session.files.remove("/etc/passwd", ROOT)
    session.put("/etc/passwd", b"x" * (1 << 20) + b"y", ROOT)
    with pytest.raises(errors.LimitReached):
        Accounts(session.root_fd).resolve("user")
    assert Accounts(session.root_fd).resolve("root").uid == 0


@pytest.mark.parametrize("name", ["/etc/passwd", "/etc/group"])
@pytest.mark.parametrize("content", [b"x" * (1 << 20) + b"y", b"root:x:70000:0::/:\n"])
def test_there_is_a_root_to_repair_account_files(session: Session, name: str, content: bytes) -> None:
    session.put(name, content, ROOT)
    for root in ("root", 0):
        assert Accounts(session.root_fd).resolve(root).uid == 0


# --- reading and writing -------------------------------------------------------------------------------


def test_ranges_of_a_file(session: Session) -> None:
    session.put("/home/user/a", bytes(range(200)))
    for offset, length, expected in ((0, None, 200), (50, 10, 10), (190, 50, 10), (500, None, 0), (0, 0, 0)):
        opened = session.files.open_read("/home/user/a", USER, offset=offset, length=length)
        try:
            assert (opened.size, opened.length) == (200, expected)
            assert os.read(opened.fd, opened.length) == bytes(range(200))[offset : offset + expected]
        finally:
            os.close(opened.fd)
    for offset, length in ((-1, None), (1 << 63, None), (0, -1)):
        with pytest.raises(errors.InvalidRequest):
            session.files.open_read("/home/user/a", USER, offset=offset, length=length)


def test_replacing_is_atomic_and_keeps_the_mode(session: Session) -> None:
    session.put("/home/user/run.sh", b"old", mode=0o750)
    opened = session.files.open_read("/home/user/run.sh", USER)
    session.put("/home/user/run.sh", b"new content")
    with os.fdopen(opened.fd, "rb") as old:
        assert old.read() == b"old"
    assert session.get("/home/user/run.sh") == b"new content"
    assert session.files.stat("/home/user/run.sh", USER).mode == 0o750
    session.put("/home/user/run.sh", b"", mode=0o4711)
    assert session.files.stat("/home/user/run.sh", USER).mode == 0o4711
    session.put("/home/user/run.sh", b"replaced")
    assert session.files.stat("/home/user/run.sh", USER).mode == 0o711
    assert [entry.name for entry in session.files.listdir("/home/user", USER)] == ["run.sh"]


def test_root_replacing_a_users_file_leaves_it_to_the_user(session: Session) -> None:
    session.put("/home/user/a", b"mine", USER, mode=0o600)
    session.put("/home/user/a", b"root was here", ROOT)
    info = session.files.stat("/home/user/a", ROOT)
    assert (info.uid, info.gid, info.mode) == (1000, 1000, 0o600)


def test_a_read_only_file_is_not_replaced_by_its_reader(session: Session) -> None:
    session.put("/home/user/locked", b"keep", ROOT)
    session.files.chmod("/home/user/locked", 0o444, ROOT)
    with pytest.raises(errors.PathPermission):
        session.put("/home/user/locked", b"changed", USER)
    assert session.get("/home/user/locked") == b"keep"


def test_a_writable_file_in_a_closed_directory_is_written_in_place(session: Session) -> None:
    session.put("/etc/app.conf", b"a longer beginning", ROOT)
    session.files.chown("/etc/app.conf", 1000, 1000, ROOT)
    session.put("/etc/app.conf", b"short", USER)
    assert session.get("/etc/app.conf") == b"short"


def test_append_and_exclusive(session: Session) -> None:
    session.put("/home/user/log", b"one ", append=True)
    session.put("/home/user/log", b"two", append=True)
    assert session.get("/home/user/log") == b"one two"
    with pytest.raises(errors.PathExists):
        session.put("/home/user/log", b"", exclusive=True)
    session.files.symlink("/nowhere", "/home/user/dangling", USER)
    with pytest.raises(errors.PathExists):
        session.put("/home/user/dangling", b"", exclusive=True)
    session.put("/home/user/fresh", b"x", exclusive=True)
    assert session.get("/home/user/fresh") == b"x"


def test_an_unfinished_write_leaves_nothing_and_says_how_far_it_came(session: Session) -> None:
    session.put("/home/user/a", b"before")
    chunks = iter([b"x" * 1000, b"y" * 500])

    def broken(count: int) -> bytes:
        try:
            return next(chunks)
        except StopIteration:
            raise ConnectionResetError(104, "reset") from None

    with pytest.raises(errors.TransportError) as caught:
        session.files.write("/home/user/a", broken, USER)
    assert caught.value.bytes_written == 1500
    with pytest.raises(errors.PathError) as announced:
        session.put("/home/user/b", b"four", size=5)
    assert announced.value.bytes_written == 4
    assert session.get("/home/user/a") == b"before"
    assert [entry.name for entry in session.files.listdir("/home/user", USER)] == ["a"]


def test_a_full_disk_is_reported_with_the_bytes_that_fitted(tmp_path: Path) -> None:
    syscalls.mount("tmpfs", os.fspath(tmp_path), "tmpfs", 0, "size=1m")
    try:
        root = os.open(tmp_path, os.O_PATH)
        try:
            files = SessionFiles(root)
            with pytest.raises(errors.NoSpace) as caught:
                files.write("/big", source_of(b"x" * (4 << 20)), ROOT)
            assert 0 < caught.value.bytes_written <= 1 << 20
            assert os.listdir(tmp_path) == []
        finally:
            os.close(root)
    finally:
        syscalls.umount2(os.fspath(tmp_path), syscalls.MNT_DETACH)


def test_without_unnamed_files_a_temporary_name_is_used_and_cleaned_up(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have no O_TMPFILE; a flag they refuse in the same way stands in for them."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_CREAT)
    session.put("/home/user/a", b"one")
    session.put("/home/user/a", b"two")
    assert session.get("/home/user/a") == b"two"
    with pytest.raises(errors.PathError):
        session.put("/home/user/b", b"three", size=4)
    assert [entry.name for entry in session.files.listdir("/home/user", USER)] == ["a"]


def test_names_are_bytes_and_relative_paths_start_at_cwd(session: Session) -> None:
    raw = b"caf\xe9 \n\x01"
    session.files.write(raw, source_of(b"x"), USER, cwd="/home/user")
    (entry,) = session.files.listdir("/home/user", USER)
    assert os.fsencode(entry.name) == raw
    assert session.files.stat(entry.name, USER, cwd=b"/home/user").size == 1
    assert session.files.stat("../user/" + entry.name, USER, cwd="/home/user/..//user/").size == 1
    for bad in ("", "a\0b"):
        with pytest.raises(errors.InvalidRequest):
            session.files.stat(bad, USER)
    with pytest.raises(errors.PathError):
        session.files.stat("x" * 5000, USER)


def test_writing_a_directory_or_below_a_file_is_refused_by_kind(session: Session) -> None:
    with pytest.raises(errors.IsDirectory):
        session.put("/home/user", b"", ROOT)
    with pytest.raises(errors.NotDirectory):
        session.put("/etc/hostname/x", b"", ROOT)
    with pytest.raises(errors.PathNotFound):
        session.put("/home/user/no/such", b"")
    session.put("/home/user/no/such", b"made", parents=True)
    assert session.get("/home/user/no/such") == b"made"
    with pytest.raises(errors.IsDirectory):
        session.files.open_read("/home/user", USER)
    with pytest.raises(errors.InvalidRequest):
        session.put("/home/user/..", b"")


# --- directory entries ---------------------------------------------------------------------------------


def test_directories_links_and_names(session: Session) -> None:
    files = session.files
    files.mkdir("/home/user/a/b/../c", USER, parents=True)
    files.mkdir("/home/user/a/b/../c", USER, parents=True)
    assert [entry.name for entry in files.listdir("/home/user/a", USER)] == ["b", "c"]
    with pytest.raises(errors.PathExists):
        files.mkdir("/home/user/a", USER)
    files.mkdir("/home/user/closed", USER, mode=0o000)
    assert files.stat("/home/user/closed", USER).mode == 0
    files.mkdir("/home/user/sticky", USER, mode=0o1777)
    assert files.stat("/home/user/sticky", USER).mode == 0o1777
    files.symlink("a/b", "/home/user/l", USER)
    assert files.readlink("/home/user/l", USER) == "a/b"
    assert files.stat("/home/user/l", USER).kind == "directory"
    assert files.stat("/home/user/l", USER, follow=False)[:2] == ("l", "symlink")
    with pytest.raises(errors.PathError):
        files.readlink("/home/user/a", USER)
    session.put("/home/user/l/deep", b"through")
    assert session.get("/home/user/a/b/deep") == b"through"
    files.rename("/home/user/l", "/home/user/m", USER)
    session.put("/home/user/n", b"n")
    with pytest.raises(errors.PathExists):
        files.rename("/home/user/m", "/home/user/n", USER, replace=False)
    files.rename("/home/user/m", "/home/user/n", USER)
    assert files.readlink("/home/user/n", USER) == "a/b"
    with pytest.raises(errors.PathNotFound) as caught:
        files.rename("/home/user/m", "/home/user/n", USER)
    assert (caught.value.path, caught.value.target) == ("/home/user/m", "/home/user/n")


def test_a_directory_over_a_file_says_that_the_path_exists(session: Session) -> None:
    session.put("/home/user/file", b"")
    session.files.symlink("file", "/home/user/link", USER)
    session.files.symlink("nowhere", "/home/user/dangling", USER)
    for path in ("file", "file/", "link", "dangling"):
        for parents in (True, False):
            with pytest.raises(errors.PathExists) as caught:
                session.files.mkdir(f"/home/user/{path}", USER, parents=parents)
            assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, f"/home/user/{path}")
    for parents in (True, False):
        with pytest.raises(errors.NotDirectory):
            session.files.mkdir("/home/user/file/below", USER, parents=parents)


def test_realpath_resolves_links_in_the_sandbox(session: Session) -> None:
    files = session.files
    files.mkdir("/home/user/a/b", USER, parents=True)
    session.put("/home/user/a/b/file", b"")
    files.symlink("a/b", "/home/user/relative", USER)
    files.symlink("/home/user/relative/file", "/home/user/absolute", USER)
    files.symlink("../../../../../../etc", "/home/user/out", USER)
    files.symlink("loop", "/home/user/loop", USER)
    files.symlink("nowhere/x", "/home/user/dangling", USER)

    def real(path: str, strict: bool = False) -> str:
        return files.realpath(path, USER, cwd="/home/user", strict=strict)

    for strict in (True, False):
        assert real("absolute", strict) == real("./a/../relative//file", strict) == "/home/user/a/b/file"
        assert real("out/hostname", strict) == "/etc/hostname"
        assert real("/..", strict) == real("/", strict) == "/"
        assert real("a/b/", strict) == "/home/user/a/b"
    assert real("missing/../gone") == "/home/user/gone"
    assert real("dangling") == "/home/user/nowhere/x"
    assert real("absolute/below") == "/home/user/a/b/file/below"
    assert real("loop").startswith("/home/user/loop")
    for path in ("missing", "dangling", "a/missing/../b"):
        with pytest.raises(errors.PathNotFound):
            real(path, strict=True)
    with pytest.raises(errors.NotDirectory):
        real("absolute/below", strict=True)
    with pytest.raises(errors.PathError) as caught:
        real("loop", strict=True)
    assert caught.value.errno == errno.ELOOP


def test_writing_through_a_link_changes_its_target(session: Session) -> None:
    session.put("/home/user/real", b"1")
    session.files.symlink("real", "/home/user/one", USER)
    session.files.symlink("/home/user/one", "/home/user/two", USER)
    session.put("/home/user/two", b"2")
    assert session.get("/home/user/real") == b"2"
    assert session.files.readlink("/home/user/two", USER) == "/home/user/one"
    session.files.symlink("loop", "/home/user/loop", USER)
    with pytest.raises(errors.PathError):
        session.put("/home/user/loop", b"")


def test_chmod_chown_and_copy(session: Session) -> None:
    files = session.files
    session.put("/home/user/a", b"content", mode=0o640)
    assert files.copy("/home/user/a", "/home/user/sub/b", USER, parents=True) == 7
    assert files.stat("/home/user/sub/b", USER).mode == 0o640
    files.chmod("/home/user/a", 0o200, USER)
    assert files.stat("/home/user/a", USER).mode == 0o200
    with pytest.raises(errors.PathPermission):
        session.get("/home/user/a")
    with pytest.raises(errors.PathPermission):
        files.chmod("/home/user/a", 0o777, OTHER)
    files.chown("/home/user/a", 1001, -1, ROOT)
    assert files.stat("/home/user/a", USER)[4:6] == (1001, 1000)
    files.symlink("/etc/hostname", "/home/user/l", USER)
    files.chown("/home/user/l", 1001, 1001, ROOT, follow=False)
    assert files.stat("/home/user/l", USER, follow=False).uid == 1001
    assert files.stat("/etc/hostname", USER).uid == 0
    with pytest.raises(errors.InvalidRequest):
        files.chown("/home/user/a", 65536, 0, ROOT)
    for mode in (-1, 0o10000):
        with pytest.raises(errors.InvalidRequest):
            files.chmod("/home/user/a", mode, ROOT)


def test_listing_shows_every_kind_and_is_bounded(session: Session) -> None:
    files = session.files
    files.mkdir("/home/user/d", USER)
    session.put("/home/user/f", b"12")
    files.symlink("f", "/home/user/l", USER)
    make_special(session, "/home/user")
    found = {entry.name: entry.kind for entry in files.listdir("/home/user", USER)}
    assert found == {"d": "directory", "f": "file", "l": "symlink", "fifo": "fifo", "sock": "socket"}
    with pytest.raises(errors.LimitReached):
        files.listdir("/home/user", USER, limit=4)
    with pytest.raises(errors.NotDirectory):
        files.listdir("/home/user/f", USER)


def make_special(session: Session, directory: str) -> None:
    with session.files.acting_as(USER):
        fd = session.files.tree.open(os.fsencode(directory), os.O_PATH)
        try:
            os.mkfifo(f"/proc/self/fd/{fd}/fifo")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"/proc/self/fd/{fd}/sock")
        finally:
            os.close(fd)


# --- what must be refused ------------------------------------------------------------------------------


def test_fifos_sockets_and_devices_are_refused_without_waiting(session: Session) -> None:
    make_special(session, "/home/user")
    started = time.monotonic()
    for name in ("fifo", "sock"):
        with pytest.raises(errors.NotRegularFile):
            session.files.open_read(f"/home/user/{name}", USER)
        for append in (False, True):
            with pytest.raises(errors.NotRegularFile):
                session.put(f"/home/user/{name}", b"x", append=append)
    assert time.monotonic() - started < ENOUGH


def test_devices_are_refused(tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    root = os.open(tmp_path, os.O_PATH)
    try:
        files = SessionFiles(root)
        with pytest.raises(errors.NotRegularFile):
            files.open_read("/null", ROOT)
        with pytest.raises(errors.NotRegularFile):
            files.write("/null", source_of(b""), ROOT)
    finally:
        os.close(root)


@pytest.mark.parametrize("filesystem", ["proc", "sysfs", "cgroup2"])
def test_file_systems_of_the_kernel_are_refused(tmp_path: Path, filesystem: str) -> None:
    (tmp_path / "mnt").mkdir()
    try:
        syscalls.mount(filesystem, os.fspath(tmp_path / "mnt"), filesystem)
    except OSError as error:
        pytest.skip(f"cannot mount {filesystem}: {error}")
    root = os.open(tmp_path, os.O_PATH)
    try:
        files = SessionFiles(root)
        name = next(n for n in os.listdir(tmp_path / "mnt") if (tmp_path / "mnt" / n).is_dir())
        calls: list[Callable[[], object]] = [
            lambda: files.listdir("/mnt", ROOT),
            lambda: files.write("/mnt/x", source_of(b""), ROOT),
            lambda: files.mkdir("/mnt/x", ROOT),
            lambda: files.mkdir("/mnt/x/y", ROOT, parents=True),
            lambda: files.chmod(f"/mnt/{name}", 0o755, ROOT),
            lambda: files.chown(f"/mnt/{name}", 0, 0, ROOT),
            lambda: files.remove(f"/mnt/{name}", ROOT, recursive=True),
            lambda: files.rename(f"/mnt/{name}", "/y", ROOT),
            lambda: files.symlink("x", "/mnt/x", ROOT),
        ]
        if filesystem == "proc":
            calls.append(lambda: files.open_read("/mnt/sys/kernel/core_pattern", ROOT))
            calls.append(lambda: files.write("/mnt/sys/kernel/core_pattern", source_of(b""), ROOT))
            calls.append(
                lambda: files.write("/mnt/sys/kernel/core_pattern", source_of(b""), ROOT, append=True)
            )
        for call in calls:
            with pytest.raises(errors.PathPermission) as caught:
                call()
            assert caught.value.hint
        with pytest.raises(errors.PathError):
            files.remove("/mnt", ROOT, recursive=True)
        assert os.listdir(tmp_path / "mnt")
    finally:
        os.close(root)
        syscalls.umount2(os.fspath(tmp_path / "mnt"), syscalls.MNT_DETACH)


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("/etc/hostname", True),
        ("../../../../../../../../etc/hostname", True),
        ("/home/user/../../etc/hostname", True),
        ("/proc/self/root/etc/hostname", False),
        ("/proc/1/root/etc/hostname", False),
        ("/proc/self/cwd/etc/hostname", False),
    ],
)
def test_links_never_lead_outside(session: Session, target: str, inside: bool) -> None:
    session.files.symlink(target, "/home/user/l", ROOT)
    if inside:
        assert session.get("/home/user/l", ROOT) == b"inside\n"
        session.put("/home/user/l", b"written\n", ROOT)
        assert session.get("/etc/hostname", ROOT) == b"written\n"
    else:
        with pytest.raises(errors.PathError):
            session.get("/home/user/l", ROOT)
    assert Path("/etc/hostname").read_bytes() not in (b"inside\n", b"written\n")


def test_magic_links_of_a_mounted_proc_fail(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    syscalls.mount("proc", os.fspath(tmp_path / "proc"), "proc")
    root = os.open(tmp_path, os.O_PATH)
    try:
        files = SessionFiles(root)
        for target in (
            "/proc/self/root/etc/passwd",
            "/proc/1/root/etc/passwd",
            "/proc/self/exe",
            "/proc/1/cwd",
        ):
            files.symlink(target, "/l", ROOT)
            for call in (
                lambda: files.open_read("/l", ROOT),
                lambda: files.write("/l", source_of(b""), ROOT),
                lambda: files.listdir("/l", ROOT),
                lambda: files.stat("/l/", ROOT),
            ):
                with pytest.raises(errors.PathError):
                    call()
            files.remove("/l", ROOT)
    finally:
        os.close(root)
        syscalls.umount2(os.fspath(tmp_path / "proc"), syscalls.MNT_DETACH)


# --- removal -------------------------------------------------------------------------------------------


def test_removal_of_files_links_and_trees(session: Session) -> None:
    files = session.files
    session.put("/home/user/d/e/f", b"", parents=True)
    files.symlink("/home/user/d", "/home/user/l", USER)
    with pytest.raises(errors.PathExists):
        files.remove("/home/user/d", USER)
    files.remove("/home/user/l/", USER, recursive=True)
    assert session.get("/home/user/d/e/f") == b""
    files.symlink("/etc", "/home/user/d/e/etc", USER)
    files.remove("/home/user/d", USER, recursive=True)
    assert files.listdir("/home/user", USER) == []
    assert session.get("/etc/hostname") == b"inside\n"
    with pytest.raises(errors.PathNotFound):
        files.remove("/home/user/d", USER)
    files.remove("/home/user/d", USER, missing_ok=True)
    files.remove("/home/user/d/e", USER, missing_ok=True)
    files.mkdir("/home/user/empty", USER)
    files.remove("/home/user/empty", USER)
    with pytest.raises(errors.InvalidRequest):
        files.remove("/", ROOT, recursive=True)


def test_removal_stops_where_the_user_may_not_remove(session: Session) -> None:
    session.put("/home/user/a/theirs/f", b"", ROOT, parents=True)
    session.files.chown("/home/user/a", 1000, 1000, ROOT)
    with pytest.raises(errors.PathPermission) as caught:
        session.files.remove("/home/user/a", USER, recursive=True)
    assert caught.value.stopped_at == "a/theirs"
    assert session.get("/home/user/a/theirs/f", ROOT) == b""


def test_a_deep_and_a_wide_tree_are_removed_with_few_descriptors(tmp_path: Path) -> None:
    shm = Path("/dev/shm") / f"sandkeep-test-{os.getpid()}"
    shm.mkdir()
    root = os.open(shm, os.O_PATH)
    try:
        files = SessionFiles(root)
        files.mkdir("/top", ROOT)
        fd = os.open(shm / "top", os.O_PATH)
        for _ in range(3000):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_PATH, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        for number in range(3000):
            (shm / "top" / f"w{number}").mkdir()
        files.remove("/top", ROOT, recursive=True)
        assert os.listdir(shm) == []
    finally:
        os.close(root)
        shm.rmdir()


# --- races ---------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host with a file that must survive, whatever the racing process does."""
    place = tmp_path / "host-only"
    place.mkdir()
    (place / "victim").write_bytes(b"host content")
    (place / "sub").mkdir()
    (place / "sub/victim").write_bytes(b"host content")
    yield place
    assert (place / "victim").read_bytes() == b"host content"
    assert (place / "sub/victim").read_bytes() == b"host content"
    assert sorted(os.listdir(place)) == ["sub", "victim"]


def racing(
    session: Session, work: Callable[[], object], *swaps: tuple[str, str], enough: Callable[[], object]
) -> None:
    """Run ``work`` for a while beside a process of the sandbox that keeps exchanging pairs of names.

    Longer, where that process did not get to it at once: until the race was lost and won often enough.
    """
    pid = os.fork()
    if pid == 0:
        try:
            # Confined like a process of the sandbox: links must not lead this one outside either.
            os.fchdir(session.root_fd)
            os.chroot(".")
            while True:
                for one, other in swaps:
                    try:
                        syscalls.renameat2(
                            syscalls.AT_FDCWD, one, syscalls.AT_FDCWD, other, syscalls.RENAME_EXCHANGE
                        )
                    except OSError:
                        pass
        finally:
            os._exit(1)
    try:
        started = time.monotonic()
        while (taken := time.monotonic() - started) < 0.4 or (taken < ENOUGH and not enough()):
            work()
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the racing process ended"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_directory_swapped_for_a_link_never_leads_outside(session: Session, outside: Path) -> None:
    """Two names keep changing places: a directory, and a link that aims at a directory of the host."""
    files = session.files
    files.mkdir("/home/user/d/sub", USER, parents=True)
    session.put("/home/user/d/victim", b"inside content")
    files.symlink("../" * 12 + os.fspath(outside).lstrip("/"), "/home/user/l", USER)
    seen = set()
    refused = 0

    def work() -> None:
        nonlocal refused
        try:
            seen.add(session.get("/home/user/d/victim", ROOT))
            session.put("/home/user/d/victim", b"inside content", ROOT)
            session.put("/home/user/d/new", b"", ROOT)
            files.chmod("/home/user/d/victim", 0o600, ROOT)
            files.chown("/home/user/d/victim", 1000, 1000, ROOT)
            files.remove("/home/user/d/new", ROOT)
        except errors.PathError:
            refused += 1

    racing(session, work, ("/home/user/d", "/home/user/l"), enough=lambda: seen and refused)
    assert seen == {b"inside content"}
    assert refused


def test_recursive_removal_beside_a_swapping_process_stays_inside(session: Session, outside: Path) -> None:
    files = session.files
    files.symlink(os.fspath(outside), "/home/user/l", USER)
    files.symlink("../../../.." + os.fspath(outside), "/home/user/m", USER)
    disturbed = 0

    def work() -> None:
        nonlocal disturbed
        try:
            session.put("/home/user/t/d/sub/x", b"", USER, parents=True)
            session.put("/home/user/t/d/y", b"", USER)
            files.remove("/home/user/t", USER, recursive=True)
        except errors.PathError:
            disturbed += 1

    racing(
        session,
        work,
        ("/home/user/t/d", "/home/user/l"),
        ("/home/user/t/d/sub", "/home/user/m"),
        enough=lambda: disturbed,
    )
    assert disturbed


# --- a session with one id -----------------------------------------------------------------------------


def test_a_single_id_session_switches_nothing(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_PATH)
    try:
        files = SessionFiles(root, single=True)
        files.write("/a", source_of(b"x"), USER)
        assert files.stat("/a", USER).uid == 0
        files.chown("/a", 1000, 1000, ROOT)
        assert files.stat("/a", USER).uid == 0
    finally:
        os.close(root)


def test_everything_works_rootless_on_an_overlay_with_user_attributes() -> None:
    """An ordinary uid, alone in its user namespace, on an overlay it mounted itself."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, _rootless_report().encode())
        except BaseException as error:
            os.write(write, f"failed: {error!r}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        report = pipe.read().decode()
    os.waitpid(pid, 0)
    if report.startswith("skip: "):
        pytest.skip(report.removeprefix("skip: "))
    assert report == "ok"


def _rootless_report() -> str:
    os.setgroups([])
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text("0 54321 1")
        Path("/proc/self/gid_map").write_text("0 54321 1")
        syscalls.mount("tmpfs", "/mnt", "tmpfs", 0, "size=8m,mode=0755")
        for name in ("lower/d/sub", "upper", "work", "root"):
            os.makedirs(f"/mnt/{name}")
        Path("/mnt/lower/d/f").write_bytes(b"from below")
        options = "lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work,userxattr"
        syscalls.mount("overlay", "/mnt/root", "overlay", 0, options)
    except OSError as error:
        return f"skip: no rootless overlay here: {error}"
    files = SessionFiles(os.open("/mnt/root", os.O_PATH), single=True)
    files.write("/d/f", source_of(b"replaced"), USER)
    files.write("/new/g", source_of(b"new"), USER, parents=True, mode=0o600)
    files.write("/new/g", source_of(b"again"), ROOT, exclusive=False)
    files.chmod("/new/g", 0o755, USER)
    files.symlink("/d/f", "/new/l", USER)
    files.mkdir("/new/h", USER)
    files.rename("/new/g", "/d/g", USER)
    assert Path("/mnt/root/d/f").read_bytes() == b"replaced"
    assert Path("/mnt/root/d/g").read_bytes() == b"again"
    assert files.stat("/d/g", USER)[3:6] == (0o755, 0, 0)
    files.remove("/d", USER, recursive=True)
    assert [entry.name for entry in files.listdir("/", USER)] == ["new"]
    return "ok"
