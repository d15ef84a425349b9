"""The connection between netd and a session's supervisor: one operation, and the end of the registration."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.host.native.messages import NativeState
from sandkeep.linux import sockets
from sandkeep.shared import protocol
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.net.network_lab import Box, Net, hello, network
from tests.net.test_ingress import get, start_server, urls
from tests.polling import until


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def descriptors(net: Net, box: Box) -> list[int]:
    """What the supervisor gives the server for netd; the last one is the leash."""
    return list(net.do(net.engine.driver.listeners(net.engine._context.ref(box.session))))


def registered(net: Net) -> set[str]:
    async def stats() -> dict[str, Any]:
        channel = await net.engine.network.ready()
        answer, _ = await channel.request("stats")
        return answer

    return set(net.do(stats())["sessions"])


def state(net: Net, box: Box) -> NativeState:
    found = net.do(net.engine.driver.state(net.engine._context.ref(box.session)))
    assert isinstance(found, NativeState)
    return found


def request(leash: socket.socket, **body: Any) -> tuple[dict[str, Any], list[int]]:
    leash.sendall(protocol.encode({"id": 1, **body}))
    data, fds = sockets.receive(leash)
    ((answer, _),) = protocol.FrameDecoder().feed(data)
    assert answer is not None
    return answer, fds


def open_files(pid: int) -> int:
    """How many descriptors a supervisor has, where that can be seen: only root can."""
    return len(os.listdir(f"/proc/{pid}/fd")) if os.geteuid() == 0 else 0


REFUSED: list[dict[str, Any]] = [
    {"op": "session.stop"},
    {"op": "session.info"},
    {"op": "network.listeners"},
    {"op": "network.sockets", "count": 1},
    {"op": "process.start", "process": "cmd_1", "argv": ["true"]},
    {"op": "fs.read", "path": "/etc/passwd"},
    {"op": ["sockets"], "count": 1},
    {"count": 1},
    {"op": "sockets"},
    {"op": "sockets", "count": 0},
    {"op": "sockets", "count": 33},
    {"op": "sockets", "count": -1},
    {"op": "sockets", "count": 1.0},
    {"op": "sockets", "count": True},
    {"op": "sockets", "count": 1, "family": int(socket.AF_UNIX)},
    {"op": "sockets", "count": 1, "family": int(socket.AF_NETLINK)},
    {"op": "sockets", "count": 1, "family": 2.0},
]


@everywhere
def test_a_supervisor_gives_netd_sockets_and_nothing_else(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box()
        *listeners, end = descriptors(net, box)
        for fd in listeners:
            os.close(fd)
        with socket.socket(fileno=end) as leash:
            leash.settimeout(30)
            for body in REFUSED:
                answer, fds = request(leash, **body)
                assert answer["error"]["code"] == "invalid_request" and not fds, body
            for family in (socket.AF_INET, socket.AF_INET6):
                answer, fds = request(leash, op="sockets", count=3, family=int(family))
                assert answer["ok"] == {"sockets": 3}
                made = [socket.socket(fileno=fd) for fd in fds]
                assert [sock.family for sock in made] == [family] * 3
                for sock in made:
                    sock.close()
        assert state(net, box).status == "running"


@everywhere
def test_an_older_server_can_still_ask_for_sockets_itself(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box()
        directory = os.open(f"{net.data_dir}/sessions/{box.session.id}", os.O_PATH | os.O_DIRECTORY)
        try:
            control = sockets.connect_in(directory, "supervisor.sock")
        finally:
            os.close(directory)
        with control:
            control.settimeout(30)
            answer, fds = request(control, op="network.sockets", count=2, family=int(socket.AF_INET))
        assert answer["ok"] == {"sockets": 2} and len(fds) == 2
        for fd in fds:
            os.close(fd)


@everywhere
def test_a_netd_that_floods_its_leash_or_drops_it_leaves_the_session_alone(lab: Lab) -> None:
    with network(lab) as net:
        box = net.box()
        pid = int(state(net, box).supervisor_pid)
        before = open_files(pid)
        flood = protocol.encode({"id": 1, "op": "sockets", "count": 32}) * 500
        for rubbish in (flood, b"\xff" * 4096, protocol.encode({"id": 1, "op": "sockets", "count": 8})):
            *listeners, end = descriptors(net, box)
            for fd in listeners:
                os.close(fd)
            with socket.socket(fileno=end) as leash:
                leash.setblocking(False)
                try:
                    leash.send(rubbish)  # and never read, and go while the supervisor works on it
                except BlockingIOError:
                    pass
        assert state(net, box).status == "running"
        until(lambda: open_files(pid) <= before)


@pytest.mark.slow
@everywhere
def test_the_end_of_a_supervisor_ends_its_registration_without_a_server(lab: Lab) -> None:
    with network(lab) as net:
        box, other = net.box(), net.box()
        netd = net.engine.network.pid
        assert netd is not None and registered(net) == {box.session.id, other.session.id}
        pids = [int(state(net, one).supervisor_pid) for one in (box, other)]
        net.do(net.engine.close())
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pids[0]}").exists())
        assert Path(f"/proc/{netd}").exists()  # it has the other one still
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{netd}").exists())
        net.engine = net.do(net._open())


@everywhere
def test_a_session_of_an_older_supervisor_keeps_its_network_and_says_how_to_get_its_ports(
    lab: Lab,
) -> None:
    """Such a supervisor gives the end of a pipe, which can be watched but not asked."""
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box(ports=(3000,))
        start_server(box, 3000)
        url = urls(net, box)[3000]
        assert get(net, f"{url}/x").status_code == 200
        reading, writing = os.pipe2(os.O_CLOEXEC)
        given = net.engine.driver.listeners

        async def listeners(ref: Any) -> list[int]:
            *fds, leash = await given(ref)
            os.close(leash)
            return [*fds, reading]

        net.engine.driver.listeners = listeners  # type: ignore[method-assign]
        pid = net.engine.network.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        net.until(lambda: net.engine.network.pid not in (None, pid))
        net.do(net.engine.network.ready())
        refused = get(net, f"{url}/x")
        assert refused.status_code == 503 and "Stop and resume this sandbox" in refused.text
        assert "one.test" in box.sh(f"curl -s http://one.test:{port}/")
        os.close(writing)
        net.until(lambda: box.session.id not in registered(net))
