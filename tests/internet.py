"""Two network namespaces with a cable between them: one for a server, one for everybody it talks to.

``INSIDE`` is the server's own public address, ``OUTSIDE`` that of the others; neither is in a range that
sandkeep keeps callers from. Sockets and processes that are opened within ``Internet.inside()`` or
``Internet.outside()`` stay in that namespace.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sandkeep.linux import syscalls as sc

INSIDE, OUTSIDE = "198.51.100.1", "198.51.100.2"
METADATA = "169.254.169.254"
Handler = Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class Internet:
    server_side: int
    other_side: int

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return _entered(self.server_side)

    def outside(self) -> contextlib.AbstractContextManager[None]:
        return _entered(self.other_side)


@contextlib.contextmanager
def internet() -> Iterator[Internet]:
    """Needs root. Gone with its last process and the end of the context."""
    with _namespace() as server_side, _namespace() as other_side:
        _ip(server_side, "link add cable type veth peer name far")
        with _entered(server_side):
            subprocess.run(["ip", "link", "set", "far", "netns", f"/proc/self/fd/{other_side}"],
                           check=True, pass_fds=[other_side])  # fmt: skip
        for side, name, address in ((server_side, "cable", INSIDE), (other_side, "far", OUTSIDE)):
            _ip(side, f"addr add {address}/24 dev {name}")
            _ip(side, f"link set {name} up")
            _ip(side, "link set lo up")
        _ip(other_side, f"addr add {METADATA}/32 dev lo")
        _ip(server_side, f"route add {METADATA}/32 via {OUTSIDE}")
        yield Internet(server_side, other_side)


@contextlib.contextmanager
def http_server(handle: Handler, address: str = OUTSIDE, port: int = 0) -> Iterator[str]:
    """Answers GET in whatever namespace the caller is in now; yields where, as ``address:port``."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handle(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, port), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"{address}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _ip(namespace: int, arguments: str) -> None:
    with _entered(namespace):
        subprocess.run(["ip", *arguments.split()], check=True)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    before = _own()
    try:
        sc.unshare(sc.CLONE_NEWNET)
        made = _own()
        sc.setns(before, sc.CLONE_NEWNET)
    finally:
        os.close(before)
    try:
        yield made
    finally:
        os.close(made)


@contextlib.contextmanager
def _entered(namespace: int) -> Iterator[None]:
    before = _own()
    try:
        sc.setns(namespace, sc.CLONE_NEWNET)
        yield
    finally:
        sc.setns(before, sc.CLONE_NEWNET)
        os.close(before)


def _own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
