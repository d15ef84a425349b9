"""Many callers at once on one name: some order of whole operations, never a second session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.context import Context
from sandkeep.engine.engine import Engine
from sandkeep.engine.files import Acting
from sandkeep.engine.sandboxes import Started
from sandkeep.errors import (
    NameTaken,
    NotFound,
    SandkeepError,
    SessionSnapshotting,
    SessionStopped,
    SessionStopping,
    WrongState,
)
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import SandboxSpec
from sandkeep.store.rows import ACTIVE
from tests.engine.engine_lab import EngineLab, run_script
from tests.vm.guest.scenario import pack

CALLERS = 32
ALLOWED = (NotFound, NameTaken, SessionStopped, SessionStopping, SessionSnapshotting)
"""What the contract lets a loser of a race be told."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("races"))) as lab:
        yield lab


async def get_or_create(engine: Engine, project: str, name: str) -> Started:
    """What clients do: look, create when missing, look again when somebody was quicker."""
    while True:
        try:
            return await engine.sandboxes.resume(project, name)
        except NotFound:
            try:
                return await engine.sandboxes.create(project, SandboxSpec(name=name))
            except NameTaken:
                continue


def active_sessions(lab: EngineLab, name: str) -> int:
    sandbox = lab.engine.store.sandboxes.find(lab.project, name)
    if sandbox is None:
        return 0
    page = lab.engine.store.sessions.page(lab.project, sandbox=sandbox.id)
    return sum(session.status in ACTIVE for session in page.items)


def test_concurrent_first_opens_of_one_name_yield_one_sandbox_and_one_session(lab: EngineLab) -> None:
    for round_ in range(3):
        name = f"first-{round_}"
        found = lab.all(*(get_or_create(lab.engine, lab.project, name) for _ in range(CALLERS)))
        assert {started.session.id for started in found} == {found[0].session.id}
        assert {started.sandbox.id for started in found} == {found[0].sandbox.id}
        assert active_sessions(lab, name) == 1


def test_concurrent_resumes_start_one_session(lab: EngineLab) -> None:
    started = lab.create("resumed")
    for _ in range(3):
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        found = lab.all(*(lab.engine.sandboxes.resume(lab.project, "resumed") for _ in range(CALLERS)))
        assert sum(item.resumed for item in found) == 1
        assert len({item.session.id for item in found}) == 1
        started = found[0]


def test_concurrent_stops_make_one_snapshot(lab: EngineLab) -> None:
    started = lab.create("stopped")
    ended = lab.all(*(lab.engine.sessions.stop(lab.project, started.session.id) for _ in range(CALLERS)))
    assert len({snapshot.id for _, snapshot in ended}) == 1
    assert len(lab.engine.store.snapshots.live_of(lab.project, started.sandbox.id)) == 1


def test_stop_racing_with_resume_loses_no_file(lab: EngineLab) -> None:
    started = lab.create("seesaw")
    for round_ in range(5):
        lab.sh(started.session.id, f"echo {round_} >> rounds")
        stops = [lab.engine.sessions.stop(lab.project, started.session.id) for _ in range(4)]
        resumes = [lab.engine.sandboxes.resume(lab.project, "seesaw") for _ in range(4)]
        results = lab.all(*stops, *resumes)
        assert not [item for item in results if isinstance(item, BaseException)]
        started = lab.do(lab.engine.sandboxes.resume(lab.project, "seesaw"))
        assert lab.sh(started.session.id, "cat rounds").split() == [str(i) for i in range(round_ + 1)]


def test_everything_at_once_on_one_name_keeps_one_session_and_only_named_errors(lab: EngineLab) -> None:
    chance = random.Random(7)
    highest = 0

    async def watch(stop: asyncio.Event) -> None:
        nonlocal highest
        while not stop.is_set():
            highest = max(highest, active_sessions(lab, "melee"))
            await asyncio.sleep(0)

    async def caller(number: int) -> list[SandkeepError]:
        errors: list[SandkeepError] = []
        engine, project = lab.engine, lab.project
        for _ in range(6):
            await asyncio.sleep(chance.random() * 0.01)
            try:
                match chance.randrange(6):
                    case 0:
                        await engine.sandboxes.destroy(project, "melee")
                    case 1 | 2:
                        started = await get_or_create(engine, project, "melee")
                        await run_script(engine, project, started.session.id, "echo x >> log")
                    case 3:
                        await engine.sandboxes.resume(project, "melee")
                    case 4:
                        current = engine.sandboxes.get(project, "melee").session
                        await engine.sessions.stop(project, current.id)
                    case _:
                        current = engine.sandboxes.get(project, "melee").session
                        await engine.sessions.snapshot(project, current.id)
            except SandkeepError as error:
                errors.append(error)
            except AssertionError:
                continue  # the script was killed by a stop
        return errors

    async def run() -> list[list[SandkeepError]]:
        stop = asyncio.Event()
        watcher = asyncio.create_task(watch(stop))
        found = await asyncio.gather(*(caller(number) for number in range(CALLERS)))
        stop.set()
        await watcher
        return list(found)

    errors = [error for found in lab.do(run()) for error in found]
    unnamed = [error for error in errors if not isinstance(error, ALLOWED)]
    assert not unnamed, [(type(error), str(error)) for error in unnamed]
    assert highest <= 1
    if lab.engine.store.sandboxes.find(lab.project, "melee") is not None:
        lab.do(lab.engine.sandboxes.destroy(lab.project, "melee"))
    assert WrongState not in {type(error) for error in errors}


def test_checkpoints_at_once_are_taken_one_after_the_other(lab: EngineLab) -> None:
    started = lab.create("checkpointed")
    taken = lab.all(*(lab.engine.sessions.checkpoint(lab.project, started.session.id) for _ in range(4)))
    assert not [item for item in taken if isinstance(item, BaseException)]
    assert len({snapshot.id for _, snapshot in taken}) == 4


def test_a_checkpoint_that_a_stop_cuts_short_says_that_the_session_ended(lab: EngineLab) -> None:
    started = lab.create("cut-short")
    lab.sh(started.session.id, "for i in $(seq 300); do mkdir d$i; echo x > d$i/f; done")
    for _ in range(5):

        async def both(session: str = started.session.id) -> object:
            taking = asyncio.ensure_future(lab.engine.sessions.checkpoint(lab.project, session))
            await asyncio.sleep(random.uniform(0, 0.03))
            await lab.engine.sessions.stop(lab.project, session)
            return (await asyncio.gather(taking, return_exceptions=True))[0]

        found = lab.do(both())
        assert not isinstance(found, BaseException) or type(found) in ALLOWED, repr(found)
        started = lab.do(lab.engine.sandboxes.resume(lab.project, "cut-short"))


def test_a_supervisor_that_ends_with_callers_in_its_queue_has_stopped(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lab.create("queued")

    async def reset(*arguments: object, **options: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(asyncio, "open_unix_connection", reset)
    with pytest.raises(SessionStopped):
        lab.do(lab.engine.files.stat(lab.project, started.session.id, "/", Acting()))


def test_a_policy_that_was_replaced_meanwhile_does_not_come_back(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed secret has every policy sent again that was read before others replaced it."""
    before = lab.create("policies").session
    denied = lab.do(lab.engine.sandboxes.set_policy(lab.project, before.id, NetworkPolicy.deny_all()))
    assert denied.network_policy != before.network_policy
    ask, sent = lab.engine.network._netd.ask, []

    async def note(channel: Any, op: str, *arguments: Any, **body: Any) -> Any:
        sent.append((op, body.get("policy")))
        return await ask(channel, op, *arguments, **body)

    monkeypatch.setattr(lab.engine.network._netd, "ask", note)
    lab.do(lab.engine.network.set_policy(before))
    assert ("update", denied.network_policy) in sent and ("update", before.network_policy) not in sent


def test_an_image_can_be_deleted_as_soon_as_its_last_sandbox_is_destroyed(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``destroy`` returns before the sandbox's files are gone, and the worker still finds its sessions."""
    pack(tmp_path / "tiny.tar", ["/bin/sh"])
    archive = str(tmp_path / "tiny.tar")
    lab.do(lab.engine.storage.import_image(archive, name="tiny", kind="tar"))
    lab.create("on-tiny", image="tiny")
    delayed = asyncio.Event()
    remove_session = Context.remove_session

    async def delay(context: Context, session: str) -> None:
        await delayed.wait()
        await remove_session(context, session)

    async def destroy_and_delete() -> None:
        await lab.engine.sandboxes.destroy(lab.project, "on-tiny", delete_orphan_snapshots=True)
        asyncio.get_running_loop().call_later(0.2, delayed.set)
        await lab.engine.images.delete(lab.project, "tiny", operator=True)

    monkeypatch.setattr(Context, "remove_session", delay)
    lab.do(destroy_and_delete())
    with pytest.raises(NotFound):
        lab.do(lab.engine.storage.get_image("tiny"))
