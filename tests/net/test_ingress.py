"""Ports of sandboxes reached from outside, as root and rootless."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from sandkeep.policy import NetworkPolicy
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.net.network_lab import OPERATOR, Box, Net, network
from tests.polling import ENOUGH

SERVER = (Path(__file__).parent / "port_server.py").read_text()


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def start_server(box: Box, port: int) -> None:
    box.sh(f"cat > /tmp/server.py <<'END'\n{SERVER}\nEND")
    box.net.do(box.start(f"exec python3 /tmp/server.py {port}"))
    box.sh(f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&-; do sleep 0.02; done")


def urls(net: Net, box: Box) -> dict[int, str]:
    sandbox = net.engine.sandboxes.get(net.project, box.name).sandbox
    return {route.port: route.url for route in net.engine.network.routes(sandbox)}


def get(net: Net, url: str, **options: object) -> httpx.Response:
    """A request to a name below localhost, whatever this machine's resolver makes of such names."""
    return net.do(_get(url, options))


def parts(url: str) -> tuple[str, str]:
    host = url.removeprefix("http://")
    return f"http://127.0.0.1:{host.rpartition(':')[2]}", host


async def _get(url: str, options: dict[str, object]) -> httpx.Response:
    base, _, path = url.partition("//")[2].partition("/")
    origin, host = parts(f"http://{base}")
    headers = {"host": host, **dict(options.pop("headers", {}))}  # type: ignore[call-overload]
    async with httpx.AsyncClient(timeout=ENOUGH, trust_env=False) as client:
        method = str(options.pop("method", "GET"))
        return await client.request(method, f"{origin}/{path}", headers=headers, **options)  # type: ignore[arg-type]


@everywhere
def test_a_declared_port_is_reached_by_its_url_even_without_egress(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(NetworkPolicy.deny_all(), ports=(3000, 3001))
        start_server(box, 3000)
        url = urls(net, box)[3000]
        answer = get(net, f"{url}/hello?a=1")
        assert answer.status_code == 200
        assert answer.text == f"GET /hello?a=1 {parts(url)[1]} -"
        upload = get(net, f"{url}/upload", method="POST", content=b"x" * 3_000_000)
        assert upload.text == "3000000"
        silent = get(net, urls(net, box)[3001])
        assert silent.status_code == 502 and "Nothing is listening on port 3001" in silent.text
        assert get(net, f"{url}/garbage").status_code == 502
        assert box.events("ingress", path="/hello", status=200, port=3000)
        net.until(lambda: box.row().ingress_bytes >= 3_000_000)


@everywhere
def test_websockets_and_event_streams_pass(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(ports=(8080,))
        start_server(box, 8080)
        origin, host = parts(urls(net, box)[8080])

        async def talk() -> list[str]:
            port = int(origin.rpartition(":")[2])
            async with connect(f"ws://{host}/ws", host="127.0.0.1", port=port, proxy=None) as socket:
                said = []
                for word in ("one", "two"):
                    await socket.send(word)
                    said.append(str(await socket.recv()))
                return said

        async def listen() -> list[str]:
            """Each event is asked for when the one before has come: none waits for another."""
            seen = []
            async with (
                httpx.AsyncClient(timeout=ENOUGH, trust_env=False) as client,
                client.stream("GET", f"{origin}/events", headers={"host": host}) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line:
                        seen.append(line)
                        await client.get(f"{origin}/next", headers={"host": host})
            return seen

        assert net.do(talk()) == ["one", "two"]
        assert net.do(listen()) == ["data: 0", "data: 1", "data: 2"]


@everywhere
def test_ports_come_and_go_while_the_session_runs(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(ports=(3000,))
        start_server(box, 4000)
        first = urls(net, box)[3000]
        net.do(net.engine.sandboxes.update(net.project, box.name, {"ports": (4000,)}))
        assert get(net, urls(net, box)[4000]).status_code == 200
        assert get(net, first).status_code == 404
        net.do(net.engine.sandboxes.update(net.project, box.name, {"ports": ()}))
        assert urls(net, box) == {}


@everywhere
def test_what_is_open_ends_with_its_port_and_is_counted(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(ports=(3000, 8080))
        start_server(box, 8080)
        origin, host = parts(urls(net, box)[8080])

        async def talk() -> None:
            port = int(origin.rpartition(":")[2])
            async with connect(f"ws://{host}/ws", host="127.0.0.1", port=port, proxy=None) as socket:
                for _ in range(100):
                    await socket.send("x" * 120)
                    assert await socket.recv() == "x" * 120
                await net.engine.sandboxes.update(net.project, box.name, {"ports": (8080,)})
                await socket.send("still there")
                assert await socket.recv() == "still there"
                await net.engine.sandboxes.update(net.project, box.name, {"ports": (3000,)})
                with pytest.raises(ConnectionClosed):
                    await asyncio.wait_for(socket.recv(), ENOUGH)

        net.do(talk())
        net.until(lambda: min(box.row().ingress_bytes, box.row().egress_bytes) >= 12_000)


@everywhere
def test_a_host_header_reaches_only_the_sandbox_it_names_on_every_request(lab: Lab) -> None:
    with network(lab) as net:
        mine, other = net.box(ports=(3000,)), net.box(ports=(3000,))
        for box in (mine, other):
            start_server(box, 3000)
        origin, host = parts(urls(net, mine)[3000])
        _, another = parts(urls(net, other)[3000])

        async def on_one_connection() -> list[str]:
            async with httpx.AsyncClient(timeout=ENOUGH, trust_env=False) as client:
                answers = [await client.get(origin, headers={"host": name}) for name in (host, another, host)]
                return [answer.text.split()[2] for answer in answers]

        assert net.do(on_one_connection()) == [host, another, host]
        sandbox = net.engine.sandboxes.get(net.project, mine.name).sandbox
        label = net.engine.network.routes(sandbox)[0].subdomain
        named = get(net, origin, headers={"host": f"{label}.localhost"})
        assert named.text.split()[2] == f"{label}.localhost"
        foreign = (f"{label}.evil.test", f"x.{label}.localhost", label, f"{label}.localhost.evil.test")
        for name in ("localhost", "127.0.0.1", "127.1", f"x.{host}", f"{host}.localhost", *foreign):
            assert get(net, origin, headers={"host": name}).status_code == 404


@everywhere
def test_protected_routes_want_their_token_and_keep_it_from_the_sandbox(lab: Lab) -> None:
    with network(lab, replace(OPERATOR, protect_routes=True)) as net:
        box = net.box(ports=(3000,))
        start_server(box, 3000)
        sandbox = net.engine.sandboxes.get(net.project, box.name).sandbox
        route = net.engine.network.routes(sandbox)[0]
        assert route.token is not None
        assert get(net, route.url).status_code == 401
        assert get(net, route.url, headers={"x-sandkeep-token": "wrong"}).status_code == 401
        assert get(net, route.url, headers={"x-sandkeep-token": route.token}).status_code == 200
        first = get(net, f"{route.url}/a?b=1&sandkeep_token={route.token}")
        assert first.status_code == 302 and first.headers["location"] == "/a?b=1"
        cookie = first.headers["set-cookie"].partition(";")[0]
        again = get(net, f"{route.url}/a?b=1", headers={"cookie": f"mine=1; {cookie}"})
        assert again.text.endswith(" mine=1")
        # However often it is shown, and beside others that a page elsewhere may have set for all names.
        both = {"x-sandkeep-token": route.token, "cookie": f"mine=1; {cookie}"}
        shown = get(net, f"{route.url}/a?sandkeep_token=x&sandkeep_token={route.token}&b=1", headers=both)
        assert shown.text == f"GET /a?b=1 {parts(route.url)[1]} mine=1"
        tossed = get(net, route.url, headers={"cookie": f"{cookie}; sandkeep_token=other"})
        assert tossed.status_code == 200 and tossed.text.endswith(" -")


@everywhere
def test_a_token_leads_nowhere_else_and_no_variant_of_it_reaches_the_sandbox(lab: Lab) -> None:
    settings = replace(OPERATOR, protect_routes=True, ingress_domain="boxes.example")
    with network(lab, settings) as net:
        box = net.box(ports=(3000,))
        start_server(box, 3000)
        sandbox = net.engine.sandboxes.get(net.project, box.name).sandbox
        route = net.engine.network.routes(sandbox)[0]
        assert route.token is not None and net.engine.network._ports.address is not None
        base = f"http://{route.subdomain}.localhost:{net.engine.network._ports.address[1]}"
        # A browser takes two slashes, or a backslash, for another host.
        for path in ("//evil.test/x", "/\\\\evil.test/x", "///evil.test/x"):
            led = get(net, f"{base}{path}?sandkeep_token={route.token}")
            assert led.status_code == 302 and led.headers["location"] == "/evil.test/x"
        public = {"host": f"{route.subdomain}.boxes.example"}
        for more, secure in (({}, True), ({"x-forwarded-proto": "https"}, True)):
            led = get(net, f"{base}/?sandkeep_token={route.token}", headers={**public, **more})
            assert ("; Secure" in led.headers["set-cookie"]) is secure
        assert "; Secure" not in get(net, f"{base}/?sandkeep_token={route.token}").headers["set-cookie"]
        seen = get(
            net,
            f"{base}/head",
            headers={
                "x-sandkeep-token": route.token,
                "cookie": f"mine=1; sandkeep_token ={route.token}; SANDKEEP_TOKEN={route.token}",
                "referer": f"{base}/?sandkeep_token={route.token}",
                "x-other": f"a%20{route.token}",
            },
        )
        assert "mine=1" in seen.text and route.token not in seen.text and "andkeep_token" not in seen.text
        kept = get(net, f"{base}/cookie", headers={"x-sandkeep-token": route.token}).headers
        assert kept.get_list("set-cookie") == ["a=1; Path=/", "b=2"]


@everywhere
def test_a_server_on_the_other_loopback_address_is_found_after_netd_died(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box(ports=(5000,))
        box.sh(
            "cat > /tmp/six.py <<'END'\nimport http.server, socket\n"
            "class S(http.server.HTTPServer): address_family = socket.AF_INET6\n"
            "S(('::1', 5000), http.server.SimpleHTTPRequestHandler).serve_forever()\nEND"
        )
        net.do(box.start("cd /tmp; exec python3 six.py"))
        box.sh("until (exec 3<>/dev/tcp/::1/5000) 2>&-; do sleep 0.02; done")
        url = urls(net, box)[5000]
        assert get(net, url).status_code == 200
        pid = net.engine.network.pid
        assert pid is not None
        os.kill(pid, 9)
        net.until(lambda: net.engine.network.pid not in (None, pid))
        net.do(net.engine.network.ready())
        assert urls(net, box)[5000] == url
        assert get(net, url).status_code == 200
