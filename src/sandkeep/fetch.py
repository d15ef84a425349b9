"""The blocking HTTP client for what callers name: registries of images, and archives to fill sandboxes with.

Every connection is made by a ``Reach``, which judges the address before anything is sent to it; a redirect is
a new connection and judged again. One request per connection, no cookies, no proxy but the operator's.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Mapping
from string import punctuation
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from sandkeep.reach import Reach

NETWORK_ERRORS: Final = (OSError, http.client.HTTPException)
"""What a connection that cannot be made or breaks off raises."""

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PORTS: Final = {"http": 80, "https": 443}


def split(url: str) -> SplitResult:
    """Split a URL. Raises ``ValueError`` unless it is one of http or https with a host."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"not an address for HTTP: {parts.scheme}")
    return parts


def connect(
    url: str, reach: Reach, *, timeout: float, context: ssl.SSLContext | None = None
) -> socket.socket:
    """Connect to the host of a URL; return a socket that the caller owns, for https one with TLS.

    The TLS handshake is left to `Exchange`, so that the caller has the socket before a server can delay it.

    Raises:
        Unreachable: the address is refused, or does not answer.
    """
    parts = split(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    sock = reach.connect(host, port, timeout)
    if parts.scheme == "http":
        return sock
    try:
        context = context or tls_context()
        return context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise


def tls_context() -> ssl.SSLContext:
    """Return a context that verifies certificates with the machine's authorities."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Exchange:
    """A GET over a connection of its own. Owns ``sock``, also if the request fails."""

    def __init__(self, sock: socket.socket, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.sock = sock
        self._response: http.client.HTTPResponse | None = None
        parts = urlsplit(url)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        default = {"User-Agent": "sandkeep", "Connection": "close"}
        try:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port or _PORTS[parts.scheme])
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.sock = sock
            # Spelled out: http.client would add the port of http to names reached by https.
            host = parts.netloc.rpartition("@")[2]
            connection.request("GET", target, headers={"Host": _ascii(host), **default, **headers})
            self._response = connection.getresponse()
        except BaseException:
            self.close()
            raise

    @property
    def response(self) -> http.client.HTTPResponse:
        assert self._response is not None
        return self._response

    @property
    def redirect(self) -> str | None:
        """The absolute URL that the response redirects to, if it does."""
        location = self.response.headers.get("Location")
        if self.response.status not in _REDIRECTS or not location:
            return None
        # Some servers send spaces and other bytes that a request line cannot have.
        return urljoin(self.url, quote(location, safe=punctuation, encoding="latin-1", errors="replace"))

    def close(self) -> None:
        """Close both: an unread response keeps the socket open after the socket object is closed."""
        if self._response is not None:
            self._response.close()
        self.sock.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ascii(netloc: str) -> str:
    return netloc if netloc.isascii() else netloc.encode("idna").decode()
