"""A port of a sandbox, published or not, is reached on this machine with any protocol over TCP."""

from __future__ import annotations

import socket
from contextlib import aclosing

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NotFound, SandkeepError
from sandkeep.sdk._compat_async import in_thread

pytestmark = pytest.mark.anyio

SERVER = """
import socket, threading
def serve(client):
    client.sendall(b"220 ready\\n")
    while data := client.recv(65536):
        client.sendall(data)
    client.sendall(b"over")
    client.close()
listener = socket.create_server(("127.0.0.1", 5432))
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


async def serve(box: sandkeep.Sandbox) -> None:
    """Start an echo server inside; return when it listens."""
    process = await box.create_process("python3", ["-c", SERVER])
    async with aclosing(process.output()) as output:
        async for _ in output:
            return


async def talk(port: int, size: int) -> bytes:
    """Send much, end, and return all that comes back."""
    received: list[bytes] = []
    await in_thread(lambda _: received.append(exchange(port, size)), "")
    return received[0]


def exchange(port: int, size: int) -> bytes:
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(b"x" * size)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            received += data
    return bytes(received)


def ended(sock: socket.socket) -> bool:
    """Whether a connection comes to its end."""
    with sock:
        try:
            while sock.recv(100):
                pass
        except ConnectionResetError:
            pass
    return True


async def test_bytes_pass_both_ways_and_each_way_ends_by_itself(name: str) -> None:
    async with sandkeep.create_sandbox(name, network_policy=sandkeep.NetworkPolicy.deny_all()) as box:
        await serve(box)
        async with box.forward_port(5432) as forward:
            assert (forward.address, forward.remote) == ("127.0.0.1", 5432)
            for size in (0, 1, 300_000):
                received = await talk(forward.port, size)
                assert received == b"220 ready\n" + b"x" * size + b"over"
            kept = socket.create_connection(("127.0.0.1", forward.port), 60)
        # Leaving ends what is open, and nothing listens any more.
        assert ended(kept)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", forward.port), 60).close()


async def test_failures_are_told_and_do_not_end_it(name: str) -> None:
    failures: list[SandkeepError] = []
    async with sandkeep.create_sandbox(name) as box:
        async with box.forward_port(5432, on_failure=failures.append) as forward:
            assert await talk(forward.port, 0) == b""
            assert [type(failure) for failure in failures] == [NotFound]
            await serve(box)
            assert await talk(forward.port, 0) == b"220 ready\nover"
            with pytest.raises(InvalidRequest, match="cannot listen") as refused:
                async with box.forward_port(5432, forward.port):
                    raise AssertionError("the port is taken")
            assert refused.value.details["field"] == "local"
        for remote, local in ((0, 0), (70_000, 0), (1, 70_000)):
            with pytest.raises(InvalidRequest):
                box.forward_port(remote, local)
