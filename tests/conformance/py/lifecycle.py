"""Creating, finding, resuming and changing sandboxes."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

from tests.conformance.py.bench import Bench, collect, connect, ms, refusal, rows, scenario, sh


@scenario
async def create_default(bench: Bench) -> Any:
    async with bench.box() as box:
        session = box.current_session
        return {
            "status": session.status.value,
            "persistent": box.persistent,
            "vcpus": session.vcpus,
            "memory": session.memory,
            "timeout": ms(session.execution_time_limit),
            "ports": [route.port for route in box.routes],
            "cwd": session.cwd,
        }


@scenario
async def create_image(bench: Bench) -> Any:
    async with bench.box(image="vercel/sandbox/universal") as box:
        return {"status": box.current_session.status.value, "image": bool(box.image)}


@scenario
async def create_configured(bench: Bench) -> Any:
    async with bench.box(
        resources=api.SandboxResources(vcpus=4, memory=8192),
        execution_time_limit=timedelta(minutes=2),
        ports=[3000, 8080],
        tags={"team": "a:b"},
        snapshot_expiration=timedelta(days=1),
        snapshot_retention=api.SnapshotRetention(count=3, expiration=timedelta(days=7)),
        persistent=False,
    ) as box:
        kept = box.snapshot_retention
        return {
            "vcpus": box.vcpus,
            "memory": box.memory,
            "timeout": ms(box.execution_time_limit),
            "ports": [route.port for route in box.routes],
            "tags": box.tags,
            "snapshotExpiration": ms(box.snapshot_expiration),
            "retention": [kept.count, ms(kept.expiration), kept.delete_evicted],
            "persistent": box.persistent,
        }


@scenario
async def create_from_git(bench: Bench) -> Any:
    async with bench.box(source=api.GitSource(url=os.environ["GIT_URL"])) as box:
        listed = await sh(box, "cd /vercel/sandbox/project && ls")
        return {"files": listed.split(), "text": await sh(box, "cat /vercel/sandbox/project/README.md")}


@scenario
async def create_from_tarball(bench: Bench) -> Any:
    async with bench.box(source=api.TarballSource(url=os.environ["TARBALL_URL"])) as box:
        return {"text": await sh(box, "find /vercel/sandbox -name hello.txt -exec cat {} +")}


@scenario
async def create_from_snapshot(bench: Bench) -> Any:
    async with bench.box("one") as box:
        await box.fs.write_text("kept.txt", "kept\n")
        snapshot = await box.snapshot()
        async with bench.box("two", source=api.SnapshotSource(snapshot_id=snapshot.id)) as copy:
            return {"text": await copy.fs.read_text("kept.txt"), "source": True}


@scenario
async def duplicate_name(bench: Bench) -> Any:
    async with bench.box():
        return await refusal(bench.client.create_sandbox(name=bench.name()))


@scenario
async def invalid_create(bench: Bench) -> Any:
    many = bench.client.create_sandbox(name=bench.name(), ports=list(range(2000, 2016)))
    return {"ports": await refusal(many)}


@scenario
async def failover_region(bench: Bench) -> Any:
    options = {"region": "iad1", "failover_regions": ["iad1"]}
    return await refusal(bench.client.create_sandbox(name=bench.name(), **options))


@scenario
async def context_manager(bench: Bench) -> Any:
    async with bench.box() as box:
        inside = box.current_session.status.value
    return {"inside": inside, "after": await refusal(bench.client.get_sandbox(name=bench.name()))}


@scenario
async def get_missing(bench: Bench) -> Any:
    return await refusal(bench.client.get_sandbox(name=bench.name()))


@scenario
async def get_has_no_side_effect(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.stop()
        before = await bench.client.get_sandbox(name=box.name)
        after = await bench.client.get_sandbox(name=box.name)
        sessions, _ = await rows(box)
        return {"before": before.status.value, "after": after.status.value, "sessions": len(sessions)}


@scenario
async def resume(bench: Bench) -> Any:
    async with bench.box() as box:
        first = box.current_session_id
        await box.stop()
        fresh = await bench.client.resume_sandbox(name=box.name)
        again = await bench.client.resume_sandbox(name=box.name)
        return {
            "fresh": fresh.current_session_id != first,
            "again_same": again.current_session_id == fresh.current_session_id,
            "status": again.status.value,
        }


@scenario
async def auto_resume(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.fs.write_text("kept.txt", "kept\n")
        await box.stop()
        text = await box.fs.read_text("kept.txt")
        sessions, _ = await rows(box)
        return {
            "text": text,
            "sessions": len(sessions),
            "statuses": [session.status.value for session in sessions],
        }


@scenario
async def concurrent_auto_resume(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.fs.write_text("kept.txt", "kept\n")
        await box.stop()
        handles = [await bench.client.get_sandbox(name=box.name) for _ in range(4)]
        calls = [partial(handle.fs.read_text, "kept.txt") for handle in handles]
        texts = await bench.together(calls)
        sessions, _ = await rows(box)
        return {"texts": texts, "sessions": len(sessions)}


@scenario
async def read_while_stopping(bench: Bench) -> Any:
    """Whatever state the session is found in, the client gets its answer, from this session or the next."""
    async with bench.box() as box:
        await box.fs.write_text("kept.txt", "kept\n")
        handles = [await bench.client.get_sandbox(name=box.name) for _ in range(4)]
        reads = [partial(handle.fs.read_text, "kept.txt") for handle in handles]
        _, *texts = await bench.together([box.current_session.stop, *reads])
        return {"texts": texts, "after": await box.fs.read_text("kept.txt")}


@scenario
async def credentials_from_environment(bench: Bench) -> Any:
    """A token that carries its scope is all the client needs."""
    client = connect(os.environ["SANDBOX_SERVER"], blocking=bench.blocking, environment=True)
    async with client.create_sandbox(name=bench.name()) as box:
        return {"status": box.current_session.status.value}


@scenario
async def get_or_create(bench: Bench) -> Any:
    first, created = await bench.client.get_or_create_sandbox(name=bench.name())
    try:
        second, again = await bench.client.get_or_create_sandbox(name=bench.name())
        return {
            "first_new": created,
            "second_same": not again and first.current_session_id == second.current_session_id,
        }
    finally:
        await first.destroy(delete_orphan_snapshots=True)


@scenario
async def get_or_create_after_snapshot_is_gone(bench: Bench) -> Any:
    first, _ = await bench.client.get_or_create_sandbox(name=bench.name())
    try:
        await first.fs.write_text("kept.txt", "kept\n")
        snapshot = await first.snapshot()
        await snapshot.delete()
        second, created = await bench.client.get_or_create_sandbox(name=bench.name())
        return {
            "recreated": created,
            "file": await second.fs.exists("kept.txt"),
        }
    finally:
        await first.destroy(delete_orphan_snapshots=True)


@scenario
async def list_sandboxes(bench: Bench) -> Any:
    query = bench.client.query_sandboxes
    by_name = api.SandboxQueryByName(sort_order="asc", name_prefix=bench.prefix)
    async with bench.box("a"), bench.box("b", tags={"key": f"{bench.prefix}:1"}), bench.box("c"):
        everything = [box.name async for box in query(page_size=50)]
        mine = [name for name in everything if name.startswith(bench.prefix)]
        one_by_one = await collect(query(query=by_name, page_size=1))
        tag = api.TagFilter(key="key", value=f"{bench.prefix}:1")
        tagged = await collect(query(query=api.SandboxQueryByCreatedAt(tag=tag)))
        return {
            "newest_first": mine == [bench.name("c"), bench.name("b"), bench.name("a")],
            "pages": [1] * len(one_by_one),
            "by_prefix": [box.name.rpartition("-")[2] for box in one_by_one],
            "by_tag": [box.name.rpartition("-")[2] for box in tagged],
        }


@scenario
async def update(bench: Bench) -> Any:
    async with bench.box(ports=[3000], tags={"a": "1", "b": "2"}) as box:
        session = box.current_session_id
        await box.update(tags={"x": "1"}, ports=[4000], execution_time_limit=timedelta(minutes=10))
        tags, ports = box.tags, [route.port for route in box.routes]
        await box.update(
            resources=api.SandboxResources(vcpus=4, memory=8192),
            snapshot_retention=api.SnapshotRetention(count=3),
            ports=[],
        )
        kept = box.snapshot_retention
        await box.update(snapshot_retention=None, mounts={})
        return {
            "tags": tags,
            "ports": ports,
            "ports_cleared": [route.port for route in box.routes],
            "timeout": ms(box.execution_time_limit),
            "vcpus": box.vcpus,
            "memory": box.memory,
            "retention": [kept.count, kept.delete_evicted],
            "retention_removed": box.snapshot_retention is None,
            "same_session": box.current_session_id == session,
        }


@scenario
async def extend_by_update(bench: Bench) -> Any:
    """The client computes the difference and extends the session itself; the server must not do it too."""
    async with bench.box() as box:
        await box.update(execution_time_limit=timedelta(minutes=10))
        fresh = await bench.client.get_sandbox(name=box.name)
        return {
            "sandbox": ms(fresh.execution_time_limit),
            "session": ms(fresh.current_session.execution_time_limit),
        }


@scenario
async def delete(bench: Bench) -> Any:
    box = await bench.client.create_sandbox(name=bench.name())
    await box.destroy()
    return {"after": await refusal(bench.client.get_sandbox(name=bench.name()))}


@scenario
async def delete_orphan_snapshots(bench: Bench) -> Any:
    box = await bench.client.create_sandbox(name=bench.name())
    await box.stop()
    snapshot = box.current_snapshot_id
    await box.destroy(delete_orphan_snapshots=True)
    return {"snapshot": (await bench.client.get_snapshot(snapshot_id=snapshot)).status}


@scenario
async def fork(bench: Bench) -> Any:
    async with bench.box("source", env={"WHERE": "inherited"}, tags={"from": "source"}) as box:
        await box.fs.write_text("kept.txt", "kept\n")
        await box.stop()
        forked = bench.client.fork_sandbox(source_sandbox=box.name, name=bench.name("fork"))
        async with forked as copy:
            seen = {
                "text": await copy.fs.read_text("kept.txt"),
                "env": await sh(copy, "echo $WHERE"),
                "tags": copy.tags,
            }
        other = bench.client.fork_sandbox(
            source_sandbox=box.name, name=bench.name("other"), tags={"only": "mine"}
        )
        async with other as copy:
            seen["replaced"] = copy.tags
    missing = bench.client.fork_sandbox(source_sandbox=bench.name("source"), name=bench.name("none"))
    return {**seen, "missing": await refusal(missing)}
