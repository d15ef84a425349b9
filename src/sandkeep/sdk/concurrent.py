"""The names that differ between the colours: here for asyncio and trio. ``blocking`` has the other half."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio
from anyio import Lock, sleep
from anyio.lowlevel import RunVar, current_token

from sandkeep.sdk.address import CONNECT_AGAIN_SECONDS, UnixEnd, trust

if TYPE_CHECKING:
    import httpcore2

__all__ = [
    "Lock",
    "Opening",
    "Pool",
    "Room",
    "UnixStream",
    "current_token",
    "in_thread",
    "open_pool",
    "per_run",
    "pieces_of",
    "shielded",
    "sleep",
]

if TYPE_CHECKING:
    Pool = httpcore2.AsyncConnectionPool
else:
    Pool = object


def open_pool(*, socket: str | None, tls: bool, connections: int) -> Pool:
    """Connections to one server; opened when first needed."""
    import httpcore2

    return httpcore2.AsyncConnectionPool(
        ssl_context=trust() if tls else None, uds=socket, max_connections=connections, keepalive_expiry=10.0
    )


class Room:
    """Places, taken while something is used."""

    def __init__(self, places: int) -> None:
        self._places = anyio.Semaphore(places, fast_acquire=True)

    async def take(self, seconds: float) -> None:
        """Take a place; ``TimeoutError`` if there is none in time."""
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.fail_after(seconds):
                await self._places.acquire()

    def give(self) -> None:
        self._places.release()


class UnixStream(UnixEnd):
    """A connection to a unix socket. Failures are ``OSError``, ``TimeoutError`` among them."""

    async def connect(self, path: str, seconds: float) -> None:
        with anyio.fail_after(seconds):
            while True:
                try:
                    return self.socket.connect(path)
                except BlockingIOError:
                    # As many as it lets queue are waiting for the server; that is nothing one can wait on.
                    await sleep(CONNECT_AGAIN_SECONDS)

    async def send(self, data: bytes, seconds: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_writable(self.socket)

    async def receive(self, most: int, seconds: float) -> bytes:
        """What is there, or comes; nothing once the other side has closed."""
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_readable(self.socket)

    async def send_file(self, fd: int, offset: int, count: int, seconds: float) -> int:
        """As much of a file as fits; nothing when there is no more of it."""
        while True:
            try:
                return os.sendfile(self.socket.fileno(), fd, offset, count)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_writable(self.socket)

    async def receive_into(self, pipe: int, most: int, seconds: float) -> int:
        """Move what is there, or comes, into a pipe; nothing once the other side has closed."""
        while True:
            try:
                return os.splice(self.socket.fileno(), pipe, most)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_readable(self.socket)


def pieces_of(response: httpcore2.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """The body of a response, as it comes."""
    return aclosing(response.aiter_stream())


async def shielded(work: Callable[[], Awaitable[object]], seconds: float | None) -> None:
    """Finish something although the caller is cancelled meanwhile, unless it takes too long.

    A cancelled scope is heeded at the caller's next wait. ``Task.cancel`` of asyncio, which knows no shields,
    is raised from here once the work is done.
    """
    with anyio.CancelScope(shield=True):
        if _in_asyncio():
            await _apart(work, seconds)
        else:
            with anyio.move_on_after(math.inf if seconds is None else seconds):
                await work()


def _in_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _apart(work: Callable[[], Awaitable[object]], seconds: float | None) -> None:
    """In a task of its own, which nobody else can cancel."""
    import asyncio

    async def whole() -> None:
        with anyio.move_on_after(math.inf if seconds is None else seconds):
            await work()

    task = asyncio.create_task(whole())
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        failure = None if task.cancelled() else task.exception()
        raise interrupted from failure
    task.result()


async def in_thread(function: Callable[[str], Any], argument: str) -> None:
    """Call something that blocks, away from the event loop."""
    await anyio.to_thread.run_sync(function, argument)


class _Entered(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


T = TypeVar("T", bound=_Entered)


class Opening(Generic[T]):
    """Something about to be opened: ``await`` it, or use it in ``async with``. Nothing happens before.

    Awaiting gives what was opened and cleans nothing up. ``async with`` gives the same and cleans up on exit
    as what was opened says. Each is used once; one that never was is reported, as a coroutine is.
    """

    def __init__(self, start: Callable[[], Awaitable[T]]) -> None:
        self._start = start
        self._used = False
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begun().__await__()

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(
                "something to be opened was never awaited", RuntimeWarning, source=self, stacklevel=2
            )

    def _begun(self) -> Awaitable[T]:
        if self._used:
            raise RuntimeError("this was awaited or entered before; make another one")
        self._used = True
        return self._start()

    async def __aenter__(self) -> T:
        begun = self._begun()

        async def start() -> None:
            self._opened = await begun

        try:
            # Finished even when the caller is cancelled meanwhile: otherwise nobody would clean it up.
            await shielded(start, None)
            assert self._opened is not None
            await self._opened.__aenter__()
        except BaseException as error:
            if self._opened is not None:
                await self._opened.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, trace)


class _Kept(Protocol):
    async def aclose(self) -> None: ...


K = TypeVar("K", bound=_Kept)


def per_run(make: Callable[[], K]) -> Callable[[], K]:
    """A function giving one thing per event loop, closed when that loop ends.

    The loop closes the generator that holds it: asyncio and trio both finish what is left of those.
    """
    slot: RunVar[tuple[K, Any] | None] = RunVar("sandkeep", None)

    def get() -> K:
        held = slot.get()
        if held is None:
            made = make()

            async def lifetime() -> AsyncGenerator[None, None]:
                try:
                    yield
                finally:
                    with anyio.CancelScope(shield=True):
                        await made.aclose()

            holder = lifetime()
            held = (made, holder)
            slot.set(held)
            try:
                # Up to its yield, where it waits for nothing: this is how a loop learns of a generator.
                holder.__anext__().send(None)
            except StopIteration:
                pass
        return held[0]

    return get
