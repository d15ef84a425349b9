"""The networks of sessions: registers each with netd, with the policy that the store has for it.

The store is authoritative for policies. netd gets them from the engine, and again whenever a new netd is
started, so a policy is in force exactly as long as there is a netd to enforce it; without one, sessions have
no network.

``netd_client`` has the process and the connection, ``ports`` the ingress, ``network_events`` netd's reports.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sandkeep.engine import authority, policies
from sandkeep.engine.netd_client import Greeting, NetdClient
from sandkeep.engine.network_events import record_report
from sandkeep.engine.policies import Policies
from sandkeep.engine.ports import PortRoute, Ports
from sandkeep.engine.secrets import Secrets
from sandkeep.engine.services import Services
from sandkeep.errors import (
    AccessDenied,
    HostCannot,
    InvalidRequest,
    NotFound,
    SandkeepError,
    SessionStopped,
    StoreError,
    TransportError,
)
from sandkeep.net import policy
from sandkeep.net.channel import DescriptorChannel
from sandkeep.net.resolver import name_servers
from sandkeep.net.secrets import references
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import HostPort
from sandkeep.store.rows import Sandbox, Session, SessionStatus

_SERVED: Final = (SessionStatus.PENDING, SessionStatus.RUNNING)
_RESOLV_CONF: Final = "/etc/resolv.conf"


class Network:
    def __init__(self, services: Services, policies: Policies, secrets: Secrets) -> None:
        self._services = services
        self._policies = policies
        self._secrets = secrets
        self._netd = NetdClient(services, self._introduce, partial(record_report, services))
        self._ports = Ports(services)
        self._name_servers: list[str] = []
        self._authority: authority.Authority | None = None

    @property
    def own_ports(self) -> list[int]:
        """Ports the server itself listens on; sandboxes and sources cannot reach them through it."""
        return [*self._services.settings.network.own_ports, *(self._ports.address or [])[1:]]

    # --- netd --------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The process id of the netd in use."""
        return self._netd.pid

    @property
    def problem(self) -> str | None:
        """Why there is no netd, if the latest attempt to start one failed."""
        return self._netd.problem

    async def ready(self) -> DescriptorChannel:
        """Return the connection to a netd that has every running session; start one if there is none."""
        return await self._netd.ready()

    async def run(self) -> None:
        """Start netd, so that the first session does not wait and running ones have their network."""
        await self._netd.run()

    async def close(self) -> None:
        """Close the connection to netd. netd keeps running for as long as there are sessions."""
        await self._netd.close()

    async def _introduce(self, channel: DescriptorChannel, greeting: Greeting) -> None:
        """Give a netd the settings, and every running session with its policy."""
        if greeting.ingress is not None:
            self._ports.use_listener_of(greeting.ingress)
        else:
            await self._open_ingress(channel)
        await self._configure(channel)
        # Sessions that are still starting too: they may have registered with a netd that is gone.
        active = [
            session
            for session in self._services.store.sessions.active_on_host(self._services.driver.host)
            if session.status in _SERVED
        ]
        for session in active:
            try:
                if session.id in greeting.sessions:
                    await self._netd.ask(channel, "update", **self._with_policy(session))
                    await self._publish(channel, session)
                else:
                    await self._register(channel, session)
            except StoreError as error:
                # It keeps the policy it had, or has no network if this netd does not know it.
                self._services.log("a policy cannot be used", session=session.id, error=str(error))
            except (SessionStopped, NotFound):
                if session.id in greeting.sessions:
                    raise
                # The session is ending, which the engine's watch on it notices.
        for stray in greeting.sessions - {session.id for session in active}:
            await self._netd.ask(channel, "unregister", session=stray)

    async def _open_ingress(self, channel: DescriptorChannel) -> None:
        with self._ports.listen() as listener:
            fds, domains = [listener.fileno()], self._ports.domains
            answer = await self._netd.ask(channel, "ingress", fds, domains=domains)
        self._ports.address = answer["address"]

    async def _configure(self, channel: DescriptorChannel) -> None:
        settings = self._services.settings.network
        self._name_servers = list(settings.name_servers) or _machine_name_servers()
        await self._netd.ask(
            channel,
            "configure",
            authority=await self._inspection(),
            name_servers=self._name_servers,
            names={name: list(addresses) for name, addresses in settings.names.items()},
            allowed=list(settings.allowed),
            own_ports=self.own_ports,
            limits={
                "connections": settings.connections,
                "dns_rate": settings.dns_rate,
                "dns_burst": 5 * settings.dns_rate,
            },
        )

    async def _inspection(self) -> dict[str, str] | None:
        """Return what netd needs to apply rules; ``None`` where this server cannot."""
        if not authority.available():
            return None
        if self._authority is None:
            load = partial(authority.Authority, self._services.data_dir)
            self._authority = await asyncio.get_running_loop().run_in_executor(None, load)
        settings = self._services.settings.network
        return {
            "certificate": self._authority.certificate.decode(),
            "key": self._authority.key.decode(),
            "token_key": self._authority.token_key.decode(),
            "issuer": settings.issuer,
            "trusted": "".join(_text(path) for path in settings.trusted),
        }

    async def jwks(self) -> dict[str, Any]:
        """Return the key that verifies tokens of forwarded requests."""
        await self._inspection()
        return self._authority.jwks if self._authority is not None else {"keys": []}

    async def refresh(self) -> None:
        """Send netd the machine's name servers if they have changed."""
        if self._netd.channel is None or self._services.settings.network.name_servers:
            return
        if self._name_servers != _machine_name_servers():
            await self._configure(self._netd.channel)

    # --- sessions ----------------------------------------------------------------------------------------

    def check(self, project: str, wanted: NetworkPolicy) -> None:
        """Refuse a policy that this host cannot enforce."""
        policy.validate(wanted, operator_allowed=self._services.settings.network.allowed)
        ruled = next((domain for domain in wanted.domains if domain.rules), None)
        if ruled is not None and not authority.available():
            field, problem = f'domains["{ruled.pattern}"]', "rules cannot be applied by this server"
            raise InvalidRequest(
                f"{field}: {problem}", hint="install sandkeep[net]", field=field, problem=problem
            )
        for name, field in references(wanted):
            if not self._secrets.exists(project, name):
                problem = f"there is no secret named {name}"
                raise InvalidRequest(f"{field}: {problem}", field=field, problem=problem)
            try:
                self._secrets.open_for_header(project, name)
            except InvalidRequest as error:
                problem = error.message
                raise InvalidRequest(f"{field}: {problem}", field=field, problem=problem) from None
            except StoreError:
                pass  # its value does not open: netd refuses requests that need it

    def check_host_ports(self, wanted: Sequence[HostPort], *, operator: bool) -> None:
        """Refuse ports of this machine that the caller may not give to a sandbox.

        Args:
            wanted: those that the sandbox does not have already.
            operator: the local user of the machine asks, who can reach them all without a sandbox.
        """
        settings = self._services.settings.network
        for each in wanted:
            if each.port in self.own_ports:
                problem = f"{each.port} is a port of the sandbox server itself"
                raise InvalidRequest(f"host_ports: {problem}", field="host_ports", problem=problem)
            if not operator and each.port not in settings.host_ports:
                problem = f"only the local user of the server's machine may give port {each.port} of it"
                raise AccessDenied(
                    f"host_ports: {problem}",
                    field="host_ports",
                    problem=problem,
                    hint="the operator lists ports that tokens may give in network.host_ports",
                )

    def _with_policy(self, session: Session) -> dict[str, Any]:
        """Return a session's policy and the secrets it refers to, in netd's form."""
        complete = self._policies.complete(session.project, session.network_policy)
        values: dict[str, str] = {}
        for name, _ in references(policies.shown(complete)):
            try:
                values[name] = self._secrets.open_for_header(session.project, name)
            except SandkeepError as error:
                # netd refuses requests that need it; the rest of the policy applies.
                self._services.log("a secret cannot be used", secret=name, error=str(error))
        granted = self._host_ports(session)
        return {"session": session.id, "policy": complete, "secrets": values, "host_ports": granted}

    def _host_ports(self, session: Session) -> dict[str, list[int]]:
        """Return the ports of this machine that a session may reach, by name, as netd takes them."""
        sandbox = self._services.store.sandboxes.find_by_id(session.project, session.sandbox or "")
        found: dict[str, list[int]] = {}
        for each in sandbox.host_ports if sandbox is not None else ():
            found.setdefault(each.name, []).append(each.port)
        return found

    def _identity(self, session: Session) -> dict[str, str]:
        project = self._services.store.projects.get(session.project)
        return {
            "team_id": project.team,
            "project_id": project.name,
            "sandbox_id": session.id,
            "sandbox_name": session.sandbox_name,
        }

    async def refresh_secret(self, project: str, name: str) -> None:
        """Send netd a secret's new value for every session that uses it, also for those still starting."""
        for session in self._services.store.sessions.active_on_host(self._services.driver.host):
            if session.project != project or session.status not in _SERVED:
                continue
            try:
                wanted = self._policies.policy(session.project, session.network_policy)
            except StoreError:
                continue  # its policy cannot be opened, so netd cannot get it
            if name not in {used for used, _ in references(wanted)}:
                continue
            try:
                # Nothing inside the session is touched, so a session cannot delay or prevent this.
                channel = await self.ready()
                # Re-read the row: netd was given others first, and a newer policy may have been stored.
                current = self._services.store.sessions.find(session.id) or session
                await self._netd.ask(channel, "update", **self._with_policy(current))
            except NotFound:
                continue  # it is ending, or will be registered with the store's value later
            except TransportError:
                await self.ready()  # the next netd reads the row

    async def _trust(self, session: Session) -> None:
        """Make a session trust the authority before its first request is inspected."""
        if self._authority is not None and _has_rules(session):
            await self._authority.install(self._services.driver, self._services.ref(session))

    def environment(self, session: Session) -> dict[str, str]:
        """Return variables for the session's processes, in addition to those of the sandbox."""
        if self._authority is None or not _has_rules(session):
            return {}
        return self._authority.environment()

    async def attach(self, session: Session, listeners: Sequence[int] = ()) -> None:
        """Give a session its network, with its policy in force from the first packet.

        ``listeners`` are those returned by its creation, if any; they are closed.
        """
        try:
            channel = await self.ready()
        except BaseException:
            for fd in listeners:
                os.close(fd)
            raise
        try:
            await self._register(channel, session, listeners, fresh=True)
        except TransportError:
            # netd died before it responded. The next one reads the store, which may not have the session yet.
            await self._register(await self.ready(), session, fresh=True)
        await self._trust(session)

    async def _register(
        self,
        channel: DescriptorChannel,
        session: Session,
        listeners: Sequence[int] = (),
        *,
        fresh: bool = False,
    ) -> None:
        """Register a session with netd; ``fresh`` if no netd has had it before."""
        try:
            fds = list(listeners or await self._services.driver.listeners(self._services.ref(session)))
        except HostCannot as error:
            if error.details.get("part") == "network-steering":
                return  # the operator accepted that: such a session has no network
            raise
        try:
            identity = self._identity(session)
            await self._netd.ask(channel, "register", fds, identity=identity, **self._with_policy(session))
        finally:
            for fd in fds:
                os.close(fd)
        await self._publish(channel, session, fresh=fresh)

    async def set_policy(self, session: Session) -> None:
        """Enforce the policy of a session's row, for open connections too."""
        channel = await self.ready()
        # Re-read the row: a newer policy may have been stored, and put in force, since the caller read it.
        session = self._services.store.sessions.find(session.id) or session
        try:
            await self._netd.ask(channel, "update", **self._with_policy(session))
        except NotFound:
            await self._register(channel, session)
        except TransportError:
            await self.ready()  # the next netd reads the row
        # Last, because it depends on the session's own files, which must not decide whether the policy holds.
        await self._trust(session)

    async def detach(self, session_id: str) -> None:
        """Unregister a session that is over, and count its last bytes."""
        channel = self._netd.channel
        if channel is None:
            return
        try:
            await self._netd.ask(channel, "unregister", session=session_id)
        except TransportError:
            pass  # netd is gone, and its registrations with it

    # --- ports -------------------------------------------------------------------------------------------

    def routes(self, sandbox: Sandbox) -> list[PortRoute]:
        """Return where each port of a sandbox is reached while it runs; the same for all of its sessions."""
        return self._ports.routes(sandbox)

    async def publish(self, session: Session) -> None:
        """Make the ports of a session's sandbox reachable, and no others."""
        try:
            await self._publish(await self.ready(), session)
        except TransportError:
            await self.ready()  # the next netd reads the row

    async def _publish(self, channel: DescriptorChannel, session: Session, *, fresh: bool = False) -> None:
        if session.sandbox is None:
            return
        sandbox = self._services.store.sandboxes.find_by_id(session.project, session.sandbox)
        routes = self._ports.published(sandbox) if sandbox is not None else {}
        if fresh and not routes:
            return  # nothing was published before
        await self._netd.ask(channel, "routes", session=session.id, routes=routes)


def _has_rules(session: Session) -> bool:
    return any(domain.rules for domain in policies.shown(session.network_policy).domains)


def _text(path: str) -> str:
    with open(path, encoding="ascii", errors="ignore") as handle:
        return handle.read()


def _machine_name_servers() -> list[str]:
    try:
        with open(_RESOLV_CONF, encoding="utf-8", errors="replace") as handle:
            return name_servers(handle.read())
    except OSError:
        return []
