"""The schema, as ordered steps from an empty database to the current version.

A step, once released, never changes: a new one is appended. `migrate` applies the missing steps in one
transaction, so a database is always at some version and never between two; a crash in the middle leaves the
old version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from sandkeep.errors import SchemaTooNew
from sandkeep.store import addresses
from sandkeep.store.database import Database
from sandkeep.store.sqlite import SqliteDatabase

Step = Callable[[Database], None]


def first_schema(db: Database) -> None:
    for statement in _FIRST.split(";"):
        if statement.strip():
            db.run(statement)


def secrets(db: Database) -> None:
    db.run(
        "CREATE TABLE secrets (project TEXT NOT NULL REFERENCES projects (id), name TEXT NOT NULL,"
        " sealed BLOB NOT NULL, created_ms BIGINT NOT NULL, updated_ms BIGINT NOT NULL,"
        " PRIMARY KEY (project, name))"
    )


def actors(db: Database) -> None:
    db.run("ALTER TABLE events ADD COLUMN actor TEXT")
    db.run("ALTER TABLE events ADD COLUMN sandbox_name TEXT")


def identity(db: Database) -> None:
    db.run("CREATE TABLE identity (id TEXT NOT NULL, generation BIGINT NOT NULL)")


def intentions(db: Database) -> None:
    """Add columns for intended operations, so that the server that starts after a crash finishes them."""
    db.run("ALTER TABLE sandboxes ADD COLUMN destroying TEXT")
    db.run("CREATE INDEX condemned_sandboxes ON sandboxes (project) WHERE destroying IS NOT NULL")
    db.run("ALTER TABLE sessions ADD COLUMN ending TEXT")
    db.run("ALTER TABLE snapshots ADD COLUMN unwanted INTEGER NOT NULL DEFAULT 0")
    db.run("CREATE INDEX unwanted_snapshots ON snapshots (project) WHERE unwanted = 1 AND status = 'created'")


def persistence_of_sessions(db: Database) -> None:
    """Give each session its own ``persistent`` from its start; later changes of its sandbox do not count."""
    db.run("ALTER TABLE sessions ADD COLUMN persistent INTEGER NOT NULL DEFAULT 0")
    db.run(
        "UPDATE sessions SET persistent = 1"
        " WHERE sandbox IN (SELECT id FROM sandboxes WHERE sandboxes.persistent = 1)"
    )


def sources_of_sandboxes(db: Database) -> None:
    db.run("ALTER TABLE sandboxes ADD COLUMN source TEXT")


def chosen_snapshots(db: Database) -> None:
    db.run("ALTER TABLE sessions ADD COLUMN rolled_back INTEGER NOT NULL DEFAULT 0")


def origins(db: Database) -> None:
    """Copy columns of the session to its snapshots: a restore needs them after the session's row is gone."""
    for column in ("runtime", "cwd"):
        db.run(f"ALTER TABLE snapshots ADD COLUMN {column} TEXT")
        db.run(
            f"UPDATE snapshots SET {column} ="
            f" (SELECT {column} FROM sessions WHERE sessions.id = snapshots.source_session)"
        )


def addresses_of_ports(db: Database) -> None:
    db.run(
        "CREATE TABLE addresses (number BIGINT PRIMARY KEY,"
        " sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE, port BIGINT NOT NULL,"
        " UNIQUE (sandbox, port))"
    )
    found = db.all("SELECT id, ports FROM sandboxes WHERE ports != '[]' ORDER BY created_ms, id")
    for sandbox, ports in found:
        addresses.assign(db, str(sandbox), json.loads(str(ports)))


def sealed_policies(db: Database) -> None:
    """Mark that header values of policies are sealed: a version that would send them unopened must not start.

    The engine seals existing values, because it has the key.
    """


def exact_resources(db: Database) -> None:
    """Add whether the caller asked for the limits of a sandbox. Earlier sandboxes stay best effort."""
    db.run("ALTER TABLE sandboxes ADD COLUMN exact_resources INTEGER NOT NULL DEFAULT 0")


def lifetimes_of_sandboxes(db: Database) -> None:
    """Add when the server destroys a sandbox by itself: when its session ends, or at a time."""
    db.run("ALTER TABLE sandboxes ADD COLUMN destroy_on_stop INTEGER NOT NULL DEFAULT 0")
    db.run("ALTER TABLE sandboxes ADD COLUMN delete_after_ms BIGINT")
    db.run("ALTER TABLE sandboxes ADD COLUMN delete_at_ms BIGINT")
    db.run("CREATE INDEX sandboxes_by_lifetime ON sandboxes (delete_at_ms) WHERE delete_at_ms IS NOT NULL")


def independent_limits(db: Database) -> None:
    """Add the limits that a caller named, each by itself. Earlier rows have processors and memory only."""
    for table in ("sandboxes", "sessions"):
        db.run(f"ALTER TABLE {table} ADD COLUMN asked_limits TEXT")


def input_and_metadata_of_processes(db: Database) -> None:
    """Add whether clients write the input of a process, and what they noted about it."""
    db.run("ALTER TABLE processes ADD COLUMN stdin INTEGER NOT NULL DEFAULT 0")
    db.run("ALTER TABLE processes ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}'")


def comments_and_batches(db: Database) -> None:
    """Add what callers say of a snapshot, and which sandboxes are being made together."""
    db.run("ALTER TABLE snapshots ADD COLUMN comment TEXT")
    db.run("ALTER TABLE sandboxes ADD COLUMN batch TEXT")
    db.run("CREATE INDEX sandboxes_by_batch ON sandboxes (batch) WHERE batch IS NOT NULL")
    # Whether a snapshot is in use is asked for each that goes with its sandbox.
    db.run("CREATE INDEX sessions_by_source ON sessions (source_snapshot) WHERE source_snapshot IS NOT NULL")


def ports_of_the_host(db: Database) -> None:
    """Add which ports of the server's machine a sandbox may reach: none, unless it is given some."""
    db.run("ALTER TABLE sandboxes ADD COLUMN host_ports TEXT NOT NULL DEFAULT '[]'")


STEPS: tuple[Step, ...] = (
    first_schema,
    secrets,
    actors,
    identity,
    intentions,
    persistence_of_sessions,
    sources_of_sandboxes,
    chosen_snapshots,
    origins,
    addresses_of_ports,
    sealed_policies,
    exact_resources,
    lifetimes_of_sandboxes,
    independent_limits,
    input_and_metadata_of_processes,
    comments_and_batches,
    ports_of_the_host,
)


def migrate(db: SqliteDatabase, *, now_ms: int, steps: Sequence[Step] = STEPS) -> int:
    """Bring the schema up to date and return its version.

    Raises `SchemaTooNew` if a newer sandkeep changed the schema: its rows could have a meaning unknown here.
    """
    [(version,)] = db.all("PRAGMA user_version")
    if version == len(steps):
        return len(steps)
    # Another process may be migrating, too; the one that gets the lock second finds no step missing.
    with db.transaction():
        [(version,)] = db.all("PRAGMA user_version")
        if version > len(steps):
            raise SchemaTooNew(
                f"{db.path} has schema {version}, and this sandkeep knows up to {len(steps)}",
                path=db.path,
                found=version,
                known=len(steps),
                hint="upgrade sandkeep, or use another data directory",
            )
        db.run(
            "CREATE TABLE IF NOT EXISTS schema_steps"
            " (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_ms BIGINT NOT NULL)"
        )
        for number, step in enumerate(steps[version:], start=version + 1):
            step(db)
            db.run("INSERT INTO schema_steps VALUES ($1, $2, $3)", number, step.__name__, now_ms)
        db.all(f"PRAGMA user_version = {len(steps)}")
    return len(steps)


# Snapshots name sessions, parents and layers by plain text: those rows may be deleted before the snapshot is.
_FIRST = """
CREATE TABLE projects (
    id TEXT PRIMARY KEY,
    team TEXT NOT NULL,
    name TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    UNIQUE (team, name)
);

CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    project TEXT NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    expires_ms BIGINT,
    revoked_ms BIGINT,
    last_used_ms BIGINT
);
CREATE INDEX tokens_by_project ON tokens (project, created_ms, id);

CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    project TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    status TEXT NOT NULL,
    status_updated_ms BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    current_session TEXT,
    current_snapshot TEXT,
    image TEXT NOT NULL,
    runtime TEXT,
    cwd TEXT NOT NULL,
    vcpus BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    timeout_ms BIGINT NOT NULL,
    idle_timeout_ms BIGINT,
    persistent INTEGER NOT NULL,
    env TEXT NOT NULL,
    tags TEXT NOT NULL,
    ports TEXT NOT NULL,
    network_policy TEXT,
    network_id TEXT,
    mounts TEXT NOT NULL,
    snapshot_expiration_ms BIGINT,
    keep_last_snapshots TEXT,
    region TEXT NOT NULL,
    failover_regions TEXT NOT NULL,
    total_active_cpu_ms BIGINT NOT NULL,
    total_duration_ms BIGINT NOT NULL,
    total_ingress_bytes BIGINT NOT NULL,
    total_egress_bytes BIGINT NOT NULL,
    UNIQUE (project, name)
);
CREATE INDEX sandboxes_by_created ON sandboxes (project, created_ms, id);
CREATE INDEX sandboxes_by_status_updated ON sandboxes (project, status_updated_ms, id);
CREATE INDEX sandboxes_by_snapshot ON sandboxes (current_snapshot) WHERE current_snapshot IS NOT NULL;

CREATE TABLE sandbox_tags (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (sandbox, name)
);

CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    project TEXT NOT NULL REFERENCES projects (id),
    sandbox TEXT REFERENCES sandboxes (id) ON DELETE SET NULL,
    sandbox_name TEXT NOT NULL,
    status TEXT NOT NULL,
    host TEXT NOT NULL,
    generation BIGINT NOT NULL,
    requested_ms BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    started_ms BIGINT,
    requested_stop_ms BIGINT,
    stopped_ms BIGINT,
    aborted_ms BIGINT,
    snapshotted_ms BIGINT,
    timeout_ms BIGINT NOT NULL,
    idle_timeout_ms BIGINT,
    deadline_ms BIGINT,
    source_snapshot TEXT,
    layer_base TEXT,
    image TEXT NOT NULL,
    runtime TEXT,
    region TEXT NOT NULL,
    cwd TEXT NOT NULL,
    vcpus BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    ports TEXT NOT NULL,
    network_policy TEXT,
    network_id TEXT,
    mounts TEXT NOT NULL,
    interactive_port BIGINT,
    driver TEXT NOT NULL,
    barriers TEXT NOT NULL,
    stop_reason TEXT,
    active_cpu_ms BIGINT NOT NULL,
    duration_ms BIGINT NOT NULL,
    ingress_bytes BIGINT NOT NULL,
    egress_bytes BIGINT NOT NULL
);
CREATE UNIQUE INDEX one_active_session ON sessions (sandbox)
    WHERE status IN ('pending', 'running', 'snapshotting', 'stopping');
CREATE INDEX active_sessions ON sessions (host, deadline_ms)
    WHERE status IN ('pending', 'running', 'snapshotting', 'stopping');
CREATE INDEX sessions_by_created ON sessions (project, created_ms, id);
CREATE INDEX sessions_by_sandbox ON sessions (sandbox, created_ms, id);

CREATE TABLE processes (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    project TEXT NOT NULL REFERENCES projects (id),
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    args TEXT NOT NULL,
    cwd TEXT NOT NULL,
    username TEXT,
    status TEXT NOT NULL,
    exit_code BIGINT,
    started_ms BIGINT NOT NULL,
    finished_ms BIGINT,
    duration_ms BIGINT,
    reason TEXT
);
CREATE INDEX processes_by_session ON processes (session, started_ms, id);
CREATE INDEX running_processes ON processes (session) WHERE status = 'running';

CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    project TEXT NOT NULL REFERENCES projects (id),
    sandbox TEXT REFERENCES sandboxes (id) ON DELETE SET NULL,
    source_session TEXT NOT NULL,
    parent TEXT,
    layer TEXT NOT NULL,
    image TEXT NOT NULL,
    host_key TEXT,
    region TEXT NOT NULL,
    status TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    expires_ms BIGINT,
    expiry_asked INTEGER NOT NULL,
    last_used_ms BIGINT,
    synced_ms BIGINT,
    method TEXT NOT NULL
);
CREATE INDEX snapshots_by_created ON snapshots (project, created_ms, id);
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox, created_ms, id);
CREATE INDEX snapshots_by_parent ON snapshots (parent) WHERE parent IS NOT NULL;
CREATE INDEX snapshots_by_expiry ON snapshots (expires_ms)
    WHERE status = 'created' AND expires_ms IS NOT NULL;
CREATE INDEX unsynced_snapshots ON snapshots (created_ms) WHERE status = 'created' AND synced_ms IS NULL;

CREATE TABLE drives (
    id TEXT PRIMARY KEY,
    project TEXT NOT NULL REFERENCES projects (id),
    name TEXT NOT NULL,
    region TEXT NOT NULL,
    max_size_bytes BIGINT NOT NULL,
    layer TEXT,
    parent TEXT,
    root TEXT,
    current_session TEXT REFERENCES sessions (id),
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    UNIQUE (project, name)
);
CREATE INDEX drives_by_created ON drives (project, created_ms, id);
CREATE INDEX drives_by_updated ON drives (project, updated_ms, id);
CREATE INDEX drives_by_session ON drives (current_session) WHERE current_session IS NOT NULL;

CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    time_ms BIGINT NOT NULL,
    project TEXT NOT NULL,
    sandbox TEXT,
    session TEXT,
    kind TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_by_project ON events (project, sequence);
CREATE INDEX events_by_sandbox ON events (sandbox, sequence);
CREATE INDEX events_by_session ON events (session, sequence);
CREATE INDEX events_by_time ON events (time_ms)
"""
