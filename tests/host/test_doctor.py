"""What doctor says, checked against what the machine really does, as root and as ordinary users."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.cli.commands.doctor import render
from sandkeep.cli.main import main
from sandkeep.host.doctor import DoctorReport, Finding, probe
from sandkeep.host.doctor.trial import TrialSteps, attempt
from sandkeep.host.driver import Limits
from sandkeep.linux import cgroup, syscalls
from tests.conftest import User
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _probe(data_dir: str) -> dict[str, Any]:
    before = sorted(os.listdir(data_dir)), Path("/proc/self/mountinfo").read_text()
    report = probe(data_dir)
    assert (sorted(os.listdir(data_dir)), Path("/proc/self/mountinfo").read_text()) == before
    return report.to_json()


def status(report: dict[str, Any], name: str) -> str:
    return next(str(found["status"]) for found in report["findings"] if found["name"] == name)


@pytest.mark.root
def test_root_report_covers_every_capability_and_leaves_nothing(tmp_path: Path) -> None:
    report = _probe(str(tmp_path))
    assert report["mode"] == "root"
    names = [found["name"] for found in report["findings"]]
    assert len(set(names)) == len(names)
    assert {
        "python",
        "kernel",
        "architecture",
        "user namespaces",
        "mount namespace",
        "pid namespace with /proc",
        "network namespace",
        "network steering",
        "sysfs",
        "seccomp filters",
        "idmapped layers",
        "overlay filesystem",
        "subordinate ids",
        "control groups: memory",
        "control groups: kill",
        "data directory",
        "disk space",
        "disk quotas",
        "merged /usr",
        "limit: open files",
    } <= set(names)
    for found in report["findings"]:
        assert found["why"], found
        assert found["status"] == "works" or found["fix"], found


def test_ordinary_user_with_a_range_is_told_it_works(ordinary_user: User) -> None:
    report = ordinary_user.call(_probe, str(ordinary_user.home))
    assert report["mode"] == "rootless"
    assert status(report, "subordinate ids") == "works", report
    tried = ordinary_user.run(["unshare", "--user", "--map-root-user", "--mount", "true"])
    assert (status(report, "user namespaces") == "works") == (tried.returncode == 0)


def _probe_without_mount_setattr(data_dir: str) -> dict[str, Any]:
    """As on a kernel before 5.12."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    number, enosys, allow = 442, 0x00050000 | errno.ENOSYS, 0x7FFF0000
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, enosys), (give, 0, 0, allow)]
    syscalls.seccomp_set_filter(b"".join(struct.pack("HBBI", *line) for line in program))
    return _probe(data_dir)


def test_on_an_older_kernel_only_what_is_missing_is_said_to_be_missing(ordinary_user: User) -> None:
    report = ordinary_user.call(_probe_without_mount_setattr, str(ordinary_user.home))
    assert not report["can_run"]
    (missing,) = [found for found in report["findings"] if found["status"] == "missing" and found["required"]]
    assert missing["name"] == "overlay filesystem"
    assert "mount_setattr" in missing["why"]
    assert "Linux 5.12" in missing["fix"]


def test_ordinary_user_without_a_range_is_told_what_that_means(single_user: User) -> None:
    report = single_user.call(_probe, str(single_user.home))
    found = next(found for found in report["findings"] if found["name"] == "subordinate ids")
    assert found["status"] == "degraded"
    assert "one id only" in found["why"]
    assert found["fix"]


@pytest.mark.root
def test_refused_user_namespaces_are_missing_with_the_step_and_the_sysctl(tmp_path: Path) -> None:
    """With user.max_user_namespaces at 0, set in a namespace of its own, no session can run."""
    script = f"""
import json, os
from sandkeep.linux import syscalls as sc
from sandkeep.host.doctor import probe
sc.unshare(sc.CLONE_NEWUSER | sc.CLONE_NEWNS)
for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
print(json.dumps(probe({str(tmp_path)!r}).to_json()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert not report["can_run"]
    found = next(found for found in report["findings"] if found["name"] == "user namespaces")
    assert found["status"] == "missing"
    assert "No space left" in found["why"]
    assert "max_user_namespaces" in found["fix"]
    assert status(report, "id ranges") == "missing"


@pytest.mark.root
def test_a_filesystem_that_cannot_be_idmapped_is_named(tmp_path: Path) -> None:
    """overlayfs is one that cannot: put the data directory on one and look."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    syscalls.mount("overlay", str(tmp_path / "merged"), "overlay", 0, options)
    try:
        report = _probe(str(tmp_path / "merged"))
    finally:
        syscalls.umount2(str(tmp_path / "merged"))
    assert status(report, "idmapped layers") == "missing"
    assert status(report, "data directory") == "degraded"
    assert not report["can_run"]


def test_data_directory_is_neither_needed_nor_created(tmp_path: Path) -> None:
    probe(str(tmp_path / "a/b"))
    assert list(tmp_path.iterdir()) == []


def _predicted(lab: Lab) -> dict[str, str]:
    """Doctor's words for memory, pids and cpu in the terms of a session's record."""
    states = {
        "is watched": "watched",
        "RLIMIT_NPROC, which": "enforced",
        "counted per user": "per user",
        "can use all CPUs": "absent",
    }
    found = {}
    for finding in probe(lab.driver.data_dir).findings:
        part = finding.name.removeprefix("control groups: ")
        if part in ("memory", "pids", "cpu"):
            said = next((state for words, state in states.items() if words in finding.why), "")
            found[part] = "enforced" if finding.status == "works" else said
    return found


def _got(lab: Lab) -> dict[str, str]:
    limits = lab.box(limits=Limits(memory_bytes=1 << 30, pids=100, cpus=1.0)).created.limits
    return {part: limits[part].state for part in ("memory", "pids", "cpu")}


@everywhere
def test_doctor_says_which_limits_a_session_gets(lab: Lab) -> None:
    assert _predicted(lab) == _got(lab)


WITHOUT_GROUPS = r"""
import json, sys
from sandkeep.linux import syscalls
from tests.host import test_doctor
from tests.driver_lab import Lab
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
for line in reversed(open("/proc/self/mountinfo").readlines()):
    left, _, right = line.partition(" - ")
    if right.startswith("cgroup"):
        syscalls.umount2(left.split(" ")[4], 2)
with Lab(sys.argv[1]) as lab:
    findings = test_doctor.probe(sys.argv[1]).findings
    fixes = [found.fix for found in findings if found.name.startswith("control groups")]
    predicted, got = test_doctor._predicted(lab), test_doctor._got(lab)
    box = lab.box(limits=test_doctor.Limits(memory_bytes=100 << 20))
    record = box.run("python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))").record
    print(json.dumps([predicted, got, fixes, record.reason]))
"""


@pytest.mark.slow
@pytest.mark.root
def test_doctor_is_right_where_no_control_groups_are_mounted(tmp_path: Path) -> None:
    """As in a container that was given none."""
    data = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GROUPS, str(data)], capture_output=True, text=True, check=True
    )
    predicted, got, fixes, hog = json.loads(done.stdout.splitlines()[-1])
    assert predicted == got == {"memory": "watched", "pids": "per user", "cpu": "absent"}
    assert all("/sys/fs/cgroup" in fix for fix in fixes)
    assert hog == "out of memory"  # watched is not unlimited


IN_A_GROUP = """
import json, os, sys
os.read(0, 1)
from sandkeep.host.doctor import probe
from sandkeep.host.driver import Limits
from tests.driver_lab import Lab
with Lab(sys.argv[1]) as lab:
    own = lab.box().created.limits["pids"]
    asked = lab.box(limits=Limits(pids=500, explicit=frozenset({"pids"}))).created.limits["pids"]
print(json.dumps([probe(sys.argv[1]).to_json(), own.to_json(), asked.to_json()]))
"""


@pytest.mark.root
def test_limits_of_groups_above_are_told_and_leave_room_for_others(tmp_path: Path) -> None:
    hierarchy = cgroup.detect(parent=f"sandkeep-test-{os.getpid()}")
    group = hierarchy.create("above")
    try:
        group.limit(memory=3 << 30, pids=777)
        with subprocess.Popen(
            [sys.executable, "-c", IN_A_GROUP, str(tmp_path / "data")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            group.attach(process.pid)
            report, own, asked = json.loads(process.communicate(b"x")[0])
    finally:
        group.remove()
    found = {item["name"]: item for item in report["findings"]}
    assert found["limit: processes"]["status"] == "degraded"
    assert found["limit: processes"]["why"].startswith("777 for all sessions together")
    assert found["limit: processes"]["fix"]
    assert found["limit: memory"]["why"].startswith("3.0 GiB for all sessions together")
    assert (own["state"], own["value"]) == ("enforced", 388), "half of it, where nobody asked for more"
    assert (asked["state"], asked["value"]) == ("enforced", 500)


def test_a_step_that_fails_is_named_and_later_ones_are_explained() -> None:
    def tries(steps: TrialSteps) -> None:
        with steps.step("first"):
            pass
        with steps.step("second"):
            os.mkdir("/proc/nothing/here")
        with steps.step("third"):
            pass

    outcome = attempt(tries)
    assert outcome.failure("first") == ""
    assert outcome.failure("second").startswith("second: No such file")
    assert outcome.failure("third").startswith("second: No such file")


def test_a_bug_in_a_trial_is_reported_not_raised() -> None:
    def tries(steps: TrialSteps) -> None:
        raise RuntimeError("boom")

    assert attempt(tries).failure("anything") == "RuntimeError: boom"


def test_exit_status_says_whether_sessions_can_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SANDKEEP_HOME", str(tmp_path))
    exit_status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert exit_status == (0 if report["can_run"] else 1)


def test_table_is_aligned_and_puts_the_fix_below(tmp_path: Path) -> None:
    report = DoctorReport(
        "rootless",
        (
            Finding("a", "works", "tried"),
            Finding("longer name", "missing", "reason " * 20, "do this", required=True),
        ),
    )
    lines = render(report, 80).splitlines()
    assert lines[0] == "works     a            tried"
    assert lines[1].startswith("missing   longer name  reason")
    assert all(len(line) <= 80 for line in lines)
    assert any(line.strip() == "> do this" for line in lines)
    assert lines[-1].startswith("Sessions cannot run here")
