"""Names that differ between the two halves: here for threads, in ``_compat_async`` for asyncio and trio."""

from __future__ import annotations

import atexit
import os
import select
import socket as sockets
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from threading import Lock, Semaphore, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from sandkeep.sdk.address import CONNECT_AGAIN_SECONDS, UnixEnd, trust

if TYPE_CHECKING:
    import httpcore2

__all__ = [
    "Background",
    "LocalSocket",
    "Lock",
    "OwnWith",
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

_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 10.0

if TYPE_CHECKING:
    Pool = httpcore2.ConnectionPool
else:
    Pool = object


def open_pool(*, socket: str | None, tls: bool, connections: int) -> Pool:
    """Return a connection pool for one server; it connects when first used."""
    import httpcore2

    class Backend(httpcore2.SyncBackend):
        def connect_unix_socket(self, path: str, *args: Any, **kwargs: Any) -> httpcore2.NetworkStream:
            # The library leaves its socket open if no server listens, so check that first.
            with sockets.socket(sockets.AF_UNIX) as probe:
                try:
                    probe.connect(path)
                except OSError as error:
                    raise httpcore2.ConnectError(str(error)) from error
            return super().connect_unix_socket(path, *args, **kwargs)

    return httpcore2.ConnectionPool(
        network_backend=Backend(),
        ssl_context=trust() if tls else None,
        uds=socket,
        max_connections=connections,
        keepalive_expiry=10.0,
    )


class Slots:
    """A semaphore with a timeout."""

    def __init__(self, count: int) -> None:
        self._semaphore = Semaphore(count)

    def acquire(self, seconds: float) -> None:
        """Take a slot; raise ``TimeoutError`` if none becomes free in time."""
        if not self._semaphore.acquire(timeout=seconds):
            raise TimeoutError("no free connection")

    def release(self) -> None:
        self._semaphore.release()


class UnixStream(UnixEnd):
    """A connection to a unix socket. Failures are ``OSError``, ``TimeoutError`` among them."""

    def connect(self, path: str, seconds: float) -> None:
        deadline = monotonic() + seconds
        while True:
            try:
                return self.socket.connect(path)
            except BlockingIOError:
                # The listen backlog is full, and that is not pollable.
                if monotonic() > deadline:
                    raise TimeoutError("the server does not accept connections") from None
                sleep(CONNECT_AGAIN_SECONDS)

    def send(self, data: bytes, seconds: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self._await(select.POLLOUT, seconds)

    def receive(self, most: int, seconds: float) -> bytes:
        """Return received bytes, waiting for at least one; nothing once the peer has closed."""
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                self._await(select.POLLIN, seconds)

    def send_file(self, fd: int, offset: int, count: int, seconds: float) -> int:
        """Send as much of a file as fits; return how much, 0 at the end of the file."""
        while True:
            try:
                return os.sendfile(self.socket.fileno(), fd, offset, count)
            except BlockingIOError:
                self._await(select.POLLOUT, seconds)

    def receive_into(self, pipe: int, most: int, seconds: float) -> int:
        """Move received bytes into a pipe, waiting for at least one; return 0 once the peer has closed."""
        while True:
            try:
                return os.splice(self.socket.fileno(), pipe, most)
            except BlockingIOError:
                self._await(select.POLLIN, seconds)

    def _await(self, event: int, seconds: float) -> None:
        waiting = select.poll()
        waiting.register(self.socket, event)
        if not waiting.poll(seconds * 1000):
            raise TimeoutError(f"no data moved on the connection in {seconds:g} s")


class LocalSocket:
    """A TCP socket on this machine, listening or connected. Failures are ``OSError``."""

    def __init__(self, sock: sockets.socket) -> None:
        sock.setblocking(True)
        self.socket: sockets.socket = sock

    def accept(self) -> LocalSocket:
        # Not every system wakes a thread that accepts when another one closes the listener.
        while True:
            ready, _, _ = select.select([self.socket], [], [], _LOOK_SECONDS)
            if ready:
                return LocalSocket(self.socket.accept()[0])

    def receive(self, most: int) -> bytes:
        """Return received bytes, waiting for at least one; nothing once the peer will send no more."""
        return self.socket.recv(most)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        """Close it; what waits for it in another thread fails."""
        try:
            self.socket.shutdown(sockets.SHUT_RDWR)
        except OSError:
            pass  # it is a listener, or its peer is gone
        self.socket.close()


class Background:
    """Work beside the caller, from entering this to leaving it."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def __enter__(self) -> Background:
        return self

    def start(self, work: Callable[..., object], *arguments: object) -> None:
        """Begin some work, which must not raise."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = Thread(target=work, args=arguments, name="sandkeep forward", daemon=True)
        self._threads.append(thread)
        thread.start()

    def __exit__(self, *_: object) -> None:
        """Wait until all has ended: the caller has closed what it works with."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)


def together(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Do two things at the same time, neither of which raises; return when both are done."""
    thread = Thread(target=one, name="sandkeep forward", daemon=True)
    thread.start()
    other()
    thread.join()


def chunks_of(response: httpcore2.Response) -> AbstractContextManager[Iterator[bytes]]:
    """Return the body of a response, chunk by chunk."""
    return closing(cast("Generator[bytes, None, None]", response.iter_stream()))


class OwnWith:
    """A handle that is entered by ``with``; ``async with`` says so."""

    if not TYPE_CHECKING:  # type checkers report it themselves

        async def __aenter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"{name} of sandkeep.sync needs 'with'; 'async with' is for 'import sandkeep'")

        async def __aexit__(self, *_: object) -> None:
            """Exist so that ``async with`` calls ``__aenter__``, which explains the mistake."""


def shielded(work: Callable[[], object], seconds: float | None) -> None:
    """Call the function: a thread cannot be cancelled."""
    del seconds
    work()


def in_thread(function: Callable[[str], Any], argument: str) -> None:
    """Call the function directly: blocking code needs no other thread."""
    function(argument)


def current_token() -> int:
    """Return what connections belong to: a child process must not use those of its parent."""
    return os.getpid()


class _Kept(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=_Kept)


def per_run(make: Callable[[], K]) -> Callable[[], K]:
    """Return a function that returns one object per process, closed when the interpreter exits."""
    held: dict[int, K] = {}
    guard = Lock()

    def get() -> K:
        with guard:
            kept = held.get(os.getpid())
            if kept is None:
                kept = held[os.getpid()] = make()
                atexit.register(kept.close)
        return kept

    return get
