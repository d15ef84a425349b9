"""Secrets and what happened on a sandbox's network, as the SDK gives them: the same in both colours."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec import UNSET

if TYPE_CHECKING:
    from sandkeep.wire.additions import EventObject
    from sandkeep.wire.secrets import SecretObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What may be known about a secret. Its value never leaves the server."""

    name: str
    """What rules call it: ``${secret:name}``."""
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, shown: SecretObject) -> Secret:
        return cls(
            name=shown.name,
            created_at=datetime.fromtimestamp(shown.created_at / 1000, UTC),
            updated_at=datetime.fromtimestamp(shown.updated_at / 1000, UTC),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent:
    """Something that happened on a sandbox's network. What does not apply to its kind is ``None``."""

    id: str
    time: datetime
    kind: str
    """``dns``, ``connection``, ``closed``, ``cut``, ``request``, ``ingress``, ``limit``, ``suppressed``."""
    session_id: str | None = None
    verdict: str | None = None
    """``allow`` or ``deny``."""
    reason: str | None = None
    rule: str | None = None
    """The line of the policy that decided."""
    name: str | None = None
    """The host, where it is known by name."""
    address: str | None = None
    port: int | None = None
    query_type: str | None = None
    """What a DNS query asked for, such as ``AAAA``."""
    method: str | None = None
    path: str | None = None
    """Of a request, without its query string."""
    status: int | None = None
    received_bytes: int | None = None
    """By the sandbox, on a connection that was closed."""
    sent_bytes: int | None = None
    duration: timedelta | None = None
    limit: str | None = None
    """Which one was reached."""
    count: int | None = None
    """How many events were left out, there being too many."""

    @classmethod
    def of(cls, shown: EventObject) -> NetworkEvent:
        data = shown.data
        milliseconds = data.get("milliseconds")
        return cls(
            id=shown.id,
            time=datetime.fromtimestamp(shown.time / 1000, UTC),
            kind=shown.kind.removeprefix("network."),
            session_id=None if shown.session_id is UNSET else shown.session_id,
            verdict=data.get("verdict"),
            reason=data.get("reason"),
            rule=data.get("rule"),
            name=data.get("name"),
            address=data.get("address"),
            port=data.get("port"),
            query_type=data.get("type"),
            method=data.get("method"),
            path=data.get("path"),
            status=data.get("status"),
            received_bytes=data.get("received"),
            sent_bytes=data.get("sent"),
            duration=None if milliseconds is None else timedelta(milliseconds=milliseconds),
            limit=data.get("limit"),
            count=data.get("count"),
        )
