"""What dies or fails beside others keeps none of them from what they do, and leaves nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.errors import SandkeepError, SessionStopped
from sandkeep.host.native import network
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.native.messages import NativeState
from sandkeep.host.rootfs import Composed, Lower
from tests.engine.engine_lab import EngineLab
from tests.polling import until


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("bystanders")), Settings(pool=1)) as lab:
        yield lab


def supervisor(lab: EngineLab, session: str) -> int:
    ref = lab.engine._context.ref(lab.engine.sessions.get(lab.project, session))
    state = lab.do(lab.engine.driver.state(ref))
    assert isinstance(state, NativeState)
    return state.supervisor_pid


def test_who_waits_for_descriptors_of_a_session_hears_that_its_supervisor_died(lab: EngineLab) -> None:
    started = lab.create("dies")
    pid = supervisor(lab, started.session.id)
    directory = f"{lab.data_dir}/sessions/{started.session.id}"
    os.kill(pid, signal.SIGSTOP)

    async def killed_meanwhile() -> Any:
        asking = asyncio.create_task(asyncio.to_thread(network.get_listeners, directory, generation=1))
        await asyncio.sleep(0.2)  # until it waits for the answer: what is sent before that is not asked yet
        os.kill(pid, signal.SIGKILL)
        return await asking

    with pytest.raises(SessionStopped, match="the supervisor of session"):
        lab.do(killed_meanwhile())


def test_a_supervisor_that_dies_while_netd_is_told_about_it_keeps_no_other_waiting(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, other = lab.create("dying"), lab.create("other")
    pid, first = supervisor(lab, dying.session.id), lab.engine.network.pid
    assert first is not None
    real = lab.engine.driver.listeners
    asked: list[str] = []

    async def listeners(ref: Any) -> Sequence[int]:
        asking = asyncio.ensure_future(real(ref))
        if ref.session == dying.session.id and not asked:
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
        asked.append(ref.session)
        return await asking

    monkeypatch.setattr(lab.engine.driver, "listeners", listeners)
    os.kill(pid, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)

    async def restarted() -> bool:
        await lab.engine.network.ready()
        await asyncio.sleep(0.01)
        return lab.engine.network.pid not in (None, first)

    until(lambda: lab.do(restarted()))
    assert set(asked) == {dying.session.id, other.session.id}
    assert not [facts for note, facts in lab.log if note == "task failed"]
    lab.do(lab.engine.sessions.stop(lab.project, other.session.id))
    lab.do(lab.engine.sandboxes.resume(lab.project, "other"))


def ready(lab: EngineLab) -> set[str]:
    return set(os.listdir(f"{lab.data_dir}/ready"))


def prepared(lab: EngineLab) -> str:
    """The file of a supervisor that waits for a session, once there is one; others have theirs."""

    def look() -> list[str]:
        return [name for name in ready(lab) if b"sandkeep-ready" in command(int(name.split("-")[1]))]

    return until(look)[0]


def kill(name: str) -> None:
    """Kill a prepared supervisor, and wait until it no longer looks alive."""
    pid = int(name.split("-")[1])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not command(pid))


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_prepared_supervisor_whose_create_failed_leaves_no_file(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lab.engine.storage.rootfs

    async def broken(image: str, **more: Any) -> Composed:
        rootfs, warnings = await real(image, **more)
        slots = [replace(slot, lowers=(Lower("/nothing/here"),)) for slot in rootfs.slots]
        return Composed(replace(rootfs, slots=tuple(slots)), warnings)

    monkeypatch.setattr(lab.engine.storage, "rootfs", broken)
    name = prepared(lab)

    def taken() -> bool:
        """Once it got the session: until it has said that it is ready, others do."""
        with pytest.raises(SandkeepError):
            lab.create("broken")
        return b"sandkeep-ready" not in command(int(name.split("-")[1]))

    until(taken)
    assert name not in ready(lab)


def test_what_a_killed_prepared_supervisor_leaves_is_removed_while_the_zygote_runs(lab: EngineLab) -> None:
    name = prepared(lab)
    kill(name)
    until(lambda: name not in ready(lab))
    assert prepared(lab) != name


def test_the_zygote_removes_a_killed_supervisor_that_the_kernel_takes_long_to_end(lab: EngineLab) -> None:
    name, driver = prepared(lab), lab.engine.driver
    assert isinstance(driver, NativeDriver)
    zygote = driver.zygote.pid
    assert zygote is not None
    with open(f"{lab.data_dir}/ready/{name}", "rb") as file:
        os.kill(zygote, signal.SIGSTOP)
        kill(name)
        fcntl.flock(file, fcntl.LOCK_EX)  # as the dying supervisor would until its last descriptor is closed
        os.kill(zygote, signal.SIGCONT)
        assert prepared(lab) != name  # the zygote has seen the death
        assert name in ready(lab)
    until(lambda: name not in ready(lab))


def test_supervisors_killed_while_they_prepare_do_not_leave_the_pool_empty(lab: EngineLab) -> None:
    for _ in range(2):
        kill(prepared(lab))
    prepared(lab)
