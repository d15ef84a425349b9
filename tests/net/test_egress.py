"""What a session reaches under each kind of policy, as root and rootless."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sandkeep.policy import NetworkPolicy
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.net.network_lab import echo, hello, network

CUSTOM = NetworkPolicy.custom

pytestmark = pytest.mark.skipif(
    not os.path.exists("/usr/bin/curl"), reason="no curl in the host's /usr: apt-get install curl"
)


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


@everywhere
def test_allow_all_reaches_names_and_allowed_addresses(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box()
        assert box.session.barriers["barriers"]["network-steering"] == {"state": "in force"}
        assert box.sh(f"curl -sS http://one.test:{port}/") == "hello from one.test"
        assert box.sh("getent ahostsv4 one.test | grep -c ^198.18.") != "0"
        assert "Could not resolve host" in box.sh("curl -sS http://nowhere.invalid/")


@everywhere
def test_deny_all_answers_nothing_dns_included(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box(NetworkPolicy.deny_all())
        assert "Could not resolve host" in box.sh(f"curl -sS http://one.test:{port}/")
        out = box.sh(f"curl -sS http://127.0.0.2:{port}/; curl -sS http://93.184.216.34:{port}/")
        assert "hello" not in out
        assert box.events("dns", name="one.test", verdict="deny")
        assert box.events("connection", address="93.184.216.34", verdict="deny")


@everywhere
def test_custom_reaches_listed_names_only(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(hello)
        box = net.box(CUSTOM(["one.test"]))
        assert box.sh(f"curl -sS http://one.test:{port}/") == "hello from one.test"
        assert "Could not resolve host" in box.sh(f"curl -sS http://two.test:{port}/")
        denied = box.events("dns", name="two.test")[0]
        assert denied.data["verdict"] == "deny" and "not an allowed domain" in denied.data["reason"]
        allowed = box.events("connection", name="one.test")[0]
        assert (allowed.data["verdict"], allowed.data["rule"], allowed.data["port"]) == (
            "allow",
            "one.test",
            port,
        )


@everywhere
def test_a_server_that_speaks_first_and_half_closed_connections_work(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(echo)
        box = net.box(CUSTOM(["one.test"]))
        connect = f"exec 3<>/dev/tcp/one.test/{port}; read -r a <&3; echo $a"
        script = f"{connect}; echo hi >&3; read -r a <&3; echo $a"
        assert box.sh(script) == "220 ready\nhi"
        python = (
            "import socket,sys; s=socket.create_connection(('one.test',int(sys.argv[1])));"
            "s.sendall(b'x'*3000000); s.shutdown(1); n=0\n"
            "while d:=s.recv(65536): n+=len(d)\n"
            "print(n)"
        )
        assert box.sh(f'python3 -c "{python}" {port}') == str(3_000_000 + len("220 ready\n"))


@everywhere
def test_a_change_of_policy_cuts_what_it_no_longer_allows(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(echo)
        box = net.box(CUSTOM(["one.test", "two.test"]))

        async def both() -> tuple[str, str]:
            one = await box.start(f"exec 3<>/dev/tcp/one.test/{port}; cat <&3; echo ended")
            two = await box.start(f"exec 3<>/dev/tcp/two.test/{port}; cat <&3; echo ended")
            return one, two

        one, _two = net.do(both())
        net.until(lambda: len(box.events("connection", verdict="allow")) == 2)
        box.policy(CUSTOM(["two.test"]))
        assert net.do(box.output(one)).endswith("ended")
        assert box.events("cut", name="one.test")
        assert not [event for event in box.events("cut") if event.data["name"] == "two.test"]
        assert "Could not resolve" in box.sh(f"curl -sS http://one.test:{port}")


@everywhere
def test_bytes_are_counted_into_the_session(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(echo)
        box = net.box()
        box.sh(f"exec 3<>/dev/tcp/one.test/{port}; head -c 100000 /dev/zero >&3; head -c 100010 <&3 | wc -c")
        net.until(lambda: box.row().egress_bytes >= 100_000 and box.row().ingress_bytes >= 100_010)
        assert box.row().egress_bytes == 100_000


@everywhere
def test_netd_killed_means_no_network_and_then_the_same_policy(lab: Lab) -> None:
    with network(lab) as net:
        port, web = net.serve(echo), net.serve(hello)
        box = net.box(CUSTOM(["one.test"]))
        cat = net.do(box.start(f"exec 3<>/dev/tcp/one.test/{port}; cat <&3; echo cut"))
        net.until(lambda: box.events("connection", verdict="allow"))
        before = net.engine.network.pid
        assert before is not None
        os.kill(before, 9)
        assert net.do(box.output(cat)).endswith("cut")
        assert box.sh(f"curl -sS http://one.test:{web}/") == "hello from one.test"
        assert "Could not resolve" in box.sh(f"curl -sS http://two.test:{web}/")
        assert net.engine.network.pid not in (None, before)


@everywhere
def test_connections_survive_a_restart_of_the_engine(lab: Lab) -> None:
    with network(lab) as net:
        port = net.serve(echo)
        box = net.box(CUSTOM(["one.test"]))
        connect = f"exec 3<>/dev/tcp/one.test/{port}; read -r a <&3"
        script = f"{connect}; sleep 1.5; echo again >&3; read -r a <&3; echo $a"
        process = net.do(box.start(script))
        net.until(lambda: box.events("connection", verdict="allow"))
        pid = net.engine.network.pid
        net.reopen()
        assert net.do(box.output(process)) == "again"
        net.until(lambda: net.engine.network.pid)
        assert net.engine.network.pid == pid


@everywhere
def test_netd_has_no_privileges_files_or_company(lab: Lab) -> None:
    with network(lab) as net:
        net.box()
        pid = net.engine.network.pid
        with open(f"/proc/{pid}/status", encoding="ascii") as handle:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in handle if ":\t" in line)
        assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
        assert status["NSpid"].split()[-1] == "1"
        uids = set(status["Uid"].split())
        assert len(uids) == 1
        if lab.driver.mode == "root":
            assert 0x6FFF_0000 <= int(uids.pop()) < 0x7000_0000
            assert os.listdir(f"/proc/{pid}/root") == []
        assert ("netd is less confined than it could be", {}) not in [(text, {}) for text, _ in net.log]
