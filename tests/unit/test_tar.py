"""The tar reader and writer against each other, GNU tar, Python's tarfile, and nonsense."""

from __future__ import annotations

import gzip
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandkeep.errors import ArchiveError, TransportError
from sandkeep.shared.tarreader import EXTENDED_LIMIT, TarReader
from sandkeep.shared.tarwriter import TarWriter


def dribble(data: bytes, most: int) -> Callable[[int], bytes]:
    """A source that returns at most ``most`` bytes at a time."""
    stream = io.BytesIO(data)
    return lambda count: stream.read(min(count, most))


def contents(data: bytes, *, most: int = 1 << 20) -> list[tuple[Any, ...]]:
    found = []
    for entry in TarReader(dribble(data, most)):
        body = b""
        while chunk := entry.read(1000):
            body += chunk
        assert len(body) == entry.size
        found.append(
            (
                entry.kind,
                entry.name,
                entry.link,
                entry.mode,
                entry.uid,
                entry.gid,
                entry.mtime_ns,
                entry.xattrs,
                body,
            )
        )
    return found


def written(entries: list[dict[str, Any]]) -> bytes:
    output = io.BytesIO()
    writer = TarWriter(output.write)
    for entry in entries:
        body = entry.get("body", b"")
        writer.add(**{key: value for key, value in entry.items() if key != "body"}, size=len(body))
        if body:
            writer.content(body)
    writer.close()
    return output.getvalue()


names = st.binary(min_size=1, max_size=400).filter(lambda n: b"\0" not in n and not n.endswith(b"/"))
common = {
    "name": names,
    "mode": st.integers(0, 0o7777),
    "uid": st.integers(0, 2**40),
    "gid": st.integers(0, 2**31),
    "mtime": st.integers(-(2**39), 2**39),
    "xattrs": st.dictionaries(
        st.text("abc.", min_size=1).map(lambda t: b"user." + t.encode()), st.binary(max_size=300), max_size=3
    ),
}
entries = st.one_of(
    st.fixed_dictionaries({**common, "kind": st.just("file"), "body": st.binary(max_size=2000)}),
    st.fixed_dictionaries({**common, "kind": st.just("directory")}),
    st.fixed_dictionaries({**common, "kind": st.sampled_from(["symlink", "hardlink"]), "link": names}),
)


@given(
    wanted=st.lists(entries, max_size=5),
    most=st.sampled_from([1, 7, 511, 513, 1 << 20]),
    packed=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read_back(wanted: list[dict[str, Any]], most: int, packed: bool) -> None:
    data = written(wanted)
    assert data == written(wanted), "equal input gives equal bytes"
    if packed:
        data = gzip.compress(data, mtime=0)
    expected = [
        (
            entry["kind"],
            entry["name"] + (b"/" if entry["kind"] == "directory" else b""),
            entry.get("link", b""),
            entry["mode"],
            entry["uid"],
            entry["gid"],
            entry["mtime"] * 10**9,
            entry["xattrs"],
            entry.get("body", b""),
        )
        for entry in wanted
    ]
    assert contents(data, most=most) == expected


@given(wanted=st.lists(entries, max_size=4))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_tarfile_reads_what_is_written(wanted: list[dict[str, Any]]) -> None:
    with tarfile.open(fileobj=io.BytesIO(written(wanted))) as archive:
        members = archive.getmembers()
        assert len(members) == len(wanted)
        for member, entry in zip(members, wanted, strict=True):
            # tarfile drops slashes at the end of any name
            assert os.fsencode(member.name) == entry["name"].rstrip(b"/")
            assert (member.mode, member.uid, member.gid) == (entry["mode"], entry["uid"], entry["gid"])
            assert member.mtime == entry["mtime"]
            if entry["kind"] == "file":
                handle = archive.extractfile(member)
                assert handle is not None
                assert handle.read() == entry["body"]
            elif "link" in entry:
                assert os.fsencode(member.linkname) == entry["link"]


def test_plain_entries_need_no_extension_header() -> None:
    data = written([{"name": b"a/" * 49 + b"f", "kind": "file", "mode": 0o644, "body": b"x", "mtime": 1}])
    assert len(data) == 512 + 512 + 1024
    data = written([{"name": b"d" * 90 + b"/" + b"f" * 90, "kind": "file", "mode": 0o644}])
    assert len(data) == 512 + 1024


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "dir/deeper").mkdir(parents=True)
    (top / "dir/file").write_bytes(b"content" * 300)
    (top / "dir/empty").touch(mode=0o4755)
    (top / ("long" * 40)).mkdir()
    (top / ("long" * 40) / ("name" * 50)).write_bytes(b"long")
    os.symlink("target" * 30, top / "link")
    os.link(top / "dir/file", top / "hard")
    os.makedirs(os.fsencode(top) + b"/caf\xe9")
    (top / "ünïcode").write_bytes(b"u")
    for path in [top, *top.rglob("*")]:
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    return top


def summary(found: list[tuple[Any, ...]]) -> dict[bytes, tuple[str, int, bytes, int]]:
    return {
        name.rstrip(b"/"): (kind, mode, body, mtime) for kind, name, _, mode, _, _, mtime, _, body in found
    }


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_of_gnu_tar(tree: Path, format: str) -> None:
    if shutil.which("tar") is None:
        pytest.skip("GNU tar is not installed")
    if format in ("v7", "ustar"):
        shutil.rmtree(tree / ("long" * 40))
        (tree / "link").unlink()
        os.utime(tree, (1_600_000_000, 1_600_000_000))
    command = ["tar", "-c", f"--format={format}", "--sort=name", "-C", os.fspath(tree), "."]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    found = contents(data)
    expected = {}
    for directory, directories, files in os.walk(os.fsencode(tree)):
        for name in (*directories, *files):
            path = os.path.join(directory, name)
            info = os.lstat(path)
            short = b"./" + os.path.relpath(path, os.fsencode(tree))
            kind = "symlink" if os.path.islink(path) else "directory" if os.path.isdir(path) else "file"
            expected[short] = (kind, info.st_mode & 0o7777)
    seen = summary(found)
    assert {name: value[:2] for name, value in seen.items() if name != b"."} == expected | {
        name: ("hardlink", expected[name][1]) for name in (b"./hard",) if seen[name][0] == "hardlink"
    }
    assert seen[b"./dir/file"][2] == b"content" * 300
    assert all(value[3] == 1_600_000_000 * 10**9 for value in seen.values())
    hard = next(entry for entry in found if entry[1] == b"./hard")
    assert hard[0] == "hardlink"
    assert hard[2] == b"./dir/file"
    if format in ("gnu", "posix"):
        assert next(entry for entry in found if entry[1] == b"./link")[2] == b"target" * 30


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("packed", [False, True])
def test_archives_of_tarfile(format: int, packed: bool) -> None:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz" if packed else "w", format=format) as archive:
        for name, size in (
            ("a", 0),
            ("b" * 120 if format != tarfile.USTAR_FORMAT else "b", 513),
            ("c/d", 512),
        ):
            member = tarfile.TarInfo(name)
            member.size = size
            member.mtime = 12
            archive.addfile(member, io.BytesIO(b"x" * size))
        if format != tarfile.USTAR_FORMAT:
            big = tarfile.TarInfo("numbers")
            big.uid, big.gid, big.mtime = 2**35, 2**33, -5
            archive.addfile(big)
    found = contents(output.getvalue(), most=300)
    assert [len(entry[8]) for entry in found[:3]] == [0, 513, 512]
    if format != tarfile.USTAR_FORMAT:
        assert found[3][4:7] == (2**35, 2**33, -5 * 10**9)


def test_pax_records_of_tarfile() -> None:
    output = io.BytesIO()
    pax = {"comment": "global", "uid": "77"}
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT, pax_headers=pax) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"SCHILY.xattr.user.k": "v=\n1", "mtime": "1.5", "gid": "5", "path": "renamed"}
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("b"))
    first, second = contents(output.getvalue())
    assert first[1] == b"renamed"
    assert first[4:8] == (77, 5, 1_500_000_000, {b"user.k": b"v=\n1"})
    assert second[4:6] == (77, 0)
    assert second[7] == {}


def test_gzip_members_follow_each_other_and_may_be_padded() -> None:
    data = written([{"name": b"a", "kind": "file", "mode": 0o644, "body": bytes(3000)}])
    packed = (
        gzip.compress(data[:1000], mtime=0)
        + gzip.compress(b"", mtime=0)
        + gzip.compress(data[1000:], mtime=0)
        + bytes(700)
    )
    assert len(contents(packed, most=10)) == 1


def test_content_that_is_not_read_is_skipped() -> None:
    data = written(
        [
            {"name": b"a", "kind": "file", "mode": 0, "body": b"x" * 300_000},
            {"name": b"b", "kind": "file", "mode": 0, "body": b"y"},
        ]
    )
    reader = iter(TarReader(dribble(data, 70_000)))
    first = next(reader)
    assert first.read(10) == b"x" * 10
    second = next(reader)
    assert second.read(10) == b"y"
    with pytest.raises(ValueError, match="moved on"):
        first.read(1)
    assert next(reader, None) is None


def test_the_source_is_read_to_its_end() -> None:
    """Otherwise whoever writes into the other end of a pipe would be cut off in the padding."""
    stream = io.BytesIO(written([]) + bytes(10240))
    assert list(TarReader(stream.read)) == []
    assert stream.read() == b""


def test_a_large_file_is_copied_in_bounded_memory() -> None:
    """The archive is a stream of 64 MiB of which no piece is ever kept."""
    size = 64 << 20
    pieces = iter([header(size=size), *[bytes(1 << 16)] * (size >> 16), END])
    sink = os.open("/dev/null", os.O_WRONLY)
    try:
        (copied,) = (entry.copy_to(sink) for entry in TarReader(lambda count: next(pieces, b"")))
    finally:
        os.close(sink)
    assert copied == size


# --- hostile input -------------------------------------------------------------------------------------


def header(kind: bytes = b"0", size: int = 0, name: bytes = b"n", **changes: bytes) -> bytes:
    fields = {
        "name": name.ljust(100, b"\0"),
        "mode": b"0000644\0",
        "uid": b"0000000\0",
        "gid": b"0000000\0",
        "size": b"%011o\0" % size,
        "mtime": b"00000000000\0",
        "checksum": b"        ",
        "kind": kind,
        "link": bytes(100),
        "magic": b"ustar\x0000",
        "rest": bytes(247),
    }
    fields |= {key: value.ljust(len(fields[key]), b"\0") for key, value in changes.items()}
    block = b"".join(fields.values())
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def pax(*records: bytes, size: int | None = None) -> bytes:
    body = b"".join(records)
    return header(b"x", len(body) if size is None else size) + body + bytes(-len(body) % 512)


END = bytes(1024)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "without its end marker"),
        (b"x" * 100, "without its end marker"),
        (b"x" * 1024, "checksum"),
        (header(), "without its end marker"),
        (header(size=10) + b"abc", "middle of its content"),
        (header(size=2**33 - 1), "middle of its content"),
        (header(size=5, name=b"../x") + b"ab", "middle of its content"),
        (header(b"S") + END, "sparse"),
        (pax(b"22 GNU.sparse.major=1\n") + header() + END, "sparse"),
        (header(b"M") + END, "unknown type"),
        (header(b"Z") + END, "unknown type"),
        (header(name=b"") + END, "no usable name"),
        (header(b"2") + END, "without a usable target"),
        (header(mode=b"rwxr-x") + END, "mode that is not a number"),
        (header(mode=b"+644") + END, "mode that is not a number"),
        (header(mode=b"6_4") + END, "mode that is not a number"),
        (header(uid=b"9") + END, "uid that is not a number"),
        (header(size=0, mtime=b"\x80" + b"\xff" * 11) + END, "out of range"),
        (header(uid=b"\xff" * 8) + END, "uid out of range"),
        (pax(size=EXTENDED_LIMIT + 1), "at most"),
        (header(b"L", EXTENDED_LIMIT + 1), "at most"),
        (pax(b"9 path=a\n", size=600), "middle of a header"),
        (pax(b"99 path=a\n") + header(), "malformed"),
        (pax(b"0 path=a\n") + header(), "malformed"),
        (pax(b"3 a\n") + header(), "malformed"),
        (pax(b"-9 path=a\n") + header(), "malformed"),
        (pax(b"7 =abc\n") + header(), "malformed"),
        (pax(b"path=abc\n") + header(), "malformed"),
        (pax(b"26 SCHILY.xattr.user.\0k=v\n") + header(), "malformed"),
        (pax(b"12 path=a\0b\n") + header() + END, "no usable name"),
        (pax(b"11 size=-1\n") + header() + END, "out of range"),
        (pax(b"33 mtime=99999999999999999999999\n") + header() + END, "out of range"),
        (pax(b"13 mtime=1.x\n") + header() + END, "out of range"),
        (gzip.compress(header() + END, mtime=0)[:-9], "gzip"),
        (gzip.compress(header() + END, mtime=0)[:-5] + b"abcde", "gzip"),
        (gzip.compress(header() + END, mtime=0) + b"garbage", "gzip"),
        (b"\x1f\x8b" + b"\0" * 50, "gzip"),
    ],
)
def test_hostile_archives_are_refused(data: bytes, message: str) -> None:
    for most in (1 << 20, 100):
        with pytest.raises(ArchiveError, match=message):
            contents(data, most=most)


def test_the_error_names_the_entry() -> None:
    data = header(name=b"fine") + header(name=b"cut", size=600) + b"abc"
    with pytest.raises(ArchiveError) as caught:
        contents(data)
    assert (caught.value.entry, caught.value.index) == ("cut", 1)


def test_many_global_headers_take_no_memory() -> None:
    body = b"".join(b"%d SCHILY.xattr.user.%04d=%b\n" % (528, number, b"x" * 500) for number in range(1000))
    data = (header(b"g", len(body)) + body + bytes(-len(body) % 512)) * 3 + header() + END
    (entry,) = contents(data)
    assert entry[7] == {}


@given(st.binary(max_size=3000), st.sampled_from([1, 100, 1 << 20]))
def test_random_bytes_raise_nothing_else(data: bytes, most: int) -> None:
    with pytest.raises(ArchiveError):
        contents(data or b"x", most=most)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_archives_raise_nothing_else(data: st.DataObject) -> None:
    """A good archive with a few bytes changed, its header checksums made right again."""
    archive = bytearray(
        pax(b"9 path=a\n", b"12 mtime=12\n")
        + header(size=3)
        + b"abc".ljust(512, b"\0")
        + header(b"2", link=b"t")
        + header(b"L", 4)
        + b"long".ljust(512, b"\0")
        + header(b"5", name=b"d/")
        + END
    )
    for _ in range(data.draw(st.integers(1, 4))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    for start in range(0, len(archive), 512):
        block = archive[start : start + 512]
        if any(block[257:262]) and data.draw(st.booleans()):
            block[148:156] = b"        "
            archive[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    try:
        contents(bytes(archive))
    except ArchiveError:
        pass


def test_random_damage_to_gzip_raises_nothing_else() -> None:
    packed = gzip.compress(header(size=3000) + os.urandom(3072) + END)
    rng = random.Random(7)
    for _ in range(300):
        damaged = bytearray(packed)
        damaged[rng.randrange(2, len(damaged))] ^= 1 << rng.randrange(8)
        try:
            contents(bytes(damaged[: rng.choice([len(damaged), rng.randrange(2, len(damaged))])]))
        except ArchiveError:
            pass


def test_a_failing_source_or_sink_is_not_mistaken_for_something_else() -> None:
    def broken(_: object) -> bytes:
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ArchiveError, match="stopped arriving"):
        list(TarReader(broken))
    with pytest.raises(TransportError):
        TarWriter(broken).close()


def test_the_writer_holds_callers_to_their_word() -> None:
    writer = TarWriter(io.BytesIO().write)
    writer.add(b"a", "file", mode=0o644, size=3)
    with pytest.raises(ValueError, match="missing"):
        writer.add(b"b", "file", mode=0o644)
    with pytest.raises(ValueError, match="more than announced"):
        writer.content(b"abcd")
    with pytest.raises(ValueError, match="missing"):
        writer.close()
    with pytest.raises(ValueError, match="NUL"):
        TarWriter(io.BytesIO().write).add(b"a\0", "file", mode=0)
