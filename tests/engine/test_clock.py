"""The wall clock is set while sandboxes live: nothing that was given a duration ends early or late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.errors import NotFound
from sandkeep.host.native import zygote_client
from sandkeep.host.reports import SessionState
from sandkeep.process_options import ProcessOptions
from sandkeep.shared import clock
from sandkeep.store.rows import SessionStatus, SnapshotStatus
from tests.conftest import remove_tree
from tests.engine.engine_lab import EngineLab
from tests.polling import until

DAY = 86_400_000
MINUTE = 60_000


class ClockLab(EngineLab):
    """An engine and supervisors with a wall clock that the test sets."""

    def jump(self, by_ms: int) -> None:
        path = Path(self.data_dir, "clock")
        path.write_text(str(int(path.read_text()) + by_ms))

    def look_after(self) -> None:
        self.do(self.engine.upkeep.turn())

    def state(self, session: str) -> SessionState:
        found = self.engine.sessions.get(self.project, session)
        return self.do(self.engine.driver.state(self.engine.sessions._context.ref(found)))

    def status(self, session: str) -> SessionStatus:
        return self.engine.sessions.get(self.project, session).status


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClockLab]:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "clock").write_text("0")
    real = clock.wall_ms
    monkeypatch.setattr(clock, "wall_ms", lambda: real() + int((data / "clock").read_text() or 0))
    script = str(Path(__file__).with_name("jumping_zygote.py"))
    monkeypatch.setattr(zygote_client, "_SCRIPT", script)
    lab = ClockLab(str(data), Settings(pool=0))
    try:
        yield lab
    finally:
        lab.close()
        remove_tree(data)


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
def test_a_jump_of_the_wall_clock_changes_no_remaining_time(lab: ClockLab, jump: int) -> None:
    started = lab.create("timed", timeout=timedelta(minutes=30))
    session = started.session.id
    lab.jump(jump)
    lab.look_after()
    assert lab.status(session) is SessionStatus.RUNNING
    state = lab.state(session)
    assert state.remaining_ms is not None and state.deadline_ms is not None
    assert 0 < state.remaining_ms <= 30 * MINUTE
    assert abs(state.deadline_ms - clock.wall_ms() - state.remaining_ms) < MINUTE

    longer = lab.do(lab.engine.sessions.extend(lab.project, session, by_ms=10 * MINUTE))
    left = lab.state(session).remaining_ms
    assert left is not None and state.remaining_ms < left <= 40 * MINUTE
    assert longer.deadline_ms is not None and longer.deadline_ms - clock.wall_ms() <= 40 * MINUTE
    lab.look_after()
    assert lab.status(session) is SessionStatus.RUNNING


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
def test_a_jump_while_no_server_runs_changes_no_remaining_time(lab: ClockLab, jump: int) -> None:
    session = lab.create("survivor", timeout=timedelta(minutes=30)).session.id
    lab.do(lab.engine.close())
    lab.jump(jump)
    lab.engine = lab.do(lab._open())
    lab.look_after()
    found = lab.engine.sessions.get(lab.project, session)
    assert found.status is SessionStatus.RUNNING
    assert found.deadline_ms is not None and 0 < found.deadline_ms - clock.wall_ms() <= 30 * MINUTE


def test_a_session_still_ends_when_its_time_is_up_after_a_jump_back(lab: ClockLab) -> None:
    session = lab.create("brief", timeout=timedelta(seconds=3)).session.id
    lab.jump(-DAY)
    assert lab.ended(session).stop_reason == "deadline reached"


def test_idle_time_is_not_what_the_wall_clock_says(lab: ClockLab) -> None:
    session = lab.create("quiet", idle_timeout=timedelta(minutes=10)).session.id
    lab.look_after()
    lab.jump(DAY)
    lab.look_after()
    assert lab.status(session) is SessionStatus.RUNNING


def test_idle_time_goes_on_after_a_restart_and_stands_still_while_no_server_runs(
    lab: ClockLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"timeout": timedelta(hours=20), "idle_timeout": timedelta(minutes=10)}
    session = lab.create("quiet", **limits).session.id
    printing = lab.create("prints", **limits).session.id
    arguments = ["-c", "while :; do echo tick; sleep 0.1; done"]
    lab.do(lab.engine.processes.start(lab.project, printing, ProcessOptions(command="sh", args=arguments)))
    real, ahead = clock.steady_ms, [0]
    monkeypatch.setattr(clock, "steady_ms", lambda: real() + ahead[0])

    def look_after(minutes: int) -> SessionStatus:
        ahead[0] += minutes * MINUTE
        lab.look_after()
        return lab.status(session)

    assert look_after(9) is SessionStatus.RUNNING
    lab.do(lab.engine.close())
    ahead[0] += 60 * MINUTE
    lab.engine = lab.do(lab._open())
    lab.look_after()
    assert lab.status(session) is SessionStatus.RUNNING
    assert look_after(2) is SessionStatus.STOPPED
    ended = lab.engine.sessions.get(lab.project, session)
    assert ended.stop_reason == "idle"
    assert lab.status(printing) is SessionStatus.RUNNING


def test_an_idle_session_in_use_again_is_not_ended(lab: ClockLab, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lab.create("used", timeout=timedelta(hours=20), idle_timeout=timedelta(minutes=10)).session.id
    real, ahead = clock.steady_ms, [0]
    monkeypatch.setattr(clock, "steady_ms", lambda: real() + ahead[0])
    activity = lab.engine.activity
    with activity.attached(session):
        ahead[0] += 60 * MINUTE
        lab.look_after()
        assert lab.status(session) is SessionStatus.RUNNING
        ahead[0] += 60 * MINUTE
    assert activity.idle_ms(session) < MINUTE  # what was attached used it until the end
    with pytest.raises(NotFound), activity.attached(session):
        ahead[0] += 11 * MINUTE
        raise NotFound("a request that is refused", kind="session", name=session)
    assert activity.idle_ms(session) >= 10 * MINUTE
    lab.look_after()
    assert lab.status(session) is SessionStatus.STOPPED


def test_expiry_does_not_believe_a_jump_forward_before_an_hour_has_passed(
    lab: ClockLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lab.create("kept", snapshot_expiration=timedelta(hours=2)).session.id
    _, checkpoint = lab.do(lab.engine.sessions.checkpoint(lab.project, session))

    def status() -> SnapshotStatus:
        return lab.engine.snapshots.get(lab.project, checkpoint.id).status

    lab.look_after()
    lab.jump(DAY)
    lab.look_after()
    assert status() is SnapshotStatus.CREATED
    noticed = [facts for message, facts in lab.log if message.startswith("the clock was set forward")]
    assert len(noticed) == 1 and abs(noticed[0]["ahead_ms"] - DAY) < MINUTE
    real = clock.elapsed_ms
    monkeypatch.setattr(clock, "elapsed_ms", lambda: real() + clock.DOUBT_MS)
    lab.look_after()
    assert status() is SnapshotStatus.DELETED


def test_a_session_that_ended_while_no_server_ran_is_recorded_with_its_real_end(lab: ClockLab) -> None:
    session = lab.create("alone", timeout=timedelta(seconds=4)).session.id
    directory = Path(lab.data_dir, "sessions", session)
    lab.do(lab.engine.close())

    def final() -> dict[str, Any] | None:
        state: dict[str, Any] = json.loads((directory / "state.json").read_text())
        return state if state["status"] == "stopped" else None

    state = until(final)
    assert state is not None
    lab.jump(10 * MINUTE)  # as if the server came back much later
    lab.engine = lab.do(lab._open())
    lab.do(asyncio.sleep(0))
    ended = lab.ended(session)
    assert ended.stop_reason == "deadline reached"
    assert ended.stopped_ms == state["stopped_ms"]
    assert ended.duration_ms == state["usage"]["duration_ms"] < MINUTE


def test_a_cautious_clock_follows_corrections_and_doubts_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 1_000_000, "elapsed": 0}
    monkeypatch.setattr(clock, "wall_ms", lambda: now["wall"])
    monkeypatch.setattr(clock, "elapsed_ms", lambda: now["elapsed"])

    def later(by_ms: int, *, set_by: int = 0) -> int:
        now["elapsed"] += by_ms
        now["wall"] += by_ms + set_by
        return cautious.now_ms()

    cautious = clock.CautiousClock()
    assert later(5000) == 1_005_000
    assert later(5000, set_by=30_000) == now["wall"], "a correction"
    assert later(5000, set_by=-DAY) == now["wall"], "set back"
    before = now["wall"]
    assert later(5000, set_by=DAY) == before + 5000 and cautious.ahead_ms == DAY
    assert later(clock.DOUBT_MS // 2) == before + 5000 + clock.DOUBT_MS // 2
    assert later(clock.DOUBT_MS) == now["wall"] and cautious.ahead_ms == 0
    slept = 8 * 3_600_000
    assert later(slept) == now["wall"], "a machine that slept"
