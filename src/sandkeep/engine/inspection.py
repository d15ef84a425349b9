"""Check a data directory for damage, with or without a server, and change nothing."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass

from sandkeep.engine.damage import broken
from sandkeep.host.layers.repair import examine
from sandkeep.host.layers.sessions import session_names
from sandkeep.store import identity

_CURRENT = (
    "SELECT b.name, s.layer FROM sandboxes AS b JOIN snapshots AS s ON s.id = b.current_snapshot ORDER BY 1"
)


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    """The store, a sandbox, or a layer that no sandbox needs now."""
    why: str
    fix: str


def inspect(data_dir: str) -> list[Problem]:
    """Return everything that is wrong with a data directory; nothing if it does not exist."""
    path = os.path.join(data_dir, identity.STORE)
    found = identity.count_contents(data_dir)
    if not os.path.exists(path):
        return [_store(f"{path} is missing, and there are {found}")] if any(found) else []
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return _read(connection, data_dir, found)
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
            return []  # a server has it locked on this disk, and has checked it
        return [_store(f"{path}: {error}")]


def _read(connection: sqlite3.Connection, data_dir: str, found: identity.Contents) -> list[Problem]:
    [(state,), *_] = connection.execute("PRAGMA quick_check(1)").fetchall()
    if state != "ok":
        return [_store(str(state))]
    beside = identity.read(data_dir)
    if beside is not None and any(found):
        own = connection.execute("SELECT id, generation FROM identity").fetchone() or ("none", 0)
        if own[0] != beside.id or own[1] < beside.generation:
            return [
                _store(f"it is {own[0]} at {own[1]}; the layers were last with {beside.id} at {beside[1]}")
            ]
    current: dict[str, str] = dict(connection.execute(_CURRENT).fetchall())
    return _layers(data_dir, current)


def _layers(data_dir: str, current: dict[str, str]) -> list[Problem]:
    root = os.path.join(data_dir, "layers")
    if not os.path.isdir(root):
        return []
    examined = examine(root, session_names(root))
    faults = broken(examined, set(current.values()))
    problems = [
        Problem(f"sandbox {name}", faults[layer].why, f"sandkeep repair {name}")
        for name, layer in current.items()
        if layer in faults
    ]
    reported = {faults[layer].layer for layer in current.values() if layer in faults}
    problems += [
        Problem(f"layer {layer}", why, "sandkeep repair")
        for layer, why in examined.damaged.items()
        if layer not in reported
    ]
    return problems


def _store(why: str) -> Problem:
    return Problem("store", why, "restore it, or 'sandkeep serve --adopt'")
