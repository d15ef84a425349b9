"""Ports of sandboxes: their URLs, their tokens, and the socket on which netd accepts requests for them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
from typing import Any, Final, NamedTuple

from sandkeep.engine import keys
from sandkeep.engine.services import Services
from sandkeep.engine.settings import NetworkSettings
from sandkeep.store.rows import Sandbox

_LOOPBACK: Final = "127.0.0.1"
_EVERY_ADDRESS: Final = "0.0.0.0"


class PortRoute(NamedTuple):
    """How a port of a sandbox is reached from outside."""

    port: int
    subdomain: str
    url: str
    token: str | None
    """Clients send it as ``x-sandkeep-token``, or once as the parameter ``sandkeep_token``."""
    address: str | None = None
    """A loopback address of this route only, if the ingress accepts requests at such addresses."""
    connect_to: str | None = None
    """Address and port to connect to, if the URL has a name below ``localhost`` that few resolvers know."""


class Ports:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._settings = services.settings.network
        self._has_addresses = (
            self._settings.ingress_domain is None and self._settings.ingress_address == _LOOPBACK
        )
        """Whether each route has an address of its own."""
        self.address: list[Any] | None = None
        """Address and port that netd listens on, once a netd has been introduced."""

    def use_listener_of(self, address: list[Any]) -> None:
        """Reuse the listener of a netd that already runs."""
        self.address = address
        self._has_addresses = self._has_addresses and address[0] == _EVERY_ADDRESS

    def listen(self) -> socket.socket:
        """Return a new listener for netd, on the same port as the previous one if that is free."""
        port = self.address[1] if self.address is not None else self._settings.ingress_port
        listener, self._has_addresses = _listen(self._settings, port)
        return listener

    @property
    def domains(self) -> list[str]:
        """Domains below which host names lead to sandboxes."""
        return ["localhost", *filter(None, [self._settings.ingress_domain])]

    def routes(self, sandbox: Sandbox) -> list[PortRoute]:
        """Return where each port of a sandbox is reached while it runs; the same for all of its sessions."""
        sandboxes = self._services.store.sandboxes
        numbers = sandboxes.addresses(sandbox.project, sandbox.id) if sandbox.ports else {}
        routes = []
        for port in sandbox.ports:
            subdomain = _subdomain(sandbox, port)
            address = _address(numbers[port]) if self._has_addresses and port in numbers else None
            if self._settings.ingress_domain is not None:
                url = f"https://{subdomain}.{self._settings.ingress_domain}"
            else:
                number = self.address[1] if self.address is not None else self._settings.ingress_port
                url = f"http://{address or f'{subdomain}.localhost'}:{number}"
            named = self._settings.ingress_domain is None and address is None
            routes.append(
                PortRoute(
                    port,
                    subdomain,
                    url,
                    self._token(subdomain),
                    address,
                    self._listening_at() if named else None,
                )
            )
        return routes

    def _listening_at(self) -> str:
        """Return address and port of the listener, for clients on this machine if it is on every address."""
        host, number = self.address or (self._settings.ingress_address, self._settings.ingress_port)
        if host in (_EVERY_ADDRESS, "::"):
            host = _LOOPBACK
        return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"

    def published(self, sandbox: Sandbox) -> dict[str, tuple[int, str | None]]:
        """Return port and token by host name or address, in netd's form."""
        return {
            host: (route.port, route.token)
            for route in self.routes(sandbox)
            for host in (route.subdomain, route.address)
            if host is not None
        }

    def _token(self, subdomain: str) -> str | None:
        if not self._settings.protect_routes:
            return None
        key = keys.derive(self._services.data_dir, "route tokens")
        return hmac.new(key, subdomain.encode(), hashlib.sha256).hexdigest()


def _subdomain(sandbox: Sandbox, port: int) -> str:
    """Return a readable label of a host name that no other sandbox has: names are unique per project only."""
    readable = sandbox.name.lower().replace("_", "-").strip("-")[:32].strip("-") or "sandbox"
    digest = base64.b32encode(hashlib.sha256(sandbox.id.encode()).digest()).decode().lower()
    return f"{readable}-{port}-{digest[:12]}"


def _address(number: int) -> str:
    """Return a loopback address of 127.64.0.0/10, which by custom is unused."""
    high, last = divmod(number, 254)
    return f"127.{64 + high // 256}.{high % 256}.{last + 1}"


def _listen(settings: NetworkSettings, port: int) -> tuple[socket.socket, bool]:
    """Return a listener, on another port if that one is in use, and whether routes have their own addresses.

    Browsers and curl resolve names below ``localhost``; most resolvers do not. So requests are accepted at
    every loopback address, by one socket that is bound to the loopback device. The port has priority: where
    another program has it at another address, or before Linux 5.7, only one address is used.
    """
    address = settings.ingress_address
    wide = settings.ingress_domain is None and address == _LOOPBACK
    failure: OSError | None = None
    for number in (port, 0):
        for everywhere in (True, False) if wide else (False,):
            try:
                return _listener(_EVERY_ADDRESS if everywhere else address, number, everywhere), everywhere
            except OSError as error:
                failure = error
    assert failure is not None
    raise failure


def _listener(address: str, port: int, on_loopback: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if on_loopback:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        sock.bind((address, port))
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock
