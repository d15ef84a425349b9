"""Asking systemd for a scope where it cannot be had. That it can be had is shown in ``tests/vm``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.host.native import scope
from sandkeep.linux.cgroup import units

needs_busctl = pytest.mark.skipif(shutil.which("busctl") is None, reason="busctl is not installed")


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def under_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that looks as if systemd ran it; returns where its bus would be."""
    monkeypatch.setattr(units, "systemd_runs", lambda: True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    monkeypatch.setattr(scope, "_CONTROLLERS", str(tmp_path / "cgroup.controllers"))
    monkeypatch.setattr(scope, "_SYSTEM_BUS", str(tmp_path / "bus"))
    monkeypatch.setattr(scope, "_USER_RUNTIME", str(tmp_path / "{uid}"))
    (tmp_path / str(os.geteuid())).mkdir()
    return tmp_path / "bus" if os.geteuid() == 0 else tmp_path / str(os.geteuid()) / "bus"


def test_without_systemd_nobody_is_asked(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "systemd_runs", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert scope.enter(child, "sandkeep-0") == scope.SystemdScope()


def test_a_hidden_pid_1_is_a_reason(
    child: int, under_systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "FIRST", str(tmp_path / "hidden"))
    monkeypatch.setattr(scope, "_SYSTEMD_RUNS", str(tmp_path))
    found = scope.enter(child, "sandkeep-0")
    assert "PID 1 is hidden" in found.why
    assert "ProtectProc=" in found.fix


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("0::/init.scope\n", True),
        ("0::/machine.slice/c.scope/init.scope\n", True),
        ("12:pids:/\n0::/init.scope\n", True),
        ("0::/\n", False),
        ("0::/system.slice/docker-1.scope\n", False),
        ("0::/../../init.scope\n", False),
        ("12:pids:/init.scope\n", False),
    ],
)
def test_systemd_is_known_by_where_pid_1_is(tmp_path: Path, text: str, runs: bool) -> None:
    (tmp_path / "first").write_text(text)
    assert units.systemd_runs(str(tmp_path / "first")) is runs
    assert not units.systemd_runs(str(tmp_path / "hidden"))


@needs_busctl
def test_without_a_bus_the_reason_and_what_to_do_are_said(child: int, under_systemd: Path) -> None:
    found = scope.enter(child, "sandkeep-0")
    assert not found.unit
    assert str(under_systemd) in found.why
    assert found.fix


@needs_busctl
def test_a_bus_that_does_not_answer_is_a_reason_and_no_failure(child: int, under_systemd: Path) -> None:
    under_systemd.write_text("no socket")
    found = scope.enter(child, "sandkeep-0")
    assert not found.unit
    assert found.why.startswith("systemd gave no scope: ")
    assert found.fix


def test_without_busctl_that_is_said(
    child: int, under_systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = scope.enter(child, "sandkeep-0")
    assert "busctl" in found.why
    assert "busctl" in found.fix


def test_limits_of_the_unit_we_are_in_hold_for_the_scope(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1073741824\n",
        "memory.high": "max\n",
        "memory.swap.max": "0\n",
        "cpu.max": "150000 100000\n",
        "pids.max": "3552\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert scope.inherited(str(tmp_path)) == [
        ("MemoryMax", "t", "1073741824"),
        ("MemorySwapMax", "t", "0"),
        ("CPUQuotaPerSecUSec", "t", "1500000"),
    ]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.swap.max").unlink()
    assert scope.inherited(str(tmp_path)) == []
