"""Changes inside a session, seen from outside as they happen."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from sandkeep.errors import PathNotFound
from sandkeep.host.driver import ProcessSpec
from sandkeep.host.reports import FileChange
from tests.conftest import IS_ROOT, User
from tests.driver_lab import Box, Lab
from tests.polling import ENOUGH


async def _watch(box: Box, script: str, *, recursive: bool, wanted: set[str]) -> list[FileChange]:
    """Run a script once a watch of the working directory has begun; collect until all wanted paths came."""
    found: list[FileChange] = []
    changes = box.lab.driver.files(box.ref).watch("watched", recursive=recursive)
    async for batch in changes:
        if not batch and not found:
            spec = ProcessSpec(process=f"w{recursive}", argv=("bash", "-c", script), cwd="watched")
            await box.lab.driver.start_process(box.ref, spec)
        found += batch
        if wanted <= {f"{change.kind} {change.path.rpartition('watched/')[2]}" for change in found}:
            break
    await changes.aclose()  # type: ignore[attr-defined]
    return found


def watch_a_tree(data_dir: str, mode: Any = None) -> None:
    with Lab(data_dir, mode) as lab:
        box = lab.box()
        box.files("mkdir", path="watched/old", parents=True)
        script = "echo x > a; mkdir -p new/deep; echo y > new/deep/b; echo z >> old/c; mv a moved; rm moved"
        wanted = {
            "created a",
            "modified a",
            "created new",
            "created new/deep",
            "created new/deep/b",
            "created old/c",
            "created moved",
            "removed a",
            "removed moved",
        }
        lab.do(asyncio.wait_for(_watch(box, script, recursive=True, wanted=wanted), ENOUGH))
        script = "mkdir -p deeper; echo q > deeper/unseen; echo last > last"
        seen = lab.do(asyncio.wait_for(_watch(box, script, recursive=False, wanted={"created last"}), ENOUGH))
        assert not [change for change in seen if change.path.endswith("unseen")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(str(tmp_path_factory.mktemp("watching"))) as lab:
        yield lab


@pytest.mark.skipif(not IS_ROOT, reason="needs real root")
def test_a_tree_is_watched_with_the_directories_made_meanwhile(tmp_path_factory: Any) -> None:
    watch_a_tree(str(tmp_path_factory.mktemp("root")))


def test_rootless_too(ordinary_user: User) -> None:
    assert ordinary_user.call(watch_a_tree, str(ordinary_user.home / "watch")) is None


def test_what_cannot_be_watched_is_an_error_at_once(lab: Lab) -> None:
    box = lab.box()

    async def first() -> None:
        async for _ in box.lab.driver.files(box.ref).watch("/no/such/place"):
            pass

    with pytest.raises(PathNotFound):
        lab.do(first())


def test_a_watcher_that_goes_away_frees_its_place(lab: Lab) -> None:
    box = lab.box()

    async def look_once() -> None:
        changes = box.lab.driver.files(box.ref).watch("/tmp")
        async for _ in changes:
            break
        await changes.aclose()  # type: ignore[attr-defined]

    for _ in range(200):
        lab.do(look_once())
    assert box.run("true").code == 0


def test_a_file_without_a_name_is_not_told_of(lab: Lab) -> None:
    """What is written from outside has none until it is whole; a file called like that has its own."""
    box = lab.box()
    box.files("mkdir", path="watched", parents=True)

    async def look() -> list[str]:
        found: list[str] = []
        changes = lab.driver.files(box.ref).watch("watched")
        async for batch in changes:
            if not batch and not found:

                async def content() -> AsyncIterator[bytes]:
                    yield b"x" * 100_000

                await lab.driver.files(box.ref).write("watched/whole", content())
                spec = ProcessSpec("numbered", ("sh", "-c", "echo > '#1'; echo >> '#1'; echo > last"))
                await lab.driver.start_process(box.ref, dataclasses.replace(spec, cwd="watched"))
            found += [f"{change.kind} {change.path.rpartition('/')[2]}" for change in batch]
            if "modified last" in found:
                break
        await changes.aclose()  # type: ignore[attr-defined]
        return found

    found = lab.do(asyncio.wait_for(look(), ENOUGH))
    assert {line.split()[1] for line in found} == {"whole", "#1", "last"}
    assert {"created whole", "modified #1"} <= set(found)
