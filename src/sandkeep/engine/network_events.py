"""Write netd's reports to the store: events of sessions' networks, and bytes transferred."""

from __future__ import annotations

from typing import Any

from sandkeep.engine.names import new_id
from sandkeep.engine.services import Services
from sandkeep.store.rows import ACTIVE, Session


def record_report(services: Services, report: dict[str, Any]) -> None:
    """Write the events and byte counts of one report, except of sessions that the store no longer has."""
    store = services.store
    rows: dict[str, Session | None] = {}

    def find(session_id: str) -> Session | None:
        if session_id not in rows:
            rows[session_id] = store.sessions.find(session_id)
        return rows[session_id]

    if report["lost"]:
        services.log("network events were lost", count=report["lost"])
    for session_id in report.get("used", ()):  # a netd of an earlier version does not report it
        services.activity.touch(session_id)
    with store.transaction():
        for event in report["events"]:
            session = find(event["session"])
            if session is None:
                continue
            store.events.add(
                new_id("evt", now_ms=event["time_ms"]),
                event["kind"],
                time_ms=event["time_ms"],
                project=session.project,
                sandbox=session.sandbox,
                sandbox_name=session.sandbox_name,
                session=session.id,
                data=event["data"],
            )
        for session_id, (received, sent) in report["usage"].items():
            session = find(session_id)
            if session is not None and session.status in ACTIVE:
                store.sessions.update(
                    session.project,
                    session.id,
                    now_ms=services.now_ms(),
                    ingress_bytes=session.ingress_bytes + received,
                    egress_bytes=session.egress_bytes + sent,
                )
