"""Sandboxes, sessions, processes, snapshots, drives, events and tokens as the store keeps them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from sandkeep.errors import (
    DriveAttached,
    InvalidRequest,
    NameTaken,
    NotFound,
    StoreError,
    WrongState,
)
from sandkeep.store import PageRequest, Store, addresses
from sandkeep.store.rows import (
    ACTIVE,
    TERMINAL,
    Ending,
    KeepLast,
    ProcessStatus,
    Removal,
    SnapshotStatus,
    StoredHostPort,
    StoredMount,
)
from sandkeep.store.rows import SessionStatus as S
from sandkeep.store.sessions import SessionChanges
from sandkeep.store.tokens import digest_of, new_token_text
from tests.unit.store_rows import drive, open_store, process, sandbox, session, snapshot, start


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store() as opened:
        yield opened


def ids(page: Any) -> list[str]:
    return [item.id for item in page.items]


# Sandboxes


def test_each_port_has_a_number_of_its_own_while_it_is_declared(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "SPACE", 40)
    boxes = [sandbox("p", f"box{number}", ports=(3000, 3001, 3002)) for number in range(10)]
    for box in boxes:
        store.sandboxes.add(box)
    given = [store.sandboxes.addresses("p", box.id) for box in boxes]
    numbers = [number for found in given for number in found.values()]
    assert len(set(numbers)) == len(numbers) == 30 and set(numbers) <= set(range(40))
    # Ports that stay keep theirs, and what is gone is free.
    store.sandboxes.update("p", "box3", now_ms=2, ports=(3001,))
    assert store.sandboxes.addresses("p", boxes[3].id) == {3001: given[3][3001]}
    store.sandboxes.update("p", "box3", now_ms=3, ports=(3000, 3001))
    assert store.sandboxes.addresses("p", boxes[3].id) == {port: given[3][port] for port in (3000, 3001)}
    store.sandboxes.update("p", "box3", now_ms=4, tags={"a": "b"})
    assert len(store.sandboxes.addresses("p", boxes[3].id)) == 2
    store.sandboxes.delete("p", "box3")
    assert store.sandboxes.addresses("p", boxes[3].id) == {}
    # When all are taken a port has none.
    for number in range(10):
        store.sandboxes.add(sandbox("p", f"more{number}", ports=(1, 2)))
    assert sum(len(store.sandboxes.addresses("p", f"box_p_more{number}")) for number in range(10)) <= 13


def test_a_sandbox_reads_back_as_it_was_written(store: Store) -> None:
    box = sandbox(
        "p",
        "full",
        runtime="node24",
        idle_timeout_ms=5,
        persistent=False,
        destroy_on_stop=True,
        delete_after_ms=7,
        delete_at_ms=8,
        host_ports=(StoredHostPort(8000, "model.internal"),),
        env={"A": "é\ud800\0"},
        tags={"t": "a:b"},
        ports=(3000, 8080),
        network_policy={"mode": "deny-all"},
        network_id="net",
        mounts={"/data": StoredMount("d", "read-write")},
        snapshot_expiration_ms=0,
        keep_last_snapshots=KeepLast(3, 86_400_000, False),
        failover_regions=("a", "b"),
        source={"type": "git", "url": "https://example.org/é"},
        asked_limits={"cpus": 0.5, "memory_mb": 256},
        total_egress_bytes=1 << 60,
    )
    unset = [f.name for f in fields(box) if getattr(box, f.name) is None]
    assert unset == ["current_session", "current_snapshot", "destroying", "batch"]
    store.sandboxes.add(box)
    assert store.sandboxes.get("p", "full") == box
    assert store.sandboxes.find_by_id("p", box.id) == box


def test_names_are_unique_in_a_project_and_free_after_deletion(store: Store) -> None:
    store.sandboxes.add(sandbox("p", "a"))
    store.sandboxes.add(sandbox("q", "a"))
    with pytest.raises(NameTaken) as caught:
        store.sandboxes.add(sandbox("p", "a", id="box_other"))
    assert caught.value.name == "a"
    assert store.sandboxes.delete("p", "a").name == "a"
    assert store.sandboxes.find("p", "a") is None
    assert store.sandboxes.find("q", "a") is not None
    store.sandboxes.add(sandbox("p", "a", id="box_new"))


def test_an_update_changes_only_what_it_names(store: Store) -> None:
    box, _ = start(store, "p", "a", "s1")
    store.sessions.move("p", "s1", S.RUNNING, expected={S.PENDING}, now_ms=5)
    changed = store.sandboxes.update("p", "a", now_ms=9, timeout_ms=7, tags={"x": "1"}, ports=(80,))
    assert changed == replace(
        box,
        timeout_ms=7,
        tags={"x": "1"},
        ports=(80,),
        updated_ms=9,
        status=S.RUNNING,
        status_updated_ms=5,
        current_session="s1",
    )
    cleared = store.sandboxes.update("p", "a", now_ms=10, keep_last_snapshots=None, tags={})
    assert cleared.tags == {}
    assert not store.sandboxes.page("p", tags={"x": "1"}).items
    with pytest.raises(NotFound):
        store.sandboxes.update("q", "a", now_ms=11, timeout_ms=1)


def test_listing_filters_by_prefix_tag_and_status(store: Store) -> None:
    for index, name in enumerate(["ab", "abc", "Ab", "b", "ab_z", "ab-z", "a"]):
        store.sandboxes.add(sandbox("p", name, created_ms=index, tags={"n": name, "all": "y:z"}))
    asc = PageRequest(order="asc")
    names = [box.name for box in store.sandboxes.page("p", asc, name_prefix="ab").items]
    assert names == ["ab", "ab-z", "ab_z", "abc"], "a prefix sorts by name, in the order of bytes"
    assert [b.name for b in store.sandboxes.page("p", tags={"n": "b"}).items] == ["b"]
    assert len(store.sandboxes.page("p", tags={"all": "y:z"}).items) == 7
    assert not store.sandboxes.page("p", tags={"all": "y"}).items
    both = {"all": "y:z", "n": "abc"}
    assert [b.name for b in store.sandboxes.page("p", tags=both).items] == ["abc"]
    assert not store.sandboxes.page("p", tags={**both, "other": ""}).items
    assert not store.sandboxes.page("p", name_prefix="é%_").items
    assert len(store.sandboxes.page("p", status=S.PENDING).items) == 7
    assert not store.sandboxes.page("p", status=S.RUNNING).items
    assert store.sandboxes.count("p") == 7
    assert store.sandboxes.count("q") == 0


@pytest.mark.parametrize("sort", ["created", "name", "status_updated", "current_snapshot"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_every_sort_pages_through_everything_once(store: Store, sort: str, order: Any) -> None:
    for index in range(7):
        facts = {"created_ms": index // 2, "status_updated_ms": -(index // 3)}
        current = f"snap_{index % 3}" if index % 2 else None
        store.sandboxes.add(sandbox("p", f"n{index}", current_snapshot=current, **facts))
    seen: list[str] = []
    cursor = None
    while True:
        page = store.sandboxes.page("p", PageRequest(limit=2, cursor=cursor, order=order), sort=sort)
        seen += [box.name for box in page.items]
        cursor = page.next
        if cursor is None:
            break
    whole = [b.name for b in store.sandboxes.page("p", PageRequest(limit=100, order=order), sort=sort).items]
    assert seen == whole
    assert sorted(seen) == [f"n{index}" for index in range(7)]


def test_text_no_database_can_hold_is_the_callers_mistake(store: Store) -> None:
    with pytest.raises(InvalidRequest):
        store.sandboxes.page("p", name_prefix="\ud800")
    with pytest.raises(InvalidRequest):
        store.sandboxes.update("p", "a", now_ms=1, timeout_ms=1 << 70)


# Sessions


def test_a_sandbox_has_at_most_one_active_session(store: Store) -> None:
    box, _ = start(store, "p", "a", "s1")
    for status in (S.PENDING, S.RUNNING, S.STOPPING, S.SNAPSHOTTING):
        if status is not S.PENDING:
            store.sessions.move("p", "s1", status, expected=ACTIVE, now_ms=2)
        with pytest.raises(WrongState):
            store.sessions.start(session(box, "s2"))
        assert store.sandboxes.get("p", "a").current_session == "s1", "a refusal changes nothing"
    store.sessions.move("p", "s1", S.STOPPED, expected=ACTIVE, now_ms=3)
    store.sessions.start(session(box, "s2"))
    assert store.sandboxes.get("p", "a").current_session == "s2"
    active = store.sessions.active("p", box.id)
    assert active is not None and active.id == "s2"


def test_a_refused_start_leaves_the_callers_transaction_usable(store: Store) -> None:
    box, _ = start(store, "p", "a", "s1")
    with store.transaction():
        store.sandboxes.update("p", "a", now_ms=2, timeout_ms=2)
        with pytest.raises(WrongState):
            store.sessions.start(session(box, "s2"))
        store.sandboxes.update("p", "a", now_ms=3, vcpus=8)
    after = store.sandboxes.get("p", "a")
    assert (after.timeout_ms, after.vcpus, after.current_session) == (2, 8, "s1")


def test_a_move_needs_the_expected_status_and_stamps_its_time(store: Store) -> None:
    start(store, "p", "a", "s1")
    with pytest.raises(WrongState) as caught:
        store.sessions.move("p", "s1", S.STOPPING, expected={S.RUNNING}, now_ms=5)
    assert caught.value.status == "pending"
    store.sessions.move("p", "s1", S.RUNNING, expected={S.PENDING}, now_ms=10)
    store.sessions.move("p", "s1", S.STOPPING, expected={S.RUNNING}, now_ms=20)
    store.sessions.move("p", "s1", S.SNAPSHOTTING, expected={S.STOPPING}, now_ms=30)
    ended = store.sessions.move("p", "s1", S.STOPPED, expected={S.SNAPSHOTTING}, now_ms=40)
    assert (ended.started_ms, ended.requested_stop_ms, ended.stopped_ms) == (10, 20, 40)
    assert ended.duration_ms == 30
    box = store.sandboxes.get("p", "a")
    assert (box.status, box.status_updated_ms) == (S.STOPPED, 40)


@pytest.mark.parametrize("terminal", sorted(TERMINAL))
def test_a_session_never_leaves_a_terminal_status(store: Store, terminal: S) -> None:
    start(store, "p", "a", "s1")
    before = store.sessions.move("p", "s1", terminal, expected=ACTIVE, now_ms=2)
    for status in S:
        with pytest.raises(WrongState):
            store.sessions.move("p", "s1", status, expected=frozenset(S), now_ms=3)
    with pytest.raises(WrongState):
        store.sessions.update("p", "s1", now_ms=3, timeout_ms=1)
    assert store.sessions.get("p", "s1") == before


def test_ending_a_session_settles_everything_that_hung_on_it(store: Store) -> None:
    box, first = start(store, "p", "a", "s1")
    store.sessions.move("p", "s1", S.RUNNING, expected={S.PENDING}, now_ms=100)
    store.processes.add(process(first, "c1", started_ms=110))
    ended = process(first, "c2", started_ms=110)
    store.processes.add(ended)
    store.processes.finish(ended, ProcessStatus.EXITED, exit_code=3, now_ms=120)
    store.drives.add(drive("p", "d"))
    store.drives.attach("p", "d", "s1", now_ms=100)
    usage: SessionChanges = {"active_cpu_ms": 7, "ingress_bytes": 8, "egress_bytes": 9}
    store.sessions.update("p", "s1", now_ms=140, stop_reason="host died")
    store.sessions.move("p", "s1", S.ABORTED, expected=ACTIVE, now_ms=150, **usage)
    lost = store.processes.get("p", "s1", "c1")
    assert (lost.status, lost.finished_ms, lost.duration_ms) == (ProcessStatus.LOST, 150, 40)
    assert lost.reason == "session aborted: host died"
    assert store.processes.get("p", "s1", "c2").status is ProcessStatus.EXITED
    assert store.drives.get("p", "d").current_session is None

    store.sessions.start(session(box, "s2"))
    store.sessions.move("p", "s2", S.RUNNING, expected=ACTIVE, now_ms=200)
    store.sessions.move("p", "s2", S.STOPPED, expected=ACTIVE, now_ms=210, **usage)
    total = store.sandboxes.get("p", "a")
    assert (total.total_active_cpu_ms, total.total_duration_ms) == (14, 60)
    assert (total.total_ingress_bytes, total.total_egress_bytes) == (16, 18)


def test_a_late_word_about_an_old_session_does_not_touch_the_sandbox(store: Store) -> None:
    box, _ = start(store, "p", "a", "s1")
    store.sessions.move("p", "s1", S.FAILED, expected=ACTIVE, now_ms=2)
    store.sessions.start(session(box, "s2", status=S.RUNNING))
    with pytest.raises(WrongState):
        store.sessions.move("p", "s1", S.ABORTED, expected=ACTIVE, now_ms=3)
    assert store.sandboxes.get("p", "a").status is S.RUNNING


def test_a_sandbox_with_an_active_session_cannot_be_deleted(store: Store) -> None:
    start(store, "p", "a", "s1")
    with pytest.raises(WrongState):
        store.sandboxes.delete("p", "a")
    store.sessions.move("p", "s1", S.STOPPED, expected=ACTIVE, now_ms=2)
    store.sandboxes.delete("p", "a")
    history = store.sessions.get("p", "s1")
    assert (history.sandbox, history.sandbox_name) == (None, "a"), "its history and usage stay"


def test_history_of_a_deleted_sandbox_is_not_its_namesakes(store: Store) -> None:
    start(store, "p", "a", "s1")
    store.sessions.move("p", "s1", S.STOPPED, expected=ACTIVE, now_ms=2)
    store.sandboxes.delete("p", "a")
    box = sandbox("p", "a", id="box_second")
    store.sandboxes.add(box)
    assert not store.sessions.page("p", sandbox=box.id).items


def test_forgetting_spares_what_is_active_recent_or_owned(store: Store) -> None:
    for name, end in (("old", 10), ("recent", 90), ("owned", 10)):
        _, owner = start(store, "p", name, f"s-{name}")
        store.processes.add(process(owner, f"c-{name}"))
        store.sessions.move("p", f"s-{name}", S.STOPPED, expected=ACTIVE, now_ms=end)
        if name != "owned":
            store.sandboxes.delete("p", name)
    start(store, "p", "busy", "s-busy")
    assert store.sessions.forget_everywhere(before_ms=50) == 1
    assert sorted(ids(store.sessions.page("p"))) == ["s-busy", "s-owned", "s-recent"]
    assert store.processes.find("c-old") is None
    assert store.processes.find("c-owned") is not None


def test_hosts_find_their_active_sessions_in_every_project(store: Store) -> None:
    start(store, "p", "a", "s1", host="h", deadline_ms=10)
    start(store, "q", "a", "s2", host="h", deadline_ms=20)
    start(store, "p", "b", "s3", host="other", deadline_ms=10)
    start(store, "p", "c", "s4", host="h", deadline_ms=10)
    for name in ("s1", "s2", "s3"):
        project = "q" if name == "s2" else "p"
        store.sessions.move(project, name, S.RUNNING, expected=ACTIVE, now_ms=2)
    assert {row.id for row in store.sessions.active_on_host("h")} == {"s1", "s2", "s4"}
    assert store.sessions.count_active("p") == 3


# Processes, snapshots, drives, events, tokens


def test_a_finished_process_never_changes(store: Store) -> None:
    _, owner = start(store, "p", "a", "s1")
    running = process(owner, "c1", started_ms=5)
    store.processes.add(running)
    assert [row.id for row in store.processes.running("p", "s1")] == ["c1"]
    done = store.processes.finish(running, ProcessStatus.EXITED, exit_code=0, now_ms=9)
    assert (done.exit_code, done.duration_ms) == (0, 4)
    again = store.processes.finish(running, ProcessStatus.KILLED, exit_code=137, now_ms=99)
    assert again == done == store.processes.get("p", "s1", "c1")
    assert store.processes.running("p", "s1") == []


def test_a_deleted_snapshot_leaves_a_tombstone(store: Store) -> None:
    box = sandbox("p", "a")
    store.sandboxes.add(box)
    store.snapshots.add(snapshot(box, "snap_1"))
    gone = store.snapshots.delete("p", "snap_1", now_ms=5)
    assert gone.status is SnapshotStatus.DELETED
    assert store.snapshots.delete("p", "snap_1", now_ms=9) == gone
    assert ids(store.snapshots.page("p", sandbox=box.id)) == ["snap_1"]
    assert store.snapshots.live_of("p", box.id) == []
    assert store.layers_in_use() == set()


def test_the_snapshot_tree_reads_in_both_directions(store: Store) -> None:
    box = sandbox("p", "a")
    store.sandboxes.add(box)
    for index, parent in enumerate([None, 0, 1, 1, 3]):
        name = None if parent is None else f"snap_{parent}"
        store.snapshots.add(snapshot(box, f"snap_{index}", parent=name, created_ms=index))
    assert [s.id for s in store.snapshots.ancestors("p", "snap_4", limit=10)] == [
        "snap_3",
        "snap_1",
        "snap_0",
    ]
    assert [s.id for s in store.snapshots.ancestors("p", "snap_4", limit=2)] == ["snap_3", "snap_1"]
    assert [s.id for s in store.snapshots.children("p", "snap_1")] == ["snap_2", "snap_3"]


def test_what_is_in_use_is_pinned_and_not_an_orphan(store: Store) -> None:
    box, other = sandbox("p", "a"), sandbox("p", "fork")
    store.sandboxes.add(box)
    store.sandboxes.add(other)
    for name in ("mine", "theirs", "booted", "free"):
        store.snapshots.add(snapshot(box, f"snap_{name}"))
    store.sandboxes.update("p", "a", now_ms=1, current_snapshot="snap_mine")
    store.sandboxes.update("p", "fork", now_ms=1, current_snapshot="snap_theirs")
    store.sessions.start(session(other, "s1", source_snapshot="snap_booted", layer_base="base"))
    assert store.snapshots.pinned("p") == {"snap_mine", "snap_theirs", "snap_booted"}
    assert {s.id for s in store.snapshots.orphans("p", box.id)} == {"snap_mine", "snap_free"}
    assert "base" in store.layers_in_use()
    store.sessions.move("p", "s1", S.STOPPED, expected=ACTIVE, now_ms=2)
    assert store.snapshots.pinned("p") == {"snap_mine", "snap_theirs"}
    assert "base" not in store.layers_in_use()


def test_snapshots_outlive_their_sandbox(store: Store) -> None:
    box = sandbox("p", "a")
    store.sandboxes.add(box)
    store.snapshots.add(snapshot(box, "snap_1", expires_ms=10))
    store.sandboxes.delete("p", "a")
    kept = store.snapshots.get("p", "snap_1")
    assert kept.sandbox is None
    assert [s.id for s in store.snapshots.expired_everywhere(now_ms=10)] == ["snap_1"]
    assert store.snapshots.expired_everywhere(now_ms=9) == []
    assert [s.id for s in store.snapshots.unsynced_everywhere()] == ["snap_1"]
    synced = store.snapshots.mark_synced("p", "snap_1", size_bytes=7, now_ms=3)
    assert (synced.synced_ms, synced.size_bytes) == (3, 7)
    assert store.snapshots.unsynced_everywhere() == []
    assert store.snapshots.mark_used("p", "snap_1", now_ms=4).last_used_ms == 4
    changed = store.snapshots.set_expiry("p", "snap_1", None, now_ms=5, asked=True)
    assert (changed.expires_ms, changed.expiry_asked) == (None, True)


def test_a_drive_is_written_by_one_session_at_a_time(store: Store) -> None:
    start(store, "p", "a", "s1")
    start(store, "p", "b", "s2")
    store.drives.add(drive("p", "d"))
    with pytest.raises(NameTaken):
        store.drives.add(drive("p", "d", id="drv_other"))
    store.drives.attach("p", "d", "s1", now_ms=2)
    assert store.drives.attach("p", "d", "s1", now_ms=3).current_session == "s1", "again is harmless"
    with pytest.raises(DriveAttached) as caught:
        store.drives.attach("p", "d", "s2", now_ms=3)
    assert caught.value.session == "s1"
    with pytest.raises(DriveAttached):
        store.drives.delete("p", "d")
    assert store.drives.commit("p", "d", "s1", layer="l1", now_ms=4).layer == "l1"
    store.sessions.move("p", "s1", S.STOPPED, expected=ACTIVE, now_ms=5)
    with pytest.raises(DriveAttached):
        store.drives.commit("p", "d", "s1", layer="stale", now_ms=6)
    assert store.drives.attach("p", "d", "s2", now_ms=7).layer == "l1"
    store.sessions.move("p", "s2", S.STOPPED, expected=ACTIVE, now_ms=8)
    assert store.layers_in_use() == {"l1"}
    store.drives.delete("p", "d")
    assert store.drives.find("p", "d") is None


def test_events_are_read_in_the_order_they_were_recorded(store: Store) -> None:
    for index in range(5):
        store.events.add(f"evt_{9 - index}", "tick", time_ms=7, project="p", data={"n": index})
    asc = store.events.page("p", PageRequest(order="asc", limit=3))
    store.events.add("evt_0", "tick", time_ms=6, project="p", data={"n": 5})
    rest = store.events.page("p", PageRequest(order="asc", limit=100, cursor=asc.next))
    assert [event.data["n"] for event in (*asc.items, *rest.items)] == [0, 1, 2, 3, 4, 5]
    store.events.add("evt_x", "tock", time_ms=9, project="p", session="s1", sandbox="b")
    assert ids(store.events.page("p", kind="tock", session="s1", sandbox="b")) == ["evt_x"]
    assert store.events.forget_everywhere(before_ms=8) == 6
    assert ids(store.events.page("p")) == ["evt_x"]


def test_tokens_are_kept_as_digests_and_end_by_expiry_or_revocation(store: Store) -> None:
    text = new_token_text()
    token = store.tokens.add("tok_1", text, project="p", name="ci", now_ms=10, expires_ms=1_000_000)
    assert text.encode() not in token.digest and len(token.digest) == 32
    assert token.digest == digest_of(text)
    found = store.tokens.authenticate(text, now_ms=20)
    assert found is not None
    assert (found[0].id, found[1].team, found[1].name) == ("tok_1", "team", "p")
    assert store.tokens.authenticate(text + "x", now_ms=20) is None
    assert store.tokens.authenticate("\ud800", now_ms=20) is None
    assert store.tokens.of_project("p")[0].last_used_ms == 20
    store.tokens.authenticate(text, now_ms=1_000)
    assert store.tokens.of_project("p")[0].last_used_ms == 20, "accurate to a minute is enough"
    assert store.tokens.authenticate(text, now_ms=999_999) is not None
    assert store.tokens.authenticate(text, now_ms=1_000_000) is None
    with pytest.raises(NotFound):
        store.tokens.revoke("q", "tok_1", now_ms=30)
    assert store.tokens.revoke("p", "tok_1", now_ms=30).revoked_ms == 30
    assert store.tokens.revoke("p", "tok_1", now_ms=40).revoked_ms == 30
    assert store.tokens.authenticate(text, now_ms=31) is None


def test_token_texts_are_long_and_never_look_like_a_signed_document() -> None:
    texts = {new_token_text() for _ in range(100)}
    assert len(texts) == 100
    assert all(len(text) >= 46 and "." not in text for text in texts)


# Projects


def test_two_teams_may_use_one_project_name_and_never_meet(store: Store) -> None:
    one = store.projects.ensure("prj_1", team="x", name="default", now_ms=1)
    two = store.projects.ensure("prj_2", team="y", name="default", now_ms=1)
    assert store.projects.ensure("prj_3", team="x", name="default", now_ms=2) == one
    assert store.projects.get(two.id) == two
    assert store.projects.of_team("x") == [one]
    store.sandboxes.add(sandbox(one.id, "a"))
    assert store.sandboxes.find(two.id, "a") is None


def test_a_row_of_a_project_that_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(StoreError):
        store.sandboxes.add(sandbox("nowhere", "a"))


def _fill(store: Store, project: str) -> None:
    """One of everything in a project; every id starts with the project's name."""
    box, first = start(store, project, "a", f"{project}-s")
    store.processes.add(process(first, f"{project}-c"))
    store.snapshots.add(snapshot(box, f"{project}-snap1"))
    store.snapshots.add(snapshot(box, f"{project}-snap2", parent=f"{project}-snap1"))
    store.sandboxes.update(project, "a", now_ms=1, current_snapshot=f"{project}-snap2")
    store.drives.add(drive(project, "d"))
    store.events.add(f"{project}-e", "k", time_ms=1, project=project)
    store.tokens.add(f"{project}-t", f"text-{project}", project=project, name="n", now_ms=1)


def test_no_list_or_lookup_of_one_project_shows_anything_of_another(store: Store) -> None:
    _fill(store, "p")
    _fill(store, "q")
    theirs = store.sandboxes.get("q", "a").id
    lists: list[Any] = [
        store.sandboxes.page("p").items,
        store.sandboxes.page("p", name_prefix="a").items,
        store.sessions.page("p").items,
        store.snapshots.page("p").items,
        store.drives.page("p").items,
        store.events.page("p").items,
        store.tokens.of_project("p"),
        store.processes.of_session("p", "p-s"),
    ]
    assert all(shown and {row.project for row in shown} == {"p"} for shown in lists)
    assert store.snapshots.pinned("p") == {"p-snap2"}
    nothing: list[Any] = [
        store.sessions.page("p", sandbox=theirs).items,
        store.snapshots.page("p", sandbox=theirs).items,
        store.events.page("p", session="q-s").items,
        store.processes.of_session("p", "q-s"),
        store.processes.running("p", "q-s"),
        store.snapshots.live_of("p", theirs),
        store.snapshots.orphans("p", theirs),
        store.snapshots.children("p", "q-snap1"),
        store.sandboxes.find_by_id("p", theirs),
        store.sessions.active("p", theirs),
        store.drives.find_by_id("p", store.drives.get("q", "d").id),
    ]
    assert not any(nothing)
    for refused in (
        lambda: store.sessions.get("p", "q-s"),
        lambda: store.sessions.update("p", "q-s", now_ms=1, timeout_ms=1),
        lambda: store.sessions.move("p", "q-s", S.STOPPED, expected=ACTIVE, now_ms=1),
        lambda: store.processes.get("p", "q-s", "q-c"),
        lambda: store.processes.get("p", "p-s", "q-c"),
        lambda: store.snapshots.get("p", "q-snap1"),
        lambda: store.snapshots.delete("p", "q-snap1", now_ms=1),
        lambda: store.snapshots.set_expiry("p", "q-snap1", 1, now_ms=1),
        lambda: store.snapshots.ancestors("p", "q-snap2", limit=5),
        lambda: store.tokens.revoke("p", "q-t", now_ms=1),
    ):
        with pytest.raises(NotFound):
            refused()


def test_a_parent_in_another_project_ends_the_tree(store: Store) -> None:
    _fill(store, "p")
    _fill(store, "q")
    box = store.sandboxes.get("p", "a")
    store.snapshots.add(snapshot(box, "p-odd", parent="q-snap2"))
    assert store.snapshots.ancestors("p", "p-odd", limit=5) == []
    assert store.snapshots.children("q", "q-snap2") == []


def test_every_method_names_its_project_or_says_that_it_crosses_them(store: Store) -> None:
    crossing = {"find", "authenticate"}
    for noun in ("sandboxes", "sessions", "processes", "snapshots", "drives", "events", "tokens"):
        for name, method in inspect.getmembers(getattr(store, noun), inspect.ismethod):
            if name.startswith("_") or name.endswith(("_everywhere", "_on_host")) or name in crossing:
                continue
            parameters = inspect.signature(method).parameters
            takes_row = name == "finish" or (name in ("add", "start") and len(parameters) == 1)
            assert takes_row or "project" in parameters, f"{noun}.{name}"


def test_a_condemned_sandbox_is_found_by_its_id_only_and_keeps_its_name(store: Store) -> None:
    box, _ = start(store, "p", "a", "s1")
    store.sessions.move(
        "p", "s1", S.STOPPING, expected={S.PENDING}, now_ms=5, ending=Ending(False, "automatic", 7)
    )
    assert store.sessions.get("p", "s1").ending == Ending(False, "automatic", 7)
    store.sandboxes.condemn("p", "a", Removal(False, "token:first"), now_ms=6)
    condemned = store.sandboxes.condemn("p", "a", Removal(True, "token:second"), now_ms=7)
    assert condemned.destroying == Removal(True, "token:first"), "asked again, it takes more along"
    assert store.sandboxes.find("p", "a") is None
    assert (store.sandboxes.count("p"), store.sandboxes.page("p").items) == (0, ())
    assert store.sandboxes.find_by_id("p", box.id) == condemned == store.sandboxes.condemned("p", "a")
    assert store.sandboxes.condemned_everywhere() == [condemned]
    with pytest.raises(NameTaken):
        store.sandboxes.add(sandbox("p", "a", id="box_other"))
    store.sessions.move("p", "s1", S.STOPPED, expected={S.STOPPING}, now_ms=8)
    store.sandboxes.delete("p", "a")
    store.sandboxes.add(sandbox("p", "a", id="box_other"))
    assert store.sandboxes.condemned_everywhere() == []
