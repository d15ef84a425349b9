"""Files of a sandbox: whole, streamed, in batches and as trees."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import sandkeep
from sandkeep.errors import (
    ArchiveError,
    InvalidRequest,
    IsDirectory,
    NotDirectory,
    NotRegularFile,
    PathError,
    PathExists,
    PathNotFound,
    PathPermission,
)
from tests.running_user import ONE_ID

pytestmark = pytest.mark.anyio

EVERY_BYTE = bytes(range(256))


async def test_bytes_and_text_come_back_as_they_were_written() -> None:
    async with sandkeep.create_sandbox() as box:
        assert await box.fs.write_bytes("deep/er/data", EVERY_BYTE) == 256
        assert await box.fs.read_bytes("deep/er/data") == EVERY_BYTE
        await box.fs.write_text("text", "grüße\n", mode=0o600)
        assert await box.fs.read_text("text") == "grüße\n"
        assert (await box.fs.stat("text")).mode == 0o600
        await box.fs.write_bytes("empty", b"")
        assert await box.fs.read_bytes("empty") == b""
        with pytest.raises(UnicodeDecodeError):
            await box.fs.read_text("deep/er/data")


async def test_files_belong_to_the_sandboxs_user() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_text("mine", "x")
        done = await box.run_process("sh", ["-c", "test -O mine && echo yes"], capture_output=True)
        assert done.stdout == b"yes\n"


async def test_failures_say_what_and_where() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.mkdir("directory")
        await box.fs.write_text("file", "")
        with pytest.raises(PathNotFound) as missing:
            await box.fs.read_bytes("missing")
        assert missing.value.path == "missing" and missing.value.http_status == 404
        assert missing.value.request_id and missing.value.request_id.startswith("req_")
        with pytest.raises(IsDirectory):
            await box.fs.read_bytes("directory")
        with pytest.raises(NotDirectory):
            await box.fs.listdir("file")
        if not ONE_ID:
            with pytest.raises(PathPermission):
                await box.fs.write_text("/etc/hostname", "mine")
        with pytest.raises(PathExists):
            await box.fs.mkdir("directory")
        for parents, exist_ok in itertools.product((True, False), repeat=2):
            with pytest.raises(PathExists) as over:
                await box.fs.mkdir("file", parents=parents, exist_ok=exist_ok)
            assert isinstance(over.value, FileExistsError) and over.value.errno == errno.EEXIST
        with pytest.raises(NotDirectory):
            await box.fs.mkdir("file/below", parents=True)
        with pytest.raises(PathNotFound):
            await box.fs.mkdir("a/b/c")
        with pytest.raises(PathNotFound):
            await box.fs.remove("missing")
        with pytest.raises(PathExists):
            await box.fs.write_text("directory/inside", "")
            await box.fs.remove("directory")


async def test_directories_and_entries() -> None:
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.mkdir("a/b", parents=True)
        await fs.mkdir("a/b", parents=True, exist_ok=True)
        await fs.mkdir("a", exist_ok=True)
        await fs.write_text("a/f", "hello", mode=0o640)
        await fs.symlink("a/link", "f")
        assert [(entry.name, entry.kind.value) for entry in await fs.listdir("a")] == [
            ("b", "directory"),
            ("f", "file"),
            ("link", "symlink"),
        ]
        assert await fs.readlink("a/link") == "f"
        assert (await fs.stat("a/link")).is_file
        link = await fs.stat("a/link", follow_symlinks=False)
        assert link.is_symlink and link.target == "f"
        found = await fs.stat("a/f")
        assert (found.size, found.mode, found.name) == (5, 0o640, "f")
        assert await fs.is_dir("a") and await fs.is_file("a/f") and not await fs.exists("a/g")
        await fs.chmod("a/f", 0o755)
        assert (await fs.stat("a/f")).mode == 0o755
        assert await fs.copy("a/f", "c/d/f") == 5
        assert (await fs.stat("c/d/f")).mode == 0o755
        await fs.rename("c/d/f", "a/g")
        assert await fs.read_text("a/g") == "hello"
        await fs.remove("a", recursive=True)
        await fs.remove("a", missing_ok=True)
        assert not await fs.exists("a")


async def test_realpath_follows_links_and_is_strict_when_asked() -> None:
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.write_text("a/f", "")
        await fs.symlink("l", "a")
        home = await fs.realpath(".")
        assert await fs.realpath("l/../l/f") == await fs.realpath("f", cwd="l") == f"{home}/a/f"
        assert await fs.realpath("l/no/such") == f"{home}/a/no/such"
        with pytest.raises(FileNotFoundError) as missing:
            await fs.realpath("l/no/such", strict=True)
        assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "l/no/such")
        with pytest.raises(InvalidRequest):
            await fs.realpath(b"l")  # type: ignore[arg-type]


async def test_walk_and_glob_see_the_tree() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.fs.batch() as batch:
            for path in ("t/a.py", "t/b.txt", "t/sub/c.py", "t/sub/deep/d.py", "t/skip/e.py"):
                batch.write_text(path, path)
        seen = []
        async for at, directories, others in box.fs.walk("t"):
            directories[:] = [entry for entry in directories if entry.name != "skip"]
            seen.append((at, [entry.name for entry in others]))
        assert seen == [("t", ["a.py", "b.txt"]), ("t/sub", ["c.py"]), ("t/sub/deep", ["d.py"])]
        assert await box.fs.glob("*.py", "t") == ["a.py"]
        assert await box.fs.glob("**/*.py", "t") == ["a.py", "skip/e.py", "sub/c.py", "sub/deep/d.py"]
        assert await box.fs.glob("sub/*", "t") == ["sub/c.py", "sub/deep"]
        with pytest.raises(InvalidRequest):
            await box.fs.glob("/etc/*")


@pytest.mark.skipif(ONE_ID, reason="everybody is root inside")
async def test_walk_and_glob_pass_over_what_may_not_be_read() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_text("t/open/f", "")
        await box.fs.mkdir("t/closed", mode=0)
        assert [at async for at, _, _ in box.fs.walk("t")] == ["t", "t/open"]
        assert await box.fs.glob("**/f", "t") == ["open/f"]
        with pytest.raises(PathPermission):
            await box.fs.glob("*", "t/closed")


async def test_names_that_are_no_text_are_kept_byte_for_byte(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await box.run_process(
            "python3", ["-c", "open(b't', 'w'); open(b'caf\\xe9', 'w').write('x')"], check=True
        )
        assert [entry.name for entry in await fs.listdir()] == [name, "t"]
        assert await fs.glob("caf?") == [name]
        assert await fs.read_text(name) == "x"
        await fs.write_text(f"{name}-too", "y")
        await fs.rename(f"{name}-too", f"d{name}")
        await fs.symlink("link", name)
        assert await fs.readlink("link") == name
        with pytest.raises(PathNotFound) as missing:
            await fs.stat(f"no-{name}")
        assert missing.value.path == f"no-{name}"
        done = await box.run_process("cat", [name, f"d{name}"], capture_output=True)
        assert done.stdout == b"xy"
        await fs.download(".", tmp_path / "down")
        assert b"caf\xe9" in os.listdir(os.fsencode(tmp_path / "down"))
        with pytest.raises(InvalidRequest, match="surrogate"):
            await fs.stat("\ud800")


async def test_arguments_of_another_kind_are_refused_instead_of_turned_into_something() -> None:
    async with sandkeep.create_sandbox() as box:
        fs: Any = box.fs
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("path", lambda: fs.write_bytes(None, b"x")),
            ("path", lambda: fs.read_bytes(b"x")),
            ("path", lambda: fs.stat(PurePosixPath("x"))),
            ("target", lambda: fs.rename("x", 5)),
            ("data", lambda: fs.write_bytes("x", 5)),
            ("text", lambda: fs.write_text("x", b"x")),
            ("mode", lambda: fs.write_bytes("x", b"x", mode="644")),
        ]
        for name, call in wrong:
            with pytest.raises(InvalidRequest) as refused:
                await call()
            assert refused.value.field == name
        assert await fs.listdir() == []


async def test_a_failed_rename_names_the_side_that_is_at_fault() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_text("file", "")
        await box.fs.mkdir("directory")
        for source, target, kind, path in [
            ("missing", "file", PathNotFound, "missing"),
            ("file", "missing/file", PathNotFound, "missing/file"),
            ("file", "directory", IsDirectory, "directory"),
            ("directory", "file", NotDirectory, "file"),
        ]:
            with pytest.raises(kind) as failed:
                await box.fs.rename(source, target)
            assert failed.value.path == path and failed.value.details["target"] == target
        with pytest.raises(PathError, match="below itself"):
            await box.fs.rename("directory", "directory/inner")
        with pytest.raises(PathError, match="Not a symbolic link"):
            await box.fs.readlink("file")
        await box.fs.symlink("loop", "loop")
        assert not await box.fs.exists("loop")


async def test_what_is_written_is_as_old_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tree/sub").mkdir(parents=True)
    os.utime(tmp_path / "tree/sub", (1_600_000_000, 1_600_000_000))
    before = datetime.now(UTC) - timedelta(seconds=2)
    async with sandkeep.create_sandbox() as box:
        async with box.fs.batch() as batch:
            batch.write_text("file", "")
        assert (await box.fs.stat("file")).modified_at >= before
        await box.fs.upload(tmp_path / "tree", "tree")
        assert (await box.fs.stat("tree/sub")).modified_at.timestamp() == 1_600_000_000


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with sandkeep.create_sandbox() as box:
        with pytest.raises(NotRegularFile):
            await box.fs.upload(tmp_path / "pipe", "pipe")
        assert (await box.fs.upload(tmp_path, "tree")).files == 0


async def test_a_batch_is_sent_when_it_is_left_and_not_when_that_is_by_an_error() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.fs.batch() as batch:
            batch.write_text("run.sh", "echo batched", mode=0o755)
            batch.write_bytes("/tmp/elsewhere", b"absolute")
            assert len(batch) == 2
        assert (await box.run_process("sh", ["run.sh"], capture_output=True)).stdout == b"batched\n"
        assert (await box.fs.stat("run.sh")).mode == 0o755
        assert await box.fs.read_text("/tmp/elsewhere") == "absolute"
        with pytest.raises(ZeroDivisionError):
            async with box.fs.batch() as batch:
                batch.write_text("never", "")
                raise ZeroDivisionError
        assert not await box.fs.exists("never")
        with pytest.raises(InvalidRequest):
            batch.write_text("../out", "")


async def test_open_streams_both_ways_and_a_file_appears_when_it_is_complete() -> None:
    async with sandkeep.create_sandbox() as box:
        piece = EVERY_BYTE * 4096
        async with box.fs.open("big", "wb") as out:
            for _ in range(9):
                await out.write(piece)
            assert not await box.fs.exists("big")
        assert (await box.fs.stat("big")).size == 9 << 20
        async with box.fs.open("big", "rb") as source:
            assert await source.read(100) == piece[:100]
            total = 100
            async for chunk in source.chunks():
                total += len(chunk)
        assert total == 9 << 20
        with pytest.raises(ZeroDivisionError):
            async with box.fs.open("big", "wb") as out:
                for _ in range(5):
                    await out.write(piece)
                raise ZeroDivisionError
        assert (await box.fs.stat("big")).size == 9 << 20
        assert [entry.name for entry in await box.fs.listdir(".")] == ["big"], "no draft is left"


async def test_a_range_of_a_file_is_read_and_nothing_else() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_bytes("data", EVERY_BYTE)
        assert await box.fs.read_bytes("data", offset=250) == EVERY_BYTE[250:]
        assert await box.fs.read_bytes("data", offset=10, length=5) == EVERY_BYTE[10:15]
        assert await box.fs.read_bytes("data", length=3) == EVERY_BYTE[:3]
        assert await box.fs.read_bytes("data", offset=200, length=1000) == EVERY_BYTE[200:]
        for offset, length in ((256, None), (1 << 40, 5), (0, 0)):
            assert await box.fs.read_bytes("data", offset=offset, length=length) == b""
        await box.run_process("truncate", ["-s", "3G", "huge"], check=True)
        assert await box.fs.read_bytes("huge", offset=(3 << 30) - 2) == b"\0\0"
        for wrong in ({"offset": -1}, {"length": -1}, {"offset": "1"}, {"length": 1.5}, {"offset": 1 << 63}):
            arguments: dict[str, Any] = dict(wrong)
            with pytest.raises(InvalidRequest) as refused:
                await box.fs.read_bytes("data", **arguments)
            assert refused.value.field == next(iter(wrong))


async def test_an_open_file_can_be_read_from_any_offset() -> None:
    async with sandkeep.create_sandbox() as box:
        content = EVERY_BYTE * 4096
        await box.fs.write_bytes("data", content)
        async with box.fs.open("data", "rb") as source:
            assert await source.read(10) == content[:10] and source.tell() == 10
            assert await source.seek(500_000) == 500_000
            assert await source.read(4) == content[500_000:500_004]
            assert await source.seek(-2, os.SEEK_CUR) == 500_002
            assert await source.read(2) == content[500_002:500_004]
            assert await source.seek(-3, os.SEEK_END) == len(content) - 3
            assert await source.read() == content[-3:] and await source.read(1) == b""
            assert await source.seek(0) == 0, "also after the end"
            assert await source.read() == content
            assert await source.seek(5, os.SEEK_END) == len(content) + 5 and await source.read() == b""
            for offset, whence in ((-1, os.SEEK_SET), (-5_000_000, os.SEEK_CUR), (-5_000_000, os.SEEK_END)):
                with pytest.raises(InvalidRequest, match="offset"):
                    await source.seek(offset, whence)
            with pytest.raises(InvalidRequest, match="whence"):
                await source.seek(0, 7)
        with pytest.raises(ValueError, match="closed"):
            await source.seek(0)


async def test_a_range_of_lines_is_read_on_the_server() -> None:
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.write_text("many", "".join(f"line {number}\n" for number in range(1, 100_001)))
        found = await fs.read_lines("many", start=99_999, limit=1)
        assert found == sandkeep.FileLines("line 99999\n", 99_999, 1, more=True, cut=False)
        assert found.next_start == 100_000
        last = await fs.read_lines("many", start=100_000)
        assert (last.text, last.count, last.next_start) == ("line 100000\n", 1, None)
        beyond = await fs.read_lines("many", start=100_001)
        assert (beyond.text, beyond.count, beyond.more) == ("", 0, False)
        little = await fs.read_lines("many", limit=100, max_bytes=20)
        assert (little.text, little.count, little.more) == ("line 1\nline 2\n", 2, True)

        await fs.write_text("odd", "one\n\nthree ü without an end")
        whole = await fs.read_lines("odd")
        assert (whole.text, whole.count, whole.more) == ("one\n\nthree ü without an end", 3, False)
        cut = await fs.read_lines("odd", start=3, max_bytes=7)
        assert (cut.text, cut.cut, cut.more, cut.count) == ("three ", True, True, 1), (
            "half of an ü is left out"
        )
        await fs.write_bytes("latin", "grüße\n".encode("latin-1"))
        assert (await fs.read_lines("latin", encoding="latin-1")).text == "grüße\n"
        assert (await fs.read_lines("latin", errors="replace")).text == "gr\ufffd\ufffde\n"
        with pytest.raises(UnicodeDecodeError):
            await fs.read_lines("latin")
        await fs.write_text("empty", "")
        assert (await fs.read_lines("empty")).count == 0
        for wrong in ({"start": 0}, {"start": -1}, {"limit": 0}, {"max_bytes": 0}, {"max_bytes": 5 << 20}):
            with pytest.raises(InvalidRequest) as refused:
                await fs.read_lines("many", **wrong)  # type: ignore[arg-type]
            assert refused.value.field == next(iter(wrong))
        with pytest.raises(IsDirectory):
            await fs.read_lines(".")


async def test_open_reads_and_writes_text_by_lines() -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.fs.open("notes", "w") as out:
            await out.write("eins\nzwei ü\n")
        async with box.fs.open("notes", "a") as out:
            await out.write("drei")
        async with box.fs.open("notes") as source:
            assert [line async for line in source] == ["eins\n", "zwei ü\n", "drei"]
        with pytest.raises(PathExists):
            await box.fs.open("notes", "x")
        with pytest.raises(PathNotFound):
            await box.fs.open("missing")
        raw = await box.fs.open("notes", "rb")
        assert await raw.readline() == b"eins\n"
        await raw.aclose()


async def test_a_file_goes_up_and_comes_down_with_its_mode(tmp_path: Path) -> None:
    here = tmp_path / "tool"
    here.write_bytes(EVERY_BYTE * 5000)
    here.chmod(0o750)
    steps: list[sandkeep.Transferred] = []
    async with sandkeep.create_sandbox() as box:
        done = await box.fs.upload(here, "bin/tool", progress=steps.append)
        assert (done.files, done.bytes) == (1, 1280000) and steps[-1].bytes == 1280000
        assert (await box.fs.stat("bin/tool")).mode == 0o750
        back = await box.fs.download("bin/tool", tmp_path / "below" / "tool")
        assert back.bytes == 1280000
        assert (tmp_path / "below/tool").read_bytes() == here.read_bytes()
        assert (tmp_path / "below/tool").stat().st_mode & 0o777 == 0o750
        with pytest.raises(PathNotFound):
            await box.fs.download("missing", tmp_path / "missing")
        with pytest.raises(FileNotFoundError):
            await box.fs.upload(tmp_path / "missing", "missing")
        assert sorted(os.listdir(tmp_path)) == ["below", "tool"]


async def test_a_tree_goes_up_and_comes_down_with_modes_links_and_patterns(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "sub/ünï").write_text("names")
    (source / "sub" / ("long" * 40)).write_text("long names")
    (source / "link").symlink_to("sub/ünï")
    (source / "cache").mkdir()
    (source / "cache/junk").write_text("junk")
    (source / "x.pyc").write_text("junk")
    async with sandkeep.create_sandbox() as box:
        done = await box.fs.upload(source, "project", ignore=["cache", "*.pyc"])
        assert done.files == 3
        assert (await box.fs.stat("project/run")).mode == 0o755
        assert await box.fs.read_text("project/link") == "names"
        assert not await box.fs.exists("project/cache") and not await box.fs.exists("project/x.pyc")
        await box.fs.write_text("project/sub/left.pyc", "junk")
        back = await box.fs.download("project", tmp_path / "back", ignore=["*.pyc"])
        assert back.files == 3
        assert (await box.fs.upload(source, "/tmp/absolute")).files == 5
        assert await box.fs.is_dir("/tmp/absolute/sub/empty")
    copy = tmp_path / "back"
    assert sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*")) == sorted(
        ["link", "run", "sub", "sub/empty", "sub/" + "long" * 40, "sub/ünï"]
    )
    assert (copy / "run").stat().st_mode & 0o777 == 0o755
    assert os.readlink(copy / "link") == "sub/ünï"


async def test_a_thousand_files_go_up_and_come_down(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(1000):
        path = source / f"d{number % 20}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number}")
    async with sandkeep.create_sandbox() as box:
        assert (await box.fs.upload(source, "many")).files == 1000
        assert (await box.fs.download("many", tmp_path / "back")).files == 1000
        async with box.fs.batch() as batch:
            for number in range(1000):
                batch.write_text(f"batched/{number}", str(number))
        assert len(await box.fs.listdir("batched")) == 1000
    for number in range(1000):
        assert (tmp_path / f"back/d{number % 20}/f{number}").read_text() == f"file {number}"


async def test_a_stopped_sandbox_is_resumed_for_files(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_text("x")
    async with sandkeep.create_sandbox() as box:
        await box.stop()
        await box.fs.upload(tmp_path / "tree", "tree")
        await box.stop()
        await box.fs.download("tree", tmp_path / "back")
        await box.stop()
        async with box.fs.open("tree/f") as source:
            assert await source.read() == "x"
        assert (tmp_path / "back/f").read_text() == "x"


async def test_relative_paths_start_in_cwd(tmp_path: Path) -> None:
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.mkdir("below")
        for cwd in ("below", "/tmp"):
            await fs.write_text("a", "x", cwd=cwd)
            assert await fs.read_text("a", cwd=cwd) == "x"
            assert (await fs.stat("a", cwd=cwd)).is_file
            await fs.mkdir("d", cwd=cwd, exist_ok=True)
            await fs.rename("a", "d/b", cwd=cwd)
            await fs.copy("d/b", "d/c", cwd=cwd)
            await fs.chmod("d/c", 0o600, cwd=cwd)
            await fs.symlink("d/l", "b", cwd=cwd)
            assert await fs.readlink("d/l", cwd=cwd) == "b"
            assert [entry.path for entry in await fs.listdir("d", cwd=cwd)] == ["d/b", "d/c", "d/l"]
            assert [at async for at, _, _ in fs.walk("d", cwd=cwd)] == ["d"]
            assert await fs.glob("*/b", cwd=cwd) == ["d/b"]
            assert await fs.is_dir("d", cwd=cwd) and await fs.exists("d/b", cwd=cwd)
            assert await fs.is_file("d/c", cwd=cwd)
            async with fs.open("d/opened", "w", cwd=cwd) as file:
                await file.write("by lines\n")
            async with fs.open("d/opened", cwd=cwd) as file:
                assert await file.readline() == "by lines\n"
            async with fs.batch(cwd=cwd) as batch:
                batch.write_text("d/new/batched", "1")
            assert await fs.download("d/new/batched", tmp_path / "file", cwd=cwd)
            await fs.download("d/new", tmp_path / "tree", cwd=cwd)
            assert (tmp_path / "tree/batched").read_text() == "1"
            await fs.upload(tmp_path / "tree", "d/up", cwd=cwd)
            assert await fs.read_text("d/up/batched", cwd=cwd) == "1"
            await fs.remove("d", recursive=True, cwd=cwd)
        assert [entry.name for entry in await fs.listdir()] == ["below"]
        async with fs.batch(cwd="made") as batch:
            batch.write_text("f", "")
            batch.write_text("/tmp/absolute", "")
        assert await fs.exists("made/f") and await fs.exists("/tmp/absolute")
        for wrong in ("", 5):
            with pytest.raises(InvalidRequest, match="cwd"):
                await fs.read_text("made/f", cwd=wrong)  # type: ignore[arg-type]


async def test_a_batch_that_fails_names_the_path_and_says_what_is_in_place() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.mkdir("directory")
        with pytest.raises(IsDirectory) as refused:
            async with box.fs.batch() as batch:
                batch.write_text("first", "1")
                batch.write_text("./directory", "2")
                batch.write_text("never", "3")
        error = refused.value
        assert (error.path, error.entry, error.entries) == ("./directory", "directory", 1)
        assert (error.filename, error.operation, error.http_status) == ("./directory", "write", 400)
        assert await box.fs.read_text("first") == "1" and not await box.fs.exists("never")
        with pytest.raises(NotDirectory) as below:
            async with box.fs.batch(cwd="/tmp") as batch:
                batch.write_text("file", "1")
                batch.write_text("/proc/version/x", "2")
        assert (below.value.path, below.value.entries) == ("/proc/version/x", 1)


async def test_a_tree_that_fails_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "up/sub").mkdir(parents=True)
    (tmp_path / "up/sub/file").write_text("1")
    async with sandkeep.create_sandbox() as box:
        await box.fs.mkdir("there/sub/file", parents=True)
        with pytest.raises(IsDirectory) as sent:
            await box.fs.upload(tmp_path / "up", "there")
        assert (sent.value.path, sent.value.operation) == ("there/sub/file", "write")


@pytest.mark.skipif(ONE_ID, reason="a sandbox with one id reads what that id owns")
async def test_files_that_may_not_be_read_are_named_after_the_rest_has_come_down(tmp_path: Path) -> None:
    async with sandkeep.create_sandbox() as box:
        async with box.fs.batch() as batch:
            for name in ("a", "secret", "z"):
                batch.write_text(f"tree/{name}", name)
        await box.run_process("chown", ["root", "tree/secret"], sudo=True, check=True)
        await box.run_process("chmod", ["600", "tree/secret"], sudo=True, check=True)
        with pytest.raises(PathPermission) as one:
            await box.fs.download("tree", tmp_path / "one")
        assert (one.value.path, one.value.operation) == ("tree/secret", "read")
        assert one.value.errno == errno.EACCES
        assert sorted(os.listdir(tmp_path / "one")) == ["a", "z"]
        await box.run_process("chown", ["root", "tree/z"], sudo=True, check=True)
        await box.run_process("chmod", ["600", "tree/z"], sudo=True, check=True)
        with pytest.raises(ArchiveError) as several:
            await box.fs.download("tree", tmp_path / "two")
        assert several.value.path == "tree/secret"
        assert several.value.unreadable == ["secret", "z"]
        assert os.listdir(tmp_path / "two") == ["a"]
        await box.fs.download("tree", tmp_path / "three", ignore=["secret", "z"])
