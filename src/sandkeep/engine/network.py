"""The engine's side of the network: netd started and kept alive, sessions registered, events written down.

The store is the truth about policies. netd is told, and told again whenever it had to be started anew, so a
policy is in force exactly as long as there is a netd to enforce it; while there is none, sessions have no
network. netd outlives the engine: opening a data directory first looks for one that is already there.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sandkeep import __version__
from sandkeep.engine import authority, keys, policies
from sandkeep.engine.names import new_id
from sandkeep.errors import (
    HostCannot,
    InvalidRequest,
    NotFound,
    SandkeepError,
    SessionStopped,
    TransportError,
    from_json,
)
from sandkeep.linux import sockets
from sandkeep.net import netd, policy, secrets
from sandkeep.net.channel import Channel
from sandkeep.net.resolver import name_servers
from sandkeep.store.rows import ACTIVE, Sandbox, Session, SessionStatus
from sandkeep.types import NetworkPolicy

if TYPE_CHECKING:
    from sandkeep.engine.context import Context

_START_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 15.0
_BACKOFF: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_SERVED: Final = (SessionStatus.PENDING, SessionStatus.RUNNING)
_RESOLV_CONF: Final = "/etc/resolv.conf"


class Route(NamedTuple):
    """Where a port of a sandbox is reached from outside."""

    port: int
    subdomain: str
    url: str
    token: str | None
    """To be sent as ``x-sandkeep-token``, or once as the parameter ``sandkeep_token``."""


@contextmanager
def _closing_on_failure(channel: Channel) -> Iterator[None]:
    """A connection nobody will use because we were interrupted or refused is closed, not left."""
    try:
        yield
    except BaseException:
        channel.close()
        raise


class Network:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel: Channel | None = None
        self._starting: asyncio.Task[Channel] | None = None
        self._closing = False
        self._name_servers: list[str] = []
        self._authority: authority.Authority | None = None
        self._ingress_known = False
        self._known: set[str] = set()
        """Sessions the netd being introduced already serves."""
        self._ingress: list[Any] | None = None
        self.pid: int | None = None
        """Of the netd in use."""

    # --- netd --------------------------------------------------------------------------------------------

    async def ready(self) -> Channel:
        """The connection to a netd that knows every running session; started when there is none."""
        if self._channel is not None:
            return self._channel
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start netd")
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    def _started(self, task: asyncio.Task[Channel]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever waits has it

    async def _start(self) -> Channel:
        failure: SandkeepError = TransportError("the network process cannot be started")
        for pause in _BACKOFF:
            await asyncio.sleep(pause)
            try:
                channel = await self._connect()
                if channel is None:
                    await asyncio.get_running_loop().run_in_executor(None, self._launch)
                    channel = await self._connect()
                if channel is not None:
                    with _closing_on_failure(channel):
                        await self._introduce(channel)
                    self._channel = channel
                    return channel
            except HostCannot:
                raise
            except SandkeepError as error:
                failure = error
        raise failure

    async def _connect(self) -> Channel | None:
        """A connection to the netd that is there, unless there is none or it is of another version."""
        directory = os.open(self._context.data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock = sockets.connect_in(directory, netd.SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        finally:
            os.close(directory)
        channel = Channel(sock, self._on_message, lambda: self._on_gone(channel))
        with _closing_on_failure(channel):
            hello = await self._ask(channel, "hello")
            if (hello["protocol"], hello["version"]) != (netd.PROTOCOL, __version__):
                await self._ask(channel, "stop")
                channel.close()
                return None
        self.pid = channel.peer()[0]
        self._known = set(hello["sessions"])
        self._ingress_known = hello["ingress"] is not None
        self._ingress = hello["ingress"] or self._ingress
        if hello["confinement"]:
            self._context.log("netd is less confined than it could be", absent=hello["confinement"])
        return channel

    def _launch(self) -> None:
        script = os.path.join(os.path.dirname(netd.__file__), "start_netd.py")
        # Isolated, but with our own idea of where packages are: that may come from the environment.
        argv = [sys.executable, "-I", script, self._context.data_dir, ":".join(sys.path)]
        with subprocess.Popen(argv, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as launcher:
            assert launcher.stdout is not None
            line = launcher.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {}
        if "error" in message:
            raise from_json(message["error"])
        if "ready" not in message:
            raise HostCannot(
                "the network process ended while starting",
                part="netd",
                why="see netd.log in the data directory",
                hint="run 'sandkeep doctor'",
            )

    async def _introduce(self, channel: Channel) -> None:
        """Tell a netd how things are: settings, and every running session with its policy."""
        if not self._ingress_known:
            await self._open_ingress(channel)
        await self._configure(channel)
        # Those still starting too: they may have registered with a netd that is gone.
        active = [
            session
            for session in self._context.store.sessions.active_on_host(self._context.driver.host)
            if session.status in _SERVED
        ]
        for session in active:
            if session.id in self._known:
                await self._ask(channel, "update", **self._with_policy(session))
                await self._publish(channel, session)
                continue
            try:
                await self._register(channel, session)
            except (SessionStopped, NotFound):
                continue  # it is ending; whoever watches it will notice
        for stray in self._known - {session.id for session in active}:
            await self._ask(channel, "unregister", session=stray)

    async def _configure(self, channel: Channel) -> None:
        settings = self._context.settings.network
        self._name_servers = list(settings.name_servers) or _machine_name_servers()
        await self._ask(
            channel,
            "configure",
            authority=await self._inspection(),
            name_servers=self._name_servers,
            names={name: list(addresses) for name, addresses in settings.names.items()},
            allowed=list(settings.allowed),
            own_ports=[*settings.own_ports, *(self._ingress or [])[1:]],
            limits={
                "connections": settings.connections,
                "dns_rate": settings.dns_rate,
                "dns_burst": 5 * settings.dns_rate,
            },
        )

    async def _inspection(self) -> dict[str, str] | None:
        """What netd needs to apply rules, where this server can."""
        if not authority.available():
            return None
        if self._authority is None:
            load = partial(authority.Authority, self._context.data_dir)
            self._authority = await asyncio.get_running_loop().run_in_executor(None, load)
        settings = self._context.settings.network
        return {
            "certificate": self._authority.certificate.decode(),
            "key": self._authority.key.decode(),
            "token_key": self._authority.token_key.decode(),
            "issuer": settings.issuer,
            "trusted": "".join(_text(path) for path in settings.trusted),
        }

    async def jwks(self) -> dict[str, Any]:
        """The key that tokens of forwarded requests are verified with."""
        await self._inspection()
        return self._authority.jwks if self._authority is not None else {"keys": []}

    async def _ask(
        self, channel: Channel, op: str, fds: list[int] | None = None, **body: Any
    ) -> dict[str, Any]:
        try:
            answer, received = await asyncio.wait_for(channel.request(op, fds, **body), _ANSWER_SECONDS)
        except TimeoutError:
            channel.close()
            raise TransportError("the network process does not answer") from None
        for fd in received:
            os.close(fd)
        return answer

    def _on_gone(self, channel: Channel) -> None:
        if self._channel is not channel:
            return
        self._channel = None
        self.pid = None
        if not self._closing:
            self._context.log("netd ended; starting another")
            self._context.spawn(self.run(), "restart netd")

    async def run(self) -> None:
        """Have a netd, so that the first session does not wait for it and those that exist have theirs."""
        await self.ready()

    async def close(self) -> None:
        """Let netd go. It stays for as long as there are sessions."""
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()

    async def refresh(self) -> None:
        """Follow the machine to other name servers."""
        if self._channel is None or self._context.settings.network.name_servers:
            return
        if self._name_servers != _machine_name_servers():
            await self._configure(self._channel)

    # --- sessions ----------------------------------------------------------------------------------------

    def check(self, project: str, wanted: NetworkPolicy) -> None:
        """Refuse a policy that could not be enforced here."""
        policy.validate(wanted)
        ruled = next((domain for domain in wanted.domains if domain.rules), None)
        if ruled is not None and not authority.available():
            field, problem = f'domains["{ruled.pattern}"]', "rules cannot be applied by this server"
            raise InvalidRequest(
                f"{field}: {problem}", hint="install sandkeep[net]", field=field, problem=problem
            )
        for name, field in secrets.references(wanted):
            if not self._context.secrets.exists(project, name):
                problem = f"there is no secret named {name}"
                raise InvalidRequest(f"{field}: {problem}", field=field, problem=problem)

    def _with_policy(self, session: Session) -> dict[str, Any]:
        """A session's policy and the values it refers to, as netd takes them."""
        stored = session.network_policy
        found: dict[str, str] = {}
        for name, _ in secrets.references(policies.from_stored(stored)):
            try:
                found[name] = self._context.secrets.open(session.project, name)
            except SandkeepError as error:
                # Requests that need it are refused; the rest of the policy stands.
                self._context.log("a secret cannot be used", secret=name, error=str(error))
        return {"session": session.id, "policy": stored, "secrets": found}

    def _identity(self, session: Session) -> dict[str, str]:
        project = self._context.store.projects.get(session.project)
        return {
            "team_id": project.team,
            "project_id": project.name,
            "sandbox_id": session.id,
            "sandbox_name": session.sandbox_name,
        }

    async def refresh_secret(self, project: str, name: str) -> None:
        """A secret changed: sessions that use it get the new value, those still starting too."""
        for session in self._context.store.sessions.active_on_host(self._context.driver.host):
            if session.project != project or session.status not in _SERVED:
                continue
            used = {used for used, _ in secrets.references(policies.from_stored(session.network_policy))}
            if name not in used:
                continue
            try:
                # Nothing inside is touched: no session can be in the way of what its network may say.
                channel = await self.ready()
                # As it is now: others were told before this one, and its policy may be another since.
                current = self._context.store.sessions.find(session.id) or session
                await self._ask(channel, "update", **self._with_policy(current))
            except NotFound:
                continue  # it is ending, or will be registered with what the store has then
            except TransportError:
                await self.ready()  # the next netd reads the row

    async def _trust(self, session: Session) -> None:
        """Have a session trust our authority before its first request is inspected."""
        if self._authority is not None and _has_rules(session):
            await self._authority.install(self._context.driver, self._context.ref(session))

    def environment(self, session: Session) -> dict[str, str]:
        """Variables for the session's processes, on top of the sandbox's own."""
        if self._authority is None or not _has_rules(session):
            return {}
        return self._authority.environment()

    async def attach(self, session: Session) -> None:
        """Give a session its network, with its policy in force from the first packet."""
        channel = await self.ready()
        try:
            await self._register(channel, session, fresh=True)
        except TransportError:
            # netd died with the request in hand. Its successor asks the store, which may not have us yet.
            await self._register(await self.ready(), session, fresh=True)
        await self._trust(session)

    async def _register(self, channel: Channel, session: Session, *, fresh: bool = False) -> None:
        """``fresh``: nobody has told netd about the session before."""
        try:
            fds = await self._context.driver.listeners(self._context.ref(session))
        except HostCannot as error:
            if error.details.get("part") == "network-steering":
                return  # the operator accepted that: such a session has no network
            raise
        try:
            identity = self._identity(session)
            await self._ask(channel, "register", fds, identity=identity, **self._with_policy(session))
        finally:
            for fd in fds:
                os.close(fd)
        await self._publish(channel, session, fresh=fresh)

    async def set_policy(self, session: Session) -> None:
        """Put the policy of a session's row in force, for what is open too."""
        channel = await self.ready()
        # As it is now: another may have been stored, and put in force, since ours was read.
        session = self._context.store.sessions.find(session.id) or session
        try:
            await self._ask(channel, "update", **self._with_policy(session))
        except NotFound:
            await self._register(channel, session)
        except TransportError:
            await self.ready()  # the next netd reads the row
        # Only now: the session's own files decide how this goes, and not whether a policy is in force.
        await self._trust(session)

    async def detach(self, session: str) -> None:
        """A session is over: count its last bytes and forget it."""
        channel = self._channel
        if channel is None:
            return
        try:
            await self._ask(channel, "unregister", session=session)
        except TransportError:
            pass  # then netd has forgotten everything

    # --- ports -------------------------------------------------------------------------------------------

    def routes(self, sandbox: Sandbox) -> list[Route]:
        """Where each port of a sandbox is reached while it runs. The same for every session of it."""
        settings = self._context.settings.network
        found = []
        for port in sandbox.ports:
            subdomain = _subdomain(sandbox, port)
            if settings.ingress_domain is not None:
                url = f"https://{subdomain}.{settings.ingress_domain}"
            else:
                number = self._ingress[1] if self._ingress is not None else settings.ingress_port
                url = f"http://{subdomain}.localhost:{number}"
            found.append(Route(port, subdomain, url, self._token(subdomain)))
        return found

    def _token(self, subdomain: str) -> str | None:
        if not self._context.settings.network.protect_routes:
            return None
        key = keys.derive(self._context.data_dir, "route tokens")
        return hmac.new(key, subdomain.encode(), hashlib.sha256).hexdigest()

    async def publish(self, session: Session) -> None:
        """Make the ports of a session's sandbox reachable, and no others."""
        try:
            await self._publish(await self.ready(), session)
        except TransportError:
            await self.ready()  # the next netd reads the row

    async def _publish(self, channel: Channel, session: Session, *, fresh: bool = False) -> None:
        if session.sandbox is None:
            return
        sandbox = self._context.store.sandboxes.find_by_id(session.project, session.sandbox)
        routes = self.routes(sandbox) if sandbox is not None else []
        published = {route.subdomain: (route.port, route.token) for route in routes}
        if fresh and not published:
            return  # and there is nothing to take back
        await self._ask(channel, "routes", session=session.id, routes=published)

    async def _open_ingress(self, channel: Channel) -> None:
        settings = self._context.settings.network
        port = self._ingress[1] if self._ingress is not None else settings.ingress_port
        domains = ["localhost", *filter(None, [settings.ingress_domain])]
        with _listen(settings.ingress_address, port) as listener:
            answer = await self._ask(channel, "ingress", [listener.fileno()], domains=domains)
        self._ingress = answer["address"]

    async def _give_sockets(self, body: dict[str, Any]) -> None:
        """netd wants to reach into a session's network."""
        channel, request = self._channel, body["id"]
        session = self._context.store.sessions.find(str(body["session"]))
        if channel is None:
            return
        fds: list[int] = []
        try:
            if session is None:
                raise NotFound("no such session", kind="session", name=str(body["session"]))
            ref = self._context.ref(session)
            fds = await self._context.driver.sockets(ref, count=body["count"], family=body["family"])
            channel.answer(request, {}, fds)
        except SandkeepError as error:
            channel.refuse(request, error)
        finally:
            for fd in fds:
                os.close(fd)

    # --- what netd tells ---------------------------------------------------------------------------------

    def _on_message(self, body: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if body.get("notice") == "report":
            self._write_down(body)
        elif body.get("op") == "sockets":
            self._context.spawn(self._give_sockets(body), "sockets for netd")

    def _write_down(self, report: dict[str, Any]) -> None:
        store = self._context.store
        rows: dict[str, Session | None] = {}

        def row(session: str) -> Session | None:
            if session not in rows:
                rows[session] = store.sessions.find(session)
            return rows[session]

        if report["lost"]:
            self._context.log("network events were lost", count=report["lost"])
        with store.transaction():
            for event in report["events"]:
                found = row(event["session"])
                if found is None:
                    continue
                store.events.add(
                    new_id("evt", now_ms=event["time_ms"]),
                    event["kind"],
                    time_ms=event["time_ms"],
                    project=found.project,
                    sandbox=found.sandbox,
                    sandbox_name=found.sandbox_name,
                    session=found.id,
                    data=event["data"],
                )
            for session, (received, sent) in report["usage"].items():
                found = row(session)
                if found is not None and found.status in ACTIVE:
                    store.sessions.update(
                        found.project,
                        found.id,
                        now_ms=self._context.now_ms(),
                        ingress_bytes=found.ingress_bytes + received,
                        egress_bytes=found.egress_bytes + sent,
                    )


def _has_rules(session: Session) -> bool:
    return any(domain.rules for domain in policies.from_stored(session.network_policy).domains)


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="ignore") as handle:
        return handle.read()


def _subdomain(sandbox: Sandbox, port: int) -> str:
    """Readable, one label of a host name, and no other sandbox's: names are only unique in a project."""
    readable = sandbox.name.lower().replace("_", "-").strip("-")[:32].strip("-") or "sandbox"
    digest = base64.b32encode(hashlib.sha256(sandbox.id.encode()).digest()).decode().lower()
    return f"{readable}-{port}-{digest[:12]}"


def _listen(address: str, port: int) -> socket.socket:
    """A listening socket, on another port if that one is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError:
            sock.bind((address, 0))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock


def _machine_name_servers() -> list[str]:
    try:
        with open(_RESOLV_CONF, encoding="utf-8", errors="replace") as handle:
            return name_servers(handle.read())
    except OSError:
        return []
