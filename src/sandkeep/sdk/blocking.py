"""The names that differ between the colours: here for plain threads. ``concurrent`` has the other half."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from select import POLLIN, POLLOUT, poll
from socket import AF_UNIX
from socket import socket as unix_socket
from threading import Lock, Semaphore
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from sandkeep.sdk.address import CONNECT_AGAIN_SECONDS, UnixEnd, trust

if TYPE_CHECKING:
    import httpcore2

__all__ = [
    "Lock",
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
    Pool = httpcore2.ConnectionPool
else:
    Pool = object


def open_pool(*, socket: str | None, tls: bool, connections: int) -> Pool:
    """Connections to one server; opened when first needed."""
    import httpcore2

    class Backend(httpcore2.SyncBackend):
        def connect_unix_socket(self, path: str, *args: Any, **kwargs: Any) -> httpcore2.NetworkStream:
            # The library leaves its socket open when nobody listens, so see first whether somebody does.
            with unix_socket(AF_UNIX) as probe:
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


class Room:
    """Places, taken while something is used."""

    def __init__(self, places: int) -> None:
        self._places = Semaphore(places)

    def take(self, seconds: float) -> None:
        """Take a place; ``TimeoutError`` if there is none in time."""
        if not self._places.acquire(timeout=seconds):
            raise TimeoutError("no place")

    def give(self) -> None:
        self._places.release()


class UnixStream(UnixEnd):
    """A connection to a unix socket. Failures are ``OSError``, ``TimeoutError`` among them."""

    def connect(self, path: str, seconds: float) -> None:
        deadline = monotonic() + seconds
        while True:
            try:
                return self.socket.connect(path)
            except BlockingIOError:
                # As many as it lets queue are waiting for the server; that is nothing one can wait on.
                if monotonic() > deadline:
                    raise TimeoutError("the server takes no more connections") from None
                sleep(CONNECT_AGAIN_SECONDS)

    def send(self, data: bytes, seconds: float) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self._await(POLLOUT, seconds)

    def receive(self, most: int, seconds: float) -> bytes:
        """What is there, or comes; nothing once the other side has closed."""
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                self._await(POLLIN, seconds)

    def send_file(self, fd: int, offset: int, count: int, seconds: float) -> int:
        """As much of a file as fits; nothing when there is no more of it."""
        while True:
            try:
                return os.sendfile(self.socket.fileno(), fd, offset, count)
            except BlockingIOError:
                self._await(POLLOUT, seconds)

    def receive_into(self, pipe: int, most: int, seconds: float) -> int:
        """Move what is there, or comes, into a pipe; nothing once the other side has closed."""
        while True:
            try:
                return os.splice(self.socket.fileno(), pipe, most)
            except BlockingIOError:
                self._await(POLLIN, seconds)

    def _await(self, event: int, seconds: float) -> None:
        waiting = poll()
        waiting.register(self.socket, event)
        if not waiting.poll(seconds * 1000):
            raise TimeoutError("nothing happened on the connection")


def pieces_of(response: httpcore2.Response) -> AbstractContextManager[Iterator[bytes]]:
    """The body of a response, as it comes."""
    return closing(cast("Generator[bytes, None, None]", response.iter_stream()))


def shielded(work: Callable[[], object], seconds: float | None) -> None:
    """Call it: a thread cannot be cancelled."""
    del seconds
    work()


def in_thread(function: Callable[[str], Any], argument: str) -> None:
    """Call something that blocks: here, where blocking is what everything does."""
    function(argument)


def current_token() -> int:
    """What connections belong to: a child process must not use those of its parent."""
    return os.getpid()


class _Kept(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=_Kept)


def per_run(make: Callable[[], K]) -> Callable[[], K]:
    """A function giving one thing per process, closed when the interpreter ends."""
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
