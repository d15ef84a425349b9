"""HTTP to one registry: authentication, redirects, retries. No caching, no threads, no files.

Credentials are sent to the registry and to the token service it names, never to where a redirect leads: blobs
are commonly served from somebody else's storage. Plain HTTP is used for loopback or when asked for only.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import re
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping

from sandkeep.errors import ImageError, NotFound
from sandkeep.host.images.reference import HUB, Reference

TIMEOUT = 30.0
ATTEMPTS = 5
_PAUSE = 0.2
_MOST_REDIRECTS = 5
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_PARAMETER = re.compile(r'([a-zA-Z]+)="([^"]*)"')

NETWORK_ERRORS = (OSError, http.client.HTTPException)
"""What a broken connection raises while a response is read; the caller may ask again."""


class Transport:
    """Requests about one repository. Safe to use from several threads."""

    def __init__(self, reference: Reference, *, auth: tuple[str, str] | None, insecure: bool) -> None:
        self._reference = reference
        self._insecure = insecure
        self._plain_allowed = insecure or _is_loopback(
            urllib.parse.urlsplit(f"//{reference.endpoint}").hostname
        )
        self._credentials = auth or stored_credentials(reference.host)
        self._authorization: str | None = None
        self._lock = threading.Lock()
        self._base = f"{self._scheme()}://{reference.endpoint}/v2/"

    @contextlib.contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET below this repository: 200, 206 or 416; anything else is raised."""
        url = f"{self._base}{self._reference.repository}/{path}"
        failure = "no answer"
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                connection, response = self._send(url, dict(headers))
            except NETWORK_ERRORS as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise ImageError(
                        f"cannot trust {self._reference.host}: {error.verify_message}"
                    ) from error
                failure = str(error) or type(error).__name__
                continue
            with contextlib.closing(connection), response:
                if response.status in (200, 206, 416):
                    yield response
                    return
                failure = self._explain(response)
                if response.status not in _TRANSIENT:
                    kind = NotFound if response.status == 404 else ImageError
                    raise kind(f"{self._reference}: {failure}", image=str(self._reference))
        raise ImageError(f"{self._reference}: {failure} (asked {ATTEMPTS} times)", image=str(self._reference))

    # --- one request -----------------------------------------------------------------------------------

    def _send(
        self, url: str, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send with authorization, following redirects and answering one challenge."""
        challenged = False
        origin = url
        for _ in range(_MOST_REDIRECTS + 2):
            if _same_origin(url, origin) and self._authorization:
                headers["Authorization"] = self._authorization
            else:
                headers.pop("Authorization", None)
            connection, response = self._once(url, headers)
            if response.status == 401 and not challenged and _same_origin(url, origin):
                challenge = response.headers.get_all("WWW-Authenticate") or []
                _close(connection, response)
                challenged = True
                self._answer(challenge)
                continue
            location = response.headers.get("Location")
            if response.status in _REDIRECTS and location:
                _close(connection, response)
                url = urllib.parse.urljoin(url, location)
                self._check_scheme(url)
                continue
            return connection, response
        raise ImageError(f"{self._reference}: too many redirects", image=str(self._reference))

    def _once(
        self, url: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(url)
        connection = self._connect(parts)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        try:
            connection.request("GET", target, headers={"User-Agent": "sandkeep", **headers})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _connect(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT)
        context = ssl.create_default_context()
        if self._insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        proxy = urllib.request.getproxies().get("https")
        if proxy and not urllib.request.proxy_bypass(host):
            via = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
            connection = http.client.HTTPSConnection(
                via.hostname or "", via.port, timeout=TIMEOUT, context=context
            )
            connection.set_tunnel(host, parts.port or 443)
            return connection
        return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT, context=context)

    def _scheme(self) -> str:
        """Plain HTTP only where it is allowed and nobody speaks TLS."""
        if not self._plain_allowed:
            return "https"
        try:
            connection, response = self._once(f"https://{self._reference.endpoint}/v2/", {})
        except ssl.SSLCertVerificationError:
            return "https"
        except NETWORK_ERRORS:
            return "http"
        _close(connection, response)
        return "https"

    def _check_scheme(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        plain = parts.scheme == "http" and (self._insecure or _is_loopback(parts.hostname))
        if parts.scheme != "https" and not plain:
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
        connection, response = self._once(f"{realm}{separator}{urllib.parse.urlencode(query)}", headers)
        with contextlib.closing(connection), response:
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
        """The registry's own words, in short."""
        detail = response.reason
        try:
            errors = json.loads(response.read(1 << 16)).get("errors") or []
            detail = "; ".join(str(item.get("message") or item.get("code")) for item in errors) or detail
        except (ValueError, AttributeError, *NETWORK_ERRORS):
            pass
        return f"{response.status} {detail}"


def stored_credentials(host: str) -> tuple[str, str] | None:
    """What ``docker login`` stored in plain for ``host``."""
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


def _close(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
    """Both: an unread response keeps the socket open after its connection is closed."""
    response.close()
    connection.close()


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
