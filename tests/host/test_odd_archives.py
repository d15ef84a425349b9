"""Archives on which implementations of tar disagree: images, uploads and downloads read them alike.

Each archive of the table goes through all three users of ``shared.tarreader``: the unpacking of an image, an
upload into a session and the client's download. Ordinary archives must come out as ``tarfile`` and ``tar(1)``
have them.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandkeep.errors import ArchiveError, ImageError, SandkeepError
from sandkeep.host.images.unpack import unpack
from sandkeep.sdk.local import TreeWriter
from sandkeep.shared.tar import END
from sandkeep.shared.tarreader import TarFeed, TarReader
from sandkeep.supervisor.extract import extract
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import ROOT

if os.geteuid() != 0:
    pytest.skip("extracting as a user of the sandbox needs root", allow_module_level=True)


def from_image(data: bytes, directory: Path) -> None:
    unpack(io.BytesIO(data), str(directory), mode="root", whiteouts=False)


def by_upload(data: bytes, directory: Path) -> None:
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        extract(SessionFiles(root), TarReader(io.BytesIO(data).read), "/", ROOT, keep_owner=True)
    finally:
        os.close(root)


def by_download(data: bytes, directory: Path) -> None:
    writer = TreeWriter(str(directory), None)
    try:
        for start in range(0, len(data), 700):
            writer.write(data[start : start + 700])
        writer.finish()
    finally:
        writer.discard()


USERS = {"image": from_image, "upload": by_upload, "download": by_download}


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> Callable[[bytes, Path], None]:
    return USERS[str(request.param)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "out"
    made.mkdir()
    return made


# --- odd archives --------------------------------------------------------------------------------------


def block(
    kind: bytes = b"0", name: bytes = b"n", size: int = 0, link: bytes = b"", magic: bytes = b""
) -> bytes:
    fields = (name, b"0000644", b"0000000", b"0000000", b"%011o" % size, b"%011o" % 12, b" " * 8, kind, link)
    packed = struct.pack("100s8s8s8s12s12s8sc100s8s247x", *fields, magic or b"ustar\x0000")
    return packed[:148] + b"%06o\0 " % sum(packed) + packed[156:]


def signed(header: bytes) -> bytes:
    """Return the header with its checksum taken over signed bytes."""
    total = sum(struct.unpack("512b", header[:148] + b" " * 8 + header[156:]))
    return header[:148] + b"%06o\0 " % total + header[156:]


def content(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    size = len(key) + len(value) + 3
    return b"%d %b=%b\n" % (next(n for n in range(size, size + 9) if n == size + len(str(n))), key, value)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    body = b"".join(record(*text.split(b"=", 1)) for text in records)
    return block(kind, b"pax", len(body)) + content(body)


FILE = block(name=b"file", size=3) + content(b"abc")
ACCEPTED = {
    "one block of zeros as end marker": (FILE + bytes(512), {"file": b"abc"}),
    "data after the end marker": (FILE + END + bytes(512) + b"\0" * 700, {"file": b"abc"}),
    "V7 directory": (block(b"\0", b"d/", magic=bytes(8)) + FILE + END, {"d": None, "file": b"abc"}),
    "contiguous file": (block(b"7", size=3) + content(b"abc") + END, {"n": b"abc"}),
    "volume label": (block(b"V", b"label") + FILE + END, {"file": b"abc"}),
    "signed checksum": (
        signed(block(name=b"\xe9\xe9", size=3)) + content(b"abc") + END,
        {os.fsdecode(b"\xe9\xe9"): b"abc"},
    ),
    "link with a size": (block(b"2", size=7, link=b"to") + FILE + END, {"n": "to", "file": b"abc"}),
    "directory with a size": (block(b"5", b"d", size=7) + FILE + END, {"d": None, "file": b"abc"}),
    "global comment": (pax(b"comment=abc", kind=b"g") + FILE + END, {"file": b"abc"}),
    "PAX path wins over a GNU long name": (
        block(b"L", size=4) + content(b"long") + pax(b"path=paxname") + FILE + END,
        {"paxname": b"abc"},
    ),
    "empty PAX path": (pax(b"path=") + FILE + END, {"file": b"abc"}),
}
REFUSED = {
    "missing end marker": (FILE, "end marker|cut short"),
    "nothing at all": (b"", "end marker|cut short"),
    "cut in the content": (FILE[:-400], "middle of its content|cut short"),
    "global PAX path": (pax(b"path=global", kind=b"g") + FILE + END, "global extension header with a path"),
    "global PAX size": (pax(b"size=000001", kind=b"g") + FILE + END, "global extension header with a size"),
    "V7 directory with content": (
        block(name=b"d/", size=3) + content(b"abc") + END,
        "directory with content",
    ),
    "volume label with content": (block(b"V", size=3) + content(b"abc") + END, "label with content"),
    "empty name": (block(name=b"", size=3) + content(b"abc") + END, "no usable name"),
    "unknown type": (block(b"Z", size=3) + content(b"abc") + END, "unknown type"),
    "multi-volume part": (block(b"M", size=3) + content(b"abc") + END, "unknown type"),
    "GNU sparse file": (block(b"S") + END, "sparse"),
    "PAX sparse file": (pax(b"GNU.sparse.major=1") + FILE + END, "sparse"),
    "empty link target": (block(b"2") + END, "usable target"),
    "wrong checksum": (b"x" + FILE[1:] + END, "checksum"),
    "two PAX headers": (pax(b"comment=abc") * 2 + FILE + END, "same type"),
    "PAX header without an entry": (pax(b"comment=abc") + END, "after an extension header"),
    "large PAX header": (block(b"x", size=(1 << 20) + 1), "at most"),
    "signed number": (FILE.replace(b"0000644", b"+000644") + END, "not a number|checksum"),
    "impossible time": (pax(b"mtime=99999999999999") + FILE + END, "time out of range"),
}


def tree(directory: Path) -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


@pytest.mark.parametrize("case", ACCEPTED)
def test_odd_archives_that_every_user_reads(
    case: str, user: Callable[[bytes, Path], None], directory: Path
) -> None:
    data, expected = ACCEPTED[case]
    user(data, directory)
    assert tree(directory) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_odd_archives_that_every_user_refuses(
    case: str, user: Callable[[bytes, Path], None], directory: Path
) -> None:
    data, message = REFUSED[case]
    with pytest.raises((ArchiveError, ImageError), match=message):
        user(data, directory)


# --- ordinary archives ---------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with everything an ordinary archive may hold but special files."""
    top = tmp_path / "tree"
    (top / "dir/deeper").mkdir(parents=True)
    (top / "dir/file").write_bytes(b"content" * 300)
    (top / "dir/empty").touch(mode=0o755)
    (top / ("long" * 40)).mkdir()
    (top / ("long" * 40) / ("name" * 50)).write_bytes(b"long")
    (top / ("p" * 60)).mkdir()
    (top / ("p" * 60) / ("s" * 60)).write_bytes(b"prefix")
    os.symlink("target" * 30, top / "link")
    os.link(top / "dir/file", top / "hard")
    os.makedirs(os.fsencode(top) + b"/caf\xe9")
    (top / "ünïcode").write_bytes(b"u")
    try:
        os.setxattr(top / "ünïcode", "user.note", b"v=\n1")
    except OSError:
        pass  # not every filesystem has attributes
    for number, path in enumerate([top, *sorted(top.rglob("*"))]):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number * 10**9), follow_symlinks=False)
    return top


def packed(tree: Path, *options: str) -> bytes:
    if shutil.which("tar") is None:
        pytest.skip("tar is not installed")
    names = sorted(os.listdir(os.fsencode(tree)))
    command: list[str | bytes] = ["tar", "-c", "--sort=name", *options, "-C", os.fspath(tree), *names]
    return subprocess.run(command, check=True, capture_output=True).stdout


def described(directory: Path, *, times: bool) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        info = path.lstat()
        what: object = None
        if path.is_symlink():
            what = os.readlink(path)
        elif path.is_file():
            what = (path.read_bytes(), info.st_nlink)
        time = info.st_mtime_ns if times and not path.is_symlink() else None
        mode = None if path.is_symlink() else info.st_mode
        found[str(path.relative_to(directory))] = (mode, what, time)
    return found


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_ordinary_archives_come_out_as_tar_has_them(
    format: str, source: Path, user: Callable[[bytes, Path], None], directory: Path, tmp_path: Path
) -> None:
    data = packed(source, f"--format={format}", "--xattrs")
    (tmp_path / "reference").mkdir()
    subprocess.run(["tar", "-xp", "--xattrs", "-C", tmp_path / "reference"], input=data, check=True)
    user(data, directory)
    times = user is not by_download  # a download leaves files with the time they arrived
    assert described(directory, times=times) == described(tmp_path / "reference", times=times)
    if times:
        for name in os.listxattr(tmp_path / "reference/ünïcode"):
            if name.startswith("user."):
                assert os.getxattr(directory / "ünïcode", name) == b"v=\n1"


@pytest.mark.parametrize("format", ["v7", "ustar", "oldgnu", "gnu", "posix"])
def test_ordinary_headers_are_read_as_tarfile_reads_them(format: str, source: Path) -> None:
    if format in ("v7", "ustar"):
        shutil.rmtree(source / ("long" * 40))
        (source / "link").unlink()
    if format == "v7":
        shutil.rmtree(source / ("p" * 60))
    else:
        os.mkfifo(source / "fifo")
        os.mknod(source / "null", 0o20666, os.makedev(1, 3))
    data = packed(source, f"--format={format}")
    kinds = {"file": "isreg", "directory": "isdir", "symlink": "issym", "hardlink": "islnk", "fifo": "isfifo"}
    kinds["character_device"] = "ischr"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = archive.getmembers()
        entries = [event for event in TarFeed().feed(data) if not isinstance(event, bytes)]
        assert len(entries) == len(expected)
        for entry, member in zip(entries, expected, strict=True):
            assert entry.name.rstrip(b"/") == os.fsencode(member.name)
            assert getattr(member, kinds[entry.kind])()
            assert (entry.mode, entry.uid, entry.gid) == (member.mode, member.uid, member.gid)
            assert entry.link == os.fsencode(member.linkname)
            assert abs(entry.mtime_ns / 1e9 - member.mtime) < 1e-6
            if member.isreg():
                assert (entry.size, entry.offset) == (member.size, member.offset_data)


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_sparse_files_are_refused(
    format: str, user: Callable[[bytes, Path], None], directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "tree").mkdir()
    with open(tmp_path / "tree/sparse", "wb") as made:
        made.truncate(1 << 24)
    data = packed(tmp_path / "tree", f"--format={format}", "--sparse")
    with pytest.raises(SandkeepError, match="sparse"):
        user(data, directory)
