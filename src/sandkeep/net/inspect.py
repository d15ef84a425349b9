"""Rules applied to requests: connections to domains with rules end here, and begin anew towards the server.

TLS is ended with a certificate of the installation's own authority, and begun again with the server's
certificate verified for the name that was judged. Every request is judged by itself: its host must be the
name the connection was made to, its path is put into one form both for judging and for sending, and the rules
in force at that moment decide. Values of secrets are put in here, and exist nowhere else outside the store.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from sandkeep.errors import HostCannot, InvalidRequest
from sandkeep.net import http, http1, http2, policy, secrets, sniff
from sandkeep.net.egress import Egress, Flow, Refused, dial
from sandkeep.net.http import BadMessage, HeaderList, Request, Response
from sandkeep.net.resolver import NoSuchName, ResolveFailed
from sandkeep.net.tls import Leaves
from sandkeep.net.tokens import Signer
from sandkeep.net.turns import Pace
from sandkeep.policy import Forward, Respond, Rule, Transform

_MOST_IDLE: Final = 8
_WIDE: Final = 16
"""HTTP/2 connections of a session that may have megabytes under way; the others together must not."""
_LONGEST_PATH: Final = 512
_REPEATABLE: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
"""Idempotent methods: a server may receive them twice."""
_ECHOED: Final = frozenset({b"TRACE", b"TRACK"})
"""Methods whose response shows the client the request that the server received."""


class Inspector:
    """State that all inspected connections share."""

    def __init__(self, leaves: Leaves, upstream: ssl.SSLContext, signer: Signer) -> None:
        self._leaves = leaves
        self.upstream = upstream
        self.signer = signer

    async def serve(self, egress: Egress, flow: Flow, kind: sniff.TrafficKind) -> None:
        """Serve an accepted connection until it ends."""
        assert flow.name is not None
        try:
            context = self._leaves.context(flow.name) if kind is sniff.TrafficKind.TLS else None
        except BaseException:
            flow.client.close()
            raise
        stream = await http.accepted(flow.client, context)
        connection = _Connection(self, egress, flow, secure=context is not None)
        scheme = b"https" if context is not None else b"http"
        try:
            if kind is sniff.TrafficKind.HTTP2 or stream.protocol == "h2":
                egress.http2 += 1
                try:
                    narrow = egress.http2 > _WIDE
                    await http2.serve(stream, connection.respond, scheme=scheme, narrow=narrow)
                finally:
                    egress.http2 -= 1
            else:
                await http1.serve(stream, connection.respond, scheme=scheme)
        except Exception as error:
            # The client went away, or the server broke off in the middle of a response.
            stream.abort()
            expected = isinstance(error, OSError | TimeoutError | BadMessage)
            if not expected and type(error).__module__.partition(".")[0] not in ("h11", "h2"):
                raise
        finally:
            connection.close()
            stream.close()


class _Connection:
    """One client connection, and the connections to servers made for it alone."""

    def __init__(self, inspector: Inspector, egress: Egress, flow: Flow, *, secure: bool) -> None:
        self._inspector = inspector
        self._egress = egress
        self._flow = flow
        self._secure = secure
        self._idle: list[http1.ServerConnection] = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def respond(self, request: Request) -> Response:
        started = time.monotonic()
        action, label = "pass", None
        try:
            rules = self._egress.rules(self._flow)
            rule, label = await self._judge(request, rules)
            action = _ACTIONS[type(rule.action)] if rule is not None else "pass"
            request.body = self._egress.counted(request.body, into=False)
            response = await self._carry_out(rule, rules, request)
            if response.upgraded is not None:
                self._leave_http(response, rules)
                response.count = self._egress.count
        except Refused as refused:
            self._record(request, "deny", str(refused), 403, started)
            return http.plain(403)
        except BadMessage as error:
            self._record(request, "deny", str(error), error.status, started)
            return http.plain(error.status)
        except (OSError, TimeoutError, ssl.SSLError, NoSuchName, ResolveFailed) as error:
            self._record(request, "allow", f"the server cannot be reached: {error}", 502, started, label)
            return http.plain(502)
        self._record(request, "allow", action, response.status, started, label)
        response.body = self._egress.counted(response.body, into=True)
        return response

    def _record(
        self,
        request: Request,
        verdict: str,
        reason: str,
        status: int,
        started: float,
        rule: str | None = None,
    ) -> None:
        path = request.target.partition(b"?")[0].decode("latin-1")
        self._egress.audit.record(
            "network.request",
            **self._flow.facts(),
            method=request.method.decode("latin-1"),
            path=path[:_LONGEST_PATH],
            verdict=verdict,
            reason=reason,
            rule=rule,
            status=status,
            milliseconds=round((time.monotonic() - started) * 1000),
        )

    # --- judging -----------------------------------------------------------------------------------------

    async def _judge(self, request: Request, rules: Sequence[Rule] | None) -> tuple[Rule | None, str | None]:
        """Return the rule for a request, and its name in events: its index among those of the domain."""
        if sniff.host_name(request.authority) != self._flow.name:
            host = request.authority.decode("latin-1")
            raise Refused(f"the request asks for {host}, not for {self._flow.name}")
        if rules is None:
            raise Refused("the policy no longer allows this")
        if b"#" in request.target:
            raise BadMessage("a fragment is not part of a request")  # some servers drop it, others do not
        path, mark, query = request.target.decode("latin-1").partition("?")
        try:
            path = policy.canonical_path(path)
            pairs = parse_qsl(query, keep_blank_values=True, encoding="utf-8", max_num_fields=1000)
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
            headers.append(("host", request.authority.decode("latin-1")))
            method = request.method.decode("latin-1")
            policy.refuse_ambiguous(rules, method=method, path=path, headers=headers)
            rule = await _slowly(
                policy.matching(rules, method=method, path=path, query=pairs, headers=headers)
            )
        except (InvalidRequest, ValueError) as error:
            raise BadMessage(str(error)) from None
        except (HostCannot, policy.TooMuchText) as error:
            raise Refused(str(error)) from None
        request.target = f"{path}{mark}{query}".encode("latin-1")
        place = next((index for index, other in enumerate(rules) if other is rule), None)
        return rule, None if place is None else f"{self._flow.name}[{place}]"

    def _leave_http(self, response: Response, rules: Sequence[Rule] | None) -> None:
        """Note the rules that allowed an upgrade: nothing is judged after it, so it ends when they change."""
        try:
            self._check_unchanged(rules)
        except Refused:
            response.done()
            raise
        self._flow.upgraded_under = rules

    def _check_unchanged(self, rules: Sequence[Rule] | None) -> None:
        """Refuse if the rules have changed since the request was judged."""
        if rules is None or self._egress.rules(self._flow) != rules:
            raise Refused("the policy changed while connecting")

    async def _carry_out(self, rule: Rule | None, rules: Sequence[Rule] | None, request: Request) -> Response:
        action = rule.action if rule is not None else None
        if isinstance(action, Respond):
            return _direct(action)
        if request.upgrade is not None and request.upgrade.lower() != b"websocket":
            request.upgrade = None
        if isinstance(action, Forward):
            return await self._forward(action.url, rules, request)
        headers = action.headers if isinstance(action, Transform) else ()
        if isinstance(action, Transform) and not (self._secure or action.secrets_over_http):
            for name, value in headers:
                if secrets.refers(value):
                    raise Refused(
                        f"the secret in {name} is not sent over plain HTTP, where it could be read on the way"
                    )
        if headers and request.method.upper() in _ECHOED:
            raise BadMessage("the response would show what a rule sets", 405)
        sent = list(request.headers)

        def prepare() -> None:
            """Fill in secrets at the last moment, so that one changed or removed since is not sent."""
            self._check_unchanged(rules)
            values = self._fill_in(headers)
            replaced = {name for name, _ in values}
            if b"host" in replaced:
                raise Refused("the host of a request cannot be replaced")
            request.headers = http.without(sent, replaced) + values

        return await self._pass_on(request, prepare)

    def _fill_in(self, headers: tuple[tuple[str, str], ...]) -> HeaderList:
        try:
            return [
                (name.lower().encode(), secrets.fill_in(value, self._egress.secrets).encode("latin-1"))
                for name, value in headers
            ]
        except KeyError as missing:
            problem = "does not exist, or does not fit into a header"
            raise Refused(f"the secret {missing.args[0]} {problem}") from None

    # --- servers -----------------------------------------------------------------------------------------

    async def _pass_on(self, request: Request, prepare: Callable[[], None]) -> Response:
        """Send to the server the client asked for, over an idle connection of this client if there is one."""
        while self._idle and request.length == 0 and request.method in _REPEATABLE:
            prepare()
            client = self._idle.pop()
            try:
                return await client.send(request)
            except (OSError, BadMessage):
                continue  # closed by the server while it was idle; nothing was lost with an empty body
        # Looked up and judged anew: the connection to the client may be hours old.
        await self._egress.find_addresses(self._flow)
        sock = await self._egress.connect(self._flow)
        context = self._inspector.upstream if self._secure else None
        stream = await http.connected(sock, context, self._flow.name)
        try:
            prepare()
        except BaseException:
            stream.close()
            raise
        return await http1.ServerConnection(stream, self._give_back).send(request)

    def _give_back(self, client: http1.ServerConnection) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(client)
        else:
            client.close()

    async def _forward(self, url: str, rules: Sequence[Rule] | None, request: Request) -> Response:
        """Send to another URL, with the original request described in headers and a signed token."""
        parts = urlsplit(url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        described = {
            "vercel-forwarded-host": self._flow.name or "",
            "vercel-forwarded-scheme": "https" if self._secure else "http",
            "vercel-forwarded-port": str(self._flow.port),
            "vercel-forwarded-path": request.target.decode("latin-1"),
            "vercel-sandbox-oidc-token": self._inspector.signer.token(
                audience=url.rstrip("/"), claims=self._egress.identity
            ),
        }
        request.headers = http.without(request.headers, (name.encode() for name in described))
        request.headers += [(name.encode(), value.encode("latin-1")) for name, value in described.items()]
        request.target = parts.path.rstrip("/").encode() + request.target
        request.authority = parts.netloc.rpartition("@")[2].encode()
        sock = await self._dial(host, parts.port or (443 if secure else 80))
        stream = await http.connected(sock, self._inspector.upstream if secure else None, host)
        try:
            self._check_unchanged(rules)
        except Refused:
            stream.close()
            raise
        return await http1.ServerConnection(stream).send(request)

    async def _dial(self, host: str, port: int) -> socket.socket:
        """Connect to where a rule forwards: any address that needs no permission of the operator."""
        literal = policy.literal_address(host)
        addresses = (literal,) if literal else await self._egress.resolver.resolve(host.lower())
        failure: Exception = Refused(f"{host} has no address that may be reached")
        for address in addresses:
            if not self._egress.world.open_to_all(address, port):
                continue
            try:
                sock = await dial(address, port, self._egress.world.limits.connect_seconds)
            except (OSError, TimeoutError) as error:
                failure = error
                continue
            self._egress.world.refuse_own(sock, port)
            return sock
        raise failure


async def _slowly(steps: Generator[None, None, Rule | None]) -> Rule | None:
    """Run a generator and return its value, yielding to other tasks between its steps."""
    pace = Pace()
    while True:
        try:
            next(steps)
        except StopIteration as found:
            rule: Rule | None = found.value
            return rule
        await pace.rest()


_ACTIONS: Final[Mapping[type[Any], str]] = {Respond: "respond", Forward: "forward", Transform: "transform"}


def _direct(action: Respond) -> Response:
    body = (action.body or "").encode()
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in action.headers]
    if action.content_type is not None:
        headers = [item for item in headers if item[0] != b"content-type"]
        headers.append((b"content-type", action.content_type.encode("latin-1")))
    if action.status_code not in (204, 205, 304):
        headers.append((b"content-length", str(len(body)).encode()))
    return Response(action.status_code, headers, http.just(body) if body else http.nothing())
