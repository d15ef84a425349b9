"""The name server of a session: it responds with addresses that stand for names, or with an error.

Names the policy denies do not exist, and are never sent to a real name server, so a query carries nothing
out. Names it allows are looked up first, because a clear "no such host" is worth a round trip. The response
then has an address of ``FakeNames``, never the real one. Other records than addresses do not exist.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Collection
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

from sandkeep.addresses import Address
from sandkeep.net import dns
from sandkeep.net.audit import Bucket, SessionAudit
from sandkeep.net.names import RANGE, TTL, FakeNames
from sandkeep.net.policy import Decision, Judgement
from sandkeep.net.resolver import NoSuchName, ResolveFailed, SessionResolver

_LOOPBACK: Final[dict[int, Address]] = {dns.A: IPv4Address("127.0.0.1"), dns.AAAA: IPv6Address("::1")}
_KINDS: Final = {dns.A: "A", dns.AAAA: "AAAA", dns.PTR: "PTR", 16: "TXT", 15: "MX", 33: "SRV", 65: "HTTPS"}
_MOST_PENDING: Final = 128
_AT_ONCE: Final = 32
_IDLE_SECONDS: Final = 10.0

JudgeName = Callable[[str], Judgement]


class _MustAsk(Exception):
    """The response depends on a name that has not been looked up yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Responder:
    """Responds to one session. ``judge`` says whether its policy allows a name."""

    def __init__(
        self,
        names: FakeNames,
        resolver: SessionResolver,
        audit: SessionAudit,
        judge: JudgeName,
        *,
        burst: float,
        rate: float,
    ) -> None:
        self._names = names
        self._resolver = resolver
        self._audit = audit
        self._judge = judge
        self._bucket = Bucket(burst=burst, rate=rate)
        self._flooding = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.denies_all = False
        """Refuse every query, without saying whether the name exists."""
        self.host_names: Collection[str] = ()
        """Names that lead to ports of this machine, under every policy; no name server is asked."""

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    # --- transports --------------------------------------------------------------------------------------

    def on_datagram(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, sender = sock.recvfrom(4096)
            except OSError:
                return
            if not self._within_rate():
                continue
            self._answer_to(data, lambda reply, sender=sender: _send(sock, reply, sender))  # type: ignore[misc]

    async def serve_stream(self, client: socket.socket) -> None:
        """Serve DNS over TCP: queries one after the other until the client ends or is silent."""
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        while True:
            data = await asyncio.wait_for(loop.sock_recv(client, 4096), _IDLE_SECONDS)
            if not data:
                return
            buffer += data
            while len(buffer) >= 2 and len(buffer) >= 2 + (size := struct.unpack_from("!H", buffer)[0]):
                message = bytes(buffer[2 : 2 + size])
                del buffer[: 2 + size]
                if not self._within_rate():
                    return
                reply = await self._answer(message)
                if reply is None:
                    return
                sending = loop.sock_sendall(client, struct.pack("!H", len(reply)) + reply)
                await asyncio.wait_for(sending, _IDLE_SECONDS)

    def _within_rate(self) -> bool:
        if self._bucket.take():
            self._flooding = False
            return True
        if not self._flooding:
            self._flooding = True
            self._audit.record("network.limit", limit="dns", verdict="deny", reason="too many DNS queries")
        return False

    def _answer_to(self, data: bytes, send: Callable[[bytes], None]) -> None:
        """Respond at once if no lookup is needed, otherwise after the lookup."""
        try:
            reply = self._answer_known(data)
        except _MustAsk:
            if len(self._tasks) < _MOST_PENDING:
                task = asyncio.create_task(self._answer_later(data, send), name="dns answer")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            reply = dns.error(data, dns.SERVER_FAILURE)
        if reply is not None:
            send(reply)

    async def _answer_later(self, data: bytes, send: Callable[[bytes], None]) -> None:
        reply = await self._answer(data)
        if reply is not None:
            send(reply)

    async def _answer(self, data: bytes) -> bytes | None:
        try:
            return self._answer_known(data)
        except _MustAsk as must:
            try:
                await self._resolver.resolve(must.name)
            except (NoSuchName, ResolveFailed):
                pass  # cached now; the response below says so
        try:
            return self._answer_known(data)
        except _MustAsk:
            return dns.error(data, dns.SERVER_FAILURE)

    # --- answers -----------------------------------------------------------------------------------------

    def _answer_known(self, data: bytes) -> bytes | None:
        try:
            asked = dns.question(data)
        except dns.Malformed as error:
            return dns.error(data, error.rcode)
        if asked.name in self.host_names:
            return self._granted(asked)
        if self.denies_all:
            self._record(asked, "deny", "the policy denies everything")
            return dns.reply(asked, dns.REFUSED)
        if asked.name == "localhost" or asked.name.endswith(".localhost"):
            local = _LOOPBACK.get(asked.kind)
            return dns.reply(asked, dns.OK, addresses=(local,) if local else ())
        if asked.name.endswith(".arpa"):
            return self._reverse(asked)
        verdict = self._judge(asked.name)
        if verdict.decision is Decision.DENY:
            self._record(asked, "deny", verdict.reason)
            return dns.reply(asked, dns.NO_SUCH_NAME)
        if asked.kind != dns.A:
            return dns.reply(asked, dns.OK)
        try:
            if self._resolver.known(asked.name) is None:
                raise _MustAsk(asked.name)
        except NoSuchName as error:
            self._record(asked, "allow", str(error), verdict.rule)
            return dns.reply(asked, dns.NO_SUCH_NAME)
        except ResolveFailed as error:
            self._record(asked, "allow", str(error), verdict.rule)
            return dns.reply(asked, dns.SERVER_FAILURE)
        address = self._names.address(asked.name)
        self._record(asked, "allow", verdict.reason, verdict.rule, address=str(address))
        return dns.reply(asked, dns.OK, addresses=(address,), ttl=TTL)

    def _granted(self, asked: dns.Question) -> bytes:
        """Respond for a name of a port of this machine."""
        if asked.kind != dns.A:
            return dns.reply(asked, dns.OK)
        address = self._names.address(asked.name)
        self._record(asked, "allow", "the name stands for this machine", address=str(address))
        return dns.reply(asked, dns.OK, addresses=(address,), ttl=TTL)

    def _reverse(self, asked: dns.Question) -> bytes:
        """Respond with the name behind an address of ``FakeNames``; other addresses have no name."""
        octets = asked.name.removesuffix(".in-addr.arpa").split(".")
        try:
            address = IPv4Address(".".join(reversed(octets)))
        except ValueError:
            return dns.reply(asked, dns.NO_SUCH_NAME)
        name = self._names.name(address) if address in RANGE else None
        if name is None or asked.kind != dns.PTR:
            return dns.reply(asked, dns.NO_SUCH_NAME)
        return dns.reply(asked, dns.OK, pointer=name)

    def _record(
        self, asked: dns.Question, verdict: str, reason: str, rule: str | None = None, **facts: Any
    ) -> None:
        kind = _KINDS.get(asked.kind, f"TYPE{asked.kind}")
        self._audit.record(
            "network.dns", name=asked.name, type=kind, verdict=verdict, reason=reason, rule=rule, **facts
        )


def _send(sock: socket.socket, reply: bytes, receiver: Any) -> None:
    try:
        sock.sendto(reply, receiver)
    except OSError:
        pass  # the session is not reading; it will ask again
