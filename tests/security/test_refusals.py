"""A barrier the machine cannot build is refused by name, unless the operator agreed to do without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandkeep import sync
from sandkeep.linux.overlay import HOW
from tests.conftest import ROOT, User
from tests.server.server_process import ServerProcess


def on(case: str, data_dir: Path, *accepted: str) -> dict[str, Any]:
    """What becomes of a session on a restricted machine."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.restricted", case, str(data_dir), ",".join(accepted)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def data_dir(test_area: Path) -> Path:
    return test_area / "lab"


@pytest.mark.root
def test_on_a_whole_machine_nothing_is_refused_or_absent(data_dir: Path) -> None:
    answer = on("everything", data_dir, "seccomp", "sys", "masks")
    assert {barrier["state"] for barrier in answer["barriers"].values()} == {"in force"}
    assert answer["nested"] == {"root": "EPERM", "user": "EPERM"}


@pytest.mark.root
@pytest.mark.parametrize(
    ("case", "part"),
    [("no-filters", "seccomp"), ("no-cgroup-namespace", "cgroup-namespace"), ("covered-sys", "sys")],
)
def test_a_barrier_that_cannot_be_had_is_refused_or_accepted_by_name(
    data_dir: Path, case: str, part: str
) -> None:
    refused = on(case, data_dir)
    assert refused["refused"] == part
    assert refused["why"] and "doctor" in refused["hint"] and refused["sessions"] == []
    # Agreeing to do without something else does not help.
    other = "masks" if part != "masks" else "sys"
    assert on(case, data_dir, other)["refused"] == part
    accepted = on(case, data_dir, part)
    states = {name: barrier["state"] for name, barrier in accepted["barriers"].items()}
    assert states.pop(part) == "absent" and accepted["barriers"][part]["why"]
    assert set(states.values()) == {"in force"}


@pytest.mark.root
def test_namespaces_cannot_be_nested_even_without_a_filter(data_dir: Path) -> None:
    answer = on("no-filters", data_dir, "seccomp")
    assert answer["nested"] == {"root": "ENOSPC", "user": "ENOSPC"}


@pytest.mark.root
def test_what_has_no_substitute_is_refused_whatever_was_agreed(data_dir: Path) -> None:
    assert on("covered-proc", data_dir)["refused"] == "proc"
    assert on("covered-proc", data_dir, "proc")["refused"] == "proc"


def test_without_user_namespaces_an_ordinary_user_is_told_so(single_user: User) -> None:
    code = "import sys; from tests.security.restricted import main; main(*sys.argv[1:])"
    data = str(single_user.home / "data")
    for accepted in ("", "user-namespace"):
        done = single_user.python(code, "no-user-namespaces", data, accepted)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["refused"] == "user-namespace" and "doctor" in answer["hint"]


def test_without_user_namespaces_command_line_and_sdk_say_so(single_user: User) -> None:
    denied, home = "user-namespaces-denied", {"SANDKEEP_HOME": str(single_user.home / "denied")}
    code = "import sys; from tests.security.restricted import {0}; {0}(*sys.argv[1:])"
    done = single_user.python(code.format("command_line"), denied, "run", "--", "true", env=home)
    assert done.returncode == 125
    assert "user-namespace" in done.stderr and "doctor" in done.stderr and "server.log" not in done.stderr
    done = single_user.python(code.format("sdk"), denied, env=home)
    answer = json.loads(done.stdout)
    assert answer["kind"] == "IsolationUnavailable"
    assert "user-namespace" in answer["said"] and "server.log" not in answer["said"]


# --- kernels without a call -----------------------------------------------------------------------------

_MAIN = "import sys; from tests.security.restricted import main; main(*sys.argv[1:])"
_COMMAND_LINE = "import sys; from tests.security.restricted import command_line; command_line(*sys.argv[1:])"
_EXAMINE = """
import json, sys; from tests.security.restricted import examine; print(json.dumps(examine(*sys.argv[1:])))
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["root", "single"])
def run(request: pytest.FixtureRequest, data_dir: Path) -> Run:
    """Python source as root or as an ordinary user, with a data directory as its second argument."""
    if request.param == "single":
        user: User = request.getfixturevalue("single_user")
        home = str(user.home / "data")
        return lambda code, case, *rest: user.python(code, case, *(rest or (home,)))
    if os.geteuid() != 0:
        pytest.skip("needs real root")

    def as_root(code: str, case: str, *rest: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        return subprocess.run(
            [sys.executable, "-c", code, case, *(rest or (str(data_dir),))],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": paths, "SANDKEEP_HOME": str(data_dir)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return as_root


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _sessions_on(run: Run, case: str, home: str) -> dict[str, Any]:
    return _answer(run(_MAIN, case, home, ""))


@pytest.fixture
def home(run: Run, request: pytest.FixtureRequest, data_dir: Path) -> str:
    if "root" in request.node.name:
        return str(data_dir)
    user: User = request.getfixturevalue("single_user")
    return str(user.home / "data")


def test_where_layers_cannot_be_descriptors_sessions_take_the_older_way_and_doctor_says_so(
    run: Run, home: str
) -> None:
    answer = _sessions_on(run, "no-layers-as-descriptors", home)
    assert answer["barriers"]["root-filesystem"]["how"] == HOW["names"]
    report = _answer(run(_EXAMINE, "no-layers-as-descriptors"))
    found = report["findings"]["overlay filesystem"]
    assert (found["status"], report["can_run"]) == ("works", True)
    assert found["why"].startswith(HOW["names"]) and "not supported" in found["why"]


@pytest.mark.parametrize(
    ("case", "reason", "root_hint", "hint"),
    [
        ("no-overlay", "refuses an overlay", "run as an ordinary user", "Linux 5.12 or later"),
        ("no-mount-attributes", "no mount_setattr", "Linux 5.12 or later", "Linux 5.12 or later"),
    ],
)
def test_where_no_overlay_can_be_mounted_sessions_are_refused_with_the_reason(
    run: Run, home: str, case: str, reason: str, root_hint: str, hint: str, request: pytest.FixtureRequest
) -> None:
    wanted = root_hint if "root" in request.node.name else hint
    answer = _sessions_on(run, case, home)
    assert answer["refused"] == "root-filesystem" and answer["sessions"] == []
    assert reason in answer["why"] and wanted in answer["hint"]
    report = _answer(run(_EXAMINE, case))
    assert not report["can_run"]
    assert report["findings"]["overlay filesystem"]["status"] == "missing"
    # The command line says it too, although it is a server in the background that cannot start.
    done = run(_COMMAND_LINE, case, "run", "--", "true")
    assert done.returncode == 125
    assert reason in done.stderr and wanted in done.stderr and "server.log" not in done.stderr


# --- limits ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_groups(test_area: Path) -> dict[str, dict[str, Any]]:
    """What a server whose host has no control groups does with limits; see ``limits_asked_for``."""
    if os.geteuid() != 0:
        pytest.skip("needs real root")
    data = test_area / "limits"
    data.mkdir()
    server = ServerProcess(data)
    server.start()
    try:
        with (
            sync.Client(url=f"unix://{server.socket}") as client,
            client.create_sandbox("kept", destroy=False, resources=sync.Resources(2)) as kept,
        ):
            limits = kept.current_session.limits
            assert (limits["cpu"], limits["memory"]) == ("enforced", "enforced")
            kept.stop()
    finally:
        server.stop()
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.limits_asked_for", str(data)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("request_", ["create", "resume asking", "fork", "update", "resume", "fork of kept"])
def test_limits_asked_for_with_the_sdk_are_refused_where_they_would_not_hold(
    without_groups: dict[str, dict[str, Any]], request_: str
) -> None:
    answer = without_groups[request_]
    assert answer["refused"] == "LimitUnenforceable" and answer["part"] == "cpu"
    assert answer["why"] and answer["why"] in answer["message"]
    assert "exact=False" in answer["hint"] and "doctor" in answer["hint"]


def test_only_limits_that_were_asked_for_are_refused_and_none_that_can_be_watched(
    without_groups: dict[str, dict[str, Any]],
) -> None:
    for part in ("memory", "disk"):
        answer = without_groups[f"{part} alone"]
        assert (answer["limits"][part], answer["limits"]["cpu"], answer["exact"]) == (
            "watched",
            "absent",
            True,
        )
    answer = without_groups["processes alone"]
    assert (answer["refused"], answer["part"]) == ("LimitUnenforceable", "pids")
    assert answer["field"] == "resources.pids" and "a limit of 128 processes" in answer["message"]


def test_limits_asked_for_on_the_command_line_are_refused_where_they_would_not_hold(
    without_groups: dict[str, dict[str, Any]],
) -> None:
    for request in ("command", "config"):
        answer = without_groups[request]
        assert answer["status"] not in (0, None)
        assert "a limit of 2 cpus" in answer["stderr"] and "--best-effort" in answer["stderr"]
        assert without_groups[f"{request}, best effort"]["status"] == 0


def test_limits_that_nobody_asked_for_are_best_effort_and_say_what_holds(
    without_groups: dict[str, dict[str, Any]],
) -> None:
    for request in ("plain", "best effort", "resume afterwards"):
        answer = without_groups[request]
        assert (answer["limits"]["cpu"], answer["limits"]["memory"]) == ("absent", "watched")
        assert answer["exact"] is False


@pytest.mark.parametrize("route", ["v2", "v3"])
def test_official_clients_start_where_their_limits_would_not_hold(
    without_groups: dict[str, dict[str, Any]], route: str
) -> None:
    answer = without_groups[route]
    assert answer["status"] == 200
    assert (answer["limits"]["cpu"], answer["limits"]["memory"]) == ("absent", "watched")
