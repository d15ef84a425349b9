"""Neither watches of a session nor programs in it take inotify from the host's programs or other sessions."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import LimitReached
from sandkeep.supervisor.identity import SESSION_IDS
from sandkeep.supervisor.inotify import MOST_WATCHES
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, everywhere, in_modes, opened
from tests.polling import ENOUGH

# Makes instances as each of the given users, keeps them all, and says how many there are.
TAKE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
for user in map(int, sys.argv[1:]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        if user:
            os.setresuid(user, user, user)
        made = 0
        while libc.inotify_init1(0) >= 0:
            made += 1
        os.write(writing, b"%d\\n" % made)
        time.sleep(1000)
    print(os.read(reading, 16).decode(), end="", flush=True)
print("all", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _machine_limit() -> int:
    return int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())


def _left(uid: int | None = None) -> int:
    """How many instances a user of the machine can make now, from a process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                os.setresuid(uid, uid, uid)
            made, libc = 0, ctypes.CDLL(None)
            while libc.inotify_init1(0) >= 0:
                made += 1
            os.write(writing, str(made).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        made = int(answer.read())
    os.waitpid(child, 0)
    return made


def _base(box: Box) -> int:
    return int(Path(f"/proc/{box.state().init_pid}/uid_map").read_text().split()[1])


@asynccontextmanager
async def _watching(box: Box) -> AsyncIterator[None]:
    """A watch that has begun."""
    changes: Any = box.lab.driver.files(box.ref).watch("/tmp")
    async with aclosing(changes):
        assert await asyncio.wait_for(anext(changes), ENOUGH) == []
        yield


@everywhere
def test_a_session_has_some_watches_and_is_told_when_it_has_all(lab: Lab) -> None:
    one, other = lab.box(), lab.box()

    async def all_of_them() -> None:
        async with AsyncExitStack() as watches:
            for _ in range(MOST_WATCHES):
                await watches.enter_async_context(_watching(one))
            with pytest.raises(LimitReached, match=f"{MOST_WATCHES} watches") as refused:
                await watches.enter_async_context(_watching(one))
            assert refused.value.details["limit"] == "watches"
            assert refused.value.details["value"] == MOST_WATCHES
            async with _watching(other):
                pass
        async with _watching(one):
            pass  # their places are free again

    lab.do(all_of_them())
    one.remove()
    other.remove()


@in_modes("root", why="an ordinary user has no ids to charge apart")
def test_watches_are_charged_to_an_id_of_the_session_and_not_to_root(lab: Lab) -> None:
    box = lab.box()
    last = _base(box) + SESSION_IDS - 1

    async def three() -> int:
        async with _watching(box), _watching(box), _watching(box):
            return _left(last)

    assert lab.do(three()) == _machine_limit() - 3
    box.remove()


def _taken(box: Box, *users: int) -> list[int]:
    """What programs of a session could take as these users, one after the other; they keep it."""
    process = box.start("python3", "-I", "-c", TAKE, *map(str, users), root=True)
    while not (text := _text(box, process)).endswith("all\n"):
        assert box.lab.do(box.lab.driver.process(box.ref, process)).status == "running", text
    return [int(line) for line in text.split()[:-1]]


def _text(box: Box, process: str) -> str:
    return b"".join(getattr(item, "data", b"") for item in box.output(process)).decode()


@everywhere
def test_programs_of_a_session_cannot_take_all_instances(lab: Lab) -> None:
    """All its users together: under root of the session's own count, else half of what the user has."""
    box = lab.box()
    users = [0] if lab.driver.mode == "single" else [0, 1, 2, 3, 4, 5]
    taken = _taken(box, *users)
    assert max(taken) > 0
    if lab.driver.mode == "root":
        assert sum(taken) == _machine_limit()
        assert _left(_base(box)) == 0
        other = lab.box()

        async def look() -> None:
            async with _watching(box), _watching(other):
                pass

        lab.do(look())
        assert sum(_taken(other, 0)) == _machine_limit()
        other.remove()
    else:
        assert max(taken) <= _machine_limit() // 4
        assert sum(taken) <= _machine_limit() // 2
        assert _left() > 0
    box.remove()


@in_modes("single", why="where there are more ids a session may use several")
def test_what_one_session_has_taken_leaves_watches_for_others(lab: Lab) -> None:
    greedy, other = lab.box(), lab.box()
    _taken(greedy, 0)

    async def look() -> None:
        async with _watching(greedy), _watching(other):
            pass

    lab.do(look())
    greedy.remove()
    other.remove()
