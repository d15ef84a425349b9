"""Watching a directory of a sandbox: what happens is told at once, and a watch leaves nothing behind."""

from __future__ import annotations

import time
from contextlib import aclosing

import pytest

import sandkeep
from sandkeep.errors import PathNotFound, SessionStopped
from sandkeep.sdk._async.watching import watched
from tests.conftest import IS_ROOT
from tests.polling import ENOUGH
from tests.sdk.leftovers import watches_of
from tests.sdk.scripted_server import Scripted, lines_answer, refusal
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio


async def test_changes_are_seen_as_they_happen() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.mkdir("w/deep", parents=True)
        await box.fs.write_text("w/old", "1")
        await box.fs.write_text("w/deep/here", "1")
        steps = [
            ("mkdir w/sub; echo 1 > w/sub/new", {("w/sub", "created"), ("w/sub/new", "created")}),
            ("echo longer >> w/old", {("w/old", "changed")}),
            ("mv w/deep/here w/there", {("w/deep/here", "removed"), ("w/there", "created")}),
            ("rm -r w/sub", {("w/sub/new", "removed"), ("w/sub", "removed")}),
        ]
        async with aclosing(box.fs.watch("w")) as watching:
            assert await anext(watching) == []
            for script, expected in steps:
                await box.run_process("sh", ["-c", script], check=True)
                asked = time.monotonic()
                seen: set[tuple[str, str]] = set()
                while not expected <= seen:
                    seen |= {(change.path, change.kind) for change in await anext(watching)}
                assert time.monotonic() - asked < ENOUGH


async def test_a_watch_can_be_of_one_directory_alone_and_anywhere() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.mkdir("in/side", parents=True)
        async with aclosing(box.fs.watch(recursive=False)) as near, aclosing(box.fs.watch("/tmp")) as far:
            assert await anext(near) == await anext(far) == []
            await box.run_process("sh", ["-c", "touch in/side/unseen /tmp/there; mkdir seen"])
            changes = await anext(near)
            assert (changes[0].path, changes[0].kind, changes[0].is_dir) == ("./seen", "created", True)
            assert ("/tmp/there", "created") in {(change.path, change.kind) for change in await anext(far)}


async def test_a_watch_is_refused_where_nothing_is_and_ends_with_the_session() -> None:
    async with sandkeep.create_sandbox() as box:
        with pytest.raises(PathNotFound):
            await anext(box.fs.watch("nowhere"))
        async with aclosing(box.fs.watch()) as watching:
            assert await anext(watching) == []
            await box.stop()
            with pytest.raises(SessionStopped):
                while True:
                    await anext(watching)


@pytest.mark.skipif(not IS_ROOT, reason="only root sees the descriptors of a supervisor")
async def test_a_watch_that_is_no_longer_read_is_gone_from_the_host(server: ServerProcess) -> None:
    async with sandkeep.create_sandbox() as box:
        for _ in range(5):
            async with aclosing(box.fs.watch()) as watching:
                assert await anext(watching) == []
                assert watches_of(server, box.current_session.id) == 1
            deadline = time.monotonic() + ENOUGH
            while watches_of(server, box.current_session.id):
                assert time.monotonic() < deadline
                await box.refresh()


async def test_more_than_can_be_told_is_told_as_overflow_and_watching_goes_on() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_text("w/a", "x")
        async with aclosing(box.fs.watch("w")) as watching:
            assert await anext(watching) == []
            script = "import os\nfor _ in range(60_000): os.rename('w/a', 'w/b'); os.rename('w/b', 'w/a')"
            await box.run_process("python3", ["-c", script], check=True)
            paths: set[str] = set()
            while "w/later" not in paths:
                changes = await anext(watching)
                paths |= {change.path for change in changes if change.kind != "overflow"}
                if ("w", "overflow") in {(change.path, change.kind) for change in changes}:
                    # After the last of them nothing is missed; there may be several.
                    await box.fs.write_text("w/later", "x")


async def test_a_watch_goes_on_after_a_lost_connection_and_says_so() -> None:
    begun = {"changes": [], "path": "/home/box/w"}
    told = {"changes": [{"kind": "modified", "path": "/home/box/w/f"}]}
    ended = refusal(410, "sandbox_stopped")
    with Scripted(lines_answer(begun), lines_answer(begun, told), ended) as script:
        async with sandkeep.Client(script.url, token="t") as client:
            watching = watched(client._transport, "sbx_1", {"path": "w"})
            assert await anext(watching) == []
            overflow, changed = await anext(watching), await anext(watching)
            assert [(change.path, change.kind) for change in overflow + changed] == [
                ("w", "overflow"),
                ("w/f", "changed"),
            ]
            with pytest.raises(SessionStopped):
                await anext(watching)
