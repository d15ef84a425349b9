"""The sandbox one gets by saying nothing is a place to work: installing and cloning are as on any machine.

Each test runs in every mode, through a server and the SDK. Packages come from a server on loopback that the
operator's settings let sandboxes reach.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandkeep import embedded, sync
from sandkeep.host.images.hostimage.packages import apt_source, os_release
from tests.conftest import IS_ROOT, remove_tree
from tests.host.registries import HOST, Registries, registries
from tests.mode_runner import MODES
from tests.polling import ENOUGH


def run_scripts(data_dir: str, settings: dict[str, Any], scripts: list[str]) -> list[list[Any]]:
    """Exit status and output of each script, one after another in a new sandbox on a server of our own."""
    os.makedirs(data_dir, mode=0o700)
    Path(data_dir, "settings.json").write_text(json.dumps(settings))
    found = embedded.ensure_server(data_dir)
    pid = int(Path(data_dir, "server.lock").read_text())
    try:
        with (
            sync.Client(f"unix://{found.socket}") as client,
            client.create_sandbox(execution_time_limit=600) as box,
        ):
            return [_ran(box, script) for script in scripts]
    finally:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + ENOUGH
        while Path(data_dir, "server.sock").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def _ran(box: sync.Sandbox, script: str) -> list[Any]:
    done = box.run_process("bash", ["-c", f"exec 2>&1\n{script}"], capture_output=True)
    return [done.returncode, done.stdout_text]


@dataclass
class Machine:
    """What the scripts printed in one mode, by name, and what the registries were asked for meanwhile."""

    outputs: dict[str, str]
    asked: list[str]


def _scripts(url: str) -> dict[str, str]:
    scripts = {"git": f"git clone -q {url}/repo.git && cat repo/README"}
    if _there("pip", "python3"):
        scripts["pip"] = (
            f"export PIP_INDEX_URL={url}/simple PIP_TRUSTED_HOST={HOST} PIP_DISABLE_PIP_VERSION_CHECK=1\n"
            "pip install -q sk-six && python3 -c 'import sk_six; sk_six.main()' && sk-six"
        )
        scripts["sudo pip"] = scripts["pip"].replace("pip install", "sudo pip install --force-reinstall")
    if _there("npm", "node"):
        scripts["npm"] = f"npm install -g --registry {url} sk-cowsay >/dev/null && sk-cowsay"
    if _there("apt-get", "dpkg-deb"):
        # The registries stand in for a proxy to the distribution's archive, and have nothing to say.
        scripts["archive"] = f"sudo apt-get -qq update -o Acquire::http::Proxy={url} >/dev/null 2>&1; true"
        scripts["apt"] = (
            "f=/etc/apt/sources.list.d/test.list\n"
            f"echo 'deb [trusted=yes] {url}/apt ./' | sudo tee $f >/dev/null\n"
            "{ sudo apt-get update -o Dir::Etc::sourcelist=$f -o Dir::Etc::sourceparts=- &&\n"
            "sudo apt-get install -y sk-golang; } >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }\n"
            "sk-golang"
        )
    return scripts


def _there(*programs: str) -> bool:
    return all(os.path.exists(f"/usr/bin/{name}") for name in programs)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registries]:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    with registries(tmp_path_factory.mktemp("registries")) as found:
        yield found


@pytest.fixture(scope="module", params=MODES)
def machine(request: pytest.FixtureRequest, served: Registries, test_area: Path) -> Machine:
    mode, user = request.param, None
    if mode == "root" and not IS_ROOT:
        pytest.skip("needs real root")
    if mode != "root":
        user = request.getfixturevalue("ordinary_user" if mode == "subuid" else "single_user")
    settings = {"network": {"names": {HOST: ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"]}}
    scripts = _scripts(f"http://{HOST}:{served.port}")
    served.asked.clear()
    data_dir = str((test_area if user is None else user.home) / "default-box")
    try:
        arguments = (data_dir, settings, list(scripts.values()))
        done = run_scripts(*arguments) if user is None else user.call(run_scripts, *arguments, timeout=300)
    finally:
        remove_tree(data_dir)
    for name, (status, output) in zip(scripts, done, strict=True):
        assert status == 0, f"{name}: {output}"
    return Machine({name: output for name, (_, output) in zip(scripts, done, strict=True)}, [*served.asked])


@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ("git", "cloned\n"),
        ("pip", "six\nsix\n"),
        ("sudo pip", "six\nsix\n"),
        ("npm", "moo\n"),
        ("apt", "go\n"),
    ],
)
def test_the_default_user_installs_and_clones_as_on_any_machine(
    machine: Machine, what: str, printed: str
) -> None:
    if what not in machine.outputs:
        pytest.skip(f"this machine has no {what}")
    assert machine.outputs[what] == printed


def test_apt_asks_the_archive_of_the_distribution(machine: Machine) -> None:
    release = os_release(Path("/etc/os-release").read_text())
    if "archive" not in machine.outputs or apt_source(release, os.uname().machine) is None:
        pytest.skip(f"no archive is known for {release.get('ID')}")
    archive = "deb.debian.org/debian" if release["ID"] == "debian" else "ubuntu.com/ubuntu"
    index = f"{archive}/dists/{release['VERSION_CODENAME']}/InRelease"
    assert any(index in asked for asked in machine.asked), machine.asked


def test_the_archive_is_that_of_the_distribution_and_of_no_other() -> None:
    debian = apt_source({"ID": "debian", "VERSION_CODENAME": "trixie"}, "x86_64")
    assert debian is not None and debian[0] == "debian.sources"
    assert "Suites: trixie trixie-updates\n" in debian[1] and "Suites: trixie-security\n" in debian[1]
    ubuntu = apt_source({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, "aarch64")
    assert ubuntu is not None and "http://ports.ubuntu.com/ubuntu-ports\n" in ubuntu[1]
    assert apt_source({"ID": "linuxmint", "VERSION_CODENAME": "wilma"}, "x86_64") is None
    assert apt_source({"ID": "debian"}, "x86_64") is None
    assert os_release('# c\nID=debian\nNAME="a b"\nBAD=\'\n') == {"ID": "debian", "NAME": "a b"}
