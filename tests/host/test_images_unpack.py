"""Unpacking archives: faithful to what is in them, and confined whoever wrote them."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import subprocess
import tarfile
import tracemalloc
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandkeep.errors import ImageError
from sandkeep.host.images import streams
from sandkeep.host.images.unpack import Unpacked, unpack
from sandkeep.shared.tarreader import TarReader
from tests.host import rootfs_runner
from tests.host.rootfs_runner import tar_of


@pytest.fixture
def area(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, with a file beside it that no archive may touch."""
    rootfs_runner.require_root()
    directory = Path(f"/dev/shm/sandkeep-unpack-{uuid.uuid4().hex[:8]}")
    (directory / "fs").mkdir(parents=True)
    (directory / "outside").write_text("untouched")
    yield directory
    assert (directory / "outside").read_text() == "untouched"
    assert sorted(p.name for p in directory.iterdir() if p.name != "reference") == ["fs", "outside"]
    shutil.rmtree(directory)


def into(area: Path, archive: bytes, *, whiteouts: bool = True) -> Unpacked:
    return unpack(io.BytesIO(archive), str(area / "fs"), mode="root", whiteouts=whiteouts)


def archive_with(*infos: tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info in infos:
            archive.addfile(info, io.BytesIO(b"x" * info.size) if info.isreg() else None)
    return out.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def manifest_of(root: str) -> dict[str, tuple[object, ...]]:
    """Everything an archive carries about every entry but device nodes."""
    found: dict[str, tuple[object, ...]] = {}
    for above, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(above, name)
            entry = os.lstat(path)
            if stat.S_ISCHR(entry.st_mode) or stat.S_ISBLK(entry.st_mode):
                continue
            attributes = {key: os.getxattr(path, key, follow_symlinks=False) for key in _attributes(path)}
            content: object = ""
            if stat.S_ISLNK(entry.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(entry.st_mode):
                content = (entry.st_size, entry.st_nlink)
            when = None if stat.S_ISLNK(entry.st_mode) else entry.st_mtime_ns // 10**9
            row = (entry.st_mode, entry.st_uid, entry.st_gid, when, content, tuple(attributes.items()))
            found[os.path.relpath(path, root)] = row
    return found


def _attributes(path: str) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


def test_a_whole_debian_is_unpacked_as_gnu_tar_does(area: Path) -> None:
    source = rootfs_runner.debian_rootfs()
    with open(source, "rb") as archive:
        done = unpack(archive, str(area / "fs"), mode="root", whiteouts=False)
    (area / "reference").mkdir()
    command = ["tar", "-C", str(area / "reference"), "--numeric-owner", "--xattrs", "--xattrs-include=*"]
    subprocess.run([*command, "-xpf", source], check=True)
    assert manifest_of(f"{area}/fs") == manifest_of(f"{area}/reference")
    diff = ["diff", "-r", "--no-dereference", "-x", "dev"]
    subprocess.run([*diff, f"{area}/fs", f"{area}/reference"], check=True)
    assert done.skipped > 0, "the archive has device nodes, which are left out"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_archive_format_is_read(area: Path, format: int) -> None:
    long = "/".join(["directory" * 5] * 4) + "/file"
    names = [long] if format == tarfile.USTAR_FORMAT else [long, "n" * 255, "ü/é"]
    into(
        area, archive_with(*(info(name, size=700, mode=0o640, uid=7, gid=8) for name in names), format=format)
    )
    for name in names:
        found = (area / "fs" / name).stat()
        assert (found.st_size, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (700, 0o640, 7, 8)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_name_whose_beginning_ends_with_a_slash_is_a_file(area: Path, format: int) -> None:
    name = "d" * 99 + "/" + "e" * 99 + "/x"
    into(area, archive_with(info(name, size=3), info("after", size=1), format=format))
    assert (area / "fs" / name).read_bytes() == b"xxx"
    assert (area / "fs/after").read_bytes() == b"x"


def test_capabilities_and_setuid_bits_are_kept(area: Path) -> None:
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    ping = info(
        "ping", size=1, mode=0o755, pax_headers={"SCHILY.xattr.security.capability": _text(capability)}
    )
    into(area, archive_with(ping, info("su", size=1, mode=0o4755), info("d", tarfile.DIRTYPE, mode=0o1777)))
    assert os.getxattr(area / "fs/ping", "security.capability") == capability
    assert stat.S_IMODE((area / "fs/su").stat().st_mode) == 0o4755
    assert stat.S_IMODE((area / "fs/d").stat().st_mode) == 0o1777


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("name", ["trusted.overlay.redirect", "user.overlay.opaque", "security.selinux"])
def test_an_archive_cannot_set_attributes_overlayfs_reads(area: Path, name: str) -> None:
    into(area, archive_with(info("d", tarfile.DIRTYPE, pax_headers={f"SCHILY.xattr.{name}": "y"})))
    assert name not in _attributes(f"{area}/fs/d")


def test_ids_a_sandbox_cannot_have_become_nobody(area: Path) -> None:
    into(area, archive_with(info("f", size=1, uid=3_000_000, gid=65_536), format=tarfile.GNU_FORMAT))
    assert ((area / "fs/f").stat().st_uid, (area / "fs/f").stat().st_gid) == (65534, 65534)


# --- confinement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "..", "/../outside"])
def test_a_name_that_leaves_is_refused(area: Path, name: str) -> None:
    with pytest.raises(ImageError, match="would leave"):
        into(area, tar_of({name: b"evil"}))


def test_an_absolute_name_is_taken_below(area: Path) -> None:
    into(area, tar_of({"/etc/name": b"inside"}))
    assert (area / "fs/etc/name").read_bytes() == b"inside"


@pytest.mark.parametrize("target", ["..", "../../../..", "/"])
def test_a_linked_parent_leads_to_the_archives_own_root(area: Path, target: str) -> None:
    into(area, tar_of({"link": ("sym", target), "link/outside": b"evil"}))
    assert (area / "fs/outside").read_bytes() == b"evil"


def test_a_parent_linked_to_what_only_the_host_has_is_refused(area: Path) -> None:
    with pytest.raises(ImageError):
        into(area, tar_of({"link": ("sym", str(area)), "link/outside": b"evil"}))


def test_a_link_replaced_by_a_directory_is_no_longer_followed(area: Path) -> None:
    into(area, tar_of({"real": None, "a": ("sym", "real"), "a/one": b"1"}))
    assert (area / "fs/real/one").exists()
    into(area, tar_of({"real": None, "b": ("sym", "real"), "b/two": b"2"}))
    both = {"c": ("sym", "real"), "c/x": b"", "c/": None, "c/three": b"3"}
    into(area, tar_of(both))
    assert (area / "fs/c/three").exists()
    assert not (area / "fs/real/three").exists()


def test_a_file_is_never_written_through_a_link(area: Path) -> None:
    into(area, tar_of({"f": ("sym", "../outside")}))
    into(area, tar_of({"f": b"new"}))
    assert not (area / "fs/f").is_symlink()


@pytest.mark.parametrize("target", ["../outside", "/dev/shm/nothing", "missing"])
def test_a_hard_link_to_outside_is_refused(area: Path, target: str) -> None:
    with pytest.raises(ImageError):
        into(area, tar_of({"h": ("hard", target)}))


def test_a_hard_link_inside_is_one(area: Path) -> None:
    into(area, tar_of({"d/a": b"same", "b": ("hard", "d/a"), "d/a2": ("hard", "/d/a")}))
    assert (area / "fs/b").stat().st_nlink == 3


def test_devices_are_left_out_and_pipes_are_not(area: Path) -> None:
    device = info("sda", tarfile.BLKTYPE, devmajor=8)
    zero = info("zero", tarfile.CHRTYPE)
    done = into(area, archive_with(device, zero, info("pipe", tarfile.FIFOTYPE, mode=0o620)))
    assert done.skipped == 2
    assert [(p.name, stat.S_ISFIFO(p.stat().st_mode)) for p in (area / "fs").iterdir()] == [("pipe", True)]


# --- markers of image layers ---------------------------------------------------------------------------


def test_whiteouts_and_opaque_directories_take_overlay_form(area: Path) -> None:
    into(area, tar_of({"d/.wh.gone": b"", "o/.wh..wh..opq": b"", "o/kept": b"", ".wh..wh.plnk/x": b""}))
    gone = (area / "fs/d/gone").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    assert os.getxattr(area / "fs/o", "trusted.overlay.opaque") == b"y"


@pytest.mark.parametrize("order", [["d", "d/new", ".wh.d"], [".wh.d", "d", "d/new"]])
def test_a_directory_removed_and_made_anew_hides_the_old_one(area: Path, order: list[str]) -> None:
    into(area, tar_of({name: None if name == "d" else b"" for name in order}))
    assert os.getxattr(area / "fs/d", "trusted.overlay.opaque") == b"y"
    assert (area / "fs/d/new").exists()


def test_a_plain_root_filesystem_may_have_names_like_markers(area: Path) -> None:
    into(area, tar_of({".wh.name": b"data"}), whiteouts=False)
    assert (area / "fs/.wh.name").read_bytes() == b"data"


# --- damaged input -------------------------------------------------------------------------------------


def test_every_truncation_is_noticed() -> None:
    archive = tar_of({"a": b"x" * 600, "b": b"y"})
    whole = len([*_contents(archive)])
    for cut in range(archive.rindex(b"y") + 1):
        with pytest.raises(ImageError):
            [*_contents(archive[:cut])]
    assert whole == 2


def _contents(archive: bytes) -> Iterator[bytes]:
    with streams.archive_errors():
        for entry in TarReader(io.BytesIO(archive).read, gunzip=False):
            yield entry.read(entry.size)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damage_ends_in_a_typed_error_or_another_archive_never_in_a_crash(data: st.DataObject) -> None:
    archive = bytearray(tar_of({"a": b"x" * 10, "n" * 120: b"y", "l": ("sym", "a")}))
    for _ in range(data.draw(st.integers(1, 6))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    try:
        for _ in _contents(bytes(archive)):
            pass
    except ImageError:
        pass


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE])
def test_a_size_below_zero_is_damage(kind: bytes) -> None:
    header = bytearray(tarfile.TarInfo("a").tobuf())
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[156:157] = kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(ImageError, match="size"):
        [*_contents(bytes(header) + bytes(1024))]


@pytest.mark.parametrize(
    ("key", "value"), [("uid", "9" * 5000), ("size", "9" * 5000), ("mtime", "9" * 5000), ("path", "a\0b")]
)
def test_extended_headers_with_impossible_values_are_damage(area: Path, key: str, value: str) -> None:
    with pytest.raises(ImageError):
        into(area, archive_with(info("a", pax_headers={key: value})))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("seconds", ["9" * 30, "-" + "9" * 30])
def test_times_no_file_can_have_are_damage(area: Path, kind: bytes, seconds: str) -> None:
    with pytest.raises(ImageError, match="out of range"):
        into(area, archive_with(info("a", kind, pax_headers={"mtime": seconds})))


def test_zero_bytes_in_names_of_links_and_attributes_are_damage(area: Path) -> None:
    with pytest.raises(ImageError, match="usable target"):
        into(area, archive_with(info("a", tarfile.SYMTYPE, pax_headers={"linkpath": "a\0b"})))
    with pytest.raises(ImageError, match="malformed"):
        into(area, archive_with(info("a", pax_headers={"SCHILY.xattr.user.a\0b": "v"})))


def test_directories_nested_deeper_than_calls_can_be(area: Path) -> None:
    deep = "d/" * 1800
    into(area, archive_with(info(deep + "x", size=1)))
    assert (area / "fs" / deep / "x").read_bytes() == b"x"
    into(area, archive_with(info("d")))  # replaced: all of it goes
    assert (area / "fs/d").is_file()


def plain(data: bytes) -> bytes:
    with streams.decompressed(io.BytesIO(data)) as source:
        out = b""
        while piece := source.read(1000):
            out += piece
        return out


def test_gzip_zstd_and_plain_streams_are_told_apart() -> None:
    data = os.urandom(100_000)
    assert plain(data) == data
    assert plain(gzip.compress(data)) == data
    assert plain(gzip.compress(data[:50]) + gzip.compress(data[50:])) == data
    assert plain(rootfs_runner.zstd(data)) == data
    assert plain(b"") == b""


@pytest.mark.parametrize("pack", [gzip.compress, rootfs_runner.zstd])
def test_a_little_that_stands_for_much_is_never_unpacked_at_once(pack: object) -> None:
    assert callable(pack)
    size = 200 << 20
    packed = pack(bytes(size)) + pack(b"end")
    tracemalloc.start()
    try:
        with streams.decompressed(io.BytesIO(packed)) as source:
            found, last = 0, b""
            while piece := source.read(streams.CHUNK):
                found, last = found + len(piece), piece
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (found, last[-3:]) == (size + 3, b"end")


def test_a_decompressor_without_bounds_gets_little_at_a_time() -> None:
    data = os.urandom(5000) * 3
    packed = zlib.compress(data) + b"more"
    wrapped = streams._SmallChunks(zlib.decompressobj())
    found = wrapped.decompress(packed, streams.CHUNK)
    while not wrapped.eof:
        assert not wrapped.needs_input
        found += wrapped.decompress(b"", streams.CHUNK)
    assert (found, wrapped.unused_data) == (data, b"more")


@pytest.mark.parametrize("pack", [gzip.compress, rootfs_runner.zstd])
def test_damaged_compression_is_noticed(pack: object) -> None:
    assert callable(pack)
    packed = pack(os.urandom(100_000))
    with pytest.raises(ImageError):
        plain(packed[:-1000])
    with pytest.raises(ImageError):
        plain(packed[:1000] + b"damage" * 20 + packed[1120:])


def test_other_compression_is_refused_by_name() -> None:
    with pytest.raises(ImageError, match="xz"):
        plain(b"\xfd7zXZ\0data")
