"""Turns: however much one session has to do, another waits for one step of it at most, not for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sandkeep.net import turns
from sandkeep.net.turns import Account, Pace, Turns


def run(work: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(turns.make_task)
        await asyncio.wait_for(work(), 120)

    asyncio.run(main())


def busy(seconds: float) -> None:
    """Use so much of the thread's time, however long that takes on a busy machine."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_session_with_many_ready_tasks_takes_turns_with_another() -> None:
    async def work() -> None:
        shared = Turns()
        hog, other = Account(shared), Account(shared)
        steps = 0

        async def flood() -> None:
            nonlocal steps
            while True:
                busy(0.001)
                steps += 1
                await asyncio.sleep(0)

        floods = [asyncio.create_task(flood(), context=hog.context()) for _ in range(100)]
        between: list[int] = []

        async def victim() -> None:
            for _ in range(50):
                before = steps
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                between.append(steps - before)

        await asyncio.sleep(0.02)
        await asyncio.create_task(victim(), context=other.context())
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        # Untamed, each of the hundred would have had a step between any two of the victim's.
        assert max(between) <= 4, between
        assert steps > 0

    run(work)


def test_a_session_alone_waits_for_nobody_and_two_that_want_all_get_as_much() -> None:
    async def work() -> None:
        shared = Turns()
        done = {"one": 0, "two": 0}
        enough = asyncio.Event()

        async def flood(name: str) -> None:
            while True:
                busy(0.0005)
                done[name] += 1
                if sum(done.values()) >= 600:
                    enough.set()
                await asyncio.sleep(0)

        accounts = {name: Account(shared) for name in done}
        floods = [asyncio.create_task(flood("one"), context=accounts["one"].context())]
        await enough.wait()
        assert shared.is_alone(accounts["one"], time.monotonic())
        done["one"] = 0
        enough.clear()
        floods += [asyncio.create_task(flood("two"), context=accounts["two"].context()) for _ in range(20)]
        await enough.wait()
        assert 1 / 4 < done["one"] / done["two"] < 4, done
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)

    run(work)


def test_tasks_in_line_can_be_cancelled_and_go_on_when_their_session_ends() -> None:
    async def work() -> None:
        account = Account(Turns())
        reached: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(0)
                reached.append(name)
            except asyncio.CancelledError:
                reached.append(f"{name} cancelled")
                raise

        account.charge(10)
        tasks = [asyncio.create_task(wait(name), context=account.context()) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        account.close()
        await asyncio.wait(tasks)
        assert reached == ["a", "c"] and tasks[1].cancelled()

    run(work)


def test_what_a_task_makes_is_charged_to_its_session_too() -> None:
    noted: list[bool] = []

    class NotedTurns(Turns):
        def note(self, account: Account, now: float, *, overdrawn: bool) -> None:
            noted.append(overdrawn)
            super().note(account, now, overdrawn=overdrawn)

    async def work() -> None:
        account = Account(NotedTurns())

        async def inner() -> None:
            busy(0.02)

        async def outer() -> None:
            await asyncio.create_task(inner())

        assert not account.must_wait()
        await asyncio.create_task(outer(), context=account.context())
        assert any(noted), "the account is overdrawn; on a busy machine it may be in credit again by now"
        with pytest.raises(ZeroDivisionError):
            await asyncio.create_task(fail(), context=account.context())

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    run(work)


def test_a_pace_lets_go_after_a_moment() -> None:
    async def work() -> None:
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        pace = Pace()
        for _ in range(20):
            busy(0.001)
            await pace.rest()
        assert others >= 19
        task.cancel()

    run(work)
