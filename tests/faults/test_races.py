"""Ends that come at the same moment: a session ends once, and everyone is told the same about it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sandkeep.errors import PathError, SandkeepError, TransportError, WrongState
from sandkeep.host.driver import ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.native.messages import NativeState, session_json
from sandkeep.host.rootfs import Rootfs
from sandkeep.shared.clock import wall_ms as now_ms
from sandkeep.shared.sealed import write_sealed
from tests.driver_lab import Lab, created
from tests.faults.watching import Being, all_gone, being
from tests.mode_runner import MODES, Ask, everywhere, opened
from tests.polling import ENOUGH

_REASONS = {"stopped", "stopped again", "deadline reached", "the session's init died"}


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


async def _ends_at_once(lab: Lab, rootfs: Rootfs, session: str, moments: random.Random) -> list[Being]:
    """Deadline, two stops (one polite), and death of init, all within a few milliseconds."""
    driver = lab.driver
    state = created(await driver.create(SessionSpec(session=session, rootfs=rootfs)))
    ref = SessionRef(driver.host, session)
    beings = [being(state.supervisor_pid), being(state.init_pid)]
    script = "trap '' TERM; echo up; setsid sleep 55 & sleep 55"

    async def at_the_time(work: Any) -> Any:
        await asyncio.sleep(max((deadline - now_ms()) / 1000 + moments.uniform(-0.005, 0.005), 0))
        return await work()

    async def kill_init() -> None:
        if beings[1].runs:
            with suppress(ProcessLookupError):  # it may be gone since
                os.kill(state.init_pid, signal.SIGKILL)

    async def start_another() -> None:
        try:
            await driver.start_process(ref, ProcessSpec("late", ("sh", "-c", script), kill_after_ms=1))
        except SandkeepError:
            pass  # it may be too late for that

    first = asyncio.create_task(driver.wait_stopped(ref), name="wait")
    await driver.start_process(ref, ProcessSpec("early", ("sh", "-c", script), kill_after_ms=40))
    deadline = now_ms() + 40
    await driver.set_deadline(ref, deadline)
    answers = await asyncio.wait_for(
        asyncio.gather(
            at_the_time(lambda: driver.stop(ref, reason="stopped")),
            at_the_time(lambda: driver.stop(ref, reason="stopped again", grace_ms=30)),
            at_the_time(kill_init),
            at_the_time(start_another),
            first,
        ),
        ENOUGH,
    )
    final = await driver.state(ref)
    assert final.status == "stopped"
    assert final.reason in _REASONS
    for answer in (answers[0], answers[1], answers[4]):
        assert (answer.status, answer.reason) == ("stopped", final.reason)
    for record in await driver.processes(ref):
        assert record.status in ("lost", "killed"), record
    await driver.forget(ref)
    await lab.storage.remove_session(session)
    return beings


@everywhere
def test_stop_deadline_and_kill_at_the_same_moment_end_a_session_once(lab: Lab) -> None:
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    moments = random.Random(11)

    async def all_of_them() -> list[Being]:
        beings: list[Being] = []
        for turn in range(6):
            lives = (_ends_at_once(lab, rootfs, f"race-{turn}-{n}", moments) for n in range(5))
            for found in await asyncio.gather(*lives):
                beings += found
        return beings

    all_gone(lab.do(all_of_them()))


@everywhere
def test_init_dying_during_a_request_is_an_end_and_not_a_hang(lab: Lab) -> None:
    """A process is being started or signalled when init dies: the caller hears, the session is stopped."""
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    moments = random.Random(5)

    async def one(session: str) -> None:
        driver = lab.driver
        state = created(await driver.create(SessionSpec(session=session, rootfs=rootfs)))
        ref = SessionRef(driver.host, session)
        await driver.start_process(ref, ProcessSpec("p", ("sleep", "60")))

        async def busy(number: int) -> None:
            try:
                for turn in range(50):
                    await driver.start_process(ref, ProcessSpec(f"p{number}-{turn}", ("true",)))
                    await driver.signal(ref, signal.SIGCONT, "p")
            except SandkeepError as error:
                assert not isinstance(error, PathError), "no path is to blame"

        async def kill() -> None:
            await asyncio.sleep(moments.uniform(0, 0.03))
            os.kill(state.init_pid, signal.SIGKILL)

        await asyncio.wait_for(asyncio.gather(busy(1), busy(2), kill()), ENOUGH)
        final = await driver.wait_stopped(ref)
        assert (final.status, final.reason) == ("stopped", "the session's init died"), final
        await driver.forget(ref)
        await lab.storage.remove_session(session)

    for number in range(10):
        lab.do(one(f"dying-{number}"))


@everywhere
def test_the_zygote_dying_during_creates_fails_none_of_them(lab: Lab) -> None:
    """Sixteen creates at once and a zygote killed again and again: every one gets its session."""
    rootfs, _ = lab.do(lab.storage.rootfs("host"))

    async def create(session: str) -> None:
        ref = SessionRef(lab.driver.host, session)
        for _ in range(8):  # a create gives up when a second zygote dies on it, and can be repeated
            try:
                await lab.driver.create(SessionSpec(session=session, rootfs=rootfs))
                break
            except SandkeepError as error:
                assert error.code in ("internal_error", TransportError.code), error
        assert (await lab.driver.state(ref)).status == "running"
        await lab.driver.stop(ref, reason="enough")
        await lab.driver.forget(ref)
        await lab.storage.remove_session(session)

    async def killer() -> None:
        for _ in range(4):
            await asyncio.sleep(0.04)
            if (zygote := lab.driver.zygote.pid) is not None:
                os.kill(zygote, signal.SIGKILL)

    async def all_of_them() -> None:
        await asyncio.wait_for(
            asyncio.gather(killer(), *(create(f"crowd-{number}") for number in range(16))), ENOUGH
        )

    lab.do(all_of_them())
    assert not [name for name in os.listdir(f"{lab.data_dir}/sessions") if name.startswith("crowd-")]


@everywhere
def test_a_supervisor_that_comes_late_finds_its_session_given_up(lab: Lab) -> None:
    """Whoever asked for it was killed, and whoever came after has already found nobody there."""
    driver = lab.driver
    ref = SessionRef(driver.host, "late")
    directory = f"{driver.data_dir}/sessions/late"
    os.mkdir(directory)
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    write_sealed(f"{directory}/spec.json", session_json(SessionSpec(session="late", rootfs=rootfs)))
    assert lab.do(driver.state(ref)).status == "aborted"
    lab.do(driver.start())
    answer = json.loads(lab.do(driver.zygote.ask("late"))[0])
    assert answer["error"]["code"] == WrongState.code
    assert lab.do(driver.state(ref)).status == "aborted"
    until = time.monotonic() + ENOUGH
    while driver.alive("late"):  # it has answered, and is about to go
        assert time.monotonic() < until
        time.sleep(0.01)
    shutil.rmtree(directory)


@everywhere
def test_a_supervisor_that_does_not_answer_yet_is_waited_for(lab: Lab) -> None:
    """It has the session's lock and still builds what is to answer: that is not a session that died."""
    box = lab.box()
    directory = f"{lab.driver.data_dir}/sessions/{box.ref.session}"
    os.rename(f"{directory}/supervisor.sock", f"{directory}/not-yet")

    async def look() -> NativeState:
        another = NativeDriver(lab.driver.data_dir, mode=lab.driver.mode)
        looking = asyncio.create_task(another.state(box.ref))
        done, _ = await asyncio.wait([looking], timeout=0.3)
        assert not done
        os.rename(f"{directory}/not-yet", f"{directory}/supervisor.sock")
        state = await asyncio.wait_for(looking, ENOUGH)
        await another.close()
        return state

    assert lab.do(look()).status == "running"
    box.remove()
