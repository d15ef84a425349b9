"""A port of the machine that a sandbox was given by a name is reached, and nothing else of the machine is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sandkeep.engine.settings import NetworkSettings
from sandkeep.errors import AccessDenied, InvalidRequest
from sandkeep.policy import Matcher, NetworkPolicy, RequestMatch, Respond, Rule
from sandkeep.spec import HostPort, SandboxSpec
from tests.driver_lab import Lab
from tests.mode_runner import Ask, everywhere, opened
from tests.net.network_lab import NAMES, Box, Net, echo, hello, network, resolving

pytestmark = pytest.mark.skipif(
    not os.path.exists("/usr/bin/curl"), reason="no curl in the host's /usr: apt-get install curl"
)

PLAIN = NetworkSettings()
"""Nothing of this machine is opened by the operator."""
MODEL = "model.internal"
POLICIES = (NetworkPolicy.allow_all(), NetworkPolicy.deny_all(), NetworkPolicy.custom(["one.test"]))


@pytest.fixture(scope="module", params=("root", "single"))
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def get(box: Box, port: int, name: str = MODEL) -> str:
    return box.sh(f"curl -sS -m 30 http://{name}:{port}/")


def give(net: Net, box: Box, *granted: HostPort) -> None:
    changing = net.engine.sandboxes.update(net.project, box.name, {"host_ports": granted}, operator=True)
    net.do(changing)


@everywhere
def test_a_port_of_the_host_is_reached_by_its_name_under_every_policy(lab: Lab) -> None:
    with network(lab, PLAIN) as net:
        web, database = net.serve(hello), net.serve(echo)
        for policy in POLICIES:
            box = net.box(policy, host_ports=(HostPort(web, MODEL), HostPort(database, "db")))
            assert get(box, web) == f"hello from {MODEL}"
            # A protocol in which the server speaks first, and that ends one way before the other.
            talk = f"exec 3<>/dev/tcp/db/{database}; head -1 <&3; echo select >&3; head -1 <&3"
            assert box.sh(talk).split() == ["220", "ready", "select"]
            [event] = box.events("connection", name=MODEL, verdict="allow")
            assert event.data["rule"] == f"host port {web} as {MODEL}"
            assert (event.data["address"], event.data["port"]) == ("127.0.0.1", web)
            assert box.events("dns", name=MODEL, verdict="allow")


@everywhere
def test_nothing_else_of_the_host_is_reached(lab: Lab) -> None:
    with resolving(lab, allowed=(), names={**NAMES, MODEL: ["127.0.0.1"]}) as (net, server):
        given, other = net.serve(hello), net.serve(hello)
        server.addresses = {"rebind.example": ["127.0.0.1"], f"x.{MODEL}": ["127.0.0.1"]}
        for policy in (NetworkPolicy.allow_all(), NetworkPolicy.custom(["*"]), NetworkPolicy.deny_all()):
            box = net.box(policy, host_ports=(HostPort(given, MODEL),))
            assert get(box, given) == f"hello from {MODEL}"
            assert "hello" not in get(box, other)
            assert box.events("connection", name=MODEL, port=other, verdict="deny")
            for name in ("127.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "localhost"):
                assert "hello" not in get(box, given, name)
            for name in ("one.test", "rebind.example", f"x.{MODEL}", "internal"):
                assert "hello" not in get(box, given, name)
            address = box.sh(f"getent ahostsv4 {MODEL} | head -1 | cut -d' ' -f1")
            assert address.startswith("198.18.")
            assert "hello" not in get(box, other, address)
            stranger = net.box(policy)
            assert "hello" not in get(stranger, given)
            assert "hello" not in get(stranger, given, address)
        # The name is the grant's: no name server hears of it.
        assert MODEL not in {name for name, _ in server.asked}


@everywhere
def test_a_grant_comes_and_goes_while_the_session_runs_and_survives_restarts(lab: Lab) -> None:
    with network(lab, PLAIN) as net:
        port = net.serve(echo)
        box = net.box(NetworkPolicy.deny_all())
        hold = f"exec 3<>/dev/tcp/{MODEL}/{port} && head -1 <&3 && cat <&3; echo over"
        assert "ready" not in box.sh(hold)
        give(net, box, HostPort(port, MODEL))
        process = net.do(box.start(hold))
        assert box.events("connection", name=MODEL, verdict="allow")
        # Neither another policy nor a new engine or netd takes it away.
        box.policy(NetworkPolicy.custom(["two.test"]))
        net.reopen()
        give(net, box, HostPort(port, MODEL), HostPort(port, "other"))
        assert not [event for event in box._event_rows("network.cut") if event.data["name"] == MODEL]
        give(net, box, HostPort(port, "other"))
        assert net.do(box.output(process)).endswith("over")
        assert box.events("cut", name=MODEL)
        assert "ready" not in box.sh(hold)
        netd = net.engine.network.pid
        assert netd is not None
        os.kill(netd, 9)
        net.until(lambda: net.engine.network.pid not in (None, netd))
        net.until(lambda: "ready" in box.sh(f"exec 3<>/dev/tcp/other/{port} && head -1 <&3"))


@everywhere
def test_rules_of_a_policy_apply_to_a_port_of_the_host(lab: Lab) -> None:
    with network(lab, PLAIN) as net:
        port = net.serve(hello)
        admin = RequestMatch(path=Matcher(starts_with="/admin"))
        ruled = {MODEL: [Rule(Respond(403, body="ruled", content_type="text/plain"), match=admin)]}
        box = net.box(NetworkPolicy.custom(ruled), host_ports=(HostPort(port, MODEL),))
        assert get(box, port) == f"hello from {MODEL}"
        assert box.sh(f"curl -sS http://{MODEL}:{port}/admin") == "ruled"
        assert box.events("request", name=MODEL, path="/admin", status=403)


@everywhere
def test_the_server_itself_cannot_be_given(lab: Lab) -> None:
    with network(lab, PLAIN) as net:
        net.box()
        own = net.engine.network.own_ports[0]
        with pytest.raises(InvalidRequest, match="sandbox server itself"):
            net.box(host_ports=(HostPort(own, MODEL),))


@everywhere
def test_only_the_local_user_and_the_operators_list_give_ports(lab: Lab) -> None:
    with network(lab, NetworkSettings(host_ports=(5432,))) as net:
        sandboxes, free, listed = net.engine.sandboxes, HostPort(8000, MODEL), HostPort(5432, "db")
        with pytest.raises(AccessDenied) as refused:
            net.do(sandboxes.create(net.project, SandboxSpec(name="mine", host_ports=(listed, free))))
        assert refused.value.details["field"] == "host_ports"
        assert net.engine.store.sandboxes.find(net.project, "mine") is None
        box = net.box(name="given", host_ports=(free,), persistent=True)
        with pytest.raises(AccessDenied):
            net.do(sandboxes.fork(net.project, "given", {"name": "copy"}))
        with pytest.raises(AccessDenied):
            changes = {"host_ports": (free, HostPort(8001, MODEL))}
            net.do(sandboxes.update(net.project, "given", changes))
        # What it has may stay, what is listed may come, and all may go.
        net.do(sandboxes.update(net.project, "given", {"host_ports": (free, listed)}))
        forked = net.do(sandboxes.fork(net.project, "given", {"name": "copy", "host_ports": (listed,)}))
        assert sandboxes.spec_of(forked.sandbox).host_ports == (listed,)
        own = net.do(sandboxes.fork(net.project, "given", {"name": "twin"}, operator=True))
        assert sandboxes.spec_of(own.sandbox).host_ports == (free, listed)
        net.do(net.engine.sessions.stop(net.project, box.session.id))
        resumed = net.do(sandboxes.resume(net.project, "given"))
        assert sandboxes.spec_of(resumed.sandbox).host_ports == (free, listed)
        for name in ("copy", "twin"):
            net.do(sandboxes.destroy(net.project, name))
