"""Check that a store belongs to its data directory.

The store has an id and a generation that grows as it changes; a file among the layers has a recent copy of
both. A store that is new, older, damaged or another one is refused beside layers or sessions: it does not
know them, and upkeep would sooner or later delete what the store does not know.

The file is written after the store is synced, so that a loss of power never leaves it ahead of the store.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Final, NamedTuple

from sandkeep.errors import SchemaTooNew, StoreError, StoreMismatch
from sandkeep.shared.sealed import read_sealed, write_sealed
from sandkeep.store.facade import Store
from sandkeep.store.identities import StoreIdentity, new_identity

STORE: Final = "store.db"
_FILE: Final = "layers/.identity"
_CHECKED_BYTES: Final = 16 << 20
"""Larger stores are not checked at every start: `sandkeep doctor` does that."""
_CORRUPT: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Contents(NamedTuple):
    """The layers and sessions in a data directory, which its store must know."""

    layers: int
    sessions: int

    def __str__(self) -> str:
        return f"{self.layers} layers and {self.sessions} sessions"


def count_contents(data_dir: str) -> Contents:
    """Count the layers and sessions of a data directory."""
    return Contents(_count(os.path.join(data_dir, "layers")), _count(os.path.join(data_dir, "sessions")))


def _count(directory: str) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(
                entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".del-", ".fold-"))
                for entry in entries
            )
    except FileNotFoundError:
        return 0


def read(data_dir: str) -> StoreIdentity | None:
    """Return the identity beside the layers; ``None`` if it is missing or unreadable."""
    try:
        body = read_sealed(os.path.join(data_dir, _FILE))
        return StoreIdentity(str(body["id"]), int(body["generation"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(data_dir: str, identity: StoreIdentity) -> None:
    """Write the identity beside the layers. The store must be synced before."""
    os.makedirs(os.path.join(data_dir, os.path.dirname(_FILE)), mode=0o700, exist_ok=True)
    write_sealed(os.path.join(data_dir, _FILE), identity._asdict(), mode=0o600, durable=True)


def open_store(data_dir: str, *, now_ms: int, adopt: bool = False, alone: bool = False) -> Store:
    """Open the store of a data directory; create it only if there are no layers or sessions.

    With ``adopt`` it is opened in any case; a damaged one is renamed and a new one created. ``alone``
    excludes other processes while it is open.

    Raises:
        StoreMismatch: it is missing, empty, older, damaged or another one, and there are layers or sessions.
    """
    path = os.path.join(data_dir, STORE)
    found = count_contents(data_dir)
    if any(found) and not adopt and not os.path.exists(path) and read(data_dir) is None:
        raise _half_removed(data_dir, path, found)
    if any(found) and not adopt and not _has_content(path):
        raise _refusal(path, found, "missing" if not os.path.exists(path) else "empty", "")
    try:
        store = _open(path, now_ms, alone)
    except StoreError as error:
        if not is_damage(error) or not (adopt or any(found)):
            raise
        if not adopt:
            raise _refusal(path, found, "damaged", f": {error.__cause__}") from error
        _move_away(path, now_ms)
        store = Store.open(path, now_ms=now_ms, alone=alone)
    try:
        if any(found) and not adopt:
            _compare(store, read(data_dir), path, found)
    except BaseException:
        store.close()
        raise
    return store


def _open(path: str, now_ms: int, alone: bool) -> Store:
    store = Store.open(path, now_ms=now_ms, alone=alone)
    try:
        if os.path.getsize(path) <= _CHECKED_BYTES:
            store.check()
    except BaseException:
        store.close()
        raise
    return store


def _has_content(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except FileNotFoundError:
        return False


def _compare(store: Store, beside: StoreIdentity | None, path: str, found: Contents) -> None:
    own = store.identity.get()
    if beside is None or own is None:
        if store.is_empty():
            raise _refusal(path, found, "empty", ": it knows no sandbox")
        if beside is not None:
            raise _refusal(path, found, "older", ": it is from before stores had an identity")
    elif own.id != beside.id:
        raise _refusal(path, found, "another", f": it is {own.id}, and they belong to {beside.id}")
    elif own.generation < beside.generation:
        ages = f": it is at {own.generation}, and they were with it at {beside.generation}"
        raise _refusal(path, found, "older", ages)


def is_damage(error: StoreError) -> bool:
    """Return whether the file itself is damaged, rather than newer, in use, or on a full disk."""
    code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
    return not isinstance(error, SchemaTooNew) and (code in _CORRUPT or error.details.get("damaged", False))


_WHAT: Final = {
    "missing": "is missing",
    "empty": "is empty",
    "older": "is older than what is beside it",
    "another": "belongs to other data",
    "damaged": "is damaged",
}


def _refusal(path: str, found: Contents, what: str, more: str) -> StoreMismatch:
    return StoreMismatch(
        f"the store {path} {_WHAT[what]}{more}; there are {found} that it does not know. Nothing was changed",
        path=path,
        found=what,
        layers=found.layers,
        sessions=found.sessions,
        hint="restore the store that belongs to them; or move layers and sessions away to begin anew; or take"
        " them as they are with 'sandkeep serve --adopt', or with 'sandkeep repair --adopt' if clients start"
        " the server: nothing is deleted, and what can be is recovered as sandboxes",
    )


def _half_removed(data_dir: str, path: str, found: Contents) -> StoreMismatch:
    """Return the error for a directory left by ``rm -rf``, which deletes the store and not all files."""
    return StoreMismatch(
        f"{data_dir} is half removed: its store is gone, and {found} are left, as 'rm -rf' leaves them, which"
        " may not delete files of subordinate ids. Nothing was changed",
        path=path,
        found="missing",
        layers=found.layers,
        sessions=found.sessions,
        hint="'sandkeep uninstall' removes the rest; to keep it, restore the store from a backup, or take"
        " what is left as sandboxes with 'sandkeep repair --adopt'",
    )


def _move_away(path: str, now_ms: int) -> None:
    """Keep a damaged store beside the new one: an operator may still recover data from it."""
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(path + suffix):
            os.rename(path + suffix, f"{path}.damaged-{now_ms}{suffix}")


def establish(store: Store, data_dir: str) -> None:
    """Record that the store and the data directory belong together."""
    own, beside = store.identity.get() or new_identity(), read(data_dir)
    newest = max(own.generation, beside.generation if beside is not None else 0) + 1
    identity = StoreIdentity(own.id, newest)
    store.identity.put(identity)
    if store.checkpoint():  # otherwise the next call writes it: never before the store itself has it
        write(data_dir, identity)
