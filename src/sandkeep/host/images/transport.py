"""HTTP to one registry: authentication, redirects, retries. No caching, no threads, no files.

Credentials are sent to the registry and to the token service it names, never to the target of a redirect:
blobs are commonly served from another company's storage. Plain HTTP is used only for loopback or on request.

Every hop (the registry, redirects, the token service) is connected to as the caller's ``Access`` allows.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sandkeep import fetch
from sandkeep.errors import ImageError, LimitReached, NotFound
from sandkeep.fetch import NETWORK_ERRORS, Exchange
from sandkeep.host.images.reference import HUB, Reference
from sandkeep.reach import ANYWHERE, HINT, Reach, Unreachable

TIMEOUT = 30.0
ATTEMPTS = 5
_PAUSE = 0.2
_MOST_REDIRECTS = 5
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_MEANINGS = {
    401: "the registry answers 401: it wants other credentials",
    403: "the registry answers 403: it refuses",
    404: "the registry answers 404: there is no such image",
}
_PARAMETER = re.compile(r'([a-zA-Z]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Access:
    """What a caller's pull may do: which addresses it may use, what it trusts, and how much it is told."""

    reach: Reach = ANYWHERE
    """Which addresses the pull may connect to, at every hop."""
    insecure: bool = False
    """Allow plain HTTP and certificates of unknown authorities."""
    insecure_hosts: Collection[str] | None = None
    """Hosts and ports that ``insecure`` applies to; all of them when not given."""
    operator: bool = True
    """The operator is asking: show the registry's own messages, and use the machine's proxy and the
    credentials that ``docker login`` stored."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Access:
        return cls(**{**body, "reach": Reach(**body["reach"])})

    def trusts(self, netloc: str) -> bool:
        return self.insecure and (self.insecure_hosts is None or netloc in self.insecure_hosts)


OPERATOR = Access()


class RegistryTransport:
    """Requests about one repository. Safe to use from several threads."""

    def __init__(
        self,
        reference: Reference,
        *,
        auth: tuple[str, str] | None,
        access: Access,
        seconds: float | None = None,
    ) -> None:
        self._reference = reference
        self._access = access
        self._seconds = seconds
        self._open: set[socket.socket] = set()
        """Open connections, so that they can be closed: a slow server may send a byte now and then."""
        self._cutting = threading.Lock()
        self._late = False
        self._timer = threading.Timer(seconds or 0, self._cut)
        self._timer.daemon = True
        if seconds is not None:
            self._timer.start()
        # Stored credentials belong to the operator: other callers bring their own.
        self._credentials = auth or (stored_credentials(reference.host) if access.operator else None)
        self._authorization: str | None = None
        self._lock = threading.Lock()
        self._base = f"{self._scheme()}://{reference.endpoint}/v2/"

    def close(self) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        with self._cutting:
            self._late = True
            for sock in self._open:
                # On a duplicate: shutting down the TLS socket object would break the thread that reads it.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(sock.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Yield the response to a GET below this repository: 200, 206 or 416; raise for any other status."""
        url = f"{self._base}{self._reference.repository}/{path}"
        failure = "no answer"
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                exchange = self._send(url, dict(headers))
            except NETWORK_ERRORS as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise ImageError(
                        f"cannot trust {self._reference.host}: {error.verify_message}"
                    ) from error
                failure = self._told(error)
                if isinstance(error, Unreachable) and error.final:
                    break
                continue
            with self._closing(exchange) as response:
                if response.status in (200, 206, 416):
                    yield response
                    return
                failure = self._explain(response)
                if response.status not in _TRANSIENT:
                    kind = NotFound if response.status == 404 else ImageError
                    raise kind(f"{self._reference}: {failure}", image=str(self._reference))
        hint = None if self._access.operator else HINT
        raise ImageError(f"{self._reference}: {failure}", hint=hint, image=str(self._reference))

    def _told(self, error: Exception) -> str:
        if isinstance(error, Unreachable):
            return str(error)
        return (str(error) or type(error).__name__) if self._access.operator else "the connection broke off"

    # --- one request -----------------------------------------------------------------------------------

    def _send(self, url: str, headers: dict[str, str]) -> Exchange:
        """Send with authorization; follow redirects and answer one challenge."""
        challenged = False
        origin = url
        for _ in range(_MOST_REDIRECTS + 2):
            if _same_origin(url, origin) and self._authorization:
                headers["Authorization"] = self._authorization
            else:
                headers.pop("Authorization", None)
            exchange = self._once(url, headers)
            if exchange.response.status == 401 and not challenged and _same_origin(url, origin):
                challenge = exchange.response.headers.get_all("WWW-Authenticate") or []
                self._close(exchange)
                challenged = True
                self._answer(challenge)
                continue
            if exchange.redirect is not None:
                self._close(exchange)
                url = exchange.redirect
                self._check_scheme(url)
                continue
            return exchange
        raise ImageError(f"{self._reference}: too many redirects", image=str(self._reference))

    def _once(self, url: str, headers: Mapping[str, str]) -> Exchange:
        """Send one request on a new connection, which ``_cut`` can close at any time."""
        try:
            sock = self._connect(url)
            with self._cutting:
                if self._late:
                    sock.close()
                    raise self._too_late()
                self._open.add(sock)
            try:
                return Exchange(sock, url, headers)
            except BaseException:
                with self._cutting:
                    self._open.discard(sock)
                raise
        except NETWORK_ERRORS:
            if self._late:
                raise self._too_late() from None
            raise

    def _close(self, exchange: Exchange) -> None:
        with self._cutting:
            self._open.discard(exchange.sock)
        exchange.close()

    @contextlib.contextmanager
    def _closing(self, exchange: Exchange) -> Iterator[http.client.HTTPResponse]:
        try:
            yield exchange.response
            if self._late:
                raise self._too_late()  # a connection that ``_cut`` closed may look like one that ended
        except NETWORK_ERRORS:
            if self._late:
                raise self._too_late() from None
            raise
        finally:
            self._close(exchange)

    def _too_late(self) -> LimitReached:
        return LimitReached(
            f"{self._reference}: a pull may take {self._seconds:g} seconds",
            limit="pull_seconds",
            value=self._seconds,
        )

    def _connect(self, url: str) -> socket.socket:
        parts, reach = urllib.parse.urlsplit(url), self._access.reach
        if parts.scheme == "http":
            return fetch.connect(url, reach, timeout=TIMEOUT)
        context = fetch.tls_context()
        if self._access.trusts(parts.netloc):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self._access.operator and reach.proxy is None:
            proxy = urllib.request.getproxies().get("https")
            if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
                reach = replace(reach, proxy=proxy)
        return fetch.connect(url, reach, timeout=TIMEOUT, context=context)

    def _scheme(self) -> str:
        """Return the scheme to use: http only where it is allowed and the registry does not speak TLS."""
        if not self._plain_allowed(urllib.parse.urlsplit(f"//{self._reference.endpoint}")):
            return "https"
        try:
            exchange = self._once(f"https://{self._reference.endpoint}/v2/", {})
        except ssl.SSLCertVerificationError:
            return "https"
        except NETWORK_ERRORS:
            return "http"
        self._close(exchange)
        return "https"

    def _plain_allowed(self, parts: urllib.parse.SplitResult) -> bool:
        return self._access.trusts(parts.netloc) or _is_loopback(parts.hostname)

    def _check_scheme(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ImageError(f"{self._reference}: refused to follow a redirect to an invalid address")
        if parts.scheme != "https" and not (parts.scheme == "http" and self._plain_allowed(parts)):
            raise ImageError(
                f"{self._reference}: refused to go on over {parts.scheme} at {parts.netloc}",
                image=str(self._reference),
            )

    # --- authentication --------------------------------------------------------------------------------

    def _answer(self, challenges: list[str]) -> None:
        for challenge in challenges:
            scheme, _, text = challenge.partition(" ")
            if scheme.lower() == "bearer":
                with self._lock:
                    self._authorization = f"Bearer {self._token(dict(_PARAMETER.findall(text)))}"
                return
            if scheme.lower() == "basic" and self._credentials:
                self._authorization = self._basic()
                return

    def _basic(self) -> str:
        name, password = self._credentials or ("", "")
        return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm", "")
        self._check_scheme(realm)
        query = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        query.setdefault("scope", f"repository:{self._reference.repository}:pull")
        separator = "&" if "?" in realm else "?"
        headers = {"Authorization": self._basic()} if self._credentials else {}
        exchange = self._once(f"{realm}{separator}{urllib.parse.urlencode(query)}", headers)
        with self._closing(exchange) as response:
            if response.status != 200:
                raise ImageError(
                    f"{self._reference}: the token service refused: {self._explain(response)}",
                    hint="check the credentials given, or log in",
                    image=str(self._reference),
                )
            try:
                body = json.loads(response.read(1 << 20))
                return str(body.get("token") or body["access_token"])
            except (ValueError, KeyError, AttributeError):
                raise ImageError(f"{self._reference}: the token service sent no token") from None

    def _explain(self, response: http.client.HTTPResponse) -> str:
        """Return the registry's own message, shortened; unless for the operator, what its status means."""
        if not self._access.operator:
            return _MEANINGS.get(response.status, f"the registry answers {response.status}")
        detail = response.reason
        try:
            errors = json.loads(response.read(1 << 16)).get("errors") or []
            detail = "; ".join(str(item.get("message") or item.get("code")) for item in errors) or detail
        except (ValueError, AttributeError, *NETWORK_ERRORS):
            pass
        return f"{response.status} {detail}"


def stored_credentials(host: str) -> tuple[str, str] | None:
    """Return the credentials that ``docker login`` stored in plain text for ``host``."""
    directory = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    try:
        with open(f"{directory}/config.json", encoding="utf-8") as source:
            known = json.load(source).get("auths") or {}
    except (OSError, ValueError, AttributeError):
        return None
    keys = [host, f"https://{host}", f"http://{host}"]
    if host == HUB:
        keys.append("https://index.docker.io/v1/")
    for key in keys:
        entry = known.get(key) or {}
        try:
            name, colon, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
        except ValueError:
            continue
        if colon:
            return name, password
        if entry.get("username"):
            return str(entry["username"]), str(entry.get("password") or "")
    return None


def _is_loopback(host: str | None) -> bool:
    if host == "localhost" or (host or "").endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _same_origin(url: str, other: str) -> bool:
    one, two = urllib.parse.urlsplit(url), urllib.parse.urlsplit(other)
    return (one.scheme, one.netloc) == (two.scheme, two.netloc)
