"""Rules on requests: matched, changed, answered, forwarded, with TLS ended and begun anew."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from websockets.asyncio.server import Server, ServerConnection, serve

from sandkeep.errors import InvalidRequest, PathError
from sandkeep.policy import (
    Forward,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    RequestMatch,
    Respond,
    Rule,
    Transform,
)
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.net.network_lab import Recorder, inspecting

pytestmark = pytest.mark.skipif(
    not os.path.exists("/usr/bin/curl"), reason="no curl in the host's /usr: apt-get install curl"
)


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


@everywhere
def test_headers_are_set_on_matching_requests_only_and_the_session_trusts_us(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        rule = Rule(
            Transform((("Authorization", "Bearer injected"), ("X-Key", "1"))),
            RequestMatch(path=Matcher(starts_with="/v1/"), methods=("GET",)),
        )
        box = net.box(NetworkPolicy.custom({"one.test": [rule]}))
        url = f"https://one.test:{port}"
        for version in ("--http1.1", "--http2"):
            server.requests.clear()
            assert box.sh(f"curl -sS {version} {url}/v1/x?q=1") == f"GET /v1/x?q=1 HTTP/1.1 one.test:{port}"
            box.sh(f"curl -sS {version} -H 'authorization: mine' {url}/v1/x; curl -sS {version} {url}/v2")
            # To a server that makes variables of headers, an underscore is a hyphen.
            box.sh(f"curl -sS {version} -H 'x_key: mine' {url}/v1/y")
            seen = [headers.get("authorization") for _, headers, _ in server.requests]
            assert seen == ["Bearer injected", "Bearer injected", None, "Bearer injected"]
            assert "x_key" not in server.requests[-1][1] and server.requests[-1][1]["x-key"] == "1"
        decided = box.events("request", path="/v1/x", verdict="allow")
        assert decided[0].data["reason"] == "transform" and decided[0].data["status"] == 200
        assert "injected" not in json.dumps([dict(event.data) for event in box.events()])


@everywhere
def test_regular_expressions_match_paths_queries_and_headers(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        rules = [
            Rule(Respond(201), RequestMatch(path=Matcher(regex="^/v[0-9]+/"))),
            Rule(Respond(202), RequestMatch(query=(PairMatcher(Matcher(exact="q"), Matcher(regex="^a+$")),))),
            Rule(Respond(203), RequestMatch(headers=(PairMatcher(key=Matcher(regex="^x-[a-z]+$")),))),
        ]
        box = net.box(NetworkPolicy.custom({"one.test": rules}))
        curl = "curl -sS -o /dev/null -w '%{http_code} '"
        url = f"https://one.test:{port}"
        asked = (f"{url}/v12/x", f"{url}/vx/?q=aaa", f"-H 'X-Some: 1' {url}/", f"{url}/vx/?q=ab")
        assert box.sh("; ".join(f"{curl} {one}" for one in asked)) == "201 202 203 200"
        assert [line for line, _, _ in server.requests] == ["GET /vx/?q=ab HTTP/1.1"]


@everywhere
def test_a_regular_expression_made_to_be_slow_gets_no_more_text_than_it_can_take(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        slow = Rule(Respond(201), RequestMatch(path=Matcher(regex="((a|b)?){500}c$")))
        box = net.box(NetworkPolicy.custom({"one.test": [slow]}))
        url = f"https://one.test:{port}/$(printf 'ab%.0s' $(seq 10000))"
        assert box.sh(f"curl -sS -o /dev/null -w '%{{http_code}}' {url}") == "403"
        assert "a regular expression of a rule" in str(box.events("request")[0].data["reason"])
        assert box.sh(f"curl -sS -o /dev/null -w '%{{http_code}}' https://one.test:{port}/ab") == "200"


SPELLINGS = (
    *("//admin", "/.//admin", "/x/..//admin", "/%2fadmin", "/x%2Fadmin", "/\\\\admin", "/%5cadmin"),
    *("/;/admin", "/x/%3B/admin", "/%252e%252e/admin", "/%00/admin", "/%0aadmin", "/%c0%afadmin"),
)


@everywhere
def test_a_rule_that_denies_is_not_stepped_around_by_spelling(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test", "two.test"))
        denied = [
            Rule(Respond(403), RequestMatch(path=Matcher(starts_with="/admin"))),
            Rule(Respond(403), RequestMatch(methods=("DELETE",))),
            Rule(Transform((("x-key", "value"),))),
        ]
        other = Rule(Transform((("x-key", "value"),)))
        box = net.box(NetworkPolicy.custom({"one.test": denied, "two.test": [other]}))
        for version in ("--http1.1", "--http2"):
            curl = f"curl -sS {version} --path-as-is -o /dev/null -w '%{{http_code}} '"
            paths = "; ".join(f"{curl} 'https://one.test:{port}{path}'" for path in SPELLINGS)
            assert box.sh(paths).split() == ["400"] * len(SPELLINGS)
            methods = ("-X delete", "-X Delete", "-X POST -H 'X-HTTP-Method-Override: DELETE'")
            headers = ("-H 'x-original-url: /admin'", "-H 'X_Rewrite_Url: /admin'")
            asked = "; ".join(f"{curl} {one} https://one.test:{port}/" for one in (*methods, *headers))
            assert box.sh(asked).split() == ["400"] * 5
            assert server.requests == []
            # Nothing is wrong with them where no rule looks.
            assert box.sh(f"{curl} 'https://two.test:{port}/x//y%2fz'") == "200"
            assert box.sh(f"{curl} 'https://one.test:{port}/a%20b/c;d?u=//x%2f'") == "200"
            assert server.requests.pop(0)[0] == "GET /x//y%2fz HTTP/1.1"
            assert server.requests.pop(0)[0] == "GET /a%20b/c;d?u=//x%2f HTTP/1.1"
        assert "empty segment" in str(box.events("request", path="//admin")[0].data["reason"])


@everywhere
def test_direct_answers_never_contact_the_server(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        answer = Respond(418, (("X-Why", "rule"),), "no tea", "text/plain")
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(answer)]}))
        out = box.sh(f"curl -sSi --http1.1 https://one.test:{port}/")
        assert out.startswith("HTTP/1.1 418") and "x-why: rule" in out and out.endswith("no tea")
        body = "head -c 20000000 /dev/zero | curl -sS -o /dev/null -w '%{http_code}' --data-binary @- "
        assert box.sh(f"{body} https://one.test:{port}/").endswith("418")
        assert server.requests == []


@everywhere
def test_plain_http_is_ruled_too_and_bodies_pass_whole(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server, secure = Recorder(), Recorder()
        plain = net.serve(server)
        port = net.serve(secure, ssl=authority.server("one.test"))
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(Transform((("x-set", "1"),)))]}))
        box.sh(
            f"head -c 5000000 /dev/zero > /tmp/big; curl -sS --data-binary @/tmp/big http://one.test:{plain}/"
        )
        assert [(headers.get("x-set"), size) for _, headers, size in server.requests] == [("1", 5_000_000)]
        for version in ("--http1.1", "--http2"):
            box.sh(f"curl -sS {version} -T /tmp/big https://one.test:{port}/; ")
            box.sh(f"curl -sS {version} -T - https://one.test:{port}/ < /tmp/big")
        assert [size for _, _, size in secure.requests] == [5_000_000] * 4


@everywhere
def test_a_server_without_a_valid_certificate_is_not_talked_to(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("two.test"))
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(Transform((("x-key", "value"),)))]}))
        out = box.sh(f"curl -sS -o /dev/null -w '%{{http_code}}' https://one.test:{port}/")
        assert out == "502" and server.requests == []


@everywhere
def test_forwarded_requests_describe_the_original_and_carry_a_token_that_verifies(lab: Lab) -> None:
    with inspecting(lab, issuer="https://sandboxes.test") as (net, authority):
        target = Recorder()
        port = net.serve(target, ssl=authority.server("inner.test"))
        url = f"https://inner.test:{port}/hook"
        match = RequestMatch(query=(PairMatcher(key=Matcher(exact="via")),))
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(Forward(url), match)]}))
        out = box.sh("curl -sS --http1.1 -d data 'https://one.test:8443/a/b?via=1'")
        assert out == f"POST /hook/a/b?via=1 HTTP/1.1 inner.test:{port}"
        _, headers, size = target.requests[0]
        assert size == 4
        described = {name: headers[f"vercel-forwarded-{name}"] for name in ("host", "scheme", "port", "path")}
        assert described == {"host": "one.test", "scheme": "https", "port": "8443", "path": "/a/b?via=1"}
        claims = verified(headers["vercel-sandbox-oidc-token"], net.do(net.engine.network.jwks()))
        assert claims["aud"] == url and claims["iss"] == "https://sandboxes.test"
        assert claims["sandbox_name"] == box.name and claims["team_id"] == "team"


@everywhere
def test_requests_are_forwarded_to_literal_addresses_that_are_open_and_to_no_others(lab: Lab) -> None:
    with inspecting(lab) as (net, _):
        target = Recorder()
        for host, written in (("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")):
            place = f"{written}:{net.serve(target, host)}"
            box = net.box(NetworkPolicy.custom({"one.test": [Rule(Forward(f"http://{place}/hook"))]}))
            assert box.sh("curl -sS http://one.test/a?b=c") == f"GET /hook/a?b=c HTTP/1.1 {place}"
            assert target.requests.pop()[1]["vercel-forwarded-path"] == "/a?b=c"
        for url in ("http://10.1.2.3/hook", "https://[fd00::1]:8443/", "http://169.254.169.254/"):
            with pytest.raises(InvalidRequest, match="not listed by the operator") as caught:
                net.box(NetworkPolicy.custom({"one.test": [Rule(Forward(url))]}))
            assert caught.value.details["field"] == 'domains["one.test"][0].forwardURL'


def verified(token: str, keys: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    def data(text: str) -> bytes:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

    signed, _, signature = token.rpartition(".")
    header, body = (json.loads(data(part)) for part in signed.split("."))
    key = next(key for key in keys["keys"] if key["kid"] == header["kid"])
    numbers = rsa.RSAPublicNumbers(*(int.from_bytes(data(key[name]), "big") for name in ("e", "n")))
    numbers.public_key().verify(data(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    claims: dict[str, str] = body
    return claims


@everywhere
def test_secrets_are_referred_to_by_name_and_sealed_at_rest(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        policy = NetworkPolicy.custom(
            {"one.test": [Rule(Transform((("authorization", "Bearer ${secret:api-key}"),)))]}
        )
        with pytest.raises(InvalidRequest) as caught:
            net.box(policy)
        assert caught.value.details["field"] == 'domains["one.test"][0].transform.headers["authorization"]'
        net.do(net.engine.secrets.set(net.project, "api-key", "s3cr3t-first"))
        box = net.box(policy)
        box.sh(f"curl -sS https://one.test:{port}/")
        net.do(net.engine.secrets.set(net.project, "api-key", "s3cr3t-second"))
        box.sh(f"curl -sS https://one.test:{port}/")
        seen = [headers["authorization"] for _, headers, _ in server.requests]
        assert seen == ["Bearer s3cr3t-first", "Bearer s3cr3t-second"]
        assert [secret.name for secret in net.engine.secrets.list(net.project)] == ["api-key"]
        for version in ("--http1.1", "--http2"):
            # A server that answers it would show the sandbox what it received.
            traced = f"curl -sS {version} -X TRACE -o /dev/null -w '%{{http_code}}' https://one.test:{port}/"
            assert box.sh(traced) == "405"
        net.do(net.engine.secrets.remove(net.project, "api-key"))
        out = box.sh(f"curl -sS -o /dev/null -w '%{{http_code}}' https://one.test:{port}/")
        assert out == "403" and len(server.requests) == 2
        for name in ("store.db", "store.db-wal"):
            with open(f"{net.data_dir}/{name}", "rb") as handle:
                assert b"s3cr3t" not in handle.read()


@everywhere
def test_a_secret_is_not_sent_in_the_clear_unless_the_rule_says_so(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        plain, secure = Recorder(), Recorder()
        port = net.serve(plain)
        safe = net.serve(secure, ssl=authority.server("one.test"))
        net.do(net.engine.secrets.set(net.project, "key", "s3cr3t"))
        headers = (("x-key", "${secret:key}"), ("x-set", "1"))
        box = net.box(NetworkPolicy.custom({"one.test": [Rule(Transform(headers))]}))
        status = "curl -sS -o /dev/null -w '%{http_code}'"
        assert box.sh(f"{status} http://one.test:{port}/a; {status} https://one.test:{safe}/") == "403200"
        assert plain.requests == [] and secure.requests[0][1]["x-key"] == "s3cr3t"
        refused = box.events("request", path="/a", verdict="deny")
        assert refused[0].data["status"] == 403
        assert "x-key is not sent over plain HTTP" in str(refused[0].data["reason"])
        box.policy(NetworkPolicy.custom({"one.test": [Rule(Transform(headers, secrets_over_http=True))]}))
        assert box.sh(f"{status} http://one.test:{port}/") == "200"
        assert plain.requests[0][1]["x-key"] == "s3cr3t"


@everywhere
def test_a_session_cannot_be_in_the_way_of_its_policy_and_its_secrets(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        net.do(net.engine.secrets.set(net.project, "key", "first"))
        rule = Rule(Transform((("x-key", "${secret:key}"),)))
        hostile = net.box(NetworkPolicy.custom({"one.test": [rule]}))
        other = net.box(NetworkPolicy.custom({"one.test": [rule]}))
        status = f"curl -ksS -o /dev/null -w '%{{http_code}}' https://one.test:{port}/"
        assert hostile.sh(status) == other.sh(status) == "200"
        # Where the certificate is to be kept there is no room for it.
        hostile.sh(
            "sudo rm -rf /usr/local/share/ca-certificates /etc/ssl/certs;"
            "sudo touch /usr/local/share/ca-certificates /etc/ssl/certs"
        )
        net.do(net.engine.secrets.remove(net.project, "key"))
        assert hostile.sh(status) == other.sh(status) == "403"
        with pytest.raises(PathError):
            hostile.policy(NetworkPolicy.custom({"one.test": [Rule(Respond(418))]}))
        assert hostile.sh(status) == "418"
        # A list of authorities of any size is not taken into the server's memory.
        other.sh("sudo truncate -s 100G /etc/ssl/certs/ca-certificates.crt")
        other.policy(NetworkPolicy.custom({"one.test": [Rule(Respond(418))]}))
        assert other.sh(status) == "418"
        assert len(server.requests) == 2


@everywhere
def test_rules_set_on_a_running_session_apply_to_what_is_open(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test"))
        box = net.box(NetworkPolicy.custom(["one.test"]))
        # Without rules the client sees the server's own certificate, which it does not trust.
        assert "unable to get local issuer certificate" in box.sh(f"curl -sS https://one.test:{port}/")
        box.policy(NetworkPolicy.custom({"one.test": [Rule(Transform((("x-set", "1"),)))]}))
        assert box.sh(f"curl -sS https://one.test:{port}/").startswith("GET / HTTP/1.1")
        assert server.requests[-1][1]["x-set"] == "1"


@everywhere
def test_websockets_pass_through_rules(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        seen: list[str | None] = []
        held_open = asyncio.Event()

        async def talk(connection: ServerConnection) -> None:
            assert connection.request is not None
            seen.append(connection.request.headers.get("x-set"))
            async for message in connection:
                if message == "held":
                    held_open.set()
                    continue
                await connection.send(f"echo {message!s}")

        async def start() -> Server:
            return await serve(talk, "127.0.0.1", 0, ssl=authority.server("one.test"))

        server = net.do(start())
        try:
            port = next(iter(server.sockets)).getsockname()[1]
            box = net.box(NetworkPolicy.custom({"one.test": [Rule(Transform((("x-set", "1"),)))]}))
            box.sh(f"cat > /tmp/ws.py <<'END'\n{WEBSOCKET}\nEND")
            assert box.sh(f"python3 /tmp/ws.py one.test {port} hello") == "101 echo hello"
            assert seen == ["1"]
            # It is not judged any more once it is open, so it does not outlive the rules that let it.
            held = net.do(box.start(f"python3 /tmp/ws.py one.test {port} hello hold"))
            net.until(held_open.is_set)
            box.policy(NetworkPolicy.custom({"one.test": [Rule(Respond(403))]}))
            assert "cut off" in net.do(box.output(held))
            net.until(lambda: min(box.row().ingress_bytes, box.row().egress_bytes) > 0)
            assert box.events("cut", name="one.test")
        finally:
            server.close()
            net.do(server.wait_closed())


WEBSOCKET = """
import os, socket, ssl, sys
host, port, word = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
raw = socket.create_connection((host, port), 10)
sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
head = ("GET / HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", "")
sock.sendall("\\r\\n".join(head).encode())
stream = sock.makefile("rb")
status = stream.readline().split()[1].decode()
while stream.readline().strip():
    pass
def say(word):
    mask = os.urandom(4)
    sock.sendall(bytes([0x81, 0x80 | len(word)]) + mask + bytes(c ^ mask[i % 4] for i, c in enumerate(word)))
say(word)
_, size = stream.read(2)
print(status, stream.read(size).decode())
if len(sys.argv) > 4:
    sock.settimeout(50)
    say(b"held")
    try:
        print("cut off" if not stream.read(1) else "told something")
    except TimeoutError:
        print("still there")
    except OSError:
        print("cut off")
"""
