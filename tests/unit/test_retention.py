"""What is kept, what is deleted, and what must never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.engine.retention import Candidate, Plan, first_expiry, plan
from sandkeep.store.rows import KeepLast

DAY = 86_400_000
NOW = 100 * DAY


def made(days_ago: float, name: str = "", **facts: object) -> Candidate:
    created = NOW - int(days_ago * DAY)
    values: dict[str, object] = {"expires_ms": None, **facts}
    return Candidate(id=name or f"snap_{days_ago}", created_ms=created, **values)  # type: ignore[arg-type]


def decide(*snapshots: Candidate, keep: KeepLast | None = None, default_ms: int = 0) -> Plan:
    return plan(snapshots, keep_last=keep, default_ms=default_ms, now_ms=NOW)


@pytest.mark.parametrize(
    ("asked", "box", "server", "expected"),
    [
        (None, None, 0, None),
        (None, None, 5, 15),
        (None, 7, 5, 17),
        (None, 0, 5, None),
        (3, 7, 5, 13),
        (0, 7, 5, None),
    ],
)
def test_a_new_snapshots_expiry_is_the_nearest_rule(
    asked: int | None, box: int | None, server: int, expected: int | None
) -> None:
    assert first_expiry(10, asked_ms=asked, sandbox_ms=box, server_ms=server) == expected


def test_without_rules_only_expiry_deletes() -> None:
    result = decide(made(3, expires_ms=NOW), made(2, expires_ms=NOW + 1), made(1))
    assert result == Plan({}, frozenset({"snap_3"}))


def test_the_newest_stay_and_the_rest_go() -> None:
    result = decide(*(made(days) for days in (5, 1, 4, 2, 3)), keep=KeepLast(2))
    assert result == Plan({}, frozenset({"snap_3", "snap_4", "snap_5"}))


def test_kept_ones_get_their_own_lifetime_from_their_creation() -> None:
    result = decide(made(1), made(2), keep=KeepLast(5, expiration_ms=10 * DAY))
    assert result.expire == {"snap_1": NOW + 9 * DAY, "snap_2": NOW + 8 * DAY}
    assert decide(made(1, expires_ms=NOW + 1), keep=KeepLast(5, expiration_ms=0)).expire == {"snap_1": None}


def test_evicted_ones_go_back_to_the_default_when_not_deleted() -> None:
    keep = KeepLast(1, expiration_ms=0, delete_evicted=False)
    result = decide(made(1), made(2), made(40), keep=keep, default_ms=30 * DAY)
    assert result == Plan({"snap_2": NOW + 28 * DAY}, frozenset({"snap_40"}))


def test_an_expiry_somebody_asked_for_is_left_alone() -> None:
    asked = made(2, expires_ms=NOW + 1, expiry_asked=True)
    assert decide(asked, keep=KeepLast(1, expiration_ms=0)).expire == {}
    assert decide(made(1), asked, keep=KeepLast(1, delete_evicted=False), default_ms=DAY) == Plan(
        {}, frozenset()
    )
    assert decide(made(1), asked, keep=KeepLast(1)).delete == {"snap_2"}, "but it can be evicted"


def test_what_is_in_use_stays_whatever_the_rules_say() -> None:
    old = made(50, pinned=True, expires_ms=NOW - DAY)
    assert decide(made(1), old, keep=KeepLast(1)).delete == frozenset()
    assert decide(old).delete == frozenset()


def test_an_unsynced_snapshot_pushes_nothing_out() -> None:
    result = decide(made(1, synced=False), made(2), made(3), keep=KeepLast(1))
    assert result.delete == {"snap_3"}
    assert decide(made(1), made(2), made(3), keep=KeepLast(1)).delete == {"snap_2", "snap_3"}


def test_an_expired_snapshot_takes_no_place_from_a_good_one() -> None:
    result = decide(made(1, expires_ms=NOW - 1), made(2), made(3), keep=KeepLast(2))
    assert result.delete == {"snap_1"}


TIMES = st.integers(0, 20)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        id=st.uuids().map(str),
        created_ms=TIMES,
        expires_ms=st.none() | TIMES,
        expiry_asked=st.booleans(),
        pinned=st.booleans(),
        synced=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.id,
)
KEEPS = st.none() | st.builds(KeepLast, st.integers(1, 4), st.none() | st.integers(0, 20), st.booleans())


@given(snapshots=CANDIDATES, keep=KEEPS, default=st.integers(0, 20), now=TIMES)
def test_rules_never_delete_what_must_stay(
    snapshots: list[Candidate], keep: KeepLast | None, default: int, now: int
) -> None:
    result = plan(snapshots, keep_last=keep, default_ms=default, now_ms=now)
    by_id = {snapshot.id: snapshot for snapshot in snapshots}
    assert not result.delete & result.expire.keys()
    assert result.delete | result.expire.keys() <= by_id.keys()
    assert not any(by_id[name].pinned for name in result.delete)
    assert not any(by_id[name].expiry_asked for name in result.expire)

    left = [replace(s, expires_ms=result.expire.get(s.id, s.expires_ms)) for s in snapshots]
    left = [s for s in left if s.id not in result.delete]
    for snapshot in left:
        alive = snapshot.expires_ms is None or snapshot.expires_ms > now
        assert alive or snapshot.pinned, "nothing past its expiry is left"
    if keep is None:
        assert result.expire == {}
    for name in result.delete:
        gone = by_id[name]
        newer = [s for s in left if (s.created_ms, s.id) > (gone.created_ms, gone.id) and s.synced]
        evicted = keep is not None and keep.delete_evicted and len(newer) >= keep.count
        lifetimes = [default] + ([keep.expiration_ms] if keep and keep.expiration_ms is not None else [])
        times = {gone.expires_ms} | {gone.created_ms + lifetime for lifetime in lifetimes if lifetime}
        expired = any(time is not None and time <= now for time in times)
        assert evicted or expired, "only eviction by enough safe newer ones, or expiry, deletes"


@given(snapshots=CANDIDATES, keep=KEEPS, default=st.integers(0, 20), now=TIMES)
def test_doing_what_was_planned_leaves_nothing_to_do(
    snapshots: list[Candidate], keep: KeepLast | None, default: int, now: int
) -> None:
    first = plan(snapshots, keep_last=keep, default_ms=default, now_ms=now)
    left = [
        replace(s, expires_ms=first.expire.get(s.id, s.expires_ms))
        for s in snapshots
        if s.id not in first.delete
    ]
    assert plan(left, keep_last=keep, default_ms=default, now_ms=now) == Plan({}, frozenset())
    shuffled = plan(list(reversed(snapshots)), keep_last=keep, default_ms=default, now_ms=now)
    assert shuffled == first, "the order of the input plays no part"
