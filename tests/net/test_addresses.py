"""Ports of sandboxes at addresses of their own, which every program on the machine can fetch."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests import fetching
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.net.network_lab import OPERATOR, Box, Net, network

RANGE = ip_network("127.64.0.0/10")
SERVER = (Path(__file__).parent / "port_server.py").read_text()


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def fetch(net: Net, program: str, url: str) -> str:
    """Beside the engine, which has a part in it."""
    return net.do(asyncio.to_thread(fetching.fetch, program, url))


def serving(net: Net, *, port: int = 3000) -> Box:
    box = net.box(ports=(port,))
    box.sh(f"cat > /tmp/server.py <<'END'\n{SERVER}\nEND")
    net.do(box.start(f"exec python3 /tmp/server.py {port}"))
    box.sh(f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&-; do sleep 0.02; done")
    return box


def urls(net: Net, box: Box) -> dict[int, str]:
    sandbox = net.engine.sandboxes.get(net.project, box.name).sandbox
    return {route.port: route.url for route in net.engine.network.routes(sandbox)}


def host_of(url: str) -> str:
    return url.removeprefix("http://").partition(":")[0]


@everywhere
def test_every_program_on_the_machine_fetches_the_url(lab: Lab) -> None:
    with network(lab) as net:
        box = serving(net)
        url = urls(net, box)[3000]
        assert ip_address(host_of(url)) in RANGE
        for program in fetching.PROGRAMS:
            said = fetch(net, program, f"{url}/{program}")
            assert said == f"GET /{program} {url.removeprefix('http://')} -"


@everywhere
def test_an_address_is_one_routes_and_stays_so_when_server_and_netd_end(lab: Lab) -> None:
    with network(lab) as net:
        one, two = serving(net), serving(net)
        first, second = urls(net, one)[3000], urls(net, two)[3000]
        assert first != second
        pid = net.engine.network.pid
        assert pid is not None
        net.reopen()
        net.do(net.engine.network.ready())
        assert net.engine.network.pid == pid, "netd outlives the engine"
        assert [urls(net, box)[3000] for box in (one, two)] == [first, second]
        os.kill(pid, 9)
        net.until(lambda: net.engine.network.pid not in (None, pid))
        net.do(net.engine.network.ready())
        assert [urls(net, box)[3000] for box in (one, two)] == [first, second]
        assert fetch(net, "python", first) == f"GET / {first.removeprefix('http://')} -"
        net.do(net.engine.sandboxes.update(net.project, one.name, {"ports": (4000,)}))
        with pytest.raises(AssertionError, match="404"):
            fetch(net, "python", first)
        assert fetch(net, "python", second).startswith("GET / ")
        net.do(net.engine.sandboxes.update(net.project, one.name, {"ports": (3000,)}))
        assert urls(net, one)[3000] == first
        assert fetch(net, "python", first).startswith("GET / ")


@everywhere
def test_only_loopback_is_listened_on_and_nobody_else_gets_an_address(lab: Lab) -> None:
    with network(lab) as net:
        url = urls(net, serving(net))[3000]
        host, _, number = url.removeprefix("http://").partition(":")
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError) as caught:
                thief.bind((host, int(number)))
            assert caught.value.errno == errno.EADDRINUSE
        ingress = net.engine.network._ports.address
        assert ingress is not None and ingress[1] == int(number)
        assert _devices(int(number)) == {"lo"}


def _devices(port: int) -> set[str]:
    """The devices that sockets listening on a port take connections from."""
    shown = subprocess.run(["ss", "-Htln", f"sport = :{port}"], capture_output=True, text=True, check=True)
    locals_ = [line.split()[3] for line in shown.stdout.splitlines()]
    return {local.partition("%")[2].partition(":")[0] for local in locals_}


@everywhere
def test_names_stay_where_the_operator_chose_an_address_or_a_domain(lab: Lab) -> None:
    for settings, ends in (
        (replace(OPERATOR, ingress_address="127.0.0.2"), ".localhost"),
        (replace(OPERATOR, ingress_domain="boxes.example"), ".boxes.example"),
    ):
        with network(lab, settings) as net:
            box = net.box(ports=(3000,))
            assert host_of(urls(net, box)[3000].replace("https:", "http:")).endswith(ends)
            ingress = net.engine.network._ports.address
            assert ingress is not None and ingress[0] == settings.ingress_address


@everywhere
def test_the_port_matters_more_than_the_addresses(lab: Lab) -> None:
    """Somebody has it at another address of the machine: it is kept at the one address, with names."""
    with socket.socket() as other:
        other.bind(("127.0.0.9", 0))
        other.listen()
        number = other.getsockname()[1]
        with network(lab, replace(OPERATOR, ingress_port=number)) as net:
            url = urls(net, net.box(ports=(3000,)))[3000]
            assert url.endswith(f".localhost:{number}")
