"""Programs that take all they can get: each ends as the contract says, and everything else stays healthy."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from sandkeep.host.driver import Limits
from sandkeep.shared.clock import wall_ms as now_ms
from tests.driver_lab import Box, Lab, Result
from tests.faults.watching import all_gone, eventually, family, running_with
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.polling import longer_and_longer

_FORKS = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count, flush=True)
time.sleep(600)
"""
_HOG = """
import time
held = []
for _ in range(40):
    held.append(b"x" * (10 << 20))
    time.sleep(0.02)
print("all of it", flush=True)
time.sleep(600)
"""
_markers = (f"{number}.{os.getpid()}" for number in itertools.count(7_001))


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _healthy(box: Box) -> None:
    assert box.sh("echo healthy").stdout == "healthy\n"


@everywhere
def test_a_fork_bomb_meets_its_limit_and_can_be_stopped(lab: Lab) -> None:
    """Processes end at the limit, other sessions go on, and a stop takes all of them."""
    other = lab.box(name="neighbour")
    box = lab.box(name="bomb", limits=Limits(pids=64))
    assert box.created.limits["pids"].state in ("enforced", "per user")
    process = box.start("python3", "-c", _FORKS)
    eventually(lambda: box.output(process))
    everyone = family(box.created.init_pid)
    forked = int(box.output(process)[0].data)  # type: ignore[union-attr]
    assert 30 < forked <= 64
    assert len(everyone) <= 66
    _healthy(other)
    assert box.stop().status == "stopped"
    all_gone(everyone)
    _healthy(other)
    box.remove()
    other.remove()


@everywhere
def test_a_bash_fork_bomb_ends_with_its_time_limit(lab: Lab) -> None:
    """The classic one, which re-forks whatever is killed: the time limit of the process takes them all."""
    box = lab.box(name="classic", limits=Limits(pids=128))
    result = box.sh("bomb() { bomb | bomb & }; bomb; sleep 600", kill_after_ms=500)
    assert (result.record.status, result.code) == ("killed", 137)
    assert result.record.reason == "time limit reached"
    eventually(lambda: len(family(box.created.init_pid)) == 1)
    _healthy(box)
    box.remove()


@everywhere
def test_a_bash_fork_bomb_ends_when_it_is_killed(lab: Lab) -> None:
    """It forks faster than anybody can look; a kill takes all of it, and nothing else of the session."""
    box = lab.box(name="killed", limits=Limits(pids=400))
    other = box.start("sleep", "600")
    bomb = box.start("bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 600")
    eventually(lambda: len(family(box.created.init_pid)) > 40)
    lab.do(lab.driver.signal(box.ref, signal.SIGKILL, bomb))
    assert box.finish(bomb).code == 137
    eventually(lambda: len(family(box.created.init_pid)) == 2)
    assert lab.do(lab.driver.process(box.ref, other)).status == "running"
    _healthy(box)
    box.remove()


@everywhere
def test_a_memory_hog_is_killed_for_it(lab: Lab) -> None:
    """By its control group, or, where there is none, by the supervisor that watches; the session lives."""
    other = lab.box(name="neighbour")
    box = lab.box(name="hog", limits=Limits(memory_bytes=100 << 20))
    state = box.created.limits["memory"].state
    assert state == ("enforced" if lab.driver.mode == "root" else "watched")
    result = box.run("python3", "-c", _HOG)
    assert (result.record.status, result.code) == ("killed", 137)
    assert result.record.out_of_memory
    assert result.record.reason == "out of memory"
    _healthy(box)
    _healthy(other)
    box.remove()
    other.remove()


@everywhere
def test_ten_million_lines_arrive(lab: Lab) -> None:
    """79 MB as fast as a program can print them, complete and in order."""
    box = lab.box(name="writer")
    result = box.run("seq", "1", "10000000", timeout=120)
    expected = hashlib.sha256()
    for start in range(1, 10_000_001, 100_000):
        expected.update("".join(f"{i}\n" for i in range(start, start + 100_000)).encode())
    assert result.gaps == []
    assert len(result.output) == 78_888_897
    assert hashlib.sha256(result.output).digest() == expected.digest()
    box.remove()


@everywhere
def test_more_than_the_cap_shows_a_gap(lab: Lab) -> None:
    """Read afterwards, a log with a cap has the beginning and the end and says what is missing between."""
    box = lab.box(name="capped")
    process = box.start("seq", "1", "3000000", log_cap_bytes=4 << 20)
    record = lab.do(lab.driver.wait_process(box.ref, process))
    result = Result(record, box.output(process))
    assert result.code == 0
    (gap,) = result.gaps
    assert len(result.output) + gap.length == 22_888_896 == result.record.output_bytes
    assert result.stdout.startswith("1\n2\n3\n") and result.stdout.endswith("2999999\n3000000\n")
    box.remove()


def _daemonise(marker: str) -> str:
    """Leaves its session, its group and its parent; the command goes on when it has."""
    daemon = f"setsid setsid sh -c 'touch up-$0; exec sleep $0' {marker} >/dev/null 2>&1"
    return f"({daemon} &) ; until [ -e up-{marker} ]; do sleep 0.01; done"


@everywhere
def test_a_daemon_outlives_its_command_but_not_the_time_limit(lab: Lab) -> None:
    """With a time limit every descendant dies, whatever it did to hide; other processes are left alone."""
    box = lab.box(name="daemons")
    other = next(_markers)
    box.start("sleep", other)
    for limit in longer_and_longer(700):
        hidden = next(_markers)
        result = box.sh(f"{_daemonise(hidden)}; echo hidden; sleep 600", kill_after_ms=limit)
        assert (result.code, result.record.reason) == (137, "time limit reached")
        eventually(lambda: not running_with(hidden))  # noqa: B023
        if result.stdout == "hidden\n":
            break
    assert result.stdout == "hidden\n"
    assert running_with(other)
    box.remove()
    assert not running_with(other)


@everywhere
def test_a_daemon_dies_with_a_stop(lab: Lab) -> None:
    box = lab.box(name="daemons")
    marker = next(_markers)
    assert box.sh(_daemonise(marker)).code == 0
    assert running_with(marker)
    box.stop()
    eventually(lambda: not running_with(marker))
    box.remove()


@everywhere
def test_a_daemon_dies_at_the_deadline_with_nobody_there(lab: Lab) -> None:
    """The deadline holds with every caller gone: the supervisor is the one who keeps it."""
    other = Lab(lab.data_dir)
    box = other.box(name="alone", deadline_ms=now_ms() + 600_000)
    marker = next(_markers)
    assert box.sh(_daemonise(marker)).code == 0
    supervisor = family(box.created.supervisor_pid)
    other.do(other.driver.set_deadline(box.ref, now_ms() + 3000))
    other.detach()
    assert running_with(marker)
    all_gone(supervisor)
    assert not running_with(marker)
    again = lab.adopt("alone")
    assert (again.state().status, again.state().reason) == ("stopped", "deadline reached")
    again.remove()
