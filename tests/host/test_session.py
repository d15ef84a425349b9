"""Whole sessions: what holds them, what limits them, how they end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import (
    InvalidRequest,
    IsolationUnavailable,
    LimitUnenforceable,
    NotFound,
    SandkeepError,
    SessionStopped,
    WrongState,
)
from sandkeep.host.driver import Driver, Limits, ProcessHandle, ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.boot import BARRIERS
from sandkeep.host.reports import Enforcement, SessionState
from sandkeep.host.rootfs import Lower
from sandkeep.shared.outputlog import Chunk
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, in_modes, opened
from tests.polling import ENOUGH, longer_and_longer, until

MEGABYTE = 1 << 20
ROOTLESS_LIMITS = "without delegated control groups there is nothing to enforce it with"


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def printed(box: Box, process: str) -> bytes:
    return b"".join(item.data for item in box.output(process) if isinstance(item, Chunk))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def inhabitants(box: Box) -> list[int]:
    """Host pids of init and everything below it."""
    found, pending = [], [int(box.created.init_pid)]
    while pending:
        pid = pending.pop()
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except OSError:
            continue
        found.append(pid)
        pending += map(int, children.split())
    return found


def gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


# --- what is in force ----------------------------------------------------------------------------------


@everywhere
def test_a_session_reports_its_tier_and_every_barrier(lab: Lab) -> None:
    state = common(lab).state()
    assert (state.tier, state.mode, state.status) == ("native", lab.driver.mode, "running")
    barriers = dict(state.barriers)
    assert tuple(barriers) == BARRIERS
    if lab.driver.mode != "root":
        shared = barriers.pop("id-range")
        assert shared.state == "shared" and shared.why
    assert {barrier.state for barrier in barriers.values()} == {"in force"}


@everywhere
def test_a_session_reports_every_limit(lab: Lab) -> None:
    asked = Limits(memory_bytes=512 * MEGABYTE, cpus=1.5, disk_bytes=1 << 30)
    limits = lab.box(limits=asked).created.limits
    assert limits["disk"].state == "watched"
    states = {part: limits[part].state for part in ("memory", "cpu", "pids")}
    if all(not why for why in lab.driver.capabilities().limits.values()):
        assert states == {"memory": "enforced", "cpu": "enforced", "pids": "enforced"}
    else:
        pids = "enforced" if lab.driver.mode == "single" else "per user"
        assert states == {"memory": "watched", "cpu": "absent", "pids": pids}
        assert limits["cpu"].why
    assert limits["pids"].value == 4096
    plain = common(lab).created.limits
    assert plain["memory"] == plain["cpu"] == plain["disk"] == Enforcement("unlimited")


@everywhere
def test_a_limit_asked_for_is_enforced_or_refused_by_name(lab: Lab) -> None:
    asked = {"memory": Limits(memory_bytes=64 * MEGABYTE), "cpu": Limits(cpus=0.5), "pids": Limits(pids=50)}
    for part, limits in asked.items():
        explicit = Limits(limits.memory_bytes, limits.cpus, limits.pids, None, frozenset({part}))
        can = not lab.driver.capabilities().limits[part] or (part, lab.driver.mode) == ("pids", "single")
        before = sorted(os.listdir(f"{lab.data_dir}/sessions"))
        if can:
            assert lab.box(limits=explicit).created.limits[part].state == "enforced"
        else:
            with pytest.raises(LimitUnenforceable) as refused:
                lab.box(limits=explicit)
            assert part in str(refused.value)
            assert sorted(os.listdir(f"{lab.data_dir}/sessions")) == before


HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"


@in_modes("root", why=ROOTLESS_LIMITS)
def test_running_out_of_memory_is_reported_as_such_and_init_lives(lab: Lab) -> None:
    if lab.driver.capabilities().limits["memory"]:
        pytest.skip(lab.driver.capabilities().limits["memory"])
    box = lab.box(limits=Limits(memory_bytes=64 * MEGABYTE, explicit=frozenset({"memory"})))
    done = box.run("python3", "-c", f"print('began', flush=True)\n{HOG}")
    assert done.record.out_of_memory and done.record.reason == "out of memory"
    assert (done.code, done.stdout) == (137, "began\n")
    assert box.lab.do(lab.driver.usage(box.ref)).oom_kills
    # The next victim of an ordinary kill is not blamed on memory.
    other = box.sh("kill -KILL $$")
    assert other.code == 137 and not other.record.out_of_memory
    shell = box.run("bash", "-c", f"python3 -c '{HOG}'; echo code $?")
    assert (shell.stdout, shell.code, shell.record.out_of_memory) == ("code 137\n", 0, False)
    assert box.run("true").code == 0
    final = box.stop()
    assert final.usage is not None and (final.usage.memory_peak_bytes or 0) > 48 * MEGABYTE


BOMB = """
import os, sys, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        count += 1
except OSError as error:
    print(error.errno, count, flush=True)
time.sleep(float(sys.argv[1]))
"""


@in_modes("root", "single", why="over a range of ids processes are counted per user, not per session")
def test_a_session_cannot_have_more_processes_than_it_may(lab: Lab) -> None:
    box = lab.box(limits=Limits(pids=50, explicit=frozenset({"pids"})))
    process = box.start("python3", "-c", BOMB, "100")
    until(lambda: b"\n" in printed(box, process))
    number, count = printed(box, process).split()
    assert int(number) == 11 and 30 < int(count) <= 50
    # With every place taken a start is refused with the kernel's reason, and the session stays.
    with pytest.raises(SandkeepError) as refused:
        box.run("true")
    assert refused.value.errno == 11
    lab.do(lab.driver.signal(box.ref, signal.SIGKILL))
    until(lambda: box.state().status == "running" and _starts(box))


def _starts(box: Box) -> bool:
    try:
        return box.run("true").code == 0
    except SandkeepError:
        return False


@everywhere
def test_a_fork_bomb_ends_with_its_session(lab: Lab) -> None:
    box = lab.box(limits=Limits(pids=300))
    process = box.start("bash", "-c", "echo lit; b() { b | b & }; b; sleep 100")
    until(lambda: b"lit" in printed(box, process))
    time.sleep(0.3)
    assert box.state().status == "running"
    pids = inhabitants(box)
    started = time.monotonic()
    assert box.stop().status == "stopped"
    assert time.monotonic() - started < ENOUGH
    until(lambda: gone(pids))


@in_modes("root", why=ROOTLESS_LIMITS)
def test_a_share_of_the_processor_is_not_exceeded(lab: Lab) -> None:
    if lab.driver.capabilities().limits["cpu"]:
        pytest.skip(lab.driver.capabilities().limits["cpu"])
    box = lab.box(limits=Limits(cpus=0.2, explicit=frozenset({"cpu"})))
    # A fifth of a second of the processor takes a second at least, and longer where others want it too.
    done = box.run("python3", "-c", "import time\nwhile time.process_time() < 0.2: pass")
    assert done.record.cpu_ms is not None and done.record.cpu_ms >= 190
    assert done.record.duration_ms >= 700
    assert done.record.cpu_ms <= 0.3 * done.record.duration_ms

    def runs_freely() -> bool:
        free = common(lab).run("python3", "-c", "t = 0\nfor i in range(3_000_000): t += i").record
        return (free.cpu_ms or 0) > 0.3 * free.duration_ms

    until(runs_freely)


# --- time ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@everywhere
def test_a_deadline_ends_everything_with_nobody_connected(lab: Lab) -> None:
    other = Lab(lab.data_dir)
    box = other.box(name=f"deadline-{os.getpid()}", deadline_ms=now_ms() + 600_000)
    process = box.start(
        "bash", "-c", "setsid -f sleep 1000; (setsid sh -c 'sleep 1001 & sleep 1002' &); echo up"
    )
    until(lambda: b"up" in printed(box, process))
    until(lambda: len(inhabitants(box)) >= 5)
    pids = [*inhabitants(box), int(box.created.supervisor_pid)]
    deadline = now_ms() + 3000
    other.do(other.driver.set_deadline(box.ref, deadline))
    other.boxes.clear()
    other.detach()
    assert now_ms() < deadline and not gone(pids[:1])
    until(lambda: gone(pids))
    assert deadline <= now_ms()
    again = lab.adopt(box.ref.session)
    state = again.state()
    assert (state.status, state.reason) == ("stopped", "deadline reached")
    assert state.stopped_ms is not None and state.stopped_ms >= deadline


@everywhere
def test_a_deadline_can_be_moved_both_ways(lab: Lab) -> None:
    for limit_ms in longer_and_longer(2500):  # in which it must be moved
        near, far = now_ms() + limit_ms, now_ms() + 3_600_000
        box = lab.box(name=f"moved{limit_ms}", deadline_ms=near)
        try:
            lab.do(lab.driver.set_deadline(box.ref, far))
            break
        except SessionStopped:
            box.remove()
    assert box.state().deadline_ms == far
    time.sleep(max(near - now_ms(), 0) / 1000 + 0.2)
    assert box.run("true").code == 0
    lab.do(lab.driver.set_deadline(box.ref, None))
    assert box.state().deadline_ms is None
    lab.do(lab.driver.set_deadline(box.ref, now_ms() + 200))
    state = lab.do(asyncio.wait_for(lab.driver.wait_stopped(box.ref), ENOUGH))
    assert (state.status, state.reason) == ("stopped", "deadline reached")


@everywhere
def test_a_frozen_session_stands_still_and_goes_on(lab: Lab) -> None:
    box = lab.box()
    process = box.start(
        "bash",
        "-c",
        "setsid -f bash -c 'while :; do echo b; sleep 0.01; done'; while :; do echo a; sleep 0.01; done",
    )
    until(lambda: b"a" in printed(box, process) and b"b" in printed(box, process))
    lab.do(lab.driver.freeze(box.ref))

    def silent() -> bool:
        before = len(printed(box, process))
        time.sleep(0.3)
        return len(printed(box, process)) == before

    until(silent)  # what was on its way is there
    assert silent()
    before = len(printed(box, process))
    assert box.state().status == "running"
    lab.do(lab.driver.thaw(box.ref))
    until(lambda: len(printed(box, process)) > before + 10)
    assert box.run("true").code == 0
    lab.do(lab.driver.freeze(box.ref))
    assert lab.do(asyncio.wait_for(lab.driver.stop(box.ref, reason="test"), ENOUGH)).status == "stopped"


@everywhere
def test_what_a_session_stopped_itself_stays_stopped(lab: Lab) -> None:
    box = lab.box()
    process = box.start("bash", "-c", "sleep 100 & kill -STOP $!; echo $!; wait")
    until(lambda: printed(box, process).endswith(b"\n"))
    stat = f"/proc/{int(printed(box, process))}/stat"
    until(lambda: " T " in box.run("cat", stat).stdout)
    lab.do(lab.driver.freeze(box.ref))
    lab.do(lab.driver.thaw(box.ref))
    assert " T " in box.run("cat", stat).stdout


@everywhere
def test_nothing_starts_in_a_frozen_session(lab: Lab) -> None:
    box = lab.box()
    lab.do(lab.driver.freeze(box.ref))

    async def start_and_thaw() -> ProcessHandle:
        starting = asyncio.create_task(lab.driver.start_process(box.ref, ProcessSpec("late", ("date",))))
        done, _ = await asyncio.wait([starting], timeout=0.3)
        assert not done
        await lab.driver.thaw(box.ref)
        return await asyncio.wait_for(starting, ENOUGH)

    assert lab.do(start_and_thaw()).record.id == "late"


# --- the end -------------------------------------------------------------------------------------------


@everywhere
def test_stopping_twice_is_stopping_once(lab: Lab) -> None:
    box = lab.box()
    running = box.start("sleep", "100")
    pids = inhabitants(box)
    first = box.stop()
    assert (first.status, first.reason) == ("stopped", "test")
    until(lambda: gone(pids))
    assert lab.do(lab.driver.stop(box.ref, reason="another")).reason == "test"
    assert box.stop().stopped_ms == first.stopped_ms == box.state().stopped_ms
    assert lab.do(lab.driver.process(box.ref, running)).status == "lost"
    for call in (
        lambda: box.run("true"),
        lambda: box.read("/etc/passwd"),
        lambda: lab.do(lab.driver.usage(box.ref)),
        lambda: lab.do(lab.driver.freeze(box.ref)),
        lambda: lab.do(lab.driver.set_deadline(box.ref, now_ms())),
        lambda: lab.do(lab.driver.signal(box.ref, 9)),
    ):
        with pytest.raises(SessionStopped):
            call()


@everywhere
def test_two_who_stop_at_once_get_the_same_end(lab: Lab) -> None:
    box = lab.box()
    box.start("sleep", "100")

    async def both(driver: Driver) -> list[SessionState]:
        stops = [driver.stop(box.ref, reason=f"stop {number}") for number in range(5)]
        return list(await asyncio.gather(*stops, driver.wait_stopped(box.ref)))

    states = lab.do(both(lab.driver))
    assert {state.reason for state in states} == {"stop 0"}
    assert {state.stopped_ms for state in states} == {states[0].stopped_ms}


@everywhere
def test_a_stop_with_grace_lets_processes_say_goodbye_and_waits_no_longer(lab: Lab) -> None:
    box = lab.box()
    script = 'trap "echo bye; exit 9" TERM; echo up; while :; do sleep 0.05; done'
    polite = box.start("bash", "-c", script)
    until(lambda: b"up" in printed(box, polite))
    started = time.monotonic()
    box.stop(grace_ms=100_000)
    assert time.monotonic() - started < 50
    done = box.finish(polite)
    assert (done.code, done.stdout) == (9, "up\nbye\n")
    stubborn_box = lab.box()
    stubborn = stubborn_box.start("bash", "-c", 'trap "" TERM; echo up; while :; do sleep 0.05; done')
    until(lambda: b"up" in printed(stubborn_box, stubborn))
    started = time.monotonic()
    assert stubborn_box.stop(grace_ms=500).status == "stopped"
    assert 0.4 < time.monotonic() - started < 50
    assert stubborn_box.finish(stubborn).record.status in ("lost", "killed")


@everywhere
def test_usage_counts_time_and_where_it_can_memory(lab: Lab) -> None:
    box = lab.box()
    box.run("python3", "-c", "sum(range(20_000_000))")
    usage = lab.do(lab.driver.usage(box.ref))
    assert usage.duration_ms is not None and usage.duration_ms > 50
    if lab.driver.mode == "root":
        assert usage.cpu_ms is not None and usage.memory_bytes is not None
        assert usage.memory_peak_bytes is not None and usage.pids is not None
        assert usage.cpu_ms > 50 and usage.memory_peak_bytes >= usage.memory_bytes > 0
        assert usage.pids >= 1 and usage.oom_kills == 0
    final = box.stop().usage
    assert final is not None and final.cpu_ms is not None and final.duration_ms is not None
    assert final.cpu_ms > 50
    assert final.duration_ms >= usage.duration_ms


@everywhere
def test_a_reference_of_another_generation_reaches_nobody(lab: Lab) -> None:
    box = lab.box()
    stale = SessionRef(box.ref.host, box.ref.session, box.ref.generation + 1)
    marker = box.start("sleep", "100")
    for call in (
        lambda: lab.do(lab.driver.state(stale)),
        lambda: lab.do(lab.driver.stop(stale, reason="stale")),
        lambda: lab.do(lab.driver.signal(stale, 9)),
        lambda: lab.do(lab.driver.files(stale).stat("/etc/passwd")),
        lambda: lab.do(lab.driver.usage(stale)),
    ):
        with pytest.raises(SessionStopped):
            call()
    assert lab.do(lab.driver.process(box.ref, marker)).status == "running"
    nowhere = SessionRef(box.ref.host, "no-such-session")
    with pytest.raises(NotFound):
        lab.do(lab.driver.state(nowhere))
    with pytest.raises(NotFound):
        lab.do(lab.driver.stop(nowhere, reason="test"))
    with pytest.raises(WrongState):
        lab.box(name=box.ref.session)


# --- what it is made of --------------------------------------------------------------------------------


@everywhere
def test_a_session_has_its_own_name_memory_and_durability(lab: Lab) -> None:
    box = lab.box(hostname="kept-safe", shm_bytes=3 * MEGABYTE, volatile=True)
    assert box.run("uname", "-n").stdout == "kept-safe\n"
    assert box.sh("df -k --output=size /dev/shm | tail -1").stdout.strip() == "3072"
    assert "volatile" in box.sh("grep ' / / ' /proc/self/mountinfo").stdout
    assert "volatile" not in common(lab).sh("grep ' / / ' /proc/self/mountinfo").stdout
    assert common(lab).run("uname", "-n").stdout == "sandbox\n"
    box.sh("echo written > file; sync")
    assert box.read("/workspace/file") == b"written\n"
    assert os.uname().nodename not in ("kept-safe", "sandbox")


def _tiny_tree(directory: str) -> None:
    """A root filesystem with a shell and two tools, and none of the usual directories."""
    for program in ("/bin/sh", "/bin/cat", "/bin/ls"):
        listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files = [word for word in listing.split() if word.startswith("/")]
        for source in (program, *files):
            target = f"{directory}{source}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(source, target)


@everywhere
def test_an_image_gets_the_mount_points_it_lacks(lab: Lab) -> None:
    """Also where it has links in their place: those lead nowhere."""
    with tempfile.TemporaryDirectory() as area:
        _tiny_tree(f"{area}/tree")
        for image, traps in (("tiny:1", ()), ("trap:1", ("proc", "dev", "sys"))):
            for name in traps:
                os.symlink("/tmp", f"{area}/tree/{name}")
            lab.do(lab.storage.import_image(f"{area}/tree", kind="directory", name=image))
            box = lab.box(image=image)
            assert box.run("/bin/cat", "/proc/self/comm").stdout == "cat\n"
            assert "null" in box.run("/bin/ls", "/dev").stdout.split()
            assert "kernel" in box.run("/bin/ls", "/sys").stdout.split()
            assert box.run("/bin/ls", "/tmp").stdout == ""


@everywhere
def test_a_link_where_something_must_be_mounted_is_refused(lab: Lab) -> None:
    """A layer with such a link in it could otherwise steer a mount anywhere."""
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    before = sorted(os.listdir(f"{lab.data_dir}/sessions"))
    for name in ("proc", "dev", "sys"):
        for kind in ("link", "file"):
            trap = f"{lab.data_dir}/trap-{name}-{kind}"
            os.mkdir(trap)
            if kind == "link":
                os.symlink("/tmp", f"{trap}/{name}")
            else:
                Path(f"{trap}/{name}").touch()
            first = rootfs.slots[0]
            slot = dataclasses.replace(first, lowers=(Lower(trap), *first.lowers))
            trapped = dataclasses.replace(rootfs, slots=(slot, *rootfs.slots[1:]))
            with pytest.raises(IsolationUnavailable) as refused:
                lab.do(lab.driver.create(SessionSpec(session="trapped", rootfs=trapped)))
            assert refused.value.part == "root-filesystem"
            assert f"/{name}" in str(refused.value)
            assert sorted(os.listdir(f"{lab.data_dir}/sessions")) == before
            shutil.rmtree(trap)


@everywhere
def test_a_deadline_that_is_no_number_is_refused(lab: Lab) -> None:
    box = common(lab)
    wrong: list[Any] = ["soon", [], float("inf")]
    for nonsense in wrong:
        with pytest.raises(InvalidRequest):
            lab.do(lab.driver.set_deadline(box.ref, nonsense))
    assert box.run("true").code == 0
