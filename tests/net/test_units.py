"""The parts without I/O: DNS messages, first bytes of connections, addresses that stand for names."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from ipaddress import IPv4Address, ip_address
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.net import dns, http, http1, sniff
from sandkeep.net.audit import Audit, SessionAudit
from sandkeep.net.egress import Refused, World
from sandkeep.net.names import RANGE, FakeNames
from sandkeep.net.resolver import ResolveFailed, Resolver, SessionResolver, name_servers
from sandkeep.net.secrets import fill_in, references
from sandkeep.net.sniff import TrafficKind
from sandkeep.policy import NetworkPolicy, Rule, Transform


def query(name: str, kind: int = dns.A) -> bytes:
    return dns.request(7, name, kind)


@given(st.binary(max_size=600))
def test_no_bytes_break_the_dns_parser(data: bytes) -> None:
    try:
        dns.question(data)
    except dns.Malformed:
        pass
    try:
        dns.response(query("a.test")[:2] + data, query("a.test"))
    except dns.Malformed:
        pass


@given(st.binary(max_size=400))
def test_a_damaged_answer_is_malformed_or_an_answer(tail: bytes) -> None:
    asked = query("a.test")
    good = dns.reply(dns.question(asked), dns.OK, addresses=(ip_address("192.0.2.1"),))
    try:
        dns.response(good[: len(asked)] + tail, asked)
    except dns.Malformed:
        pass


def test_a_question_and_its_answer_survive_the_wire() -> None:
    asked = query("Some.Example")
    question = dns.question(asked)
    assert (question.name, question.kind) == ("some.example", dns.A)
    addresses = (ip_address("192.0.2.1"), ip_address("192.0.2.2"))
    assert dns.response(dns.reply(question, dns.OK, addresses=addresses, ttl=9), asked) == dns.NameResponse(
        dns.OK, False, addresses, 9
    )


@pytest.mark.parametrize("label", [b"a.b", b"a b", b"a\0b", b"*", "ä".encode(), b"a/b"])
def test_names_that_can_be_read_two_ways_are_no_questions(label: bytes) -> None:
    body = bytes([len(label)]) + label + b"\4test\0" + struct.pack("!HH", 1, 1)
    with pytest.raises(dns.Malformed):
        dns.question(struct.pack("!HHHHHH", 1, 0x100, 1, 0, 0, 0) + body)


def test_an_answer_to_somebody_elses_name_gives_no_address() -> None:
    asked = query("a.test")
    other = dns.reply(dns.question(query("evil.test")), dns.OK, addresses=(ip_address("192.0.2.1"),))
    with pytest.raises(dns.Malformed):
        dns.response(other, asked)


# --- first bytes ---------------------------------------------------------------------------------------


def client_hello(name: str | None) -> bytes:
    """What a real TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_the_server_name_is_found_however_the_greeting_is_cut() -> None:
    hello = client_hello("one.test")
    assert sniff.sniff(hello) == (TrafficKind.TLS, "one.test")
    for size in range(1, len(hello)):
        assert sniff.sniff(hello[:size]).kind is TrafficKind.MORE
    body = hello[5:]
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    fragmented = b"".join(hello[:3] + struct.pack("!H", len(piece)) + piece for piece in pieces)
    assert sniff.sniff(fragmented) == (TrafficKind.TLS, "one.test")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"SSH-2.0-x\r\n", (TrafficKind.OTHER, None)),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", (TrafficKind.OTHER, None)),
        (b"GE", (TrafficKind.MORE, None)),
        (b"GET key\r\n", (TrafficKind.OTHER, None)),
        (b"OPTIONS rtsp://a/b RTSP/1.0\r\n", (TrafficKind.OTHER, None)),
        (b"GET / HTTP/1.1\r\nHost: One.Test:80\r\n\r\n", (TrafficKind.HTTP, "one.test")),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", (TrafficKind.INVALID, None)),
        (b"GET / HTTP/1.1\r\nX: y\nHost: b\r\nHost: a\r\n\r\n", (TrafficKind.INVALID, None)),
        (b"GET / HTTP/1.1\r\n\r\n", (TrafficKind.INVALID, None)),
        (b"PROPFIND / HTTP/1.1\r\nHost: b\r\n\r\n", (TrafficKind.HTTP, "b")),
        (b"x-own / HTTP/1.1\r\nHost: b\r\n\r\n", (TrafficKind.HTTP, "b")),
        (b"\r\n\n\r\nGET / HTTP/1.1\r\nHost: b\r\n\r\n", (TrafficKind.HTTP, "b")),
        (b"GET\t/\tHTTP/1.1\r\nHost: b\r\n\r\n", (TrafficKind.INVALID, None)),
        (b"PROPFIND / HT", (TrafficKind.MORE, None)),
        (b"\r\n", (TrafficKind.MORE, None)),
        (b"NICK somebody\r\n", (TrafficKind.OTHER, None)),
        (b"0033git-upload-pack /a.git\0host=b\0", (TrafficKind.OTHER, None)),
        (b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", (TrafficKind.INVALID, None)),
        (b"GET http://u@b/ HTTP/1.1\r\nHost: b\r\n\r\n", (TrafficKind.HTTP, "b")),
        (b"CONNECT evil:443 HTTP/1.1\r\nHost: a\r\n\r\n", (TrafficKind.HTTP, "evil")),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (TrafficKind.HTTP2, None)),
        (b"\x16\x03\x01\0\x04\x02\0\0\0", (TrafficKind.INVALID, None)),
    ],
)
def test_first_bytes_say_what_a_connection_is_for(
    data: bytes, expected: tuple[TrafficKind, str | None]
) -> None:
    assert sniff.sniff(data) == expected


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_break_the_sniffer(data: bytes, tls: bool) -> None:
    hello = client_hello("one.test") if tls else b""
    sniff.sniff(hello[:60] + data)


# --- names and the rest --------------------------------------------------------------------------------


def test_an_address_stands_for_one_name_until_long_after_it_is_forgotten() -> None:
    names = FakeNames(most=3)
    first = names.address("a")
    assert names.address("a") == first and names.name(first) == "a" and first in RANGE
    names.hold("a")
    seen = {first}
    for number in range(100):
        address = names.address(f"n{number}")
        assert address not in seen
        seen.add(address)
    assert names.name(first) == "a" and len(names) == 3
    names.release("a")
    names.address("last")
    assert names.name(first) is None
    assert names.name(IPv4Address("198.18.200.200")) is None


def test_a_flood_of_events_is_cut_down_to_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # All in one moment, however long that takes: in time some more are let through.
    monkeypatch.setattr(
        "sandkeep.net.audit.time", SimpleNamespace(monotonic=lambda: 1.0, time_ns=time.time_ns)
    )
    audit = Audit(lambda: None)
    session = SessionAudit("s", audit)
    for number in range(5000):
        session.record("network.dns", number=number)
    session.close()
    events, _ = audit.take(10_000)
    assert len(events) < 1200
    held_back = [event["data"]["count"] for event in events if event["kind"] == "network.suppressed"]
    assert len(events) - len(held_back) + sum(held_back) == 5000


def test_secrets_are_found_and_filled_in() -> None:
    rule = Rule(Transform((("authorization", "Bearer ${secret:a} ${secret:b.c}"), ("x", "$secret:d"))))
    policy = NetworkPolicy.custom({"one.test": [rule]})
    field = 'domains["one.test"][0].transform.headers["authorization"]'
    assert list(references(policy)) == [("a", field), ("b.c", field)]
    assert fill_in("Bearer ${secret:a}!", {"a": "1"}) == "Bearer 1!"
    with pytest.raises(KeyError):
        fill_in("${secret:a}", {})


def test_name_servers_are_read_from_resolv_conf() -> None:
    text = "# x\nnameserver 192.0.2.1\nsearch a.b\nnameserver fe80::1%eth0\nnameserver nonsense\n"
    assert name_servers(text) == ["192.0.2.1", "fe80::1%eth0"]


def test_an_answer_with_two_ends_is_passed_on_with_one() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            client = http1.ServerConnection(await http.connected(near))
            far.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\ntransfer-encoding: chunked\r\n\r\n"
                b"2\r\nhi\r\n0\r\n\r\n"
            )
            response = await client.send(http.Request(b"GET", b"/", b"one.test", []))
            assert [piece async for piece in response.body] == [b"hi"]
            assert response.headers == []
            response.done()
            await asyncio.sleep(0.01)  # for the transport to be gone

    asyncio.run(check())


def test_a_length_named_by_connection_costs_no_body() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            client = http1.ServerConnection(await http.connected(near))
            far.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            request = http.Request(b"POST", b"/", b"one.test", [], http.just(b"hello"), length=5)
            response = await client.send(request)
            await asyncio.sleep(0.01)
            response.done()
            await asyncio.sleep(0.01)  # for the transport to be gone
            sent = far.recv(4096)
            assert b"content-length: 5\r\n" in sent and sent.endswith(b"\r\n\r\nhello")

    asyncio.run(check())


def test_this_machine_is_reached_by_none_of_its_addresses_unless_the_operator_says_so() -> None:
    async def check() -> None:
        world = World(Resolver(), Audit(lambda: None), own_ports=frozenset({7}))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            place = listener.getsockname()
            # Any address of this machine: what is judged is that both ends have the same.
            with pytest.raises(Refused, match="this machine's own"):
                world.refuse_own(socket.create_connection(place), 80)
            world.operator_allowed = ("127.0.0.0/8",)
            with socket.create_connection(place) as sock:
                world.refuse_own(sock, 80)
            with pytest.raises(Refused, match="sandbox server itself"):
                world.refuse_own(socket.create_connection(place), 7)

    asyncio.run(check())


def test_a_name_that_does_not_exist_costs_the_same_however_often_it_is_asked() -> None:
    async def check() -> None:
        resolver = Resolver()
        with pytest.raises(ResolveFailed):
            await resolver.resolve("none.test")
        raised = []
        for _ in range(3):
            with pytest.raises(ResolveFailed) as caught:
                resolver.known("none.test")
            raised.append(len(caught.traceback))
        assert len(set(raised)) == 1

    asyncio.run(check())


def test_texts_in_events_have_an_end() -> None:
    audit = Audit(lambda: None)
    SessionAudit("s", audit).record("network.request", method="A" * 30_000, status=200)
    events, _ = audit.take(1)
    assert events[0]["data"] == {"method": "A" * 512, "status": 200}


def test_names_nobody_answers_for_are_one_sessions_problem() -> None:
    async def check() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
            silent.bind(("127.0.0.1", 0))
            place = f"127.0.0.1#{silent.getsockname()[1]}"
            resolver = Resolver([place], {"own.test": ["192.0.2.1"]})
            hostile, other = SessionResolver(resolver), SessionResolver(resolver)
            waiting = [asyncio.create_task(hostile.resolve(f"n{number}.test")) for number in range(200)]
            # Names that are asked for already cost nothing more.
            waiting += [asyncio.create_task(hostile.resolve("n0.test")) for _ in range(200)]
            asked = asyncio.create_task(other.resolve("real.test"))
            await asyncio.sleep(0.1)
            assert len([task for task in waiting if task.done()]) == 72
            assert not asked.done() and await hostile.resolve("own.test") == (ip_address("192.0.2.1"),)
            for task in (*waiting, asked):
                task.cancel()
            await asyncio.gather(*waiting, asked, return_exceptions=True)

    asyncio.run(check())


def test_requests_on_one_connection_are_all_answered_also_where_nothing_is_passed_on() -> None:
    async def check() -> None:
        async def refuse(request: http.Request) -> http.Response:
            return http.plain(403)

        async def trail(request: http.Request) -> http.Response:
            return http.Response(200, [], http.just(b"body"), trailers=[(b"x-sum", b"1")])

        asked = b"GET / HTTP/1.1\r\nHost: one.test\r\n"
        upgrade = b"Connection: upgrade\r\nUpgrade: websocket\r\n"
        received = await talk(refuse, (asked + b"\r\n") * 2 + asked + upgrade + b"\r\n" + asked + b"\r\n")
        assert received.count(b"HTTP/1.1 403") == 4
        older = await talk(trail, b"GET / HTTP/1.0\r\nHost: one.test\r\n\r\n")
        assert older.endswith(b"\r\n\r\nbody")
        newer = await talk(trail, asked + b"Connection: close\r\n\r\n")
        assert newer.endswith(b"0\r\nx-sum: 1\r\n\r\n")

    async def talk(respond: http.SendRequest, said: bytes) -> bytes:
        near, far = socket.socketpair()
        near.setblocking(False)
        stream = await http.accepted(near)
        reader, writer = await asyncio.open_connection(sock=far)
        writer.write(said)
        writer.write_eof()
        await http1.serve(stream, respond, scheme=b"http")
        stream.close()
        received = await reader.read()
        writer.close()
        await asyncio.sleep(0.01)  # for the transports to be gone
        return received

    asyncio.run(check())


def test_what_a_server_repeats_in_an_unreadable_answer_is_not_told() -> None:
    async def check() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            client = http1.ServerConnection(await http.connected(near))
            far.sendall(b"HTTP/1.1 200 OK\r\nno header: s3cr3t\r\n\r\n")
            with pytest.raises(http.BadMessage) as caught:
                await client.send(http.Request(b"GET", b"/", b"one.test", [(b"x-key", b"s3cr3t")]))
            assert "s3cr3t" not in str(caught.value)
            await asyncio.sleep(0.01)  # for the transport to be gone

    asyncio.run(check())
