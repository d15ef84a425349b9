"""Control groups on the running kernel: limits that hold, freeze, kill and counters.

In the machine's own layout and, where v1 controllers are mounted, with v1 alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandkeep.errors import LimitUnenforceable
from sandkeep.linux import cgroup, syscalls
from tests.conftest import User
from tests.polling import ENOUGH
from tests.polling import until as wait_until

pytestmark = pytest.mark.root

FORKER = """
import os, signal, time
count = 0
try:
    while count < 30:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    pass
print(count, flush=True)
time.sleep(60)
"""
HOG = "data = bytearray(256 << 20)\nfor i in range(0, len(data), 4096): data[i] = 1\n"
SPINNER = "while True: pass\n"
BREEDER = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["as mounted", "v1 only"])
def hierarchy(request: pytest.FixtureRequest, tmp_path: Path) -> cgroup.Hierarchy:
    if request.param == "as mounted":
        found = cgroup.detect().prepare([os.getpid()])
    else:
        kept = [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
            if " - cgroup2 " not in line
        ]
        (tmp_path / "mountinfo").write_text("".join(kept))
        found = cgroup.detect(str(tmp_path / "mountinfo"), parent=f"sandkeep-v1-{os.getpid()}")
        if found.layout == "none":
            pytest.skip("no v1 controllers are mounted on this machine")
    return found


@pytest.fixture
def session(hierarchy: cgroup.Hierarchy) -> Iterator[cgroup.SessionCgroup]:
    session = hierarchy.create(f"test-{os.getpid()}")
    yield session
    if session.capabilities["kill"].usable:
        session.kill()
        wait_until(lambda: not session.populated())
    session.remove()
    assert not any(os.path.exists(path) for path in session.paths())


@pytest.fixture
def spawn(session: cgroup.SessionCgroup) -> Iterator[Spawn]:
    """Start Python source inside the session's groups."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, group: cgroup.ProcessGroup | None = None) -> subprocess.Popen[str]:
        gated = f"import sys; sys.stdin.read()\n{code}"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", gated], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        session.attach(process.pid)
        if group is not None:
            group.enter(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def need(session: cgroup.SessionCgroup, *names: str) -> None:
    for name in names:
        found = session.capabilities[name]
        if not found.usable:
            pytest.skip(f"no {name} control here: {found.why}")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_pids_limit_stops_a_fork_bomb(session: cgroup.SessionCgroup, spawn: Spawn) -> None:
    need(session, "pids", "kill")
    session.limit(pids=10)
    bomb = spawn(FORKER)
    assert line(bomb) == "9"
    assert session.usage().pids == 10


def test_memory_limit_kills_the_hog_and_counts_it(session: cgroup.SessionCgroup, spawn: Spawn) -> None:
    need(session, "memory", "oom", "memory_peak")
    session.limit(memory=48 << 20)
    assert session.oom_kills() == 0
    hog = spawn(HOG)
    assert hog.wait(ENOUGH) == -signal.SIGKILL
    usage = session.usage()
    assert usage.oom_kills == 1
    assert usage.memory_peak_bytes is not None
    assert 40 << 20 < usage.memory_peak_bytes <= 48 << 20


def test_memory_limit_can_be_raised_and_lowered(session: cgroup.SessionCgroup) -> None:
    need(session, "memory")
    for size in (64 << 20, 256 << 20, 32 << 20):
        session.limit(memory=size)
        assert str(size) in {
            file.read_text().strip()
            for path in session.paths()
            for file in Path(path).glob("memory.*")
            if file.name in ("memory.max", "memory.limit_in_bytes")
        }


def test_cpu_limit_holds_a_spinner_down_and_cpu_time_is_counted(
    session: cgroup.SessionCgroup, spawn: Spawn
) -> None:
    need(session, "cpu", "cpu_time")
    session.limit(cpu=0.2)
    spinner = spawn(SPINNER)
    started = time.monotonic()
    before = session.usage().cpu_ms
    time.sleep(1.0)
    after = session.usage().cpu_ms
    spent_ms = (time.monotonic() - started) * 1000
    spinner.kill()
    assert before is not None and after is not None
    assert 0 < after - before <= 0.4 * spent_ms, "20 % of one CPU, with room for period edges"


def test_a_limit_the_kernel_refuses_is_named(session: cgroup.SessionCgroup) -> None:
    need(session, "pids")
    with pytest.raises(LimitUnenforceable) as caught:
        session.limit(pids=1 << 40)
    assert caught.value.part == "pids"


def test_frozen_processes_do_not_run_and_thaw_goes_on(session: cgroup.SessionCgroup, spawn: Spawn) -> None:
    need(session, "freeze", "cpu_time")
    spawn(SPINNER)
    wait_until(lambda: (session.usage().cpu_ms or 0) > 20)
    session.freeze(ENOUGH)
    frozen = session.usage().cpu_ms
    time.sleep(0.1)
    assert session.usage().cpu_ms == frozen
    session.thaw()
    wait_until(lambda: session.usage().cpu_ms != frozen)


@pytest.mark.parametrize("frozen", [False, True])
def test_kill_reaches_daemonised_descendants(
    session: cgroup.SessionCgroup, spawn: Spawn, frozen: bool
) -> None:
    need(session, "kill", "freeze")
    breeder = spawn(BREEDER)
    assert line(breeder) == "ready"
    assert session.populated()
    if frozen:
        session.freeze(ENOUGH)
    session.kill()
    assert breeder.wait(ENOUGH) == -signal.SIGKILL
    wait_until(lambda: not session.populated())


def test_process_group_kills_one_tree_and_spares_its_neighbour(
    session: cgroup.SessionCgroup, spawn: Spawn
) -> None:
    need(session, "process_groups")
    doomed_group, spared_group = session.process_group("p1"), session.process_group("p2")
    doomed, spared = spawn(BREEDER, doomed_group), spawn(BREEDER, spared_group)
    assert line(doomed) == line(spared) == "ready"
    wait_until(lambda: len(doomed_group.pids()) == len(spared_group.pids()) == 6)
    assert doomed.pid in doomed_group.pids()
    assert spared.pid not in doomed_group.pids()
    doomed_group.kill()
    assert doomed.wait(ENOUGH) == -signal.SIGKILL
    wait_until(lambda: not doomed_group.populated())
    doomed_group.remove()
    assert not os.path.exists(doomed_group.path)
    assert spared.poll() is None
    assert len(spared_group.pids()) == 6


def test_session_limits_cover_its_process_groups(session: cgroup.SessionCgroup, spawn: Spawn) -> None:
    need(session, "pids", "process_groups")
    session.limit(pids=10)
    bomb = spawn(FORKER, session.process_group("p1"))
    assert line(bomb) == "9"


def test_clone3_starts_a_process_inside_the_group(session: cgroup.SessionCgroup) -> None:
    descriptor = session.cgroup2_fd()
    if descriptor < 0:
        pytest.skip("no cgroup2 hierarchy here")
    pid, pidfd = syscalls.clone3(0, descriptor)
    if pid == 0:
        signal.pause()
        os._exit(0)
    os.close(descriptor)
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    session.attach(pid, cgroup2=False)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pidfd)
    assert groups.splitlines()[-1].endswith(f"/{session.name}")


def test_a_session_is_found_again_and_listed(
    hierarchy: cgroup.Hierarchy, session: cgroup.SessionCgroup
) -> None:
    assert session.name in hierarchy.leftovers()
    again = hierarchy.open(session.name)
    assert again.paths() == session.paths()
    assert hierarchy.open(session.name, session.record()).paths() == session.paths()


def test_a_group_that_goes_while_leftovers_are_opened_is_left_out(
    hierarchy: cgroup.Hierarchy, session: cgroup.SessionCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup.Hierarchy, "leftovers", lambda self: ["gone", session.name])
    assert [group.name for group in hierarchy.open_leftovers()] == [session.name]


def test_remove_waits_for_the_last_exit(hierarchy: cgroup.Hierarchy) -> None:
    for round_ in range(20):
        session = hierarchy.create(f"quick-{os.getpid()}-{round_}")
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        session.attach(child)
        session.kill()
        os.waitpid(child, 0)
        session.remove()
        assert not any(os.path.exists(path) for path in session.paths())


def _judge() -> dict[str, list[object]]:
    hierarchy = cgroup.detect().prepare([os.getpid()])
    return {name: [found.usable, found.why] for name, found in hierarchy.capabilities.items()}


def test_an_ordinary_user_without_delegation_is_told_why(single_user: User) -> None:
    for name, (is_usable, why) in single_user.call(_judge).items():
        assert not is_usable, name
        assert "not delegated" in why or "denied" in why


def _freeze_and_kill_own_child() -> list[str]:
    hierarchy = cgroup.detect()
    session = hierarchy.create("mine")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    session.attach(child)
    session.freeze(ENOUGH)
    session.kill()
    status = os.waitpid(child, 0)[1]
    session.remove()
    return [
        *[name for name, found in session.capabilities.items() if found.usable],
        str(os.WTERMSIG(status)),
        *hierarchy.leftovers(),
    ]


def test_a_delegated_group_gives_an_ordinary_user_freeze_and_kill(single_user: User) -> None:
    """Delegation as a service manager does it: the directory and three of its files belong to the user."""
    mine = cgroup.detect()
    outer = mine.create("delegated")
    descriptor = outer.cgroup2_fd()
    if descriptor < 0:
        pytest.skip("no cgroup2 hierarchy here")
    os.close(descriptor)
    group = outer.paths()[0]
    for name in ("", "/cgroup.procs", "/cgroup.subtree_control", "/cgroup.threads"):
        os.chown(group + name, single_user.uid, single_user.gid)
    keeper = os.getpid()
    home = Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2]
    above = Path(group).parent.parent
    Path(group, "cgroup.procs").write_text(str(keeper))
    try:
        result = single_user.call(_freeze_and_kill_own_child)
    finally:
        (above / "cgroup.procs").write_text(str(keeper))
        outer.remove()
    assert {"freeze", "kill", "process_groups", "cpu_time"} <= set(result)
    assert result[-1] == str(int(signal.SIGKILL))
    assert Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2] == home
