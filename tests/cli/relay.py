"""A slow network: a port that relays to another one, at a given number of bytes per second."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNKS = 20
"""Chunks per second."""


@contextmanager
def slow(address: tuple[str, int], *, rate: int) -> Iterator[int]:
    """Relay to an address at ``rate`` bytes per second; yields the port to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, address, rate), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, address: tuple[str, int], rate: int) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(near, address, rate), daemon=True).start()


def _serve(near: socket.socket, address: tuple[str, int], rate: int) -> None:
    with near, socket.create_connection(address) as far:
        back = threading.Thread(target=_pass_on, args=(far, near, rate), daemon=True)
        back.start()
        _pass_on(near, far, rate)
        back.join()


def _pass_on(one: socket.socket, other: socket.socket, rate: int) -> None:
    try:
        while data := one.recv(max(rate // _CHUNKS, 1)):
            other.sendall(data)
            time.sleep(len(data) / rate)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one of the two has closed the connection
