"""Sandboxes, sessions and snapshots: who starts, stops and destroys what, and when."""

from __future__ import annotations

from datetime import timedelta

import pytest

import sandkeep
from sandkeep.errors import (
    ConfigurationDiffers,
    InvalidRequest,
    NameTaken,
    NotFound,
    SessionStopped,
    SnapshotGone,
    TimeoutInvalid,
    WrongState,
)
from sandkeep.host.images.hostimage import programs
from sandkeep.sdk._compat_async import sleep

pytestmark = pytest.mark.anyio

PYTHON = next(name for name in programs.runtimes() if name.startswith("python"))
"""As a runtime: what this machine has."""


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


async def test_a_hook_that_raises_ends_the_session_it_was_called_for(name: str) -> None:
    async def raising(box: sandkeep.Sandbox) -> None:
        await box.run_process("true", check=True)
        raise LookupError("of the hook")

    with pytest.raises(LookupError, match="of the hook"):
        async with sandkeep.get_or_create_sandbox(name, on_create=raising):
            pytest.fail("entered")
    box = await sandkeep.get_sandbox(name)
    assert box.status is sandkeep.SessionStatus.STOPPED
    for resume in (sandkeep.resume_sandbox, sandkeep.get_or_create_sandbox):
        with pytest.raises(LookupError):
            async with resume(name, on_resume=raising):
                pytest.fail("entered")
        await box.refresh()
        assert box.status is sandkeep.SessionStatus.STOPPED
        with pytest.raises(LookupError):
            await resume(name, on_resume=raising)
        await box.refresh()
        assert box.status is sandkeep.SessionStatus.STOPPED
    # One that is called for nothing ends nothing.
    await box.resume()
    async with sandkeep.resume_sandbox(name, on_resume=raising) as same:
        assert same.status is sandkeep.SessionStatus.RUNNING


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


async def test_get_or_create_without_a_name_creates() -> None:
    seen: list[str] = []

    async def created(box: sandkeep.Sandbox) -> None:
        seen.append(box.name)

    async def resumed(box: sandkeep.Sandbox) -> None:
        raise AssertionError("nothing was there to be resumed")

    made = [await sandkeep.get_or_create_sandbox(on_create=created, on_resume=resumed) for _ in range(2)]
    assert [box.name for box in made] == seen and len(set(seen)) == 2
    for box in made:
        await box.destroy()
    async with sandkeep.get_or_create_sandbox(None, tags={"a": "b"}) as box:
        assert box.tags == {"a": "b"}
    assert (await box.refresh()).status is sandkeep.SessionStatus.STOPPED, "a scope stops, as with a name"
    await box.destroy()


async def test_a_handle_knows_what_lists_say(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        (listed,) = [each async for each in sandkeep.query_sandboxes() if each.name == name]
        assert (box.updated_at, box.tier, box.region) == (listed.updated_at, listed.tier, listed.region)
        assert box.tier is not None and box.tier is box.current_session.tier and box.region
        before = box.updated_at
        assert (await box.update(tags={"a": "b"})).updated_at > before


async def test_get_or_create_refuses_what_a_sandbox_that_exists_does_not_have(name: str) -> None:
    given: sandkeep.NewConfiguration = {
        "network_policy": sandkeep.NetworkPolicy.deny_all(),
        "env": {"A": "hidden"},
        "ports": [8080, 3000],
        "execution_time_limit": 120,
        "image": "host",
    }
    box = await sandkeep.create_sandbox(name, **given)
    given["ports"] = [3000, 8080]
    again = await sandkeep.get_or_create_sandbox(name, **given)
    assert again.current_session.id == box.current_session.id
    await box.stop()

    changed: list[tuple[sandkeep.NewConfiguration, str, object, object]] = [
        ({"network_policy": sandkeep.NetworkPolicy.allow_all()}, "networkPolicy", "deny-all", "allow-all"),
        ({"execution_time_limit": 60}, "timeout", 120_000, 60_000),
        ({"persistent": False}, "persistent", True, False),
        ({"tags": {"a": "b"}}, "tags", {}, {"a": "b"}),
        ({"image": "other"}, "image", "host", "other"),
        (
            {"source": sandkeep.GitSource("https://a.test/b")},
            "source",
            None,
            {"type": "git", "url": "https://a.test/b"},
        ),
        ({"env": {"A": "shown-never"}}, "env", ["A"], "the same but for values that are not shown"),
    ]
    for configuration, field, found, asked in changed:
        with pytest.raises(ConfigurationDiffers, match=name) as refused:
            await sandkeep.get_or_create_sandbox(name, **configuration)
        assert (refused.value.field, refused.value.found, refused.value.asked) == (field, found, asked)
        assert "hidden" not in str(refused.value) and "never" not in str(refused.value)
    assert (await box.refresh()).status is sandkeep.SessionStatus.STOPPED, "nothing was started"

    await sandkeep.resume_sandbox(name)
    await box.refresh()
    await box.update_network_policy(sandkeep.NetworkPolicy.allow_all())
    with pytest.raises(ConfigurationDiffers, match="running session"):
        await sandkeep.get_or_create_sandbox(name, **given)
    await box.destroy()


async def test_get_or_create_replaces_a_sandbox_whose_snapshot_is_gone(name: str) -> None:
    async with sandkeep.create_sandbox(name, destroy=False) as box:
        await box.fs.write_text("note", "lost")
    stopped = await box.stop()
    assert stopped.snapshot is not None
    await sandkeep.delete_snapshot(stopped.snapshot.id)
    with pytest.raises(SnapshotGone) as gone:
        await sandkeep.resume_sandbox(name)
    assert (gone.value.snapshot, gone.value.code) == (stopped.snapshot.id, "snapshot_not_found")
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
        runtime=PYTHON,
        execution_time_limit=90,
        resources=sandkeep.Resources(cpus=1, memory_mb=2048, exact=False),
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
        assert box.runtime == PYTHON
        assert box.execution_time_limit == timedelta(seconds=90)
        assert box.resources == sandkeep.Resources(1, 2048)
        assert box.tags == {"team": "blue"}
        assert box.url(8080).startswith("http://127.")
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
        with pytest.raises(TimeoutInvalid) as late:
            await box.extend_execution_time_limit(timedelta(days=10_000))
        assert late.value.maximum is not None and late.value.maximum < timedelta(days=10_000)
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


async def test_snapshots_have_the_comments_they_were_taken_with(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        checkpoint = await box.checkpoint(comment="before: the “upgrade”")
        taken = await box.snapshot(comment="x" * 1024)
        plain = await box.checkpoint()
        assert (checkpoint.comment, taken.comment, plain.comment) == (
            "before: the “upgrade”",
            "x" * 1024,
            None,
        )
        listed = {each.id: each.comment for each in await box.snapshots().all()}
        assert listed == {each.id: each.comment for each in (checkpoint, taken, plain)}
        assert (await sandkeep.get_snapshot(taken.id)).comment == taken.comment
        for wrong in ("", "two\nlines", "x" * 1025):
            with pytest.raises(InvalidRequest, match="comment") as refused:
                await box.checkpoint(comment=wrong)
            assert refused.value.details["field"] == "comment"


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
            assert fork.left_out == box.current_session.id
        ended = await box.snapshot()
        async with box.fork() as fork:
            assert fork.left_out is None, "nothing ran"
        await box.fs.write_text("two", "2")
        later = await box.checkpoint()
        async with box.fork() as fork:
            assert box.current_snapshot_id == ended.id == fork.current_snapshot_id
            assert [entry.name for entry in await fork.fs.listdir()] == ["one"]
        async with sandkeep.create_sandbox(source=sandkeep.SnapshotSource(later.id)) as other:
            assert [entry.name for entry in await other.fs.listdir()] == ["one", "two"]


async def test_a_live_fork_starts_from_what_the_running_session_has(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("one", "1")
        kept = await box.snapshot()
        process = await box.create_process("sleep", ["600"])
        await box.run_process("sh", ["-c", "echo 2 > two"], check=True)
        async with box.fork(live=True) as fork, sandkeep.fork_sandbox(name, live=True) as other:
            for made in (fork, other):
                assert [entry.name for entry in await made.fs.listdir()] == ["one", "two"]
                assert made.left_out is None
        await box.refresh()
        assert await process.poll() is None and box.current_snapshot_id == kept.id
        with pytest.raises(InvalidRequest, match="live"):
            await box.fork(live=True, image="host")
        await box.stop()
        async with box.fork(live=True) as fork:
            assert await fork.fs.exists("two") and fork.left_out is None


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
        await sandkeep.create_sandbox(
            f"{name}-{number}", tags={"run": name, "n": f"{number}:{number}"}, persistent=False
        )
        for number in range(3)
    ]
    try:
        by_name = sandkeep.query_sandboxes(sandkeep.SandboxQueryByName(prefix=name, page_size=2))
        assert [info.name async for info in by_name] == [box.name for box in boxes]
        pages = [page async for page in by_name.pages()]
        assert [len(page.items) for page in pages] == [2, 1]
        rest = await by_name.page(pages[0].next)
        assert [info.name for info in rest.items] == [boxes[2].name]
        by_tag = sandkeep.query_sandboxes(sandkeep.SandboxQueryByCreated(tags={"run": name}))
        assert [info.name for info in await by_tag.all()] == [box.name for box in reversed(boxes)]
        both = sandkeep.SandboxQueryByName(tags={"run": name, "n": "1:1"})
        assert [info.name for info in await sandkeep.query_sandboxes(both).all()] == [boxes[1].name]
        neither = sandkeep.SandboxQueryByName(tags={"run": name, "n": "1"})
        assert not await sandkeep.query_sandboxes(neither).all()
        running = sandkeep.SandboxQueryByStatusUpdated(status=sandkeep.SessionStatus.RUNNING, page_size=100)
        assert {box.name for box in boxes} <= {info.name async for info in sandkeep.query_sandboxes(running)}
    finally:
        for box in boxes:
            await box.destroy()


async def test_a_sandbox_has_up_to_64_tags_and_is_found_by_all_of_them(name: str) -> None:
    tags = {f"key-{number}": f"{name} &={number}" for number in range(64)}
    async with sandkeep.create_sandbox(name, tags=tags) as box:
        assert box.tags == tags
        found = sandkeep.query_sandboxes(sandkeep.SandboxQueryByName(tags=tags))
        assert [info.name for info in await found.all()] == [name]
        with pytest.raises(InvalidRequest, match="at most 64"):
            await box.update(tags={**tags, "one": "more"})
        with pytest.raises(InvalidRequest, match="tags"):
            sandkeep.SandboxQueryByName(tags={"a:b": "1"})


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


async def test_an_open_terminal_keeps_the_time_limit_away_unless_told_not_to(name: str) -> None:
    async with sandkeep.create_sandbox(name, execution_time_limit=timedelta(seconds=90)) as box:
        first = box.expires_at
        assert first is not None
        async with box.open_interactive("cat", extend_timeout=False) as terminal:
            await terminal.write("x\n")
            assert await terminal.read()
        assert (await box.refresh()).expires_at == first
        async with box.open_interactive("cat") as terminal:
            await terminal.write("x\n")
            assert await terminal.read()
            for _ in range(100):
                if (await box.refresh()).expires_at != first:
                    break
                await box.run_process("sleep", ["0.2"])
        assert box.expires_at is not None and box.expires_at - first >= timedelta(minutes=4)


async def test_a_drive_of_another_size_is_refused(name: str) -> None:
    drive = await sandkeep.get_or_create_drive(name, max_size_bytes=1 << 30)
    assert await sandkeep.get_or_create_drive(name) == drive
    assert await sandkeep.get_or_create_drive(name, max_size_bytes=1 << 30) == drive
    with pytest.raises(ConfigurationDiffers, match="1073741824 bytes, not the requested 5") as refused:
        await sandkeep.get_or_create_drive(name, max_size_bytes=5)
    assert (refused.value.found, refused.value.asked) == (1 << 30, 5)
    await sandkeep.delete_drive(name)


@pytest.mark.slow
async def test_an_idle_timeout_stops_a_session_as_stop_does(name: str) -> None:
    async with sandkeep.create_sandbox(name, idle_timeout=timedelta(seconds=5)) as box:
        assert box.idle_timeout == box.current_session.idle_timeout == timedelta(seconds=5)
        await box.fs.write_text("note", "kept")
        used = box.current_session
        assert used.stop_reason is None
        found = await sandkeep.get_sandbox(name)
        for _ in range(600):
            if (await found.refresh()).status is sandkeep.SessionStatus.STOPPED:
                break
            await sleep(0.05)
        assert found.current_session.stop_reason == "idle" and found.current_snapshot_id is not None
        # The next operation resumes it, and a process that is waited for keeps it.
        await box.run_process("sleep", ["12"], check=True)
        assert await box.fs.read_text("note") == "kept"
        assert box.current_session.id != used.id and box.current_session.is_running


async def test_an_idle_timeout_is_changed_compared_and_inherited(name: str) -> None:
    async with sandkeep.create_sandbox(name, idle_timeout=60) as box:
        await box.update(idle_timeout=timedelta(minutes=2), tags={"a": "b"})
        assert box.idle_timeout == timedelta(minutes=2)
        assert await sandkeep.get_or_create_sandbox(name, idle_timeout=120)
        with pytest.raises(ConfigurationDiffers) as refused:
            await sandkeep.get_or_create_sandbox(name, idle_timeout=0)
        assert (refused.value.field, refused.value.found) == ("idleTimeout", 120_000)
        async with box.fork() as fork:
            assert fork.idle_timeout == fork.current_session.idle_timeout == timedelta(minutes=2)
        async with box.fork(idle_timeout=0) as fork:
            assert fork.idle_timeout is None
        await box.update(idle_timeout=0)
        assert box.idle_timeout is None
        with pytest.raises(InvalidRequest, match="idle_timeout") as invalid:
            await box.update(idle_timeout=1)
        assert invalid.value.details["field"] == "idle_timeout"


async def test_a_sandbox_that_is_destroyed_on_stop_leaves_nothing(name: str) -> None:
    box = await sandkeep.create_sandbox(name, destroy_on_stop=True, delete_after=timedelta(hours=1))
    assert box.destroy_on_stop and box.delete_after == timedelta(hours=1)
    assert box.delete_at is not None and box.created_at < box.delete_at
    with pytest.raises(WrongState, match="is destroyed"):
        await box.snapshot()
    checkpoint = await box.checkpoint()
    stopped = await box.stop()
    assert stopped.snapshot is None and stopped.session.status is sandkeep.SessionStatus.STOPPED
    for _ in range(600):
        try:
            await sandkeep.get_sandbox(name)
        except NotFound:
            break
        await sleep(0.05)
    with pytest.raises(NotFound):
        await box.run_process("true")
    assert (await sandkeep.get_snapshot(checkpoint.id)).status is sandkeep.SnapshotStatus.DELETED
    async with sandkeep.create_sandbox(name, destroy_on_stop=True):
        pass


@pytest.mark.slow
async def test_a_lifetime_is_enforced_and_can_be_changed(name: str) -> None:
    box = await sandkeep.create_sandbox(name, delete_after=1)
    for _ in range(600):
        try:
            await box.refresh()
        except NotFound:
            break
        await sleep(0.05)
    with pytest.raises(NotFound):
        await sandkeep.get_sandbox(name)
    async with sandkeep.create_sandbox(name, delete_after=3600) as box:
        assert (await box.update(delete_after=0)).delete_at is None
        with pytest.raises(InvalidRequest, match="delete_after"):
            await box.update(delete_after=0.5)
    with pytest.raises(InvalidRequest, match="snapshot_retention") as refused:
        sandkeep.create_sandbox(destroy_on_stop=True, snapshot_retention=sandkeep.SnapshotRetention(1))
    assert refused.value.details["field"] == "destroy_on_stop"
