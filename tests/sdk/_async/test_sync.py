"""A local directory and one of a sandbox are made alike, by moving only what differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NotDirectory, PathExists, PathNotFound, PathPermission
from tests.running_user import ONE_ID

pytestmark = pytest.mark.anyio

Shape = dict[str, tuple[str, int, object]]


def shape(root: Path) -> Shape:
    """Everything below a directory: kind, permissions, and content with its time, or target."""
    found: Shape = {}
    for path in root.rglob("*"):
        info = path.lstat()
        mode = info.st_mode & 0o777
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", 0, os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", mode, None)
        else:
            found[name] = ("file", mode, (path.read_bytes(), info.st_mtime_ns))
    return found


def plant(root: Path) -> None:
    """Make a tree with modes, times, links, an empty directory and a name that is not UTF-8."""
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "main.py").write_text("print(1)\n")
    (root / "src" / "deep" / "run.sh").write_text("true\n")
    (root / "src" / "deep" / "run.sh").chmod(0o750)
    (root / "src-other").write_text("sorts between a directory and what is in it")
    (root / "empty").mkdir(mode=0o700)
    (root / "link").symlink_to("src/main.py")
    (root / "outside").symlink_to("/etc")
    (root / os.fsdecode(b"odd-\xff")).write_bytes(b"\xff")
    os.utime(root / "src" / "main.py", ns=(5, 1_600_000_000_123_456_789))


async def test_a_second_sync_moves_nothing_in_either_direction(tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    plant(here)
    async with sandkeep.create_sandbox() as box:
        first = await box.fs.sync_to(here, "work")
        assert set(first.copied) == set(shape(here)) and first.unchanged == 0 and first.deleted == ()
        assert first.bytes == sum(
            len(content[0]) for *_, content in shape(here).values() if isinstance(content, tuple)
        )
        again = await box.fs.sync_to(here, "work")
        assert (again.copied, again.bytes, again.unchanged) == ((), 0, len(first.copied))
        assert (await box.fs.sync_to(here, "work", checksum=True)).copied == ()
        fetched = await box.fs.sync_from("work", back)
        assert sorted(fetched.copied) == sorted(first.copied) and shape(back) == shape(here)
        assert (await box.fs.sync_from("work", back)).copied == ()
        assert (await box.fs.sync_from("work", back, checksum=True)).copied == ()
        assert await box.fs.readlink("work/outside") == "/etc"


async def test_a_sync_copies_what_changed_and_deletes_only_when_asked(tmp_path: Path) -> None:
    here = tmp_path / "here"
    plant(here)
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.sync_to(here, "work")
        (here / "src" / "main.py").write_text("print(22)\n")
        (here / "src" / "deep" / "run.sh").chmod(0o700)
        (here / "empty").chmod(0o750)
        (here / "link").unlink()
        (here / "link").symlink_to("src")
        (here / "src-other").unlink()
        await fs.write_text("work/theirs/new", "of the sandbox")
        planned = await fs.sync_to(here, "work", delete=True, dry_run=True)
        assert await fs.read_text("work/src/main.py") == "print(1)\n" and await fs.exists("work/src-other")
        changed = ["empty", "link", "src/deep/run.sh", "src/main.py"]
        kept = await fs.sync_to(here, "work")
        assert sorted(kept.copied) == changed == sorted(planned.copied) and kept.deleted == ()
        assert await fs.read_text("work/src/main.py") == "print(22)\n"
        assert await fs.readlink("work/link") == "src" and (await fs.stat("work/empty")).mode == 0o750
        assert await fs.exists("work/src-other") and await fs.exists("work/theirs/new")
        done = await fs.sync_to(here, "work", delete=True)
        assert done.copied == () and done.deleted == ("theirs/new", "theirs", "src-other") == planned.deleted
        assert not await fs.exists("work/theirs")
        (here / "mine").mkdir()
        (here / "mine" / "f").write_text("")
        back = await fs.sync_from("work", here, delete=True)
        assert back.deleted == ("mine/f", "mine") and back.copied == () and not (here / "mine").exists()


async def test_a_change_that_keeps_size_and_time_is_found_by_checksum(tmp_path: Path) -> None:
    here = tmp_path / "here"
    plant(here)
    file = here / "src" / "main.py"
    async with sandkeep.create_sandbox() as box:
        await box.fs.sync_to(here, "work")
        before = file.stat()
        file.write_text("print(2)\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (await box.fs.sync_to(here, "work")).copied == ()
        assert (await box.fs.sync_to(here, "work", checksum=True)).copied == ("src/main.py",)
        assert await box.fs.read_text("work/src/main.py") == "print(2)\n"
        os.utime(file, ns=(1, 1))
        assert (await box.fs.sync_to(here, "work", checksum=True)).copied == (), "only its time differs"
        file.write_text("print(3)\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (await box.fs.sync_from("work", here)).copied == ()
        assert (await box.fs.sync_from("work", here, checksum=True)).copied == ("src/main.py",)
        assert file.read_text() == "print(2)\n"


async def test_kinds_can_change_and_a_full_directory_gives_way_only_to_delete(tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    here.mkdir()
    (here / "a").write_text("a file")
    (here / "b" / "c").mkdir(parents=True)
    (here / "b" / "c" / "d").write_text("in a directory")
    (here / "l").symlink_to("b")
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.sync_to(here, "work")
        await fs.sync_from("work", back)
        (here / "a").unlink()
        (here / "a" / "x").mkdir(parents=True)
        (here / "a" / "x" / "y").write_text("now a directory")
        (here / "l").unlink()
        (here / "l").mkdir()
        (here / "l" / "inside").write_text("not through the link")
        done = await fs.sync_to(here, "work")
        assert done.copied == ("a", "a/x", "a/x/y", "l", "l/inside") and done.deleted == ()
        assert not await fs.exists("work/b/inside")

        os.unlink(here / "b" / "c" / "d")
        os.rmdir(here / "b" / "c")
        os.rmdir(here / "b")
        (here / "b").write_text("now a file")
        with pytest.raises(PathExists) as refused:
            await fs.sync_to(here, "work")
        assert refused.value.path == "b" and "delete=True" in str(refused.value)
        assert await fs.read_text("work/b/c/d") == "in a directory"
        done = await fs.sync_to(here, "work", delete=True)
        assert done.copied == ("b",) and done.deleted == ("b/c/d", "b/c")

        with pytest.raises(PathExists):
            await fs.sync_from("work", back)
        assert (back / "b" / "c" / "d").exists()
        await fs.sync_from("work", back, delete=True)
        assert shape(back) == shape(here)


async def test_what_is_ignored_is_neither_copied_nor_deleted(tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    names = ["a.pyc", "b/c.pyc", "keep.pyc", "build/out", "b/build/out", "b/top", "top/x", ".git/HEAD", "f"]
    for name in names:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    patterns = tmp_path / "patterns"
    patterns.write_text("# comment\n\n*.pyc\n!keep.pyc\nbuild/\n")
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        done = await fs.sync_to(here, "work", ignore=["/top", ".git"], ignore_from=patterns)
        assert done.copied == ("b", "b/top", "f", "keep.pyc")
        await fs.write_text("work/build/theirs", "")
        await fs.write_text("work/gone/z.pyc", "")
        done = await fs.sync_to(here, "work", ignore=["/top", ".git"], ignore_from=patterns, delete=True)
        assert done.deleted == () and await fs.exists("work/build/theirs")
        assert await fs.exists("work/gone/z.pyc"), "its directory stays for it"
        back.mkdir()
        (back / "mine.pyc").write_text("")
        await fs.sync_from("work", back, ignore_from=patterns, delete=True)
        assert sorted(shape(back)) == ["b", "b/top", "f", "gone", "keep.pyc", "mine.pyc"]
        (here / "gone").write_text("a file where ignored files are")
        with pytest.raises(PathExists) as refused:
            await fs.sync_to(here, "work", ignore_from=patterns, delete=True)
        assert refused.value.path == "work/gone"
        for wrong in ("*.pyc", ["[a"], ["a\\"], ["[[:alpha:]]"], [b"x"]):
            with pytest.raises(InvalidRequest) as invalid:
                await fs.sync_to(here, "work", ignore=wrong)  # type: ignore[arg-type]
            assert invalid.value.field.startswith("ignore")


async def test_a_sync_says_what_it_cannot_do_before_it_changes_anything(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("")
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.write_text("file", "")
        with pytest.raises(FileNotFoundError):
            await fs.sync_to(tmp_path / "none", "work")
        with pytest.raises(NotADirectoryError):
            await fs.sync_to(tmp_path / "file", "work")
        with pytest.raises(PathNotFound):
            await fs.sync_from("none", tmp_path / "made")
        with pytest.raises(NotDirectory):
            await fs.sync_from("file", tmp_path / "made")
        with pytest.raises(NotDirectory):
            await fs.sync_to(tmp_path / "here", "file")
        with pytest.raises(NotADirectoryError):
            await fs.sync_from(".", tmp_path / "file")
        assert not (tmp_path / "made").exists() and not await fs.exists("work")
        assert (await fs.sync_to(tmp_path / "here", "made/deep", dry_run=True)).copied == ()
        assert not await fs.exists("made")
        await fs.sync_to(tmp_path / "here", "deep", cwd="made")
        assert await fs.is_dir("made/deep"), "an empty directory is one too"
        os.mkfifo(tmp_path / "here" / "pipe")
        assert (await fs.sync_to(tmp_path / "here", "made/deep")).left_out == ("pipe",)
        await box.run_process("mkfifo", ["made/deep/pipe"], check=True)
        assert (await fs.sync_from("made/deep", tmp_path / "made")).left_out == ("pipe",)


async def test_directories_that_nobody_may_write_to_are_kept_in_step(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "closed").mkdir(parents=True)
    (here / "closed" / "f").write_text("1")
    (here / "closed").chmod(0o555)
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.sync_to(here, "work")
        (here / "closed").chmod(0o755)
        (here / "closed" / "f").write_text("22")
        (here / "closed" / "g").write_text("new")
        (here / "closed").chmod(0o555)
        done = await fs.sync_to(here, "work")
        assert done.copied == ("closed/f", "closed/g")
        assert (await fs.stat("work/closed")).mode == 0o555 and await fs.read_text("work/closed/f") == "22"
        assert (await fs.sync_to(here, "work")).copied == ()
        assert (await fs.sync_from("work", tmp_path / "back")).copied == ("closed", "closed/f", "closed/g")
        assert (await fs.sync_from("work", tmp_path / "back")).copied == ()
        (here / "closed").chmod(0o755)


@pytest.mark.skipif(ONE_ID, reason="everything in the sandbox belongs to one user")
async def test_what_the_user_may_not_read_is_named(tmp_path: Path) -> None:
    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.write_text("work/mine", "x")
        script = "mkdir work/closed && touch work/closed/f work/secret && chmod 700 work/closed work/secret"
        await box.run_process("sh", ["-c", script], sudo=True, check=True)
        with pytest.raises(PathPermission) as refused:
            await fs.sync_from("work", tmp_path / "made")
        assert refused.value.path == "work/closed" and not (tmp_path / "made").exists()
        with pytest.raises(PathPermission) as refused:
            await fs.sync_from("work", tmp_path / "made", ignore=["closed"])
        assert refused.value.path == "work/secret" and (tmp_path / "made" / "mine").read_text() == "x"


@pytest.mark.slow
async def test_ten_thousand_small_files_go_there_and_back(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for number in range(100):
        (here / f"d{number}").mkdir(parents=True)
        for inner in range(100):
            (here / f"d{number}" / f"file-{inner}").write_bytes(b"%d" % inner)
    async with sandkeep.create_sandbox() as box:
        assert len((await box.fs.sync_to(here, "work")).copied) == 10_100
        (here / "d7" / "file-7").write_text("changed")
        assert (await box.fs.sync_to(here, "work")).copied == ("d7/file-7",)
        assert len((await box.fs.sync_from("work", tmp_path / "back")).copied) == 10_100
        assert (await box.fs.sync_from("work", tmp_path / "back")).copied == ()


async def test_an_interrupted_sync_is_finished_by_the_next(tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    here.mkdir()
    for number in range(20):
        (here / f"file-{number}").write_bytes(b"%d" % number * 100_000)

    def interrupt(at: sandkeep.Transferred) -> None:
        if at.files == 12:
            raise RuntimeError("enough")

    async with sandkeep.create_sandbox() as box:
        fs = box.fs
        await fs.write_text("work/file-0", "an old version")
        with pytest.raises(RuntimeError):
            await fs.sync_to(here, "work", progress=interrupt)
        for entry in await fs.listdir("work"):
            assert await fs.read_bytes(f"work/{entry.name}") in (
                (here / entry.name).read_bytes(),
                b"an old version",
            )
        rest = await fs.sync_to(here, "work")
        assert rest.copied and (await fs.sync_to(here, "work", checksum=True)).copied == ()
        with pytest.raises(RuntimeError):
            await fs.sync_from("work", back, progress=interrupt)
        assert len(shape(back)) == 12
        assert len((await fs.sync_from("work", back)).copied) == 8 and shape(back) == shape(here)


async def test_a_local_file_that_cannot_be_read_is_the_error_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "f").write_text("x")

    def fail(at: sandkeep.Transferred) -> None:
        raise PermissionError("as if it could not be read")

    async with sandkeep.create_sandbox() as box:
        for move in (box.fs.sync_to, box.fs.upload):
            with pytest.raises(PermissionError, match="as if"):
                await move(tmp_path / "here", "work", progress=fail)
