"""Batches: sandboxes that are made together stay together, or none of them stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.errors import LimitReached
from sandkeep.spec import SandboxSpec
from tests.engine.engine_lab import EngineLab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("batches"))) as lab:
        yield lab


def _names(lab: EngineLab) -> list[str]:
    return sorted(row.name for row in lab.engine.store.sandboxes.page(lab.project).items)


def _clear(lab: EngineLab) -> None:
    for name in _names(lab):
        lab.do(lab.engine.sandboxes.destroy(lab.project, name))


def test_calls_with_the_same_key_make_one_batch(lab: EngineLab) -> None:
    batches, spec = lab.engine.batches, SandboxSpec(name="keyed")
    first, second = lab.all(*(batches.create(lab.project, spec, 2, key="k") for _ in range(2)))
    assert [each.session.id for each in first] == [each.session.id for each in second]
    assert _names(lab) == ["keyed-1", "keyed-2"]
    assert not lab.engine.store.sandboxes.of_batches_everywhere()
    _clear(lab)


def test_what_a_crash_left_of_a_batch_goes_with_the_next_start(lab: EngineLab) -> None:
    made = lab.do(lab.engine.sandboxes.create(lab.project, SandboxSpec(name="half-1"), batch="box_half"))
    lab.do(lab.engine.sandboxes.create(lab.project, SandboxSpec(name="whole")))
    assert _names(lab) == ["half-1", "whole"]
    lab.reopen()
    assert _names(lab) == ["whole"]
    (destroyed,) = lab.engine.store.events.page(lab.project, kind="sandbox.destroyed").items[:1]
    assert destroyed.sandbox == made.sandbox.id and "batch" in str(destroyed.data)
    _clear(lab)


def test_upkeep_removes_what_could_not_be_undone_and_leaves_open_batches_alone(lab: EngineLab) -> None:
    lab.do(lab.engine.sandboxes.create(lab.project, SandboxSpec(name="open-1"), batch="box_open"))
    lab.engine.batches._open.add("box_open")
    lab.do(lab.engine.batches.finish())
    assert _names(lab) == ["open-1"]
    lab.engine.batches._open.discard("box_open")
    lab.do(lab.engine.upkeep.turn())
    assert _names(lab) == []


def test_a_batch_beyond_the_limit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with EngineLab(str(tmp_path / "data"), settings=Settings(max_active_sessions=2)) as lab:
        lab.do(lab.engine.network.ready())
        with pytest.raises(LimitReached) as refused:
            lab.do(lab.engine.batches.create(lab.project, SandboxSpec(), 3))
        assert (refused.value.details["limit"], refused.value.details["value"]) == ("sessions", 2)
        assert not lab.engine.store.events.page(lab.project, kind="sandbox.created").items
