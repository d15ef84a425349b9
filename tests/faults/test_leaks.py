"""Creating and killing sessions in numbers leaves the machine as it was."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sandkeep.errors import NoSpace, SandkeepError
from sandkeep.host.driver import Limits, ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native import driver as native
from sandkeep.host.native.messages import NativeState
from sandkeep.host.rootfs import Bind, Lower, Rootfs
from sandkeep.shared.sealed import write_sealed
from tests.driver_lab import Lab, created
from tests.faults.watching import Being, all_gone, all_pids, being, family
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.polling import ENOUGH

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


class Traces:
    """What sessions were seen to use while they ran, to be looked for afterwards."""

    def __init__(self) -> None:
        self.beings: set[Being] = set()
        self.namespaces: set[str] = set()
        self.groups: set[str] = set()

    def note(self, state: NativeState) -> None:
        for pid in (state.supervisor_pid, state.init_pid):
            self.beings.add(being(pid))
        self.groups |= {path for _, path in state.cgroup.values()}
        try:
            links = {os.readlink(f"/proc/{state.init_pid}/ns/{name}") for name in _NAMESPACES}
        except PermissionError:
            return  # rootless: init is not ours to look into
        self.namespaces |= links - {os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}

    def left(self) -> list[str]:
        found = [f"process {one}" for one in self.beings if one.alive]
        found += [f"control group {path}" for path in self.groups if os.path.exists(path)]
        return found + [f"namespace {name}" for name in self.namespaces & _namespaces_in_use()]


def _namespaces_in_use() -> set[str]:
    """Every namespace one of our processes is in or has open, or a mount of ours pins.

    Ours only: the kernel gives the number of a namespace that is gone to the next one made on the machine.
    """
    found: set[str] = set()
    for pid in (one.pid for one in family(os.getpid())):
        for directory in (f"/proc/{pid}/ns", f"/proc/{pid}/fd"):
            try:
                for name in os.listdir(directory):
                    found.add(os.readlink(f"{directory}/{name}"))
            except OSError:
                continue
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - nsfs " in line:
            found.add(line.split(" ")[3])
    return found


def _fds(pid: int) -> list[str]:
    """Kinds of open descriptors, without the numbers that differ each time."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0])
        except OSError:
            continue
    return sorted(found)


def _picture(lab: Lab) -> dict[str, list[str]]:
    """Everything of the caller, the zygote and the disk that must not grow."""
    gc.collect()
    zygote = lab.driver.zygote.pid
    assert zygote is not None
    picture = {
        "descriptors here": _fds(os.getpid()),
        "mounts here": sorted(Path("/proc/self/mountinfo").read_text().splitlines()),
        "sessions": sorted(os.listdir(f"{lab.data_dir}/sessions")),
        "layers": sorted(os.listdir(f"{lab.data_dir}/layers")),
        "data directory": sorted(os.listdir(lab.data_dir)),
    }
    if os.geteuid() == 0:
        picture |= {
            "descriptors of the zygote": _fds(zygote),
            "mounts of the zygote": sorted(Path(f"/proc/{zygote}/mountinfo").read_text().splitlines()),
            "children of the zygote": Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split(),
        }
    return picture


def _same(lab: Lab, before: dict[str, list[str]]) -> None:
    """Wait until nothing is there that was not there before, and say what is if that never comes."""
    deadline = time.monotonic() + ENOUGH
    while fresh := _added(before, _picture(lab)):
        assert time.monotonic() < deadline, f"left behind: {fresh}"
        time.sleep(0.02)


def _added(before: dict[str, list[str]], now: dict[str, list[str]]) -> dict[str, list[str]]:
    added = {kind: list((Counter(now[kind]) - Counter(before[kind])).elements()) for kind in now}
    return {kind: names for kind, names in added.items() if names}


async def _one_life(lab: Lab, rootfs: Rootfs, session: str, traces: Traces) -> None:
    """Create, run something that tries to stay, kill, remove."""
    driver = lab.driver
    traces.note(created(await driver.create(SessionSpec(session=session, rootfs=rootfs))))
    ref = SessionRef(driver.host, session)
    await driver.start_process(
        ref, ProcessSpec("p", ("sh", "-c", "setsid sleep 77 & echo x > file; sleep 77"))
    )
    final = await driver.stop(ref, reason="enough")
    assert final.status == "stopped"
    await driver.forget(ref)
    await lab.storage.remove_session(session)


def _lives(lab: Lab, count: int, *, at_once: int) -> None:
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    traces = Traces()

    async def run() -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await _one_life(lab, rootfs, f"life-{at_once}-{number}", traces)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker(), name="life")

    lab.do(_one_life(lab, rootfs, f"warm-{at_once}", Traces()))  # connections and caches made once
    before = _picture(lab)
    lab.do(run())
    assert len(traces.beings) == 2 * count
    deadline = time.monotonic() + ENOUGH
    while left := traces.left():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)
    _same(lab, before)


@everywhere
def test_sessions_one_after_another_leave_nothing(lab: Lab) -> None:
    """No process, mount, control group, namespace, descriptor or directory is left behind."""
    _lives(lab, 200 if lab.driver.mode == "root" else 30, at_once=1)


@everywhere
def test_sessions_sixteen_at_a_time_leave_nothing(lab: Lab) -> None:
    """No process, mount, control group, namespace, descriptor or directory is left behind."""
    _lives(lab, 200 if lab.driver.mode == "root" else 48, at_once=16)


# --- sessions that never came to be ---------------------------------------------------------------------


def _missing_layer(rootfs: Rootfs) -> Rootfs:
    """A lower directory that was deleted after the root filesystem was composed."""
    return _with_lower(rootfs, f"{rootfs.slots[0].lowers[0].path}-deleted")


def _with_lower(rootfs: Rootfs, path: str) -> Rootfs:
    first = rootfs.slots[0]
    slot = type(first)(first.name, first.target, (Lower(path), *first.lowers))
    return type(rootfs)(
        rootfs.image, rootfs.flavour, (slot, *rootfs.slots[1:]), rootfs.binds, rootfs.defaults
    )


def _impossible_bind(rootfs: Rootfs) -> Rootfs:
    """A place that is not there: noticed by init, when all mounts exist and it is nearly done."""
    binds = (*rootfs.binds, Bind("/usr/share", "/no/such/place"))
    return type(rootfs)(rootfs.image, rootfs.flavour, rootfs.slots, binds, rootfs.defaults)


def _fails(lab: Lab, spec: Callable[[Rootfs], SessionSpec]) -> SandkeepError:
    """Creating fails, three times, and each time leaves nothing; afterwards creating works."""
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    lab.box(name="first-of-all").remove()
    before = _picture(lab)
    processes = set(all_pids())
    for _ in range(3):
        with pytest.raises(SandkeepError) as caught:
            lab.do(lab.driver.create(spec(rootfs)))
        _same(lab, before)
    fresh = {being(pid) for pid in set(all_pids()) - processes if _is_ours(pid)}
    all_gone(fresh)
    box = lab.box(name="half-way")
    assert box.sh("echo fine").stdout == "fine\n"
    box.remove()
    return caught.value


def _is_ours(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sandkeep-supervisor half-way")
    except OSError:
        return False


@everywhere
def test_a_missing_layer_fails_the_create_and_leaves_nothing(lab: Lab) -> None:
    error = _fails(lab, lambda rootfs: SessionSpec("half-way", _missing_layer(rootfs)))
    assert error.details["part"] == "root-filesystem"


@everywhere
def test_a_full_disk_fails_the_create_by_name_and_leaves_nothing(lab: Lab) -> None:
    def full(path: str, body: Any) -> None:
        if body["cwd"] == "/too/much":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_sealed(path, body)

    with mock.patch.object(native, "write_sealed", full):
        error = _fails(lab, lambda rootfs: SessionSpec("half-way", rootfs, cwd="/too/much"))
    assert isinstance(error, NoSpace)


@everywhere
def test_a_failure_of_init_fails_the_create_and_leaves_nothing(lab: Lab) -> None:
    error = _fails(lab, lambda rootfs: SessionSpec("half-way", _impossible_bind(rootfs)))
    assert error.details["part"] == "root-filesystem"


@everywhere
def test_a_refused_limit_fails_the_create_and_leaves_nothing(lab: Lab) -> None:
    """A limit asked for that cannot be had: an impossible one under root, any memory limit rootless."""
    if lab.driver.mode != "root" and not lab.driver.capabilities().limits["memory"]:
        pytest.skip("this user's control groups can limit memory")
    limits = Limits(memory_bytes=4096, explicit=frozenset({"memory"}))
    _fails(lab, lambda rootfs: SessionSpec("half-way", rootfs, limits=limits))


@everywhere
def test_a_name_in_use_is_refused_and_its_session_goes_on(lab: Lab) -> None:
    box = lab.box(name="taken")
    process = box.start("sh", "-c", "read line; echo $line", stdin=True)
    with pytest.raises(SandkeepError, match="exists"):
        lab.box(name="taken")
    lab.do(lab.driver.write_stdin(box.ref, process, b"unharmed\n"))
    assert box.finish(process).stdout == "unharmed\n"
    box.remove()
