"""Events: what happened, in the order it was recorded.

Pages follow the sequence number, not the clock, so a reader going forward misses nothing that is recorded
later. `Events.wait` returns as soon as an event is recorded through the same object; events that another
process records are found at the next query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sandkeep.store.database import Database
from sandkeep.store.pages import Page, PageRequest, Sort
from sandkeep.store.rows import Event
from sandkeep.store.tables import JSON, Conditions, RowTable

_TABLE = RowTable("events", Event)

RECORDED = Sort("recorded", "events.sequence", int)


class Events:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        """Waiters, by project or sandbox."""

    def add(
        self,
        event_id: str,
        kind: str,
        *,
        time_ms: int,
        project: str,
        sandbox: str | None = None,
        sandbox_name: str | None = None,
        session: str | None = None,
        data: Mapping[str, Any] | None = None,
        actor: str | None = None,
    ) -> Event:
        """Record an event; sandbox and session are ids."""
        body = data or {}
        found = self._db.one(
            "INSERT INTO events (id, time_ms, project, sandbox, session, kind, data, actor, sandbox_name)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) RETURNING sequence",
            event_id,
            time_ms,
            project,
            sandbox,
            session,
            kind,
            JSON.encode(body),
            actor,
            sandbox_name,
        )
        assert found is not None
        for key in (project, sandbox):
            for waiter in self._waiting.pop(key or "", ()):
                if not waiter.done():
                    waiter.set_result(None)
        return Event(
            sequence=found[0],
            id=event_id,
            time_ms=time_ms,
            project=project,
            sandbox=sandbox,
            session=session,
            kind=kind,
            data=body,
            actor=actor,
            sandbox_name=sandbox_name,
        )

    async def wait(self, project: str, sandbox: str | None, seconds: float) -> bool:
        """Wait for an event of a project, or about one sandbox of it; return whether one came in time."""
        key = sandbox or project
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(waiter)
        try:
            await asyncio.wait_for(waiter, seconds)
            return True
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[key]

    def mentioned_everywhere(self, kind: str, text: str) -> bool:
        """Return whether some project has an event of this kind whose data contains ``text``, an id say."""
        return (
            self._db.one("SELECT 1 FROM events WHERE kind = $1 AND instr(data, $2) > 0", kind, text)
            is not None
        )

    def page(
        self,
        project: str,
        request: PageRequest | None = None,
        *,
        sandbox: str | None = None,
        session: str | None = None,
        kind: str | None = None,
        kind_prefix: str | None = None,
    ) -> Page[Event]:
        where = Conditions().add("events.project = {}", project)
        if sandbox is not None:
            where.add("events.sandbox = {}", sandbox)
        if session is not None:
            where.add("events.session = {}", session)
        if kind is not None:
            where.add("events.kind = {}", kind)
        if kind_prefix is not None:
            where.add_prefix("events.kind", kind_prefix)
        return _TABLE.page(self._db, where, RECORDED, request or PageRequest())

    def forget_everywhere(self, *, before_ms: int) -> int:
        """Delete every project's events older than a time."""
        return self._db.run("DELETE FROM events WHERE time_ms < $1", before_ms)
