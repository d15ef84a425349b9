"""What doctor says, checked against what the machine really does, as root and as ordinary users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandkeep.cli.doctor import render
from sandkeep.cli.main import main
from sandkeep.host.doctor import Finding, Report, probe
from sandkeep.host.doctor.trial import Steps, attempt
from sandkeep.linux import syscalls
from tests.conftest import User


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


def test_a_step_that_fails_is_named_and_later_ones_are_explained() -> None:
    def tries(steps: Steps) -> None:
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
    def tries(steps: Steps) -> None:
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
    report = Report(
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
