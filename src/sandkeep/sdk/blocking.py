"""The names that differ between the colours: here for plain threads. ``concurrent`` has the other half."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from socket import AF_UNIX
from socket import socket as unix_socket
from threading import Lock
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from sandkeep.sdk.address import trust

if TYPE_CHECKING:
    import httpcore2

__all__ = [
    "Lock",
    "Pool",
    "checkpoint",
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


def pieces_of(response: httpcore2.Response) -> AbstractContextManager[Iterator[bytes]]:
    """The body of a response, as it comes."""
    return closing(cast("Generator[bytes, None, None]", response.iter_stream()))


def shielded(seconds: float) -> AbstractContextManager[Any]:
    """Nothing: a thread cannot be cancelled."""
    del seconds
    return nullcontext()


def in_thread(function: Callable[[str], Any], argument: str) -> None:
    """Call something that blocks: here, where blocking is what everything does."""
    function(argument)


def checkpoint() -> None:
    """Nothing: a thread cannot be cancelled."""


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
