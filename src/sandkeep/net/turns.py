"""Turns: netd has one thread, and no session may keep it from the others.

Each session has an ``Account`` of the thread's time. Every step of its tasks is charged to it, and so is work
that its sockets cause outside of tasks. An account that is used up is refilled at a rate that leaves as much
for all others; until then the session's steps wait in a queue, from which one is taken at a time, so that the
thread serves other sessions after each, however many connections this one has. A session that is alone waits
in its queue only, not for a refill.

Steps are short because loops that never have to wait ask a ``Pace`` when to yield.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic, thread_time
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SLICE: Final = 0.0005
"""Seconds a loop goes on before it yields."""
_BURST: Final = 0.005
_DEEPEST: Final = -0.005
"""Seconds an account holds, or is overdrawn by, at most: neither idleness nor solitude counts for long."""
_WINDOW: Final = 0.1
"""Seconds after which an idle session no longer counts as active."""

_LEAST: Final = 0.05

_account: contextvars.ContextVar[Account | None] = contextvars.ContextVar("account", default=None)


class Turns:
    """The sessions that used the thread in this window and in the one before."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._used = self._passed = _WINDOW
        self._active: tuple[set[Account], set[Account]] = (set(), set())
        self._overdrawn: tuple[set[Account], set[Account]] = (set(), set())

    def note(self, account: Account, now: float, *, overdrawn: bool) -> None:
        self._roll(now)
        self._active[0].add(account)
        if overdrawn:
            self._overdrawn[0].add(account)

    def compare(self, used: float, passed: float) -> None:
        """Note the thread time a step used, and the wall time it took."""
        self._used += used
        self._passed += passed
        if self._passed > _WINDOW:
            self._used, self._passed = self._used / 2, self._passed / 2

    def rate(self) -> float:
        """Return the share of the thread's time that an account gets.

        Equal shares for all accounts that are overdrawn, and one share for the rest together. A thread that
        does not always get a processor has less to give.
        """
        wanting = max(1, len(self._overdrawn[0]), len(self._overdrawn[1]))
        return max(self._used / self._passed, _LEAST) / (1 + wanting)

    def is_alone(self, account: Account, now: float) -> bool:
        self._roll(now)
        return all(seen <= {account} for seen in self._active)

    def _roll(self, now: float) -> None:
        if now > self._ends:
            stale = now > self._ends + _WINDOW
            self._active = (set(), set() if stale else self._active[0])
            self._overdrawn = (set(), set() if stale else self._overdrawn[0])
            self._ends = now + _WINDOW


class Account:
    """One session's budget of the thread's time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._level, self._seen = _BURST, monotonic()
        self._line: deque[Callable[[], None]] = deque()
        self._next: asyncio.Handle | None = None
        self._closed = False

    def context(self) -> contextvars.Context:
        """Return a context whose tasks, and those they start, are charged to this account."""
        context = contextvars.copy_context()
        context.run(self.charge_this_task)
        return context

    def charge_this_task(self) -> None:
        """Charge the current task to this account, from its next step on."""
        _account.set(self)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the block to this account."""
        began, before = monotonic(), thread_time()
        try:
            yield
        finally:
            used = thread_time() - before
            self._turns.compare(used, monotonic() - began)
            self.charge(used)

    def charge(self, seconds: float) -> None:
        now = monotonic()
        self._level = max(self._filled(now) - seconds, _DEEPEST)
        self._seen = now
        self._turns.note(self, now, overdrawn=self._level < 0)

    def _filled(self, now: float) -> float:
        return min(_BURST, self._level + (now - self._seen) * self._turns.rate())

    def must_wait(self) -> bool:
        return not self._closed and (bool(self._line) or self._filled(monotonic()) < 0)

    def when_free(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` when the session has its turn; never at once."""
        self._line.append(go_on)
        if self._next is None:
            self._next = self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._next = None
        now = monotonic()
        owed = -self._filled(now)
        if owed > 0 and not self._closed and not self._turns.is_alone(self, now):
            self._next = self._loop.call_later(owed / self._turns.rate(), self._take)
            return
        if self._line:
            self._line.popleft()()
        if self._line:
            self._next = self._loop.call_soon(self._take)

    async def turn(self) -> None:
        """Wait for the session's turn."""
        free = self._loop.create_future()
        self.when_free(partial(_wake, free))
        await free

    def close(self) -> None:
        """Stop charging, and let waiting steps go on."""
        self._closed = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
        while self._line:
            self._line.popleft()()


def _wake(free: asyncio.Future[None]) -> None:
    if not free.done():
        free.set_result(None)


class Pace:
    """Tells a loop that never has to wait when to yield."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = monotonic() + _SLICE

    def is_over(self) -> bool:
        return monotonic() > self._until

    async def rest(self) -> None:
        """Yield to other tasks, if it is time."""
        if self.is_over():
            await asyncio.sleep(0)
            self._until = monotonic() + _SLICE


class _Charged(Coroutine[Any, Any, T]):
    """A coroutine whose steps wait for their session's turn, and are charged to it."""

    __slots__ = ("_inner", "_waiting")

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self._waiting: Coroutine[Any, Any, None] | None = None

    def send(self, value: Any) -> Any:
        account = _account.get()
        if account is None:
            return self._inner.send(value)
        if self._waiting is None and account.must_wait():
            self._waiting = account.turn()
        if self._waiting is not None:
            try:
                return self._waiting.send(None)
            except StopIteration:
                self._waiting = None
        with account.charged():
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        return self._inner.throw(*error)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("only a task runs this")


def charge_to_current(seconds: float) -> None:
    """Charge time to the session of the running task, if it has one: for work done outside of the task."""
    account = _account.get()
    if account is not None:
        account.charge(seconds)


def make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task whose steps are charged to its session; a task factory for the loop."""
    return asyncio.Task(_Charged(work), loop=loop, **options)
