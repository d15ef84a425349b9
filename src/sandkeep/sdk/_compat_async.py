"""Names that differ between the two halves: here for asyncio and trio, in ``_compat_sync`` for threads."""

from __future__ import annotations

import math
import os
import socket as sockets
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import anyio
from anyio import Lock, sleep
from anyio.lowlevel import RunVar, current_token

from sandkeep.errors import InvalidRequest
from sandkeep.sdk.address import CONNECT_AGAIN_SECONDS, UnixEnd, trust

if TYPE_CHECKING:
    import httpcore2

__all__ = [
    "Background",
    "LocalSocket",
    "Lock",
    "OwnWith",
    "Pending",
    "Pool",
    "Slots",
    "UnixStream",
    "chunks_of",
    "current_token",
    "in_thread",
    "open_pool",
    "per_run",
    "shielded",
    "sleep",
    "together",
]

if TYPE_CHECKING:
    Pool = httpcore2.AsyncConnectionPool
else:
    Pool = object


def open_pool(*, socket: str | None, tls: bool, connections: int) -> Pool:
    """Return a connection pool for one server; it connects when first used."""
    import httpcore2

    return httpcore2.AsyncConnectionPool(
        ssl_context=trust() if tls else None, uds=socket, max_connections=connections, keepalive_expiry=10.0
    )


class Slots:
    """A semaphore with a timeout."""

    def __init__(self, count: int) -> None:
        self._semaphore = anyio.Semaphore(count, fast_acquire=True)

    async def acquire(self, seconds: float) -> None:
        """Take a slot; raise ``TimeoutError`` if none becomes free in time."""
        try:
            self._semaphore.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.fail_after(seconds):
                await self._semaphore.acquire()

    def release(self) -> None:
        self._semaphore.release()


class UnixStream(UnixEnd):
    """A connection to a unix socket. Failures are ``OSError``, ``TimeoutError`` among them."""

    async def connect(self, path: str, seconds: float) -> None:
        with anyio.fail_after(seconds):
            while True:
                try:
                    return self.socket.connect(path)
                except BlockingIOError:
                    # The listen backlog is full, and a connecting unix socket cannot be polled for that.
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
        """Return received bytes, waiting for at least one; nothing once the peer has closed."""
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_readable(self.socket)

    async def send_file(self, fd: int, offset: int, count: int, seconds: float) -> int:
        """Send as much of a file as fits; return how much, 0 at the end of the file."""
        while True:
            try:
                return os.sendfile(self.socket.fileno(), fd, offset, count)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_writable(self.socket)

    async def receive_into(self, pipe: int, most: int, seconds: float) -> int:
        """Move received bytes into a pipe, waiting for at least one; return 0 once the peer has closed."""
        while True:
            try:
                return os.splice(self.socket.fileno(), pipe, most)
            except BlockingIOError:
                with anyio.fail_after(seconds):
                    await anyio.wait_readable(self.socket)


class LocalSocket:
    """A TCP socket on this machine, listening or connected. Failures are ``OSError``."""

    def __init__(self, sock: sockets.socket) -> None:
        sock.setblocking(False)
        self.socket: sockets.socket = sock

    async def accept(self) -> LocalSocket:
        while True:
            try:
                return LocalSocket(self.socket.accept()[0])
            except BlockingIOError:
                await self._ready(anyio.wait_readable)

    async def receive(self, most: int) -> bytes:
        """Return received bytes, waiting for at least one; nothing once the peer will send no more."""
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                await self._ready(anyio.wait_readable)

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                await self._ready(anyio.wait_writable)

    async def _ready(self, wait: Callable[[sockets.socket], Awaitable[None]]) -> None:
        try:
            await wait(self.socket)
        except (anyio.ClosedResourceError, ValueError) as error:
            raise ConnectionAbortedError("the socket was closed") from error

    def close(self) -> None:
        """Close it; what waits for it in another task fails."""
        if self.socket.fileno() >= 0:
            if (notify := getattr(anyio, "notify_closing", None)) is not None:  # later than anyio 4.6
                notify(self.socket)
            self.socket.close()


class Background:
    """Work beside the caller, from entering this to leaving it."""

    async def __aenter__(self) -> Background:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    def start(self, work: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Begin some work, which must not raise."""
        self._group.start_soon(work, *arguments)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what has not ended."""
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)


async def together(
    one: Callable[[], Coroutine[Any, Any, object]], other: Callable[[], Awaitable[object]]
) -> None:
    """Do two things at the same time, neither of which raises; return when both are done."""
    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await other()


def chunks_of(response: httpcore2.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """Return the body of a response, chunk by chunk."""
    return aclosing(response.aiter_stream())


async def shielded(work: Callable[[], Awaitable[object]], seconds: float | None) -> None:
    """Finish some work even if the caller is cancelled while it runs, unless it takes too long.

    A cancelled scope takes effect at the caller's next wait. ``Task.cancel`` of asyncio ignores shields and
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
    """Run the work in a task of its own, which the caller's cancellation does not reach."""
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
    """Call a blocking function in a thread."""
    await anyio.to_thread.run_sync(function, argument)


class OwnWith:
    """A handle that is entered by ``async with``; ``with`` says so."""

    if not TYPE_CHECKING:  # type checkers report it themselves

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"{name} needs 'async with'; 'with' is for 'from sandkeep import sync'")

        def __exit__(self, *_: object) -> None:
            """Exist so that ``with`` calls ``__enter__``, which explains the mistake."""


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


class Pending(Generic[T]):
    """Something about to be opened: ``await`` it, or use it in ``async with``. Nothing happens before that.

    ``await`` returns the opened object without any clean-up. ``async with`` returns the same and cleans up on
    exit, as the object's own ``async with`` does. Use each one once; one that is never used is reported, as a
    coroutine is.
    """

    def __init__(self, start: Callable[[], Awaitable[T]]) -> None:
        self._start = start
        self._used = False
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._begun().__await__()

    def __del__(self) -> None:
        if not self._used:
            text = f"{self._called()} was never awaited; write 'await' or 'async with' in front of it"
            warnings.warn(text, RuntimeWarning, source=self, stacklevel=2)

    def _begun(self) -> Awaitable[T]:
        if self._used:
            raise RuntimeError(f"{self._called()} can be awaited or entered only once; call it again")
        self._used = True
        return self._start()

    def _called(self) -> str:
        """Return the name of the function that made this."""
        name: str = self._start.__qualname__.partition(".<locals>")[0]
        return f"{name.rpartition('.')[2]}()"

    if not TYPE_CHECKING:  # type checkers report these themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{self._called()} returns an awaitable, which has no {name!r}: "
                "write 'await' or 'async with' in front of it"
            )

        def __enter__(self) -> NoReturn:
            self._used = True
            raise TypeError(f"{self._called()} needs 'async with'; 'with' is for 'from sandkeep import sync'")

        def __exit__(self, *_: object) -> None:
            """Exist so that ``with`` calls ``__enter__``, which explains the mistake."""

    async def __aenter__(self) -> T:
        begun = self._begun()

        async def start() -> None:
            self._opened = await begun

        try:
            # Finish even if the caller is cancelled: otherwise nothing would clean up the opened object.
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
    """Return a function that returns one object per event loop, closed when that loop ends.

    An async generator holds the object: asyncio and trio both finalize generators that are left at the end.
    """
    slot: RunVar[tuple[K, Any] | None] = RunVar("sandkeep", None)

    def get() -> K:
        try:
            held = slot.get()
        except RuntimeError as error:  # anyio's message is for users of anyio
            raise InvalidRequest(
                "no event loop is running",
                hint="call this inside asyncio.run(), or use 'from sandkeep import sync as sandkeep'",
            ) from error
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
                # Advance to its yield, which does not wait: this is how a loop learns about a generator.
                holder.__anext__().send(None)
            except StopIteration:
                pass
        return held[0]

    return get
