"""Connections the server makes for a caller: to registries, repositories and archives that the caller names.

A caller must not reach through the server what it cannot reach itself. An address is judged before anything
is sent to it, and the connection is made to the address that was judged, even if the name leads elsewhere by
then. The caller gets the same message for a name that does not exist, an address that is refused and a port
without a listener: the differences would be a map of the operator's network.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sandkeep.addresses import special_kind
from sandkeep.dataclass import dataclass

HINT = "only public addresses are fetched from, unless the operator allows private sources"


class Unreachable(OSError):
    """An address is refused, or does not answer; callers cannot tell which."""

    def __init__(self, host: str, *, final: bool = False) -> None:
        super().__init__(f"{host} cannot be reached")
        self.host = host
        self.final = final
        """Asking again would not help. Not shown to callers."""


class Destination(NamedTuple):
    """An address that may be connected to."""

    family: int
    address: Any
    """As the socket module wants it."""

    @property
    def text(self) -> str:
        return str(self.address[0])


@dataclass(frozen=True, slots=True)
class Reach:
    """Which addresses the server may connect to for one caller."""

    private: bool = False
    """Loopback, private, reserved and this machine's own addresses too."""
    own_ports: Sequence[int] = ()
    """Ports of the server itself: refused on this machine's addresses even where those are allowed."""
    proxy: str | None = None
    """An HTTP proxy of the operator's that resolves names, judges their addresses and connects to them."""

    def places(self, host: str, port: int) -> list[Destination]:
        """Return the addresses of a name, if all may be connected to. Blocks. Raises ``Unreachable``."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Unreachable(host, final=True) from None
        places = [Destination(family, address) for family, *_, address in found]
        if not places or not all(self._allows(place, port) for place in places):
            raise Unreachable(host, final=True)
        return places

    def connect(self, host: str, port: int, timeout: float | None) -> socket.socket:
        """Connect to an address of a host, through the proxy if there is one. Blocks.

        Raises:
            Unreachable: the address is refused, or does not answer.
        """
        if self.proxy is None:
            return self._connect(host, port, timeout)
        self.check(host, port)
        via = urlsplit(self.proxy if "//" in self.proxy else f"//{self.proxy}")
        # The proxy is where the operator says, wherever that is.
        sock = ANYWHERE._connect(via.hostname or "", via.port or 80, timeout)
        try:
            _tunnel(sock, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _connect(self, host: str, port: int, timeout: float | None) -> socket.socket:
        for place in self.places(host, port):
            sock = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                sock.settimeout(timeout)
                sock.connect(place.address)
                return sock
            except OSError:
                sock.close()
        raise Unreachable(host)

    def check(self, host: str, port: int) -> list[Destination]:
        """Return ``places``; for a name that a proxy will resolve, check nothing and return none."""
        if self.proxy is not None:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                return []
        return self.places(host, port)

    def _allows(self, place: Destination, port: int) -> bool:
        if not self.private:
            return is_public(place.text) and not is_own(place)
        return port not in self.own_ports or not is_own(place)


def _tunnel(sock: socket.socket, target: str) -> None:
    """Have an HTTP proxy connect a socket to a host."""
    sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    with http.client.HTTPResponse(sock, method="CONNECT") as response:
        response.begin()
        if response.status != 200:
            raise OSError(f"the proxy refuses to connect: {response.status} {response.reason}")


ANYWHERE = Reach(private=True)
"""For the operator, who could connect without the server."""


def is_public(address: str) -> bool:
    """Whether sandboxes may reach an address too: the server must not be a way around that."""
    return special_kind(ipaddress.ip_address(address.partition("%")[0])) is None


def is_own(place: Destination) -> bool:
    """Whether an address is this machine's, found without sending anything.

    A machine's public addresses lead to all that listens on it, past its firewall.
    """
    with socket.socket(place.family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(place.address)
        except OSError:
            return False  # there is no route to it
        # The kernel answers for an address of its own from that address.
        return bool(probe.getsockname()[0] == place.address[0])
