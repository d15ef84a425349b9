"""The engine's promises, one at a time, on real sandboxes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sandkeep.engine.files import Acting
from sandkeep.engine.settings import Settings
from sandkeep.errors import (
    DriveAttached,
    DriveNotInitialized,
    ExecutableNotFound,
    ImageError,
    InvalidRequest,
    LayerError,
    LimitReached,
    NameTaken,
    NotFound,
    SandkeepError,
    SessionStopped,
    SnapshotGone,
    TimeoutInvalid,
)
from sandkeep.host.layers.values import Layer
from sandkeep.process_options import ProcessOptions
from sandkeep.shared.clock import wall_ms as now_ms
from sandkeep.shared.outputlog import Chunk
from sandkeep.spec import Mount, SandboxSpec, SnapshotRetention, SnapshotSource
from sandkeep.states import MountMode
from sandkeep.store.rows import ProcessStatus, SessionStatus, SnapshotMethod
from tests.engine.engine_lab import EngineLab
from tests.polling import until


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("engine"))) as lab:
        yield lab


def test_a_stopped_sandbox_resumes_with_its_files(lab: EngineLab) -> None:
    first = lab.create("keeps-files")
    lab.sh(first.session.id, "echo one > note; sudo sh -c 'echo two > /etc/two'")
    ended, snapshot = lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    assert ended.status is SessionStatus.STOPPED
    assert snapshot is not None and snapshot.method is SnapshotMethod.AUTOMATIC
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "keeps-files"))
    assert again.resumed and again.session.id != first.session.id
    assert again.session.source_snapshot == snapshot.id == again.sandbox.current_snapshot
    assert lab.sh(again.session.id, "cat note /etc/two") == "one\ntwo\n"


def test_resume_of_a_running_sandbox_is_a_no_op(lab: EngineLab) -> None:
    started = lab.create("runs")
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "runs"))
    assert (again.resumed, again.session.id) == (False, started.session.id)


def test_get_never_resumes(lab: EngineLab) -> None:
    started = lab.create("asleep")
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert lab.engine.sandboxes.get(lab.project, "asleep").session.status is SessionStatus.STOPPED


def test_stop_twice_returns_the_same_snapshot(lab: EngineLab) -> None:
    started = lab.create("stopped-twice")
    once = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    twice = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert once == twice


def test_a_session_scoped_call_after_stop_says_stopped(lab: EngineLab) -> None:
    started = lab.create("over")
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    with pytest.raises(SessionStopped):
        lab.sh(started.session.id, "true")
    with pytest.raises(SessionStopped):
        lab.do(lab.engine.files.stat(lab.project, started.session.id, "/etc", Acting()))


def test_non_persistent_sandboxes_start_clean(lab: EngineLab) -> None:
    started = lab.create("forgetful", persistent=False)
    lab.sh(started.session.id, "echo x > left")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert snapshot is None
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "forgetful"))
    assert lab.sh(again.session.id, "ls") == ""


def test_a_manual_snapshot_ends_the_session_and_is_kept_even_when_not_persistent(lab: EngineLab) -> None:
    started = lab.create("by-hand", persistent=False)
    lab.sh(started.session.id, "echo x > kept")
    ended, snapshot = lab.do(lab.engine.sessions.snapshot(lab.project, started.session.id))
    assert ended.status is SessionStatus.STOPPED and snapshot.method is SnapshotMethod.MANUAL
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "by-hand"))
    assert lab.sh(again.session.id, "cat kept") == "x\n"


def test_a_checkpoint_leaves_the_session_running_and_can_be_started_from(lab: EngineLab) -> None:
    started = lab.create("goes-on")
    lab.sh(started.session.id, "echo before > f")
    session, snapshot = lab.do(lab.engine.sessions.checkpoint(lab.project, started.session.id))
    assert session.status is SessionStatus.RUNNING
    lab.sh(started.session.id, "echo after > f")
    other = lab.create("from-checkpoint", source=SnapshotSource(snapshot.id))
    assert lab.sh(other.session.id, "cat f") == "before\n"
    assert lab.sh(started.session.id, "cat f") == "after\n"


def test_a_checkpoint_that_fails_leaves_nothing_behind(lab: EngineLab) -> None:
    started = lab.create("too-deep")
    deep = "for n in $(seq 100); do mkdir $(printf %0200d 0); cd $(printf %0200d 0); done"
    lab.sh(started.session.id, f"echo much > a; {deep}")
    with pytest.raises(LimitReached):
        lab.do(lab.engine.sessions.checkpoint(lab.project, started.session.id))

    def left() -> list[str]:
        lab.do(asyncio.sleep(0.01))
        return [name for name in os.listdir(f"{lab.data_dir}/layers") if name.startswith((".copy", ".del"))]

    until(lambda: not left())


def test_rollback_points_the_next_session_at_another_snapshot(lab: EngineLab) -> None:
    started = lab.create("back")
    lab.sh(started.session.id, "echo old > f")
    _, old = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert old is not None
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "back"))
    lab.sh(again.session.id, "echo new > f")
    lab.do(lab.engine.sessions.stop(lab.project, again.session.id))
    lab.do(lab.engine.sandboxes.update(lab.project, "back", {}, current_snapshot=old.id))
    back = lab.do(lab.engine.sandboxes.resume(lab.project, "back"))
    assert lab.sh(back.session.id, "cat f") == "old\n"
    with pytest.raises(NotFound):
        lab.do(lab.engine.sandboxes.update(lab.project, "back", {}, current_snapshot="snap_unknown"))
    assert lab.engine.sandboxes.get(lab.project, "back").sandbox.current_snapshot == old.id


def test_fork_copies_configuration_and_files_but_not_mounts(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "not-inherited", region="iad1"))
    origin = lab.create(
        "origin",
        env={"A": "1"},
        tags={"k": "v"},
        mounts={"/mnt/d": Mount("not-inherited", MountMode.READ_WRITE)},
    )
    lab.sh(origin.session.id, "echo x > f")
    lab.do(lab.engine.sessions.stop(lab.project, origin.session.id))
    fork = lab.do(
        lab.engine.sandboxes.fork(lab.project, "origin", {"name": "forked", "tags": {"z": "1"}, "mounts": {}})
    )
    assert dict(fork.sandbox.env) == {"A": "1"} and dict(fork.sandbox.tags) == {"z": "1"}
    assert dict(fork.sandbox.mounts) == {}
    assert lab.sh(fork.session.id, "cat f; echo $A") == "x\n1\n"


def test_destroy_frees_the_name_from_every_state(lab: EngineLab) -> None:
    for state in ("running", "stopped", "snapshotted"):
        started = lab.create("reused")
        if state == "stopped":
            lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        elif state == "snapshotted":
            lab.do(lab.engine.sessions.snapshot(lab.project, started.session.id))
        lab.do(lab.engine.sandboxes.destroy(lab.project, "reused"))
        with pytest.raises(NotFound):
            lab.engine.sandboxes.get(lab.project, "reused")


def test_the_deadline_behaves_as_stop(lab: EngineLab) -> None:
    started = lab.create("short", timeout=timedelta(minutes=5))
    lab.sh(started.session.id, "echo kept > f; (setsid sleep 60 &)")
    # Brought near when all is ready for it: how long that takes depends on the machine.
    ref = lab.engine.sessions._context.ref(started.session)
    lab.do(lab.engine.driver.set_deadline(ref, now_ms() + 300))
    assert lab.ended(started.session.id).stop_reason == "deadline reached"
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "short"))
    assert lab.sh(again.session.id, "cat f") == "kept\n"
    assert again.session.timeout_ms == 300_000


def test_a_session_ends_at_the_deadline_it_was_given(lab: EngineLab) -> None:
    first = lab.create("brief", timeout=timedelta(seconds=2))
    assert lab.ended(first.session.id).stop_reason == "deadline reached"
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "brief"))
    assert again.session.timeout_ms == 2000
    assert lab.ended(again.session.id).stop_reason == "deadline reached"


def test_extending_changes_this_session_only_and_has_a_maximum(lab: EngineLab) -> None:
    started = lab.create("longer", timeout=timedelta(minutes=1))
    longer = lab.do(lab.engine.sessions.extend(lab.project, started.session.id, by_ms=60_000))
    assert longer.timeout_ms == 120_000
    assert longer.deadline_ms == (started.session.deadline_ms or 0) + 60_000
    assert lab.engine.sandboxes.get(lab.project, "longer").sandbox.timeout_ms == 60_000
    with pytest.raises(TimeoutInvalid):
        lab.do(lab.engine.sessions.extend(lab.project, started.session.id, by_ms=5 * 86_400_000))


def test_a_resume_whose_snapshot_is_gone_says_so(lab: EngineLab) -> None:
    started = lab.create("no-way-back")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert snapshot is not None
    lab.do(lab.engine.snapshots.delete(lab.project, snapshot.id))
    with pytest.raises(SnapshotGone):
        lab.do(lab.engine.sandboxes.resume(lab.project, "no-way-back"))
    lab.do(lab.engine.sandboxes.destroy(lab.project, "no-way-back"))


def test_duplicate_names_unknown_images_and_runtimes_are_refused_and_leave_nothing(lab: EngineLab) -> None:
    lab.create("taken")
    with pytest.raises(NameTaken):
        lab.create("taken")
    with pytest.raises((ImageError, NotFound)):
        lab.create("nowhere", image="no/such:image")
    with pytest.raises(InvalidRequest):
        lab.create("nothing", runtime="cobol60")
    for name in ("nowhere", "nothing"):
        with pytest.raises(NotFound):
            lab.engine.sandboxes.get(lab.project, name)


def test_runtimes_and_managed_images_resolve_to_a_local_image(lab: EngineLab) -> None:
    started = lab.create("by-runtime", runtime="python3.13")
    assert started.session.runtime == "python3.13" and started.session.image.startswith("host@")


def test_keep_last_snapshots_evicts_the_oldest(lab: EngineLab) -> None:
    started = lab.create("keeps-two", retention=SnapshotRetention(2))
    made = []
    for _ in range(3):
        current = lab.do(lab.engine.sandboxes.resume(lab.project, "keeps-two"))
        _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, current.session.id))
        assert snapshot is not None
        made.append(snapshot.id)
    lab.do(lab.engine.upkeep.turn())
    live = lab.engine.store.snapshots.live_of(lab.project, started.sandbox.id)
    assert [row.id for row in live] == [made[2], made[1]]
    assert lab.engine.snapshots.get(lab.project, made[0]).status == "deleted"


def test_the_snapshot_tree_goes_both_ways(lab: EngineLab) -> None:
    lab.create("tree")
    ids = []
    for _ in range(3):
        current = lab.do(lab.engine.sandboxes.resume(lab.project, "tree"))
        _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, current.session.id))
        assert snapshot is not None
        ids.append(snapshot.id)
    up = lab.engine.snapshots.tree(lab.project, ids[2], descendants=False, limit=10)
    assert [node.snapshot.id for node in up.nodes] == [ids[1], ids[0]] and up.next is None
    down = lab.engine.snapshots.tree(lab.project, ids[0], descendants=True, limit=1)
    assert [node.snapshot.id for node in down.nodes] == [ids[1]] and down.next == ids[1]


def test_a_drive_is_written_by_one_session_and_read_by_many(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "shared", region="iad1"))
    with pytest.raises(DriveNotInitialized):
        lab.do(lab.engine.drives.fork(lab.project, "shared", name="too-early"))
    writer = lab.create("writer", mounts={"/data": Mount("shared", MountMode.READ_WRITE)})
    lab.sh(writer.session.id, "echo v1 > /data/f")
    with pytest.raises(DriveAttached):
        lab.create("second-writer", mounts={"/data": Mount("shared", MountMode.READ_WRITE)})
    with pytest.raises(DriveAttached):
        lab.do(lab.engine.drives.delete(lab.project, "shared"))
    lab.do(lab.engine.sessions.stop(lab.project, writer.session.id))
    readers = [
        lab.create(f"reader{i}", mounts={"/data": Mount("shared", MountMode.SNAPSHOT)}) for i in (1, 2)
    ]
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "writer"))
    lab.sh(again.session.id, "echo v2 > /data/f")
    for reader in readers:
        script = "cat /data/f; touch /data/x 2>/dev/null || echo read-only"
        assert lab.sh(reader.session.id, script) == "v1\nread-only\n"
    lab.do(lab.engine.sessions.stop(lab.project, again.session.id))
    fork = lab.do(lab.engine.drives.fork(lab.project, "shared", name="branch"))
    assert fork.parent == lab.engine.drives.get(lab.project, "shared").id
    third = lab.create("third", mounts={"/data": Mount("branch", MountMode.READ_WRITE)})
    assert lab.sh(third.session.id, "cat /data/f") == "v2\n"


def test_a_drives_own_directory_keeps_its_attributes(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "marked", region="iad1"))
    started = lab.create("marking", mounts={"/own": Mount("marked", MountMode.READ_WRITE)})
    look = 'stat -c %a /own /; python3 -c \'import os; print(os.listxattr("/own"), os.listxattr("/"))\''
    mark = 'sudo python3 -c \'import os; [os.setxattr(d, "user.a", b"v") for d in ("/own", "/")]\''
    for change, seen in (
        ("touch /own/f", "755\n755\n[] []\n"),
        ("sudo chmod 751 /own /", "751\n751\n[] []\n"),
        (mark, "751\n751\n['user.a'] ['user.a']\n"),
        ("true", "751\n751\n['user.a'] ['user.a']\n"),
    ):
        lab.sh(started.session.id, change)
        assert lab.sh(started.session.id, look) == seen
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        started = lab.do(lab.engine.sandboxes.resume(lab.project, "marking"))
        assert lab.sh(started.session.id, look) == seen
    before = lab.engine.drives.get(lab.project, "marked").layer
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert lab.engine.drives.get(lab.project, "marked").layer == before  # nothing new, no new layer


def test_a_session_that_cannot_start_keeps_nothing_of_a_drive(lab: EngineLab) -> None:
    lab.do(lab.engine.drives.get_or_create(lab.project, "shown", region="iad1"))
    first = lab.create("showing", mounts={"/shown": Mount("shown", MountMode.READ_WRITE)})
    lab.sh(first.session.id, "echo s > /shown/f")
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    with pytest.raises(SandkeepError):
        lab.create("cannot", mounts={"/etc/passwd": Mount("shown", MountMode.SNAPSHOT)})
    drive = lab.engine.drives.get(lab.project, "shown")

    def holders() -> tuple[str, ...]:
        assert drive.layer is not None
        return lab.do(lab.engine.storage.layer_holders())[drive.layer]

    until(lambda: holders() == (drive.id,))


def test_snapshots_of_any_kind_hold_nothing_of_the_drives(lab: EngineLab) -> None:
    for name in ("own", "seen"):
        lab.do(lab.engine.drives.get_or_create(lab.project, name, region="iad1"))
    first = lab.create("first", mounts={"/seen": Mount("seen", MountMode.READ_WRITE)})
    lab.sh(first.session.id, "echo s > /seen/f")
    lab.do(lab.engine.sessions.stop(lab.project, first.session.id))
    mounts = {"/own": Mount("own", MountMode.READ_WRITE), "/seen": Mount("seen", MountMode.SNAPSHOT)}
    started = lab.create("with-drives", mounts=mounts)
    lab.sh(started.session.id, "echo before > f; echo before > /own/f")
    _, checkpoint = lab.do(lab.engine.sessions.checkpoint(lab.project, started.session.id))
    lab.sh(started.session.id, "echo after > f; echo after > /own/f")
    without = lab.create("without-drives", source=SnapshotSource(checkpoint.id))
    assert lab.sh(without.session.id, "cat f; ls /own") == "before\n"
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    again = lab.do(lab.engine.sandboxes.resume(lab.project, "with-drives"))
    assert lab.sh(again.session.id, "cat f /own/f /seen/f") == "after\nafter\ns\n"
    lab.do(lab.engine.sessions.snapshot(lab.project, again.session.id))
    lab.do(lab.engine.sandboxes.update(lab.project, "with-drives", {}, current_snapshot=checkpoint.id))
    back = lab.do(lab.engine.sandboxes.resume(lab.project, "with-drives"))
    assert lab.sh(back.session.id, "cat f /own/f /seen/f") == "before\nafter\ns\n"


def test_a_snapshot_is_measured_and_synced_soon_or_before_the_answer(lab: EngineLab, tmp_path: Path) -> None:
    started = lab.create("measured")
    lab.sh(started.session.id, "head -c 1000000 /dev/urandom > f")
    _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert snapshot is not None
    lab.do(lab.engine.upkeep.turn())
    found = lab.engine.snapshots.get(lab.project, snapshot.id)
    assert found.synced_ms and 1_000_000 <= found.size_bytes < 3_000_000
    with EngineLab(str(tmp_path / "durable"), Settings(durable=True)) as other:
        session = other.create("durable").session.id
        _, checkpoint = other.do(other.engine.sessions.checkpoint(other.project, session))
        _, last = other.do(other.engine.sessions.stop(other.project, session))
        assert checkpoint.synced_ms and last is not None and last.synced_ms


def test_a_durable_stop_syncs_what_was_written_to_drives(tmp_path: Path) -> None:
    """Also when nothing else of the sandbox is kept."""
    with EngineLab(str(tmp_path / "durable"), Settings(durable=True)) as lab:
        lab.do(lab.engine.drives.get_or_create(lab.project, "drive", region="iad1"))
        box = lab.create("box", persistent=False, mounts={"/drive": Mount("drive", MountMode.READ_WRITE)})
        lab.sh(box.session.id, "echo kept > /drive/file")
        _, snapshot = lab.do(lab.engine.sessions.stop(lab.project, box.session.id))
        assert snapshot is None
        layer = lab.engine.drives.get(lab.project, "drive").layer
        [found] = lab.do(lab.engine.storage.list_layers())
        assert found.id == layer and found.synced_ms


def test_a_durable_stop_that_failed_is_durable_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineLab(str(tmp_path / "durable"), Settings(durable=True)) as lab:
        session = lab.create("box").session.id

        async def refuse(layer_id: str) -> Layer:
            raise LayerError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(lab.engine.storage, "sync_layer", refuse)
            with pytest.raises(LayerError):
                lab.do(lab.engine.sessions.stop(lab.project, session))
        ended, snapshot = lab.do(lab.engine.sessions.stop(lab.project, session))
        assert ended.status is SessionStatus.STOPPED
        assert snapshot is not None and snapshot.synced_ms


def test_a_snapshot_is_pushed_out_by_one_that_is_synced(lab: EngineLab) -> None:
    """Until the newer one is safe from loss of power, the older one is what would be left."""
    started = lab.create("pushes")
    made = []
    for _ in range(2):
        session = lab.do(lab.engine.sandboxes.resume(lab.project, "pushes")).session.id
        _, snapshot = lab.do(lab.engine.sessions.snapshot(lab.project, session))
        made.append(snapshot.id)

    def left() -> set[str]:
        return {row.id for row in lab.engine.store.snapshots.live_of(lab.project, started.sandbox.id)}

    lab.do(
        lab.engine.sandboxes.update(lab.project, "pushes", {"retention": SnapshotRetention(1, None, True)})
    )
    assert left() == set(made)
    lab.do(lab.engine.upkeep.turn())
    assert left() == {made[1]}


def test_process_records_and_logs_outlive_the_session(lab: EngineLab) -> None:
    started = lab.create("records")
    process = lab.do(
        lab.engine.processes.start(
            lab.project,
            started.session.id,
            ProcessOptions(command="sh", args=["-c", "echo out; echo err >&2; exit 7"]),
        )
    )
    ended = lab.do(lab.engine.processes.wait(lab.project, started.session.id, process.id))
    assert (ended.status, ended.exit_code) == (ProcessStatus.EXITED, 7)
    sleeper = lab.do(
        lab.engine.processes.start(
            lab.project, started.session.id, ProcessOptions(command="sleep", args=["60"])
        )
    )
    lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
    assert lab.text(started.session.id, process.id) == b"out\nerr\n"
    lost = lab.engine.processes.get(lab.project, started.session.id, sleeper.id)
    assert lost.status is ProcessStatus.LOST and lost.reason


def test_a_missing_executable_is_its_own_error(lab: EngineLab) -> None:
    started = lab.create("no-program")
    with pytest.raises(ExecutableNotFound):
        lab.do(
            lab.engine.processes.start(
                lab.project, started.session.id, ProcessOptions(command="no-such-program")
            )
        )


def test_observed_processes_have_the_same_records_and_logs(lab: EngineLab) -> None:
    started = lab.create("observer")
    process = lab.engine.processes.observe(lab.project, started.session.id, command="elsewhere")
    for number in range(3):
        lab.engine.processes.append(
            lab.project, started.session.id, process.id, stream="stdout", data=b"%d\n" % number
        )
    ended = lab.engine.processes.finish(lab.project, started.session.id, process.id, exit_code=0)
    assert ended.status is ProcessStatus.EXITED
    assert lab.text(started.session.id, process.id) == b"0\n1\n2\n"


def test_output_of_an_observed_process_is_followed_to_its_end_and_goes_with_its_sandbox(
    lab: EngineLab,
) -> None:
    session = lab.create("followed").session.id
    processes = lab.engine.processes
    many = [processes.observe(lab.project, session, command="elsewhere").id for _ in range(100)]

    async def append() -> None:
        for number in range(3):
            for process in many:
                processes.append(lab.project, session, process, stream="stdout", data=b"%d\n" % number)
            await asyncio.sleep(0.05)
        processes.finish(lab.project, session, many[0], exit_code=0)

    async def follow() -> bytes:
        items = processes.output(lab.project, session, many[0])
        return b"".join([item.data async for item in items if isinstance(item, Chunk)])

    before = len(os.listdir("/proc/self/fd"))
    assert lab.all(follow(), append()) == [b"0\n1\n2\n", None]
    assert len(os.listdir("/proc/self/fd")) - before < 80
    assert lab.do(_first(processes.output(lab.project, session, many[1], follow=False))) is not None
    lab.do(lab.engine.sandboxes.destroy(lab.project, "followed"))
    kept = f"{lab.data_dir}/observed"
    until(lambda: lab.do(asyncio.sleep(0.01)) or not {*many} & {*os.listdir(kept)})


async def _first(items: AsyncIterator[object]) -> object:
    return await anext(items)


def test_a_snapshot_that_cannot_be_synced_keeps_no_other_waiting(
    lab: EngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("bad", "good"):
        session = lab.create(f"sync-{name}").session.id
        _, snapshot = lab.do(lab.engine.sessions.snapshot(lab.project, session))
        made.append(snapshot)
    measure = lab.engine.storage.measure_layer

    async def refuse(layer_id: str) -> int:
        if layer_id == made[0].layer:
            raise LayerError("the layer is damaged")
        return await measure(layer_id)

    monkeypatch.setattr(lab.engine.storage, "measure_layer", refuse)
    lab.do(lab.engine.upkeep.turn())
    assert lab.engine.snapshots.get(lab.project, made[1].id).synced_ms
    assert any(note == "upkeep failed" and facts["about"] == made[0].id for note, facts in lab.log)


def test_limits_per_project_are_stated_and_enforced(tmp_path: Path) -> None:
    with EngineLab(str(tmp_path / "data"), Settings(max_active_sessions=1)) as lab:
        lab.create("one")
        with pytest.raises(LimitReached):
            lab.create("two")


def test_an_idle_session_is_stopped_when_asked_for(tmp_path: Path) -> None:
    with EngineLab(str(tmp_path / "data")) as lab:
        started = lab.create("dozes")
        lab.engine.store.sandboxes.update(lab.project, "dozes", now_ms=1, idle_timeout_ms=1)
        lab.do(lab.engine.sessions.stop(lab.project, started.session.id))
        again = lab.do(lab.engine.sandboxes.resume(lab.project, "dozes"))
        lab.do(asyncio.sleep(0.05))
        lab.do(lab.engine.upkeep.turn())
        assert lab.engine.sessions.get(lab.project, again.session.id).status is SessionStatus.STOPPED


def test_names_are_generated_when_omitted(lab: EngineLab) -> None:
    started = lab.do(lab.engine.sandboxes.create(lab.project, SandboxSpec()))
    assert started.sandbox.name


def test_waiting_for_clean_up_includes_the_clean_up_that_this_starts(lab: EngineLab) -> None:
    context = lab.engine._context
    done: list[str] = []

    async def collection() -> None:
        await asyncio.sleep(0.1)
        done.append("collection")

    async def removal() -> None:
        await asyncio.sleep(0.1)
        context.spawn(collection(), "a collection", finish=True)
        done.append("removal")

    async def wait() -> None:
        context.spawn(removal(), "a removal", finish=True)
        await context.cleared_away()

    lab.do(wait())
    assert done == ["removal", "collection"]
