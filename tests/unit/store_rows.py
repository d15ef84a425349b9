"""Rows for tests: complete, small, and different only where a test says so."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sandkeep.store import Store
from sandkeep.store.rows import (
    Drive,
    Process,
    Sandbox,
    Session,
    SessionStatus,
    Snapshot,
    SnapshotMethod,
)


def drop_columns_since_sealed_policies(run: Callable[[str], object]) -> None:
    """Take back what the steps after ``sealed_policies`` add, so that they can be applied again."""
    run("DROP INDEX sandboxes_by_lifetime")
    for index in ("sandboxes_by_batch", "sessions_by_source"):
        run(f"DROP INDEX {index}")
    run("ALTER TABLE snapshots DROP COLUMN comment")
    for column in (
        "exact_resources",
        "destroy_on_stop",
        "delete_after_ms",
        "delete_at_ms",
        "batch",
        "host_ports",
    ):
        run(f"ALTER TABLE sandboxes DROP COLUMN {column}")
    for table in ("sandboxes", "sessions"):
        run(f"ALTER TABLE {table} DROP COLUMN asked_limits")
    for column in ("stdin", "metadata"):
        run(f"ALTER TABLE processes DROP COLUMN {column}")


def sandbox(project: str, name: str, **facts: Any) -> Sandbox:
    values: dict[str, Any] = {
        "id": f"box_{project}_{name}",
        "status": SessionStatus.PENDING,
        "status_updated_ms": 1,
        "created_ms": 1,
        "updated_ms": 1,
        "image": "host",
        "cwd": "/vercel/sandbox",
        "vcpus": 2,
        "memory_mb": 4096,
        "timeout_ms": 300_000,
        "region": "local",
    }
    return Sandbox(project=project, name=name, **{**values, **facts})


def session(box: Sandbox, session_id: str, **facts: Any) -> Session:
    values: dict[str, Any] = {
        "status": SessionStatus.PENDING,
        "host": "here",
        "requested_ms": 1,
        "created_ms": 1,
        "updated_ms": 1,
        "timeout_ms": box.timeout_ms,
        "image": box.image,
        "region": box.region,
        "cwd": box.cwd,
        "vcpus": box.vcpus,
        "memory_mb": box.memory_mb,
        "driver": "native",
    }
    return Session(
        id=session_id,
        project=box.project,
        sandbox=box.id,
        sandbox_name=box.name,
        **{**values, **facts},
    )


def process(owner: Session, process_id: str, **facts: Any) -> Process:
    values: dict[str, Any] = {"name": "sh", "args": ("-c", "true"), "cwd": "/", "started_ms": 1}
    return Process(id=process_id, session=owner.id, project=owner.project, **{**values, **facts})


def snapshot(box: Sandbox, snapshot_id: str, **facts: Any) -> Snapshot:
    values: dict[str, Any] = {
        "source_session": "sbx_gone",
        "layer": f"layer-{snapshot_id}",
        "image": box.image,
        "region": box.region,
        "created_ms": 1,
        "updated_ms": 1,
        "method": SnapshotMethod.AUTOMATIC,
    }
    return Snapshot(id=snapshot_id, project=box.project, sandbox=box.id, **{**values, **facts})


def drive(project: str, name: str, **facts: Any) -> Drive:
    values: dict[str, Any] = {
        "id": f"drv_{project}_{name}",
        "region": "local",
        "max_size_bytes": 1 << 40,
        "created_ms": 1,
        "updated_ms": 1,
    }
    return Drive(project=project, name=name, **{**values, **facts})


def start(store: Store, project: str, name: str, session_id: str, **facts: Any) -> tuple[Sandbox, Session]:
    """A sandbox with a first session, as creating one records it."""
    box = sandbox(project, name)
    first = session(box, session_id, **facts)
    with store.transaction():
        store.sandboxes.add(box)
        store.sessions.start(first)
    return box, first


@contextmanager
def open_store() -> Iterator[Store]:
    """A store on a tmpfs, with the projects ``p`` and ``q`` of one team."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Store.open(f"{directory}/store.db", now_ms=1) as store,
    ):
        store.projects.ensure("p", team="team", name="p", now_ms=1)
        store.projects.ensure("q", team="team", name="q", now_ms=1)
        yield store
