"""Under systemd with cgroup v2: restarts while sessions live, and limits that hold wherever it is started.

The units are those of docs/operating.md, word for word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vm import lab
from tests.vm.conftest import Machines
from tests.vm.machine import How, Machine, Result

KERNEL = "6.1"
PAGE = (lab.ROOT / "docs/operating.md").read_text()
UNITS = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
(SET_UP,) = re.findall(r"```sh\n(useradd .*?)```", PAGE, re.DOTALL)
LONG_RUN = pytest.mark.long
USERS = ("User=", "user manager")
EVERYDAY = ("alice", "login")
"""The place most people start from."""
LONG = 900.0
"""Seconds; machines are emulated, and the one that does it may be busy."""

# A virtual environment that can be upgraded, at the place the units name.
OWN_ENVIRONMENT = """
    rm /opt/sandkeep
    cp -a /opt/lab/venv /opt/sandkeep
    sed -i '1s|/opt/lab/venv|/opt/sandkeep|' /opt/sandkeep/bin/sandkeep
"""
NEWER_WHEEL = """
import re, sys, zipfile
old, new = sys.argv[1], sys.argv[2]
version = re.search(r"sandkeep-([^-]+)-", old).group(1)
with zipfile.ZipFile(old) as source, zipfile.ZipFile(f"/root/sandkeep-{new}-py3-none-any.whl", "w") as target:
    for name in source.namelist():
        data = source.read(name)
        if ".dist-info/" in name or name == "sandkeep/version.py":
            data = data.replace(version.encode(), new.encode())
        target.writestr(name.replace(f"sandkeep-{version}.dist-info", f"sandkeep-{new}.dist-info"), data)
"""


@pytest.fixture(scope="module")
def machine(machines: Machines) -> Iterator[Machine]:
    with machines(KERNEL, memory=3072) as made:
        made.run(OWN_ENVIRONMENT)
        made.run(SET_UP)
        yield made


class Service:
    """The server as one of the units of the page."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine, self.kind = machine, kind
        self.number = ("root", "User=", "user manager").index(kind)
        self.user = ("root", "sandkeep", "alice")[self.number]
        self.own_manager = kind == "user manager"
        self.data = "/home/alice/.local/share/sandkeep" if self.own_manager else "/srv/sandkeep"
        self.sleep = f"sleep {90000 + self.number}"

    def install(self) -> None:
        path = "/etc/systemd/system"
        if self.own_manager:
            path = "/home/alice/.config/systemd/user"
            self.machine.run(["mkdir", "-p", path], user="alice", how="plain")
        self.machine.write(f"{path}/sandkeep.service", UNITS[self.number], user=self.unit_owner)
        self.ctl("daemon-reload")
        self.ctl("enable --now sandkeep")
        self.await_server()

    @property
    def unit_owner(self) -> str:
        return self.user if self.own_manager else "root"

    def ctl(self, command: str, *, check: bool = True) -> Result:
        manager = "systemctl --user" if self.own_manager else "systemctl"
        return self.machine.run(
            f"{manager} {command}", user=self.unit_owner, how="plain", timeout=LONG, check=check
        )

    def scopes(self) -> list[str]:
        listed = self._scope_manager("list-units --plain --no-legend 'sandkeep-*.scope'").out
        return [line.split()[0] for line in listed.splitlines()]

    def show_scope(self, scope: str, name: str) -> str:
        return self._scope_manager(f"show -p {name} --value {scope}").out.strip()

    def stop_scopes(self) -> None:
        self._scope_manager("stop 'sandkeep-*.scope'")

    def _scope_manager(self, command: str) -> Result:
        """The manager that gives the scopes."""
        manager = "systemctl" if self.user == "root" else "systemctl --user"
        return self.machine.run(f"{manager} {command}", user=self.user, how="plain", timeout=LONG)

    def main_pid(self) -> str:
        return self.ctl("show -p MainPID --value sandkeep").out.strip()

    def cli(self, *arguments: str) -> str:
        environment = {"SANDKEEP_HOME": self.data}
        argv = ["/opt/sandkeep/bin/sandkeep", *arguments]
        return self.machine.run(argv, user=self.user, how="plain", env=environment, timeout=LONG).out

    def await_server(self) -> None:
        asks = f"curl -sf --unix-socket {self.data}/server.sock http://localhost/health"
        self.machine.run(f"until {asks}; do sleep 0.3; done", timeout=LONG)
        assert self.ctl("is-active sandkeep").out == "active\n"

    def running(self) -> str:
        """Which process the session's is: its number and when it started."""
        return self.machine.run(
            f"for pid in $(pgrep -fx '{self.sleep}'); do echo $pid $(cut -d' ' -f22 /proc/$pid/stat); done"
        ).out

    def limits_in_force(self) -> dict[str, str]:
        """Of the session's own group, which holds its processes or groups of theirs."""
        (pid, _) = self.running().split()
        path = self.machine.read(f"/proc/{pid}/cgroup").strip().removeprefix("0::")
        (group,) = re.findall(r"(.*/sandkeep-\w+-\w+\.scope/[^/]+/[^/]+)", path)
        files = ("memory.max", "pids.max", "cpu.max")
        lines = self.machine.run([*("tail", "-qn1"), *(f"/sys/fs/cgroup{group}/{name}" for name in files)])
        return dict(zip(files, lines.out.splitlines(), strict=True))

    def upgrade(self) -> None:
        new = f"9.{self.number}"
        self.machine.run(
            f"python3 -c '{NEWER_WHEEL}' /opt/lab/wheels/sandkeep-*.whl {new} && /opt/sandkeep/bin/python3 "
            f"-m pip install --quiet --no-index --no-deps /root/sandkeep-{new}-*.whl",
            timeout=LONG,
        )
        self.ctl("restart sandkeep")
        self.await_server()
        assert new in self.machine.run("/opt/sandkeep/bin/sandkeep --version").out

    def remove(self) -> None:
        self.ctl("disable --now sandkeep", check=False)
        self.ctl("kill --signal=KILL --kill-whom=all sandkeep", check=False)
        self.stop_scopes()
        self.machine.run(f"rm -rf {self.data}; install -d -o sandkeep -g sandkeep -m 700 /srv/sandkeep")


@pytest.fixture(scope="module", params=["root", *(pytest.param(kind, marks=LONG_RUN) for kind in USERS)])
def service(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(machine, request.param)
    if made.user == "root":
        machine.run("rm -rf /srv/sandkeep")
    made.install()
    made.cli("create", "--name", "box", "--cpus", "1", "--memory", "2g", "--timeout", "5h", "--silent")
    made.cli("exec", "box", "--", "sh", "-c", f"setsid {made.sleep} >/dev/null 2>&1 </dev/null & echo begun")
    yield made
    made.remove()


def test_sessions_go_on_through_every_restart(service: Service) -> None:
    before, limits = service.running(), service.limits_in_force()
    assert len(before.split()) == 2
    assert limits["memory.max"] == str(2048 << 20)
    assert limits["cpu.max"] == "100000 100000"
    assert 1000 < int(limits["pids.max"]) <= 4096
    (first,) = service.scopes()

    def check(what: str) -> None:
        service.await_server()
        assert service.running() == before, what
        assert service.limits_in_force() == limits, what
        assert service.cli("exec", "box", "--", "echo", what) == f"{what}\n"
        assert first in service.scopes(), "the session's own scope stays"
        assert len(service.scopes()) <= 2, "scopes without a session are gone"

    check("start")
    service.ctl("set-property --runtime sandkeep MemoryMax=2500M CPUQuota=180%")
    service.ctl("restart sandkeep")
    check("restart")
    (new,) = set(service.scopes()) - {first}
    assert service.show_scope(new, "MemoryMax") == str(2500 << 20), "as the unit's"
    assert float(service.show_scope(new, "CPUQuotaPerSecUSec").removesuffix("s")) == 1.8
    killed = service.main_pid()
    service.machine.run(f"kill -KILL {killed}")
    check("crash")
    assert service.main_pid() != killed
    service.ctl("daemon-reload")
    check("daemon-reload")
    service.ctl("stop sandkeep")
    assert service.running() == before
    service.ctl("start sandkeep")
    check("stop and start")
    service.upgrade()
    check("upgrade")
    assert service.cli("run", "--rm", "--", "echo", "new") == "new\n", "new sessions can be made"


BOMB = "my $n = 0; while (defined(my $p = fork)) { if (!$p) { sleep 60000; exit } $n++ } print $n"


def test_one_session_cannot_use_up_everybodys_processes(service: Service) -> None:
    allowed = int(service.limits_in_force()["pids.max"])
    service.cli("create", "--name", "bomb", "--cpus", "1", "--memory", "2g", "--timeout", "5h", "--silent")
    try:
        started = int(service.cli("exec", "bomb", "--", "perl", "-e", BOMB))
        assert allowed * 0.95 < started < allowed, "its own limit ended it, and no smaller one"
        assert service.cli("exec", "box", "--", "echo", "a neighbour") == "a neighbour\n"
        assert service.cli("run", "--rm", "--", "echo", "a newcomer") == "a newcomer\n"
    finally:
        service.cli("rm", "bomb")
    for scope in service.scopes():
        assert service.show_scope(scope, "TasksMax") == "infinity"


def test_stopping_the_scopes_ends_every_session_and_keeps_its_files(service: Service) -> None:
    service.cli("exec", "box", "--", "sh", "-c", "echo kept >file")
    before = set(service.scopes())
    service.stop_scopes()
    assert service.running() == ""
    assert service.cli("exec", "box", "--", "cat", "file") == "kept\n"
    (new,) = service.scopes()
    assert new not in before, "the next zygote has one of its own"


# --- wherever it is started ----------------------------------------------------------------------------

PLACES = [
    ("root", "plain", "/system.slice/"),
    ("root", "service", "/system.slice/"),
    ("alice", "service", "/user.slice/user-1000.slice/user@1000.service/"),
    ("alice", "login", "/user.slice/user-1000.slice/user@1000.service/"),
    ("bob", "login", "/user.slice/user-1001.slice/user@1001.service/"),
]


def _tried(machine: Machine, user: str, how: How, *before: str) -> dict[str, Any]:
    """What ``limits.py`` reports when it is started by this user, in this way."""
    home = f"/var/tmp/limits-{user}-{how}-{len(before)}"
    argv = [*before, "/opt/lab/venv/bin/python3", "/opt/lab/guest/limits.py"]
    done = machine.run(argv, user=user, how=how, env={"SANDKEEP_HOME": home}, timeout=LONG)
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("user", "how", "below"),
    [
        pytest.param(*place, id=f"{place[0]}-{place[1]}", marks=() if place[:2] == EVERYDAY else LONG_RUN)
        for place in PLACES
    ],
)
def test_every_limit_holds_wherever_it_is_started(machine: Machine, user: str, how: How, below: str) -> None:
    found = _tried(machine, user, how)
    enforced = {part: found["limits"][part] for part in ("memory", "pids", "cpu")}
    assert enforced == {"memory": "enforced", "pids": "enforced", "cpu": "enforced"}
    assert found["doctor"] == {"memory": "works", "pids": "works", "cpu": "works"}
    assert found["values"] == {
        "memory.max": str(2048 << 20),
        "pids.max": "60",
        "cpu.max": "100000 100000",
    }
    for capability in ("freeze", "kill", "oom", "process_groups"):
        version, path = found["groups"][capability]
        assert version == "v2"
        assert path.startswith(f"/sys/fs/cgroup{below}")
        assert re.search(r"/sandkeep-\w+-\w+\.scope/", path)
    assert found["hog"] == [137, "out_of_memory"]
    assert 0 < found["forks"] < 60
    assert found["throttled"] > 0
    assert found["checkpoint"]
    assert (found["left"], found["group_left"]) == ([], False)
    lingers = "ends them with bob's last login" if user == "bob" else "can be restarted while they run"
    assert lingers in found["scope"]["why"]


@pytest.mark.parametrize("user", [pytest.param("root", marks=LONG_RUN), "alice"])
@pytest.mark.parametrize(
    "hide",
    [
        pytest.param("umount /sys/fs/cgroup", id="none mounted"),
        pytest.param("mount -o remount,bind,ro /sys/fs/cgroup", id="read-only", marks=LONG_RUN),
    ],
)
def test_without_control_groups_a_session_says_what_it_has_instead(
    machine: Machine, user: str, hide: str
) -> None:
    """As in a container: the mount namespace is another one, and its control groups are no use."""
    home = f"/var/tmp/limits-{user}-hidden"
    switch = "" if user == "root" else f"setpriv --reuid {user} --regid {user} --init-groups "
    tries = f"{switch}env HOME=/home SANDKEEP_HOME={home} /opt/lab/venv/bin/python3 /opt/lab/guest/limits.py"
    done = machine.run(
        ["unshare", "--mount", "bash", "-c", f"{hide} && {tries}; rm -rf {home}"], timeout=LONG
    )
    found = json.loads(done.out.splitlines()[-1])
    assert found["limits"] | {"disk": ""} == {
        "memory": "watched",
        "pids": "per user",
        "cpu": "absent",
        "disk": "",
    }
    assert found["doctor"] == {"memory": "degraded", "pids": "degraded", "cpu": "missing"}
    assert all("/sys/fs/cgroup" in fix for fix in found["fixes"])


HINTS = {
    "a user without a manager": (
        "setpriv --reuid carol --regid carol --init-groups",
        ("the user carol has no bus", "loginctl enable-linger carol"),
    ),
    "a hidden PID 1": (
        "systemd-run -q --wait --pipe -p ProtectProc=invisible -p User=carol -p Delegate=yes",
        ("PID 1 is hidden", "ProtectProc="),
    ),
    "no system bus": (
        "systemd-run -q --wait --pipe -p InaccessiblePaths=/run/dbus -p Delegate=yes",
        ("the system has no bus", "message bus"),
    ),
}


@pytest.mark.parametrize("where", HINTS)
def test_doctor_says_why_there_is_no_scope_and_what_to_do(machine: Machine, where: str) -> None:
    starts, (why, fix) = HINTS[where]
    machine.run("id carol || useradd carol")
    doctor = f"{starts} env HOME=/tmp SANDKEEP_HOME=/tmp/carol /opt/lab/venv/bin/sandkeep doctor --json"
    said = machine.run(doctor, timeout=LONG).json()
    (scope,) = (found for found in said["findings"] if found["name"] == "systemd scope")
    assert scope["status"] == "degraded"
    assert why in scope["why"]
    assert fix in scope["fix"]
