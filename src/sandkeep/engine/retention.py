"""Which snapshots to keep, and for how long. Pure functions over facts.

A snapshot expires at a time of its own, set when it is made (`first_expiry`). Keep-last rules of its sandbox
then apply to the newest ones (`plan`). Neither ever deletes a pinned snapshot, and a snapshot that is not
synced, which loss of power could destroy, never displaces a synced one.

Deleting a snapshot deletes only its row: its layer stays for as long as any chain contains it (see the marks
of ``host.layers``), so parents do not affect the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sandkeep.store.rows import KeepLast


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The facts about a snapshot that retention uses."""

    id: str
    created_ms: int
    expires_ms: int | None
    expiry_asked: bool = False
    """The caller chose the expiry for this snapshot."""
    pinned: bool = False
    """Some sandbox's current snapshot, or the source of an active session."""
    synced: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes to make. A snapshot is in at most one of the two."""

    expire: Mapping[str, int | None]
    """New expiry times by id; ``None`` is never."""
    delete: frozenset[str]


def first_expiry(
    created_ms: int, *, asked_ms: int | None, sandbox_ms: int | None, server_ms: int
) -> int | None:
    """Return when a new snapshot expires: as asked, or by the sandbox's or server's default. 0 is never."""
    lifetime = next(value for value in (asked_ms, sandbox_ms, server_ms) if value is not None)
    return _expiry(created_ms, lifetime)


def plan(snapshots: Iterable[Candidate], *, keep_last: KeepLast | None, default_ms: int, now_ms: int) -> Plan:
    """Return what to do with the snapshots of one sandbox. Once done, another call returns nothing.

    ``default_ms`` is the lifetime that snapshots beyond the newest return to when they are not deleted.
    """
    expire: dict[str, int | None] = {}
    delete: set[str] = set()
    places = keep_last.count if keep_last is not None else 0
    for snapshot in sorted(snapshots, key=lambda s: (s.created_ms, s.id), reverse=True):
        expires = snapshot.expires_ms
        kept = places > 0
        if keep_last is not None and not snapshot.expiry_asked:
            if not kept:
                expires = _expiry(snapshot.created_ms, default_ms)
            elif keep_last.expiration_ms is not None:
                expires = _expiry(snapshot.created_ms, keep_last.expiration_ms)
        evicted = keep_last is not None and not kept and keep_last.delete_evicted
        past = expires is not None and expires <= now_ms
        if (evicted or past) and not snapshot.pinned:
            delete.add(snapshot.id)
            continue
        # An expired snapshot does not displace a good one, nor an unsynced one a synced one.
        if kept and snapshot.synced and not past:
            places -= 1
        if expires != snapshot.expires_ms:
            expire[snapshot.id] = expires
    return Plan(expire, frozenset(delete))


def _expiry(created_ms: int, lifetime_ms: int) -> int | None:
    return created_ms + lifetime_ms if lifetime_ms else None
