"""Ports of sandboxes as their owner sees them."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator

import httpx
import pytest

from sandkeep.sync import Client
from tests import fetching
from tests.cli.program import Program
from tests.server.server_process import ServerProcess, running_server


@pytest.fixture(scope="module")
def protected(able: None) -> Iterator[ServerProcess]:
    with running_server(settings={"network": {"protect_routes": True, "ingress_port": 0}}) as server:
        yield server


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_the_token_of_a_protected_route_is_shown_to_its_owner(protected: ServerProcess, way: str) -> None:
    url, token = (f"unix://{protected.socket}", None) if way == "unix" else (protected.url, protected.token)
    with (
        Client(url=url, token=token, team=protected.team, project=protected.project) as client,
        client.create_sandbox(ports=[3000], persistent=False) as box,
    ):
        route = box.routes[0]
        assert route.token and route.token not in repr(route)
        assert route.link == f"{route.url}/?sandkeep_token={route.token}"
        assert client.get_sandbox(box.name).routes == box.routes
        named = {"SANDKEEP_TEAM": protected.team, "SANDKEEP_PROJECT": protected.project}
        cli = Program({"SANDKEEP_URL": url, **named, **({"SANDKEEP_TOKEN": token} if token else {})})
        shown = cli("config", "list", box.name, "--json").json["routes"]
        address = route.url.removeprefix("http://")
        assert shown == [{"port": 3000, "url": route.url, "token": route.token, "address": address}]
        assert route.link in cli("config", "list", box.name).text


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_every_program_here_fetches_the_url_of_a_port(server: ServerProcess, way: str) -> None:
    url, token = (f"unix://{server.socket}", None) if way == "unix" else (server.url, server.token)
    with (
        Client(url=url, token=token, team=server.team, project=server.project) as client,
        client.create_sandbox(ports=[3000]) as box,
    ):
        found = box.url(3000)
        for text in ("one", "two"):
            box.fs.write_text("page", text)
            listening = box.create_process("python3", ["-u", "-m", "http.server", "3000"])
            assert listening.stdout.readline()
            for program in fetching.PROGRAMS:
                assert fetching.fetch(program, f"{found}/page") == text
            box.stop()
            box.resume()
            assert box.url(3000) == client.get_sandbox(box.name).url(3000) == found


def test_a_url_that_few_resolvers_know_comes_with_an_address(able: None) -> None:
    settings = {"network": {"ingress_address": "127.0.0.2", "ingress_port": 0}}
    with (
        running_server(settings=settings) as server,
        Client(url=f"unix://{server.socket}") as client,
        client.create_sandbox(ports=[3000]) as box,
    ):
        box.fs.write_text("page", "found")
        assert box.create_process("python3", ["-u", "-m", "http.server", "3000"]).stdout.readline()
        route = box.routes[0]
        assert ".localhost:" in route.url and route.address.startswith("127.0.0.2:")
        request = urllib.request.Request(f"http://{route.address}/page", headers={"Host": route.host})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            assert answer.read() == b"found"


def test_a_port_is_answered_while_there_is_no_server(able: None) -> None:
    """More often than netd has sockets at hand, and with none at hand when the server is killed."""
    with (
        running_server(settings={"network": {"ingress_port": 0}}) as server,
        Client(url=f"unix://{server.socket}", team=server.team, project=server.project) as client,
        client.create_sandbox(ports=[3000]) as box,
    ):
        found = box.url(3000)
        box.fs.write_text("page", "inside")
        listening = box.create_process("python3", ["-u", "-m", "http.server", "3000"])
        assert listening.stdout.readline()
        server.stop(signal.SIGKILL)
        with httpx.Client(timeout=60, trust_env=False) as anyone:
            answers = [anyone.get(f"{found}/page").text for _ in range(20)]
        assert answers == ["inside"] * 20
        server.start()
        assert httpx.get(f"{found}/page", timeout=60, trust_env=False).text == "inside"


LOCAL_ONLY = "the URLs of sandbox ports work on this machine only"


@pytest.mark.parametrize(
    ("arguments", "network", "warned"),
    [
        (["--public-url", "https://sandboxes.example"], {}, True),
        (["--host", "0.0.0.0"], {}, True),
        ([], {}, False),
        (["--public-url", "https://sandboxes.example"], {"ingress_domain": "boxes.example"}, False),
        (["--public-url", "https://sandboxes.example"], {"ingress_address": "0.0.0.0"}, False),
    ],
)
def test_a_server_for_others_says_when_its_ports_are_for_this_machine_only(
    able: None, arguments: list[str], network: dict[str, str], warned: bool
) -> None:
    settings = {"network": {"ingress_port": 0, **network}, "pool": 0}
    with running_server(*arguments, settings=settings) as server:
        assert (LOCAL_ONLY in server.log()) is warned
        assert ("network.ingress_domain" in server.log()) is warned
