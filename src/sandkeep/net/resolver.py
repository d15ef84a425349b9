"""Names to addresses, by asking the machine's name servers directly.

It needs no files once it is configured, so it works in a process that has none. The operator's own names come
first and are final. Responses are cached for their time to live, within bounds; equal queries at the same
time are sent once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import Context
from ipaddress import ip_address
from typing import Final

from sandkeep.addresses import Address
from sandkeep.net import dns

_MOST_CACHED: Final = 8192
_MOST_PENDING: Final = 2048
_MOST_PER_SESSION: Final = 128
_SHORTEST, _LONGEST, _FAILED = 5.0, 300.0, 2.0
_TRY_SECONDS: Final = 2.0
_TRIES: Final = 2


class NoSuchName(Exception):
    """The name does not exist, or has no address."""


class ResolveFailed(Exception):
    """No name server gave an answer."""


def name_servers(text: str) -> list[str]:
    """Return the servers that a ``resolv.conf`` lists."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            try:
                ip_address(words[1].partition("%")[0])
            except ValueError:
                continue
            found.append(words[1])
    return found


class Resolver:
    def __init__(self, servers: Iterable[str] = (), names: Mapping[str, Iterable[str]] | None = None) -> None:
        self._cache: OrderedDict[str, tuple[float, tuple[Address, ...] | Exception]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[tuple[Address, ...]]] = {}
        self.configure(servers, names or {})

    def configure(self, servers: Iterable[str], names: Mapping[str, Iterable[str]]) -> None:
        """``servers`` are addresses, with a port after ``#`` where it is not 53."""
        self._servers = [_endpoint(server) for server in servers]
        self._static = {
            name.lower().removesuffix("."): tuple(ip_address(text) for text in texts)
            for name, texts in names.items()
        }
        self._cache.clear()

    def known(self, name: str) -> tuple[Address, ...] | None:
        """Return addresses known without a query, or ``None``; raise if the name is known to have none."""
        static = self._static.get(name)
        if static is not None:
            return static
        cached = self._cache.get(name)
        if cached is None or cached[0] <= time.monotonic():
            return None
        self._cache.move_to_end(name)
        if isinstance(cached[1], Exception):
            # A new one: an exception keeps the frames it passed when raised, and this one stays in the cache.
            raise type(cached[1])(*cached[1].args)
        return cached[1]

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Return every address of a name, IPv4 first."""
        known = self.known(name)
        if known is not None:
            return known
        task = self._asking.get(name)
        if task is None:
            if len(self._asking) >= _MOST_PENDING:
                raise ResolveFailed("too many names are being resolved")
            # Not in the context of the first session that asks: others may wait for it too.
            task = asyncio.create_task(self._ask(name), name=f"resolve {name}", context=Context())
            self._asking[name] = task
            task.add_done_callback(lambda done: self._asked(name, done))
        return await asyncio.shield(task)

    def _asked(self, name: str, task: asyncio.Task[tuple[Address, ...]]) -> None:
        del self._asking[name]
        if not task.cancelled():
            task.exception()  # retrieved, in case no caller waits for it any more

    async def _ask(self, name: str) -> tuple[Address, ...]:
        life = _FAILED
        try:
            kinds = (dns.A, dns.AAAA)
            answers = await asyncio.gather(
                *(self._query(name, kind) for kind in kinds), return_exceptions=True
            )
            good = [answer for answer in answers if isinstance(answer, dns.NameResponse)]
            addresses = tuple(address for answer in good for address in answer.addresses)
            if not addresses:
                if any(answer.rcode == dns.NO_SUCH_NAME for answer in good) or len(good) == len(kinds):
                    raise NoSuchName(f"{name} has no address")
                raise ResolveFailed(f"no name server answered for {name}")
            life = min(max(float(min(a.ttl for a in good if a.addresses)), _SHORTEST), _LONGEST)
        except (NoSuchName, ResolveFailed) as error:
            self._remember(name, life, error)
            raise
        self._remember(name, life, addresses)
        return addresses

    def _remember(self, name: str, life: float, result: tuple[Address, ...] | Exception) -> None:
        self._cache[name] = (time.monotonic() + life, result)
        self._cache.move_to_end(name)
        while len(self._cache) > _MOST_CACHED:
            self._cache.popitem(last=False)

    async def _query(self, name: str, kind: int) -> dns.NameResponse:
        # A new socket and a random id for each query: a response can only be forged by guessing both.
        request = dns.request(secrets.randbelow(1 << 16), name, kind)
        for attempt in range(_TRIES * len(self._servers)):
            server = self._servers[attempt % len(self._servers)]
            try:
                answer = await asyncio.wait_for(_by_datagram(server, request), _TRY_SECONDS)
                if answer.truncated:
                    answer = await asyncio.wait_for(_by_stream(server, request), _TRY_SECONDS)
            except (OSError, TimeoutError, dns.Malformed, asyncio.IncompleteReadError):
                continue
            if answer.rcode in (dns.OK, dns.NO_SUCH_NAME):
                return answer
        raise ResolveFailed(f"no name server answered for {name}")


class SessionResolver:
    """A resolver as one session uses it, with a limit: its unanswered names do not block other sessions."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._waiting: dict[str, int] = {}

    def known(self, name: str) -> tuple[Address, ...] | None:
        return self._resolver.known(name)

    async def resolve(self, name: str) -> tuple[Address, ...]:
        known = self._resolver.known(name)
        if known is not None:
            return known
        if name not in self._waiting and len(self._waiting) >= _MOST_PER_SESSION:
            raise ResolveFailed("too many names are being resolved")
        self._waiting[name] = self._waiting.get(name, 0) + 1
        try:
            return await self._resolver.resolve(name)
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]


def _endpoint(server: str) -> tuple[str, int]:
    address, _, port = server.partition("#")
    return address, int(port or 53)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def _by_datagram(server: tuple[str, int], request: bytes) -> dns.NameResponse:
    loop = asyncio.get_running_loop()
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(_family(server[0]), kind) as sock:
        sock.connect(server)
        await loop.sock_sendall(sock, request)
        while True:
            data = await loop.sock_recv(sock, 4096)
            try:
                return dns.response(data, request)
            except dns.Malformed:
                continue  # perhaps forged; the real response may still come


async def _by_stream(server: tuple[str, int], request: bytes) -> dns.NameResponse:
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(struct.pack("!H", len(request)) + request)
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        return dns.response(await reader.readexactly(size), request)
    finally:
        writer.close()
