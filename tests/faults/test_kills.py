"""Each process of the host layer is killed with SIGKILL; what must survive does, and the rest is gone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.errors import NotFound, SandkeepError, SessionStopped, TransportError
from sandkeep.host import storage
from sandkeep.host.layers.values import Layer
from sandkeep.shared.outputlog import End
from tests.driver_lab import Lab
from tests.faults.watching import Being, all_gone, being, eventually, family, running_with, sweep
from tests.mode_runner import MODES, Ask, everywhere, opened

_REQUESTER = """
import sys, time
from tests.driver_lab import Lab
lab = Lab(sys.argv[1])
box = lab.box(name=sys.argv[2])
script = "for i in $(seq 1 300); do echo line $i; sleep 0.005; done; echo end >&2"
process = box.start("bash", "-c", script, process="writer")
print(process, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _elsewhere(lab: Lab, code: str, *args: str) -> subprocess.Popen[str]:
    """Another process of ours that uses the same data directory."""
    path = os.pathsep.join([*(entry for entry in sys.path if entry), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH") or path}
    command = [sys.executable, "-c", code, lab.data_dir, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _zygote(lab: Lab) -> int:
    assert lab.driver.zygote.pid is not None
    return lab.driver.zygote.pid


def _workers(lab: Lab) -> list[int]:
    """Worker processes on this lab's data directory."""
    workers = set(running_with(str(Path(storage.__file__).with_name("start_worker.py"))))
    return [pid for pid in running_with(lab.data_dir) if pid in workers]


def _noticed(lab: Lab, worker: Being) -> None:
    """Until a killed worker is dead and the lab's event loop has heard, as a server's does by itself."""

    async def look() -> bool:
        await asyncio.sleep(0.01)
        channel = lab.storage._channel
        return not worker.runs and (channel is None or not channel.open or bool(_workers(lab)))

    eventually(lambda: lab.do(look()))


# --- the requester --------------------------------------------------------------------------------------


@everywhere
def test_a_session_outlives_the_process_that_asked_for_it(lab: Lab) -> None:
    """kill -9 of the requester: the session runs on, and another caller reads its whole output."""
    with _elsewhere(lab, _REQUESTER, "orphan") as requester:
        assert requester.stdout is not None
        process = requester.stdout.readline().strip()
        requester.kill()
    box = lab.adopt("orphan")
    assert box.state().status == "running"
    result = box.finish(process)
    assert result.stdout == "".join(f"line {i}\n" for i in range(1, 301))
    assert result.stderr == "end\n"
    assert (result.code, result.record.status) == (0, "exited")
    assert result.gaps == []
    assert box.sh("echo still here").stdout == "still here\n"
    box.remove()


# --- the supervisor -------------------------------------------------------------------------------------


@everywhere
def test_nothing_is_lost_with_the_supervisor(lab: Lab) -> None:
    """kill -9 of the supervisor: every process dies, records say lost, the files become the next session."""
    box = lab.box(name="headless")
    box.sh("mkdir -p work && echo precious > work/file && ln -s file work/link && rm -f ~/.profile")
    done = box.start("echo", "finished before")
    box.finish(done)
    busy = box.start("bash", "-c", "echo begun; setsid sleep 31.5 & (setsid sleep 32.5 &) ; sleep 600")
    eventually(lambda: box.output(busy) and len(family(box.created.init_pid)) >= 4)
    eventually(lambda: box.output(busy))  # what it has not read yet dies with it
    everyone = family(box.created.supervisor_pid)
    assert len(everyone) >= 5

    os.kill(box.created.supervisor_pid, signal.SIGKILL)

    all_gone(everyone)
    state = box.state()
    assert (state.status, state.reason) == ("aborted", "supervisor died")
    with pytest.raises(SessionStopped):
        box.start("true")
    assert lab.do(lab.driver.process(box.ref, busy)).status == "lost"
    assert lab.do(lab.driver.process(box.ref, done)).status == "exited"
    assert {record.id for record in lab.do(lab.driver.processes(box.ref))} >= {busy, done}
    followed = box.finish(busy)
    assert followed.stdout == "begun\n"
    assert followed.record.reason == "supervisor died"

    assert "headless" in lab.do(lab.storage.recover_layers()).lost
    box.publish("rescued")
    assert "headless" not in lab.do(lab.storage.recover_layers()).lost
    after = lab.box(name="heir", layer="rescued")
    assert after.sh("cat work/link; test -e ~/.profile || echo removed").stdout == "precious\nremoved\n"
    after.remove()
    sweep(lab, box)
    assert lab.do(lab.storage.collect_layers()).deleted == ("rescued",)


@everywhere
def test_a_reader_of_live_output_learns_that_the_supervisor_died(lab: Lab) -> None:
    """Following output ends, with what was logged, instead of hanging."""
    box = lab.box(name="followed")
    process = box.start("bash", "-c", "echo before; sleep 600")
    eventually(lambda: box.output(process))
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {box.created.supervisor_pid}"]):
        result = box.finish(process)
    assert (result.stdout, result.record.status) == ("before\n", "lost")
    assert not any(isinstance(item, End) for item in result.items)
    sweep(lab, box)


@everywhere
def test_a_dead_supervisors_name_is_not_taken_again_by_accident(lab: Lab) -> None:
    """The directory of a crashed session stays until somebody decides; its name is refused till then."""
    box = lab.box(name="keepsake")
    box.sh("echo kept > file")
    supervisor = being(box.created.supervisor_pid)
    os.kill(supervisor.pid, signal.SIGKILL)
    all_gone([supervisor])
    with pytest.raises(SandkeepError, match="exists"):
        lab.box(name="keepsake")
    assert "keepsake" in lab.do(lab.storage.recover_layers()).lost
    sweep(lab, box)
    with pytest.raises(NotFound):
        lab.do(lab.driver.state(box.ref))


# --- init -----------------------------------------------------------------------------------------------


@everywhere
def test_a_session_ends_with_its_init(lab: Lab) -> None:
    """kill -9 of init: the kernel kills the rest, the supervisor closes the books, the files are kept."""
    box = lab.box(name="beheaded")
    box.sh("echo kept > file")
    busy = box.start("bash", "-c", "echo begun; setsid sleep 41.5 & sleep 600")
    eventually(lambda: box.output(busy) and len(family(box.created.init_pid)) >= 3)
    everyone = family(box.created.supervisor_pid)

    os.kill(box.created.init_pid, signal.SIGKILL)

    final = lab.do(lab.driver.wait_stopped(box.ref))
    assert (final.status, final.reason) == ("stopped", "the session's init died")
    all_gone(everyone)
    record = lab.do(lab.driver.process(box.ref, busy))
    assert (record.status, record.reason) == ("lost", "the session's init died")
    assert box.finish(busy).stdout == "begun\n"
    assert not any(os.path.exists(path) for _, path in final.cgroup.values())
    box.publish("after-init")
    heir = lab.box(layer="after-init")
    assert heir.sh("cat file").stdout == "kept\n"
    heir.remove()
    box.remove()
    lab.do(lab.storage.collect_layers())


# --- the zygote -----------------------------------------------------------------------------------------


@everywhere
def test_a_killed_zygote_is_replaced_unnoticed(lab: Lab) -> None:
    """kill -9 of the zygote: sessions go on, the next create starts another, with nothing asked of anyone."""
    box = lab.box(name="bystander")
    process = box.start("bash", "-c", "read line; echo got $line", stdin=True)
    first = _zygote(lab)
    for _ in range(5):
        os.kill(_zygote(lab), signal.SIGKILL)
        fresh = lab.box()
        assert fresh.sh("echo new").stdout == "new\n"
        fresh.remove()
    assert _zygote(lab) != first
    lab.do(lab.driver.write_stdin(box.ref, process, b"input\n"))
    assert box.finish(process).stdout == "got input\n"
    assert box.state().status == "running"
    box.remove()


@everywhere
def test_supervisors_survive_zygote_and_driver(lab: Lab) -> None:
    """Everything but the supervisor goes away in order; a later driver finds the session again."""
    other = Lab(lab.data_dir)
    box = other.box(name="left-alone")
    process = box.start("bash", "-c", "sleep 0.3; echo later; sleep 0.2; echo and later")
    zygote, supervisor = being(_zygote(other)), being(box.created.supervisor_pid)
    other.detach()
    all_gone([zygote])
    time.sleep(0.4)
    assert supervisor.runs
    again = lab.adopt("left-alone")
    refs = lab.do(lab.driver.sessions())
    assert again.ref in refs
    assert again.finish(process).stdout == "later\nand later\n"
    assert again.sh("echo alive").stdout == "alive\n"
    again.remove()
    all_gone([supervisor])


# --- the worker -----------------------------------------------------------------------------------------


@everywhere
def test_a_killed_worker_is_replaced_by_the_next_call(lab: Lab) -> None:
    lab.do(lab.storage.list_layers())
    (worker,) = _workers(lab)
    killed = being(worker)
    os.kill(worker, signal.SIGKILL)
    _noticed(lab, killed)
    assert lab.do(lab.storage.list_layers()) == []
    (replaced,) = _workers(lab)
    assert replaced != worker


async def _killed_meanwhile(lab: Lab) -> list[Layer]:
    """A call that is under way when the worker dies."""
    await lab.storage.list_layers()
    (worker,) = _workers(lab)
    os.kill(worker, signal.SIGSTOP)
    calling = asyncio.create_task(lab.storage.list_layers())
    done, _ = await asyncio.wait([calling], timeout=0.2)
    assert not done
    os.kill(worker, signal.SIGKILL)
    return await calling


@everywhere
def test_a_call_under_way_does_not_notice_that_the_worker_died(lab: Lab) -> None:
    assert lab.do(_killed_meanwhile(lab)) == []


@everywhere
def test_a_call_hears_that_two_workers_died(lab: Lab) -> None:
    """Whatever is in it may be what kills them: it is not tried for ever."""
    started = []

    def spawn(argv: list[str], fd: int, environment: dict[str, str]) -> None:
        started.append(argv)
        type(lab.driver).spawn(lab.driver, ["/bin/true"], fd, environment)

    lab.driver.spawn = spawn  # type: ignore[method-assign]
    try:
        with pytest.raises(TransportError, match="the worker process ended"):
            lab.do(_killed_meanwhile(lab))
    finally:
        del lab.driver.spawn
    assert len(started) == 1
    assert lab.do(lab.storage.list_layers()) == []


@everywhere
def test_a_publish_cut_short_is_finished(lab: Lab) -> None:
    """The worker dies at random moments of publishing: the call always ends in a whole layer."""
    moments = random.Random(7)
    for number in range(8):
        box = lab.box(name=f"torn-{number}")
        box.sh(f"mkdir -p a/b; for i in 1 2 3; do echo {number}-$i > a/b/$i; done")
        box.stop()
        lab.do(lab.driver.forget(box.ref))
        lab.do(lab.storage.list_layers())
        (worker,) = _workers(lab)
        victim = being(worker)
        delay = moments.uniform(0, 0.004)
        code = f"import os, time; print(flush=True); input(); time.sleep({delay}); os.kill({worker}, 9)"
        killer = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert killer.stdin is not None and killer.stdout is not None
        killer.stdout.readline()
        killer.stdin.write("\n")
        killer.stdin.flush()
        box.publish(f"whole-{number}")
        killer.communicate()
        _noticed(lab, victim)
        lab.do(lab.storage.recover_layers())
        box.publish(f"whole-{number}")
        heir = lab.box(layer=f"whole-{number}")
        assert heir.sh("cat a/b/*").stdout == f"{number}-1\n{number}-2\n{number}-3\n"
        heir.remove()
        box.remove()
    names = {f"whole-{number}" for number in range(8)}
    assert set(lab.do(lab.storage.collect_layers()).deleted) == names
    leftovers = [name for name in os.listdir(f"{lab.data_dir}/layers") if "-" in name]
    assert leftovers == [".lock-fold"] or leftovers == []
