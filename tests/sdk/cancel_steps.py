"""Cancelling a flow at exactly its n-th wait, and at every one of them in turn.

A coroutine is driven step by step between the event loop and its task, so every suspension is seen. There are
two ways of cancelling: a scope of anyio or trio respects shields; ``Task.cancel``, which is what
``asyncio.timeout``, ``wait_for`` and task groups of asyncio use, respects nothing.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio

Flow = Callable[[], Coroutine[Any, Any, object]]
MOST_STEPS = 2000


@types.coroutine
def _stepping(flow: Coroutine[Any, Any, object], on_step: Callable[[], None]) -> Generator[Any, Any, object]:
    value, error = None, None
    while True:
        try:
            waits_for = flow.send(value) if error is None else flow.throw(error)
        except StopIteration as ended:
            return ended.value
        on_step()
        value, error = None, None
        try:
            value = yield waits_for
        except BaseException as thrown:
            error = thrown


class Steps:
    """Cancels a flow when it has waited ``at`` times, or for so many seconds."""

    def __init__(self, at: int, patience: float) -> None:
        self.at = at
        self._patience = patience
        self.seen = 0

    @property
    def reached(self) -> bool:
        return self.seen >= self.at

    def _count(self, cancel: Callable[[], object]) -> Callable[[], None]:
        def on_step() -> None:
            self.seen += 1
            if self.seen == self.at:
                cancel()

        return on_step

    async def by_scope(self, flow: Flow) -> None:
        with anyio.move_on_after(self._patience) as scope:
            await _stepping(flow(), self._count(scope.cancel))

    async def by_task(self, flow: Flow) -> None:
        async def body() -> object:
            task = asyncio.current_task()
            assert task is not None
            return await _stepping(flow(), self._count(task.cancel))

        task = asyncio.create_task(body())
        await asyncio.wait([task], timeout=self._patience)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def cancelled_at_every_step(
    way: str,
    flow: Flow,
    check: Callable[[], Awaitable[object]],
    *,
    patience: float = 60.0,
    stride: int = 1,
) -> int:
    """Run a flow again and again, cancelled later each time, until it ends before. Returns its waits."""
    for at in range(1, MOST_STEPS, stride):
        steps = Steps(at, patience)
        await (steps.by_scope(flow) if way == "scope" else steps.by_task(flow))
        await check()
        if not steps.reached:
            return steps.seen
    raise AssertionError(f"the flow has more than {MOST_STEPS} waits")
