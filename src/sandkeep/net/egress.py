"""Egress of one session: accept every connection it makes, judge it, and relay or reset it.

The steps for a connection: find its destination (the address before steering) and the name behind that
address; ask the policy; resolve the name and ask the policy about the real address; connect; ask once more,
since the policy may have changed in between. Under a custom policy the first bytes of a connection to a name
must not ask for another name.

A name that the sandbox was given for ports of this machine leads to these ports and nowhere else, under every
policy: no name server is asked about it, and no address is judged. Rules of the policy for that name apply.

A new policy applies to open connections at once: each is judged again, and cut if the verdict has changed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, NamedTuple

from sandkeep.linux import netlink
from sandkeep.net import sniff
from sandkeep.net.audit import Audit, SessionAudit
from sandkeep.net.names import RANGE, FakeNames
from sandkeep.net.policy import Address, Decision, Judge, Judgement, is_within
from sandkeep.net.relay import Pipes, Relay, has_urgent, in_line, keep_alive, reset_on_close
from sandkeep.net.resolver import NoSuchName, ResolveFailed, Resolver, SessionResolver
from sandkeep.net.responder import Responder
from sandkeep.net.turns import Account, Turns
from sandkeep.policy import NetworkPolicy, Rule
from sandkeep.states import PolicyMode

_ORIGINAL_DESTINATION: Final = 80
_OWN: Final = IPv4Address(netlink.ADDRESS)
_AT_ONCE: Final = 16
_DNS: Final = 53
_HOST: Final = IPv4Address("127.0.0.1")

HostPorts = Mapping[str, frozenset[int]]
"""Ports of this machine that a session may reach, by the name that leads to them."""


class EgressLimits(NamedTuple):
    """Of each session."""

    connections: int = 1024
    dns_burst: float = 1000
    dns_rate: float = 200
    connect_seconds: float = 10
    greeting_seconds: float = 10


@dataclass(slots=True)
class World:
    """State that all sessions of a netd share."""

    resolver: Resolver
    audit: Audit
    pipes: Pipes = field(default_factory=Pipes)
    turns: Turns = field(default_factory=Turns)
    operator_allowed: tuple[str, ...] = ()
    """Ranges the operator opened although they are private or this machine's own."""
    own_ports: frozenset[int] = frozenset()
    """Ports the server itself listens on: never reachable from a session."""
    limits: EgressLimits = field(default_factory=EgressLimits)
    inspect: Callable[[Egress, Flow, sniff.TrafficKind], Awaitable[None]] | None = None
    """Serves connections to domains with rules, and owns the client's socket from then on."""

    def refuse_own(self, sock: socket.socket, port: int, *, granted: bool = False) -> None:
        """Close a connection that turned out to lead to the sandbox server, or to this machine.

        Also at a public address of the machine: those reach every listener on it, past its firewall. One that
        was ``granted`` may lead to this machine, but not to the server.
        """
        peer = sock.getpeername()[0]
        if peer != sock.getsockname()[0]:
            return
        if port in self.own_ports:
            sock.close()
            raise Refused("that is the sandbox server itself")
        if not granted and not is_within(ip_address(peer), self.operator_allowed):
            sock.close()
            raise Refused(f"{peer} is this machine's own and not listed by the operator")

    def open_to_all(self, address: Address, port: int) -> bool:
        """Whether an address is none of those that only the operator can open."""
        judge = Judge(NetworkPolicy.allow_all(), operator_allowed=self.operator_allowed)
        return judge.decide(name=None, address=address, port=port).decision is Decision.ALLOW


class Flow:
    """One connection of a session, from the moment it is accepted."""

    def __init__(self, client: socket.socket, address: Address, port: int) -> None:
        self.client = client
        self.address = address
        self.port = port
        self.name: str | None = None
        self.candidates: tuple[Address, ...] = ()
        """Where the name may be reached: resolved, and each address allowed by the policy."""
        self.verdict: Judgement | None = None
        self.upgraded_under: Sequence[Rule] | None = None
        """The rules that let it leave HTTP, after which none of its bytes are judged any more."""
        self.handed_over = False
        """The inspector owns the client's socket."""
        self.started = time.monotonic()
        self.relay: Relay | None = None
        self.task: asyncio.Task[None] | None = None

    def is_outdated(self, verdict: Judgement) -> bool:
        """Whether it left HTTP under other rules than those of ``verdict``."""
        rules = verdict.domain.rules if verdict.domain is not None else None
        return self.upgraded_under is not None and self.upgraded_under != rules

    def moved(self) -> tuple[int, int]:
        """Return bytes received and sent so far, as the session sees them."""
        return (self.relay.received, self.relay.sent) if self.relay is not None else (0, 0)

    def cut(self) -> None:
        """End the connection now, with a reset."""
        if self.relay is not None:
            self.relay.abort()
        if self.task is not None:
            self.task.cancel()
        if not self.handed_over and self.client.fileno() >= 0:
            reset_on_close(self.client)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "address": str(self.address), "port": self.port}


class Refused(Exception):
    """A connection is refused; ``rule`` is the line of the policy that refuses it."""

    def __init__(self, reason: str, rule: str | None = None) -> None:
        super().__init__(reason)
        self.rule = rule


class Egress:
    def __init__(self, session: str, listeners: list[socket.socket], world: World) -> None:
        self.session = session
        self.world = world
        self.account = Account(world.turns)
        self.audit = SessionAudit(session, world.audit)
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._names = FakeNames()
        self._flows: set[Flow] = set()
        self._done = (0, 0)
        self._policy = NetworkPolicy.deny_all()
        self._judge = Judge(self._policy)
        self._host_ports: HostPorts = {}
        self.secrets: Mapping[str, str] = {}
        """Values the policy's rules refer to."""
        self.identity: Mapping[str, Any] = {}
        """Whose session this is, for those who receive its forwarded requests."""
        self.http2 = 0
        """Connections that speak HTTP/2 with us."""
        self.resolver = SessionResolver(world.resolver)
        self._responder = Responder(
            self._names,
            self.resolver,
            self.audit,
            lambda name: self._judge.decide(name=name, address=None, port=_DNS),
            burst=world.limits.dns_burst,
            rate=world.limits.dns_rate,
        )
        self._context = self.account.context()

    def start(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            self._listen(listener)

    def close(self) -> None:
        """Stop serving, and cut open connections."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._responder.close()
        for flow in list(self._flows):
            flow.cut()
        self.account.close()
        self.audit.close()

    def usage(self) -> tuple[int, int]:
        """Return bytes into and out of the session since it was registered."""
        moved = [flow.moved() for flow in self._flows]
        received, sent = self._done
        return received + sum(item[0] for item in moved), sent + sum(item[1] for item in moved)

    async def counted(self, body: AsyncIterator[bytes], *, into: bool) -> AsyncIterator[bytes]:
        """Pass a body on, counting its bytes as received or sent by the session."""
        async for piece in body:
            self._done = (self._done[0] + len(piece) * into, self._done[1] + len(piece) * (not into))
            yield piece

    def count(self, sent: int, received: int) -> None:
        """Count bytes out of and into the session that no relay counts."""
        self._done = (self._done[0] + received, self._done[1] + sent)

    @property
    def connections(self) -> int:
        return len(self._flows)

    def rules(self, flow: Flow) -> Sequence[Rule] | None:
        """Return the rules in force for a flow's requests; ``None`` if it may make no more requests."""
        verdict = self._verdict(flow, flow.address)
        if verdict.decision is not Decision.INSPECT or verdict.domain is None:
            return None
        return verdict.domain.rules

    # --- policy ------------------------------------------------------------------------------------------

    def set_policy(self, policy: NetworkPolicy, host_ports: HostPorts) -> int:
        """Apply a policy to new and open connections at once; return how many were cut.

        ``host_ports`` are the ports of this machine that the session may reach besides.
        """
        self._policy = policy
        self._judge = Judge(policy, operator_allowed=self.world.operator_allowed)
        self._host_ports = host_ports
        self._responder.host_names = host_ports.keys()
        self._responder.denies_all = policy.mode is PolicyMode.DENY_ALL
        cut = 0
        for flow in list(self._flows):
            if flow.verdict is None:
                continue  # not decided yet: it will meet the new policy
            verdict = self._verdict(flow, flow.address)
            if (
                verdict.decision is not flow.verdict.decision
                or verdict.of_host != flow.verdict.of_host
                or flow.is_outdated(verdict)
            ):
                cut += 1
                self.audit.record(
                    "network.cut", **flow.facts(), verdict="deny", reason=verdict.reason, rule=verdict.rule
                )
                flow.cut()
        return cut

    # --- connections -------------------------------------------------------------------------------------

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._on_news, listener)

    def _on_news(self, listener: socket.socket) -> None:
        """Accept connections or queries; later if the session has used up its time."""
        if self.account.must_wait():
            self._loop.remove_reader(listener.fileno())
            self.account.when_free(lambda: self._resume_listening(listener))
        else:
            self._accept_ready(listener)

    def _resume_listening(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._listen(listener)
            self._accept_ready(listener)

    def _accept_ready(self, listener: socket.socket) -> None:
        take = self._accept if listener.type == socket.SOCK_STREAM else self._responder.on_datagram
        with self.account.charged():
            # In a context that charges the tasks it makes as well.
            self._context.copy().run(take, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # Out of descriptors or memory: connections wait in the kernel's queue until the retry.
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(0.2, self._listen, listener)
                return
            client.setblocking(False)
            in_line(client)
            try:
                address, port = original_destination(client)
            except OSError:
                client.close()
                continue
            flow = Flow(client, address, port)
            if len(self._flows) >= self.world.limits.connections:
                self._refuse(flow, Refused(f"more than {self.world.limits.connections} connections"))
                reset(client)
                continue
            self._flows.add(flow)
            flow.task = asyncio.create_task(self._serve(flow), name=f"connection of {self.session}")

    async def _serve(self, flow: Flow) -> None:
        try:
            if flow.port == _DNS:
                await self._responder.serve_stream(flow.client)
                self._end(flow)
                return
            await self._open(flow)
        except Refused as refused:
            self._refuse(flow, refused)
            self._end(flow, abruptly=True)
        except (OSError, TimeoutError, asyncio.CancelledError):
            self._end(flow, abruptly=True)
        except Exception as error:
            # A bug in netd; it ends this connection only.
            self._loop.call_exception_handler({"message": "a connection failed", "exception": error})
            self._end(flow, abruptly=True)

    def _refuse(self, flow: Flow, refused: Refused) -> None:
        self.audit.record(
            "network.connection", **flow.facts(), verdict="deny", reason=str(refused), rule=refused.rule
        )

    def _end(self, flow: Flow, *, abruptly: bool = False) -> None:
        if flow not in self._flows:
            return
        self._flows.discard(flow)
        received, sent = flow.moved()
        self._done = (self._done[0] + received, self._done[1] + sent)
        if flow.name is not None:
            self._names.release(flow.name)
        if flow.verdict is not None:
            milliseconds = round((time.monotonic() - flow.started) * 1000)
            self.audit.record(
                "network.closed", **flow.facts(), received=received, sent=sent, milliseconds=milliseconds
            )
        if flow.relay is not None:
            flow.relay.release()
        elif flow.handed_over:
            pass
        elif abruptly:
            reset(flow.client)
        else:
            flow.client.close()

    def _verdict(self, flow: Flow, address: Address | None) -> Judgement:
        ports = self._host_ports.get(flow.name) if flow.name is not None else None
        if ports is None or flow.name is None:
            return self._judge.decide(name=flow.name, address=address, port=flow.port)
        if flow.port not in ports:
            problem = f"{flow.name} stands for other ports of this machine than {flow.port}"
            return Judgement(Decision.DENY, problem, of_host=True)
        rule = f"host port {flow.port} as {flow.name}"
        domain = self._judge.domain(flow.name)
        if domain is not None and domain.rules:
            return Judgement(Decision.INSPECT, "the domain has rules", rule, domain, of_host=True)
        return Judgement(Decision.ALLOW, "the sandbox was given this port", rule, of_host=True)

    def _decide(self, flow: Flow, address: Address | None) -> Judgement:
        verdict = self._verdict(flow, address)
        if verdict.decision is Decision.DENY:
            raise Refused(verdict.reason, verdict.rule)
        return verdict

    async def _open(self, flow: Flow) -> None:
        if isinstance(flow.address, IPv4Address) and flow.address in RANGE:
            name = self._names.name(flow.address)
            if name is None:
                raise Refused("the address stands for no name this session has looked up")
            flow.name = name
            self._names.hold(name)
            try:
                await self.find_addresses(flow)
            except (NoSuchName, ResolveFailed) as error:
                raise Refused(str(error)) from None
        else:
            if flow.address.is_loopback or flow.address == _OWN:
                raise Refused("the session's own address does not lead outside")
            flow.candidates = (flow.address,)
        verdict = self._decide(flow, flow.candidates[0])
        if verdict.decision is Decision.INSPECT:
            await self._inspect(flow, verdict)
            return
        intended = verdict
        upstream = await self.connect(flow)
        try:
            # The policy may have changed while connecting.
            verdict = self._decide(flow, flow.address)
            if verdict.decision is not Decision.ALLOW or verdict.of_host != intended.of_host:
                raise Refused("the policy changed while connecting")
        except BaseException:
            upstream.close()
            raise
        self.opened(flow, verdict)
        await self._relay(flow, upstream)

    async def find_addresses(self, flow: Flow) -> None:
        """Resolve the flow's name to the addresses that the policy allows."""
        assert flow.name is not None
        if self._decide(flow, None).of_host:
            flow.candidates = (_HOST,)
            return
        addresses = await self.resolver.resolve(flow.name)
        allowed = []
        refused: Refused | None = None
        for address in addresses:
            try:
                self._decide(flow, address)
            except Refused as error:
                refused = error
            else:
                allowed.append(address)
        if not allowed:
            raise refused or Refused(f"{flow.name} has no address")
        flow.candidates = tuple(allowed)

    async def connect(self, flow: Flow) -> socket.socket:
        """Connect to the first candidate that accepts, and make that the flow's address."""
        failure: Exception = Refused("no address")
        for address in flow.candidates:
            try:
                upstream = await dial(address, flow.port, self.world.limits.connect_seconds)
            except (OSError, TimeoutError) as error:
                failure = Refused(f"{address} port {flow.port} cannot be reached: {error or 'time-out'}")
                continue
            granted = address == _HOST and self._verdict(flow, address).of_host
            self.world.refuse_own(upstream, flow.port, granted=granted)
            flow.address = address
            return upstream
        raise failure

    def opened(self, flow: Flow, verdict: Judgement) -> None:
        flow.verdict = verdict
        self.audit.record(
            "network.connection", **flow.facts(), verdict="allow", reason=verdict.reason, rule=verdict.rule
        )

    async def _relay(self, flow: Flow, upstream: socket.socket) -> None:
        keep_alive(flow.client)
        relay = Relay(flow.client, upstream, self.world.pipes, self.account, lambda: self._end(flow))
        flow.relay = relay
        relay.start_receiving()
        judged_by_name = flow.name is not None and not (flow.verdict is not None and flow.verdict.of_host)
        if judged_by_name and self._policy.mode is PolicyMode.CUSTOM:
            await self._greeting(flow, silent=True)
        relay.start_sending()

    async def _inspect(self, flow: Flow, verdict: Judgement) -> None:
        if self.world.inspect is None:
            raise Refused("rules cannot be applied on this machine", verdict.rule)
        flow.address = flow.candidates[0]
        kind = await self._greeting(flow, silent=False)
        self.opened(flow, verdict)
        flow.handed_over = True
        try:
            await self.world.inspect(self, flow, kind)
        finally:
            self._end(flow)

    async def _greeting(self, flow: Flow, *, silent: bool) -> sniff.TrafficKind:
        """Peek at the first bytes until they show which name the client asks for; it must be the flow's.

        ``silent`` allows clients that wait for the server to send first, and protocols without a name.
        """
        patience = self.world.limits.greeting_seconds
        head = await self._peek(flow.client, 1, None if silent else patience)
        deadline = self._loop.time() + patience
        while (found := sniff.sniff(head)).kind is sniff.TrafficKind.MORE and head:
            more = await self._peek(flow.client, len(head) + 1, max(deadline - self._loop.time(), 0))
            if len(more) <= len(head):
                if has_urgent(flow.client):
                    raise Refused("urgent data hides whom the connection asks for")
                break  # the client has sent all it will
            head = more
        if found.kind in (sniff.TrafficKind.OTHER, sniff.TrafficKind.MORE) and not silent:
            raise Refused("neither TLS nor HTTP, and the domain has rules")
        if found.kind is sniff.TrafficKind.INVALID:
            raise Refused("the connection begins with a malformed greeting")
        if found.name is not None and found.name != flow.name:
            raise Refused(f"the connection asks for {found.name}, not for {flow.name}")
        return found.kind

    async def _peek(self, client: socket.socket, count: int, seconds: float | None) -> bytes:
        """Return the bytes received so far, once there are ``count`` or no more will come."""
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
        ready = asyncio.Event()
        self._loop.add_reader(client.fileno(), ready.set)
        try:
            async with asyncio.timeout(seconds):
                await ready.wait()
        finally:
            self._loop.remove_reader(client.fileno())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return client.recv(sniff.MOST_BYTES + 1, socket.MSG_PEEK)


def original_destination(client: socket.socket) -> tuple[Address, int]:
    """Return the destination of a steered connection before it was steered."""
    if client.family == socket.AF_INET:
        data = client.getsockopt(socket.IPPROTO_IP, _ORIGINAL_DESTINATION, 16)
        port, packed = struct.unpack("!2xH4s8x", data)
        return IPv4Address(packed), port
    data = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
    port, packed = struct.unpack("!2xH4x16s4x", data)
    return IPv6Address(packed), port


async def dial(address: Address, port: int, seconds: float) -> socket.socket:
    """Connect from this machine."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        keep_alive(sock)
        in_line(sock)
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


def reset(sock: socket.socket) -> None:
    if sock.fileno() >= 0:
        reset_on_close(sock)
        sock.close()


def adopt(fds: list[int]) -> list[socket.socket]:
    """Make socket objects of listeners' descriptors; they own them."""
    made: list[socket.socket] = []
    try:
        for fd in fds:
            made.append(socket.socket(fileno=fd))
    except OSError:
        for fd in fds[len(made) :]:
            os.close(fd)
        for sock in made:
            sock.close()
        raise
    return made
