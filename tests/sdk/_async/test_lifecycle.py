"""Sandboxes, sessions and snapshots: who starts, stops and destroys what, and when."""

from __future__ import annotations

from datetime import timedelta

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NameTaken, NotFound, SessionStopped, SnapshotGone

pytestmark = pytest.mark.anyio


async def test_leaving_a_create_scope_destroys_the_sandbox_and_its_snapshots(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        assert box.status is sandkeep.SessionStatus.RUNNING
        snapshot = await box.checkpoint()
    with pytest.raises(NotFound):
        await sandkeep.get_sandbox(name)
    assert (await sandkeep.get_snapshot(snapshot.id)).status is sandkeep.SnapshotStatus.DELETED


async def test_a_create_scope_can_leave_the_sandbox_stopped(name: str) -> None:
    async with sandkeep.create_sandbox(name, destroy=False) as box:
        await box.fs.write_text("note", "kept")
    box = await sandkeep.get_sandbox(name)
    assert box.status is sandkeep.SessionStatus.STOPPED
    assert await box.fs.read_text("note") == "kept"
    await box.destroy()


async def test_creating_without_a_scope_cleans_nothing_up(name: str) -> None:
    box = await sandkeep.create_sandbox(name)
    assert (await sandkeep.get_sandbox(name)).status is sandkeep.SessionStatus.RUNNING
    await box.destroy()


async def test_a_scope_cleans_up_when_its_body_fails_and_the_failure_is_what_is_seen(name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with sandkeep.create_sandbox(name):
            raise ZeroDivisionError
    with pytest.raises(NotFound):
        await sandkeep.get_sandbox(name)


async def test_leaving_a_scope_of_a_destroyed_sandbox_is_no_error(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.destroy()


async def test_getting_never_resumes_and_resuming_does(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        first = box.current_session.id
        await box.stop()
        seen = await sandkeep.get_sandbox(name)
        assert seen.status is sandkeep.SessionStatus.STOPPED
        async with sandkeep.resume_sandbox(name) as resumed:
            assert resumed.status is sandkeep.SessionStatus.RUNNING
            assert resumed.current_session.id != first
        assert (await seen.refresh()).status is sandkeep.SessionStatus.STOPPED
        assert [session.is_running for session in await box.sessions().all()] == [False, False]


async def test_operations_on_a_stopped_sandbox_resume_it(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("note", "from before")
        stopped = await box.stop()
        assert stopped.snapshot is not None
        assert (await box.run_process("cat", ["note"], capture_output=True)).stdout == b"from before"
        assert box.current_session.source_snapshot_id == stopped.snapshot.id


async def test_stopping_twice_says_the_same(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        first, second = await box.stop(), await box.stop()
        assert first.session.id == second.session.id
        assert first.snapshot is not None and second.snapshot is not None
        assert first.snapshot.id == second.snapshot.id


async def test_nested_resume_scopes_share_a_session_and_its_end_is_its_own_error(name: str) -> None:
    async with sandkeep.create_sandbox(name, destroy=False):
        pass
    async with sandkeep.resume_sandbox(name) as outer:
        async with sandkeep.resume_sandbox(name) as inner:
            assert inner.current_session.id == outer.current_session.id
            assert await inner.fs.exists(".")
        with pytest.raises(SessionStopped) as refused:
            await outer.fs.exists(".")
        assert refused.value.code == "session_stopped"
        assert refused.value.http_status == 410
    await outer.destroy()


async def test_a_handle_that_stopped_its_scope_itself_resumes_again(name: str) -> None:
    async with sandkeep.create_sandbox(name, destroy=False):
        pass
    async with sandkeep.resume_sandbox(name) as box:
        await box.stop()
        assert await box.fs.exists(".")
    assert (await box.refresh()).status is sandkeep.SessionStatus.STOPPED
    await box.destroy()


async def test_hooks_run_exactly_when_a_sandbox_or_a_session_came_to_be(name: str) -> None:
    seen: list[str] = []

    async def created(box: sandkeep.Sandbox) -> None:
        seen.append("created")
        await box.fs.write_text("ready", "yes")

    async def resumed(box: sandkeep.Sandbox) -> None:
        seen.append("resumed")
        assert await box.fs.read_text("ready") == "yes"

    box = await sandkeep.get_or_create_sandbox(name, on_create=created, on_resume=resumed)
    assert seen == ["created"]
    again = await sandkeep.get_or_create_sandbox(name, on_create=created, on_resume=resumed)
    assert seen == ["created"], "it was running"
    await box.stop()
    await sandkeep.get_or_create_sandbox(name, on_create=created, on_resume=resumed)
    assert seen == ["created", "resumed"]
    await again.stop()
    assert await again.fs.exists("ready")
    assert seen == ["created", "resumed", "resumed"], "an operation started a session"
    await box.destroy()


async def test_get_or_create_replaces_a_sandbox_whose_snapshot_is_gone(name: str) -> None:
    async with sandkeep.create_sandbox(name, destroy=False) as box:
        await box.fs.write_text("note", "lost")
    stopped = await box.stop()
    assert stopped.snapshot is not None
    await sandkeep.delete_snapshot(stopped.snapshot.id)
    with pytest.raises(SnapshotGone):
        await sandkeep.resume_sandbox(name)
    async with sandkeep.get_or_create_sandbox(name) as fresh:
        assert not await fresh.fs.exists("note")
    await fresh.destroy()


async def test_a_name_is_taken_once(name: str) -> None:
    async with sandkeep.create_sandbox(name):
        with pytest.raises(NameTaken) as refused:
            await sandkeep.create_sandbox(name)
        assert refused.value.name == name


async def test_arguments_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidRequest) as refused:
        await sandkeep.create_sandbox("not a name")
    assert refused.value.field == "name"
    assert refused.value.http_status is None


async def test_configuration_is_what_was_asked_for(name: str) -> None:
    async with sandkeep.create_sandbox(
        name,
        runtime="python3.13",
        execution_time_limit=90,
        resources=sandkeep.Resources(vcpus=1),
        env={"GREETING": "hello"},
        tags={"team": "blue"},
        ports=[8080],
        network_policy=sandkeep.NetworkPolicy.custom(
            {"api.example.com": [sandkeep.Rule(sandkeep.Transform.set_headers({"authorization": "secret"}))]},
            deny_subnets=["10.0.0.0/8"],
        ),
        snapshot_expiration=timedelta(days=2),
        snapshot_retention=sandkeep.SnapshotRetention(3),
    ) as box:
        assert box.runtime == "python3.13"
        assert box.execution_time_limit == timedelta(seconds=90)
        assert box.resources == sandkeep.Resources(1, 2048)
        assert box.tags == {"team": "blue"}
        assert str(8080) in box.url(8080)
        with pytest.raises(InvalidRequest, match="8080"):
            box.url(80)
        assert box.network_policy is not None
        assert box.network_policy.domains == ("api.example.com",)
        assert box.network_policy.deny_subnets == ("10.0.0.0/8",)
        assert box.network_policy.injected == {"api.example.com": ("authorization",)}
        assert box.snapshot_expiration == timedelta(days=2)
        assert box.snapshot_retention == sandkeep.SnapshotRetention(3)
        assert box.expires_at is not None and box.image
        done = await box.run_process("sh", ["-c", "echo $GREETING"], capture_output=True)
        assert done.stdout_text == "hello\n"


async def test_updates_replace_what_is_given_and_leave_the_rest(name: str) -> None:
    async with sandkeep.create_sandbox(name, tags={"a": "1"}, ports=[3000]) as box:
        retention = sandkeep.SnapshotRetention(2)
        await box.update(tags={"b": "2"}, execution_time_limit=120, snapshot_retention=retention)
        assert box.tags == {"b": "2"} and box.execution_time_limit == timedelta(minutes=2)
        assert [route.port for route in box.routes] == [3000]
        await box.update(ports=[4000])
        assert [route.port for route in box.routes] == [4000]
        assert box.snapshot_retention == retention
        await box.update(snapshot_retention=None)
        assert box.snapshot_retention is None
        await box.update(network_policy=sandkeep.NetworkPolicy.deny_all())
        assert box.current_session.network_policy is not None
        assert box.current_session.network_policy.mode is sandkeep.PolicyMode.DENY_ALL
        session = await box.update_network_policy(sandkeep.NetworkPolicy.allow_all())
        assert session.network_policy is not None
        assert session.network_policy.mode is sandkeep.PolicyMode.ALLOW_ALL


async def test_extending_changes_the_running_session_only(name: str) -> None:
    async with sandkeep.create_sandbox(name, execution_time_limit=60) as box:
        session = await box.extend_execution_time_limit(timedelta(minutes=1))
        assert session.execution_time_limit == timedelta(minutes=2)
        assert box.execution_time_limit == timedelta(minutes=1)


async def test_snapshots_end_the_session_checkpoints_do_not(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("v", "1")
        one = await box.checkpoint()
        assert not box.status.is_final
        assert one.method is sandkeep.SnapshotMethod.CHECKPOINT
        await box.fs.write_text("v", "2")
        two = await box.snapshot(expiration=timedelta(days=1))
        assert box.status is sandkeep.SessionStatus.STOPPED
        assert two.method is sandkeep.SnapshotMethod.MANUAL and two.expires_at is not None
        assert {one.id, two.id} <= {snapshot.id for snapshot in await box.snapshots().all()}
        await box.resume()
        three = await box.snapshot()
        assert three.parent_id == two.id
        assert [node.snapshot.id for node in await box.snapshot_tree()] == [three.id, two.id]
        down = await box.snapshot_tree(two, descendants=True)
        assert [node.snapshot.id for node in down] == [two.id, three.id]


async def test_rollback_starts_the_next_session_from_an_earlier_snapshot(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("v", "1")
        earlier = await box.checkpoint()
        await box.fs.write_text("v", "2")
        await box.rollback(earlier)
        assert box.status is sandkeep.SessionStatus.STOPPED
        assert await box.fs.read_text("v") == "1"


async def test_a_rollback_to_what_is_not_there_changes_nothing(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        kept = await box.snapshot()
        gone = await box.checkpoint()
        await sandkeep.delete_snapshot(gone.id)
        process = await box.create_process("sleep", ["60"])
        for snapshot, error in (("snap_nothing", NotFound), (gone, SnapshotGone)):
            with pytest.raises(error):
                await box.rollback(snapshot)
        await box.refresh()
        assert box.status is sandkeep.SessionStatus.RUNNING and await process.poll() is None
        assert box.current_snapshot_id == kept.id


async def test_a_fork_of_a_running_sandbox_starts_from_its_current_snapshot(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("one", "1")
        async with box.fork() as fork:
            assert fork.current_snapshot_id is None and not await fork.fs.exists("one")
        ended = await box.snapshot()
        await box.fs.write_text("two", "2")
        later = await box.checkpoint()
        async with box.fork() as fork:
            assert box.current_snapshot_id == ended.id == fork.current_snapshot_id
            assert [entry.name for entry in await fork.fs.listdir()] == ["one"]
        async with sandkeep.create_sandbox(source=sandkeep.SnapshotSource(later.id)) as other:
            assert [entry.name for entry in await other.fs.listdir()] == ["one", "two"]


async def test_a_fork_has_the_files_and_configuration_of_its_source(name: str) -> None:
    async with sandkeep.create_sandbox(name, tags={"from": "source"}, env={"A": "1"}) as box:
        await box.fs.write_text("shared", "yes")
        await box.snapshot()
        async with box.fork(f"{name}-f", tags={"from": "fork"}) as fork:
            assert await fork.fs.read_text("shared") == "yes"
            assert fork.tags == {"from": "fork"}
            await fork.fs.write_text("shared", "no")
            assert (await fork.run_process("printenv", ["A"], capture_output=True)).stdout == b"1\n"
        assert await box.fs.read_text("shared") == "yes"
        async with sandkeep.fork_sandbox(name, f"{name}-g") as other:
            assert await other.fs.read_text("shared") == "yes"


async def test_sandboxes_are_listed_by_name_prefix_by_tag_and_in_pages(name: str) -> None:
    boxes = [
        await sandkeep.create_sandbox(f"{name}-{number}", tags={"run": name}, persistent=False)
        for number in range(3)
    ]
    try:
        by_name = sandkeep.query_sandboxes(sandkeep.SandboxQueryByName(prefix=name, page_size=2))
        assert [info.name async for info in by_name] == [box.name for box in boxes]
        pages = [page async for page in by_name.pages()]
        assert [len(page.items) for page in pages] == [2, 1]
        rest = await by_name.page(pages[0].next)
        assert [info.name for info in rest.items] == [boxes[2].name]
        by_tag = sandkeep.query_sandboxes(sandkeep.SandboxQueryByCreated(tag=("run", name)))
        assert [info.name for info in await by_tag.all()] == [box.name for box in reversed(boxes)]
        running = sandkeep.SandboxQueryByStatusUpdated(status=sandkeep.SessionStatus.RUNNING, page_size=100)
        assert {box.name for box in boxes} <= {info.name async for info in sandkeep.query_sandboxes(running)}
    finally:
        for box in boxes:
            await box.destroy()


async def test_usage_is_counted(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.run_process("sh", ["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
        assert (await box.current_usage()).duration > timedelta()
        stopped = await box.stop()
        assert stopped.session.usage is not None and stopped.session.usage.cpu > timedelta()
        assert box.usage.cpu >= stopped.session.usage.cpu
        found = await sandkeep.query_sessions(sandkeep.SessionQuery(sandbox=name)).all()
        assert [session.id for session in found] == [stopped.session.id]
        assert (await sandkeep.get_session(stopped.session.id)).usage == stopped.session.usage


async def test_drives_outlive_sandboxes(name: str) -> None:
    drive = await sandkeep.get_or_create_drive(name, max_size_bytes=1 << 30)
    assert (await sandkeep.get_or_create_drive(name)).id == drive.id
    async with sandkeep.create_sandbox(mounts={"/data": sandkeep.Mount(name)}) as box:
        await box.run_process("sh", ["-c", "echo kept > /data/file"], sudo=True, check=True)
        assert (await sandkeep.get_drive(name)).session_id == box.current_session.id
    reader = {"/data": sandkeep.Mount(name, sandkeep.MountMode.SNAPSHOT)}
    async with sandkeep.create_sandbox(mounts=reader) as box:
        assert await box.fs.read_text("/data/file") == "kept\n"
    forked = await sandkeep.fork_drive(name, f"{name}-f")
    assert forked.parent_id == drive.id
    names = sandkeep.query_drives(sandkeep.DriveQueryByName(prefix=name))
    assert [found.name async for found in names] == [name, f"{name}-f"]
    await sandkeep.delete_drive(f"{name}-f")
    await sandkeep.delete_drive(name)
    with pytest.raises(NotFound):
        await sandkeep.get_drive(name)


async def test_a_client_of_ones_own_does_the_same(name: str) -> None:
    async with sandkeep.Client() as client, client.create_sandbox(name) as box:
        assert (await client.get_sandbox(name)).name == box.name
    with pytest.raises(InvalidRequest, match="closed"):
        await client.get_sandbox(name)
