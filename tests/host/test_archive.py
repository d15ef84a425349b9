"""Trees into and out of a session as tar streams, on a real idmapped overlay and on a plain directory."""

from __future__ import annotations

import errno
import gzip
import io
import os
import random
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep import errors
from sandkeep.linux import syscalls
from sandkeep.shared.tarreader import TarReader
from sandkeep.shared.tarwriter import TarWriter
from sandkeep.supervisor.archive import Archived, archive
from sandkeep.supervisor.extract import extract
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import ROOT, Identity
from tests.host.session_files import USER, Session, open_session

if os.geteuid() != 0:
    pytest.skip("acting as other users needs root", allow_module_level=True)


@pytest.fixture(params=["overlay", "plain"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with open_session(request.param, tmp_path) as opened:
        yield opened


Member = tuple[str, bytes, dict[str, Any]]


def packed(*members: Member) -> bytes:
    """An archive by Python's tarfile: name, content, further attributes of the member."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as writer:
        for name, content, attributes in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in attributes.items():
                setattr(member, key, value)
            writer.addfile(member, io.BytesIO(content))
    return output.getvalue()


def file(name: str, content: bytes = b"", **attributes: Any) -> Member:
    return name, content, attributes


def directory(name: str, mode: int = 0o755, **attributes: Any) -> Member:
    return name, b"", {"type": tarfile.DIRTYPE, "mode": mode, **attributes}


def symlink(name: str, target: str) -> Member:
    return name, b"", {"type": tarfile.SYMTYPE, "linkname": target}


def hardlink(name: str, target: str) -> Member:
    return name, b"", {"type": tarfile.LNKTYPE, "linkname": target}


def unpack(
    session: Session, data: bytes, dest: str = "/home/user", who: Identity = USER, **options: Any
) -> int:
    return extract(session.files, TarReader(io.BytesIO(data).read), dest, who, **options)


def pack(session: Session, *paths: str, who: Identity = USER, **options: Any) -> tuple[bytes, Archived]:
    output = io.BytesIO()
    done = archive(session.files, paths, TarWriter(output.write), who, **options)
    return output.getvalue(), done


def listing(session: Session, path: str = "/home/user") -> list[str]:
    return [entry.name for entry in session.files.listdir(path, ROOT)]


# --- into a session ------------------------------------------------------------------------------------


def test_every_kind_of_entry_arrives(session: Session) -> None:
    seen: list[str] = []
    data = packed(
        directory("./"),
        directory("d", mode=0o750, mtime=1000),
        file("d/f", b"content", mode=0o640, mtime=2000),
        symlink("d/l", "/etc/passwd"),
        hardlink("d/h", "d/f"),
        file("d/x", b"#!", mode=0o6755),
        file("deep/er/g", b"parents are made"),
    )
    done = unpack(session, data, on_entry=lambda entry: seen.append(os.fsdecode(entry.name)))
    assert done == 7
    assert seen == ["./", "d/", "d/f", "d/l", "d/h", "d/x", "deep/er/g"]
    files = session.files
    d, f = files.stat("/home/user/d", USER), files.stat("/home/user/d/f", USER)
    assert (d.mode, d.mtime_ns, d.uid) == (0o750, 1000 * 10**9, 1000)
    assert (f.mode, f.mtime_ns, f.uid, f.nlink) == (0o640, 2000 * 10**9, 1000, 2)
    assert f.ino == files.stat("/home/user/d/h", USER).ino
    assert files.readlink("/home/user/d/l", USER) == "/etc/passwd"
    assert session.get("/home/user/deep/er/g") == b"parents are made"
    assert files.stat("/home/user/d/x", USER).mode == 0o755, "set-id bits are dropped"
    assert files.stat("/home/user", USER).mode == 0o755


def test_gzip_is_recognised_and_a_missing_destination_made(session: Session) -> None:
    assert unpack(session, gzip.compress(packed(file("a", b"1"))), "/home/user/new/place") == 1
    assert session.get("/home/user/new/place/a") == b"1"


def test_owners_are_kept_only_when_asked(session: Session) -> None:
    data = packed(
        directory("d", uid=1000, gid=2000),
        file("d/f", b"", uid=1001, gid=1001, mode=0o4711, pax_headers={"SCHILY.xattr.user.k": "v"}),
        (*symlink("l", "x")[:2], {**symlink("l", "x")[2], "uid": 5, "gid": 6}),
    )
    unpack(session, data, "/one", ROOT)
    unpack(session, data, "/two", ROOT, keep_owner=True)
    files = session.files
    for path, ids in (
        ("/one/d", (0, 0)),
        ("/two/d", (1000, 2000)),
        ("/two/d/f", (1001, 1001)),
        ("/two/l", (5, 6)),
    ):
        assert files.stat(path, ROOT, follow=False)[4:6] == ids, path
    assert files.stat("/one/d/f", ROOT).mode == 0o711
    assert files.stat("/two/d/f", ROOT).mode == 0o4711
    assert os.getxattr(session.disk / "two/d/f", "user.k") == b"v"
    with pytest.raises(errors.ArchiveError, match="ids the sandbox does not have"):
        unpack(session, packed(file("x", uid=65536)), "/three", ROOT, keep_owner=True)
    with pytest.raises(errors.ArchiveError) as caught:
        unpack(session, packed(file("x", uid=5)), who=USER, keep_owner=True)
    assert caught.value.errno == errno.EPERM
    assert listing(session) == []


def test_overlay_and_trusted_attributes_are_not_set(session: Session) -> None:
    attributes = ("user.overlay.opaque", "trusted.overlay.opaque", "user.ok")
    records = {f"SCHILY.xattr.{name}": "y" for name in attributes}
    unpack(session, packed(file("f", pax_headers=records)), "/one", ROOT, keep_owner=True)
    found = os.listxattr(session.disk / "one/f")
    assert [name for name in attributes if name in found] == ["user.ok"]


def test_a_read_only_directory_can_be_filled_first(session: Session) -> None:
    unpack(
        session, packed(directory("ro", mode=0o555), file("ro/f", b"1"), directory("ro/s"), file("z", b""))
    )
    assert session.files.stat("/home/user/ro", USER).mode == 0o555
    assert session.get("/home/user/ro/f") == b"1"


def test_existing_files_are_replaced_and_directories_kept(session: Session) -> None:
    unpack(
        session, packed(directory("d", mode=0o700), file("d/f", b"old"), symlink("d/l", "f"), file("g", b"g"))
    )
    opened = session.files.open_read("/home/user/d/f", USER)
    unpack(
        session,
        packed(
            directory("d", mode=0o777),
            file("d/f", b"new"),
            file("d/l", b"no longer a link"),
            symlink("g", "d"),
            hardlink("g", "d/f"),
            hardlink("d/f", "g"),
        ),
    )
    with os.fdopen(opened.fd, "rb") as old:
        assert old.read() == b"old"
    assert session.get("/home/user/d/f") == b"new"
    assert session.files.stat("/home/user/d/l", USER, follow=False).kind == "file"
    assert session.files.stat("/home/user/d", USER).mode == 0o700
    assert session.files.stat("/home/user/g", USER, follow=False).nlink == 2
    assert listing(session) == ["d", "g"]
    assert listing(session, "/home/user/d") == ["f", "l"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (file("/etc/evil"), "absolute"),
        (file("../evil"), r"\.\."),
        (file("a/../../evil"), r"\.\."),
        (directory("a/.."), r"\.\."),
        (hardlink("h", "/etc/passwd"), "absolute"),
        (hardlink("h", "../other/x"), r"\.\."),
        (hardlink("h", "missing"), "No such file"),
        (hardlink("h", "."), "destination itself"),
        (("n", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}), "character device"),
        (("n", b"", {"type": tarfile.BLKTYPE}), "block device"),
        (("n", b"", {"type": tarfile.FIFOTYPE}), "fifo"),
        (file("done/below"), "Not a directory"),
        (file("dir"), "Is a directory"),
        (file("."), "Is a directory"),
        (symlink("dir", "x"), "File exists"),
        (directory("done"), "File exists|Not a directory"),
        (file("x" * 300), "File name too long"),
    ],
)
def test_a_bad_entry_stops_and_says_what_is_in_place(session: Session, member: Member, message: str) -> None:
    with pytest.raises(errors.ArchiveError, match=message) as caught:
        unpack(session, packed(file("done", b"1"), directory("dir"), member, file("never", b"")))
    assert (caught.value.entries, caught.value.index) == (2, 2)
    assert caught.value.entry.rstrip("/") == member[0]
    assert caught.value.path == os.path.join("/home/user", member[0])
    assert session.get("/home/user/done") == b"1"
    assert listing(session) == ["dir", "done"]


def test_a_cut_off_archive_leaves_no_part_of_a_file(session: Session) -> None:
    data = packed(file("first", b"1"), file("second", b"x" * 5000))
    with pytest.raises(errors.ArchiveError) as caught:
        unpack(session, data[:4000])
    assert (caught.value.entries, caught.value.entry) == (1, "second")
    assert listing(session) == ["first"]
    unpack(session, packed(file("second", b"before")))
    with pytest.raises(errors.ArchiveError):
        unpack(session, data[:4000])
    assert session.get("/home/user/second") == b"before"
    assert listing(session) == ["first", "second"]


def test_a_user_extracts_only_where_they_may_write(session: Session) -> None:
    with pytest.raises(errors.ArchiveError) as caught:
        unpack(session, packed(file("evil")), "/etc")
    assert caught.value.errno == errno.EACCES
    with pytest.raises(errors.PathPermission):
        unpack(session, packed(file("evil")), "/etc/new")


def test_links_of_the_archive_lead_nowhere_outside(session: Session, tmp_path: Path) -> None:
    """Each link is made as given; what a later entry finds through it is the sandbox's own directory."""
    outside = tmp_path / "host-only"
    outside.mkdir()
    for target in (
        os.fspath(outside),
        "../" * 15 + os.fspath(outside).lstrip("/"),
        "/proc/self/root" + os.fspath(outside),
    ):
        data = packed(symlink("way", target), file("way/evil", b"x"), hardlink("stolen", "way/evil"))
        with pytest.raises(errors.ArchiveError):
            unpack(session, data, who=ROOT)
        session.files.remove("/home/user/way", ROOT)
        assert os.listdir(outside) == []
    unpack(session, packed(symlink("way", "/home/other"), file("way/inside", b"x")), who=ROOT)
    assert session.get("/home/other/inside", ROOT) == b"x"
    with pytest.raises(errors.ArchiveError):
        unpack(session, packed(hardlink("stolen", "way/inside")), who=ROOT)
    session.files.symlink("/etc/hostname", "/home/user/name", ROOT)
    unpack(session, packed(file("name", b"replaced, not followed")), who=ROOT)
    assert session.get("/etc/hostname", ROOT) == b"inside\n"


def test_extraction_beside_a_swapping_process_stays_inside(session: Session, tmp_path: Path) -> None:
    outside = tmp_path / "host-only"
    outside.mkdir()
    session.files.symlink(os.fspath(outside), "/home/user/l", USER)
    session.files.mkdir("/home/user/d", USER)
    pid = os.fork()
    if pid == 0:
        try:
            os.fchdir(session.root_fd)
            os.chroot(".")
            while True:
                syscalls.renameat2(-1, "/home/user/d", -1, "/home/user/l", syscalls.RENAME_EXCHANGE)
        finally:
            os._exit(1)
    data = packed(
        *[member for n in range(20) for member in (directory(f"d/s{n}", mode=0o777), file(f"d/s{n}/f", b"x"))]
    )
    try:
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:
            try:
                unpack(session, data, who=ROOT)
            except errors.ArchiveError:
                pass
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the racing process ended"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.listdir(outside) == []


def test_damaged_archives_raise_nothing_but_archive_errors(tmp_path: Path) -> None:
    """Random changes to a good archive, with header checksums made right again."""
    good = packed(
        directory("d", mtime=5),
        file("d/f", b"content", pax_headers={"SCHILY.xattr.user.k": "v", "mtime": "1.5"}),
        symlink("d/l", "f"),
        hardlink("d/h", "d/f"),
        file("x" * 120, b"long"),
    )[:8192]
    rng = random.Random(20)
    syscalls.mount("tmpfs", os.fspath(tmp_path), "tmpfs", 0, "size=8m")
    root = os.open(tmp_path, os.O_PATH)
    stopped = 0
    try:
        for attempt in range(400):
            data = bytearray(good)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.choice([0, 47, 46, 48, 55, 128, 255, rng.randrange(256)])
            for start in range(0, len(data), 512):
                block = data[start : start + 512]
                if block[257:262] == b"ustar":
                    block[148:156] = b"        "
                    data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
            try:
                extract(
                    SessionFiles(root),
                    TarReader(io.BytesIO(data).read),
                    f"/{attempt % 3}",
                    ROOT,
                    keep_owner=True,
                )
            except errors.ArchiveError:
                stopped += 1
        assert 40 < stopped < 400
        assert set(os.listdir(tmp_path)) <= {"0", "1", "2"}
    finally:
        os.close(root)
        syscalls.umount2(os.fspath(tmp_path), syscalls.MNT_DETACH)


def test_a_full_disk_stops_the_extraction(tmp_path: Path) -> None:
    syscalls.mount("tmpfs", os.fspath(tmp_path), "tmpfs", 0, "size=1m")
    try:
        root = os.open(tmp_path, os.O_PATH)
        try:
            data = packed(file("a", b"x" * 500_000), file("b", b"x" * 900_000))
            with pytest.raises(errors.ArchiveError) as caught:
                extract(SessionFiles(root), TarReader(io.BytesIO(data).read), "/", ROOT)
            assert (caught.value.entries, caught.value.errno) == (1, errno.ENOSPC)
            assert os.listdir(tmp_path) == ["a"]
        finally:
            os.close(root)
    finally:
        syscalls.umount2(os.fspath(tmp_path), syscalls.MNT_DETACH)


# --- out of a session ----------------------------------------------------------------------------------


def fill(session: Session) -> None:
    session.put("/home/user/p/a", b"alpha", mode=0o640, parents=True)
    session.put("/home/user/p/sub/b", b"beta" * 1000, parents=True)
    session.put("/home/user/p/node_modules/x", b"", parents=True)
    session.put("/home/user/p/sub/c.pyc", b"")
    session.files.symlink("../a", "/home/user/p/sub/l", USER)


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        return reader.getnames()


def test_a_tree_comes_out_and_goes_in_again(session: Session) -> None:
    fill(session)
    with session.files.acting_as(USER):
        fd = session.files.tree.open(b"/home/user/p", os.O_PATH)
        os.link("a", "z", src_dir_fd=fd, dst_dir_fd=fd)
        os.close(fd)
    data, done = pack(session, "p", cwd="/home/user")
    assert done == Archived(9, ())
    assert (
        names(data)
        == [
            *("p", "p/a", "p/node_modules", "p/node_modules/x", "p/sub", "p/sub/b", "p/sub/c.pyc", "p/sub/l"),
            "p/z",
        ]
        or len(names(data)) == done.entries
    )
    again, _ = pack(session, "p", cwd="/home/user")
    assert again == data
    unpack(session, data, "/home/user/copy")
    for path, content in (("p/a", b"alpha"), ("p/sub/b", b"beta" * 1000), ("p/z", b"alpha")):
        assert session.get(f"/home/user/copy/{path}") == content
    copied = session.files.stat("/home/user/copy/p/a", USER)
    assert (copied.mode, copied.nlink) == (0o640, 2)
    assert session.files.readlink("/home/user/copy/p/sub/l", USER) == "../a"


def test_names_follow_the_paths_given_and_ignored_ones_are_left_out(session: Session) -> None:
    fill(session)
    data, _ = pack(session, "/home/user/p/a", "p/./sub/", cwd="/home/user", ignore=["*.pyc"])
    assert names(data) == ["home/user/p/a", "p/sub", "p/sub/b", "p/sub/l"]
    data, _ = pack(session, ".", cwd="/home/user/p", ignore=["node_modules", "sub/b"])
    assert names(data) == ["a", "sub", "sub/c.pyc", "sub/l"]
    data, _ = pack(session, "/home/user/p", ignore=["*o*_mod*les", "home/*/sub"])
    assert names(data) == ["home/user/p", "home/user/p/a"]
    with pytest.raises(errors.InvalidRequest):
        pack(session, "../user", cwd="/home/user")
    with pytest.raises(errors.PathNotFound):
        pack(session, "missing")


def test_gnu_tar_reads_it(session: Session, tmp_path: Path) -> None:
    fill(session)
    session.put("/home/user/p/" + "long" * 40 + "/" + "name" * 50, b"deep", parents=True)
    data, _ = pack(session, "p", cwd="/home/user")
    target = tmp_path / "unpacked"
    target.mkdir()
    subprocess.run(["tar", "-x", "-C", os.fspath(target)], input=data, check=True, capture_output=True)
    assert (target / "p/a").read_bytes() == b"alpha"
    assert (target / "p" / ("long" * 40) / ("name" * 50)).read_bytes() == b"deep"
    assert (target / "p/a").stat().st_uid == 1000


def test_what_cannot_be_read_is_reported_after_a_well_formed_archive(session: Session) -> None:
    fill(session)
    session.put("/home/user/p/secret", b"s", ROOT, mode=0o600)
    session.files.mkdir("/home/user/p/closed", ROOT, mode=0o700)
    output = io.BytesIO()
    with pytest.raises(errors.ArchiveError) as caught:
        archive(session.files, ["/home/user/p"], TarWriter(output.write), USER)
    assert caught.value.unreadable == ["home/user/p/closed", "home/user/p/secret"]
    assert (caught.value.path, caught.value.errno) == ("/home/user/p/closed", errno.EACCES)
    assert "home/user/p/sub/b" in names(output.getvalue())
    assert "home/user/p/secret" not in names(output.getvalue())


def test_special_files_and_the_kernels_file_systems_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "t/proc").mkdir(parents=True)
    (tmp_path / "t/a").write_bytes(b"1")
    os.mkfifo(tmp_path / "t/fifo")
    syscalls.mount("proc", os.fspath(tmp_path / "t/proc"), "proc")
    root = os.open(tmp_path, os.O_PATH)
    try:
        output = io.BytesIO()
        done = archive(SessionFiles(root), ["/t"], TarWriter(output.write), ROOT)
        assert done == Archived(2, ("t/fifo", "t/proc"))
        assert names(output.getvalue()) == ["t", "t/a"]
    finally:
        os.close(root)
        syscalls.umount2(os.fspath(tmp_path / "t/proc"), syscalls.MNT_DETACH)


@pytest.mark.parametrize(
    "change", [lambda fd: os.truncate(fd, 1000), lambda fd: os.pwrite(fd, b"x", 3_000_000)]
)
def test_a_file_that_changes_size_is_padded_or_cut_and_reported(
    tmp_path: Path, change: Callable[[int], object]
) -> None:
    """The change happens while the first half is on its way: the sink blocks until it is made."""
    (tmp_path / "log").write_bytes(b"y" * 2_000_000)
    (tmp_path / "next").write_bytes(b"after")
    root = os.open(tmp_path, os.O_PATH)
    changed = False
    pieces: list[bytes] = []

    def sink(data: bytes) -> None:
        nonlocal changed
        pieces.append(data)
        if not changed:
            changed = True
            fd = os.open(tmp_path / "log", os.O_RDWR)
            change(fd)
            os.close(fd)

    try:
        with pytest.raises(errors.ArchiveError) as caught:
            archive(SessionFiles(root), ["/log", "/next"], TarWriter(sink), ROOT)
    finally:
        os.close(root)
    assert caught.value.changed == ["log"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as reader:
        assert [(member.name, member.size) for member in reader] == [("log", 2_000_000), ("next", 5)]


def test_a_reader_that_goes_away_is_a_transport_error(session: Session) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with pytest.raises(errors.TransportError):
            archive(session.files, ["/etc"], TarWriter(lambda data: os.write(write, data)), ROOT)
    finally:
        os.close(write)


def test_archives_stream_through_a_pipe_between_two_sessions(session: Session) -> None:
    """Neither side ever holds the whole: 16 MB pass through a pipe's 64 KiB."""
    session.put("/home/user/src/big", os.urandom(16_000_000), parents=True)
    read, write = os.pipe()
    failures: list[BaseException] = []

    def send() -> None:
        def sink(data: bytes) -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(write, view) :]

        try:
            archive(session.files, ["src"], TarWriter(sink), USER, cwd="/home/user")
        except BaseException as error:
            failures.append(error)
        finally:
            os.close(write)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        extract(session.files, TarReader(lambda count: os.read(read, count)), "/home/user/dst", USER)
    finally:
        os.close(read)
        thread.join()
    assert failures == []
    assert session.get("/home/user/dst/src/big") == session.get("/home/user/src/big")
