"""Stopping, snapshots, sessions, and where a sandbox continues."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

from tests.conformance.py.bench import Bench, collect, ms, refusal, rows, scenario


@scenario
async def stop_is_idempotent(bench: Bench) -> Any:
    async with bench.box() as box:
        session = box.current_session
        first = await session.stop()
        second = await session.stop()
        fresh = await bench.client.get_sandbox(name=box.name)
        return {
            "statuses": [first.status.value, second.status.value],
            "snapshot": fresh.current_snapshot_id is not None,
        }


@scenario
async def stop_without_persistence(bench: Bench) -> Any:
    async with bench.box(persistent=False) as box:
        await box.fs.write_text("kept.txt", "kept\n")
        await box.stop()
        fresh = await bench.client.get_sandbox(name=box.name)
        return {
            "snapshot": fresh.current_snapshot_id is not None,
            "file": await box.fs.exists("kept.txt"),
        }


@scenario
async def timeout_expiry(bench: Bench) -> Any:
    async with bench.box(execution_time_limit=timedelta(seconds=3)) as box:
        await box.fs.write_text("kept.txt", "kept\n")
        deadline = time.monotonic() + 60
        status = "running"
        while status not in ("stopped", "failed", "aborted") and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            status = (await bench.client.get_sandbox(name=box.name)).status.value
        return {"status": status, "text": await box.fs.read_text("kept.txt")}


@scenario
async def extend(bench: Bench) -> Any:
    async with bench.box() as box:
        before = box.current_session.execution_time_limit
        session = await box.extend_execution_time_limit(timedelta(minutes=1))
        too_far = await refusal(box.extend_execution_time_limit(timedelta(days=5)))
        return {"grew": ms(session.execution_time_limit - before), "too_far": too_far}


@scenario
async def snapshot_twice(bench: Bench) -> Any:
    async with bench.box() as box:
        first = await box.snapshot(expiration=0)
        second = await box.snapshot(expiration=timedelta(days=1))
        return {
            "different": first.id != second.id,
            "statuses": [first.status, second.status],
            "never": first.expires_at is None,
            "dated": abs(second.expires_at - time.time() * 1000 - 86_400_000) < 120_000,
        }


@scenario
async def snapshots(bench: Bench) -> Any:
    async with bench.box() as box:
        first = await box.snapshot()
        second = await box.snapshot()
        listed = await collect(bench.client.query_snapshots(name=box.name))
        got = await bench.client.get_snapshot(snapshot_id=first.id)
        before = got.status
        gone = await got.delete()
        return {
            "listed": len(listed),
            "got": before,
            "deleted": gone.status,
            "tombstone": (await bench.client.get_snapshot(snapshot_id=first.id)).status,
            "parent": second.parent_id == first.id,
        }


@scenario
async def retention(bench: Bench) -> Any:
    async with bench.box(snapshot_retention=api.SnapshotRetention(count=2)) as box:
        for _ in range(4):
            await box.snapshot()
        # An old snapshot goes once the newer ones would survive a power failure, moments later.
        deadline = time.monotonic() + 60
        kept = 4
        while kept > 2 and time.monotonic() < deadline:
            _, found = await rows(box)
            kept = sum(snapshot.status == "created" for snapshot in found)
            await asyncio.sleep(0.2)
        return {"kept": kept}


@scenario
async def rollback(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.fs.write_text("state.txt", "first\n")
        first = await box.snapshot()
        await box.fs.write_text("state.txt", "second\n")
        await box.stop()
        await box.update(current_snapshot_id=first.id)
        text = await box.fs.read_text("state.txt")
        return {"text": text, "unknown": await refusal(box.update(current_snapshot_id="snap_unknown"))}


@scenario
async def sessions(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.stop()
        await box.run_process("true")
        found = await collect(bench.client.query_sessions(name=box.name))
        return {
            "count": len(found),
            "one_source": {session.sandbox_name for session in found} == {box.name},
        }
