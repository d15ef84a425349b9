"""Secrets and network events of a sandbox, as the SDK returns them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from msgspec import UNSET

from sandkeep.dataclass import dataclass

if TYPE_CHECKING:
    from sandkeep.wire.secrets import SecretObject
    from sandkeep.wire.v1 import EventObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """The public part of a secret. Its value never leaves the server."""

    name: str
    """Rules refer to it as ``${secret:name}``."""
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, shown: SecretObject) -> Secret:
        """Return the value for an object of a response."""
        return cls(
            name=shown.name,
            created_at=datetime.fromtimestamp(shown.created_at / 1000, UTC),
            updated_at=datetime.fromtimestamp(shown.updated_at / 1000, UTC),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent:
    """Something that happened on a sandbox's network. Fields that do not apply to its kind are ``None``."""

    id: str
    time: datetime
    kind: str
    """``dns``, ``connection``, ``closed``, ``cut``, ``request``, ``ingress``, ``limit``, ``suppressed``."""
    session_id: str | None = None
    verdict: str | None = None
    """``allow`` or ``deny``."""
    reason: str | None = None
    rule: str | None = None
    """The entry of the policy that decided."""
    name: str | None = None
    """Name of the host, if known."""
    address: str | None = None
    port: int | None = None
    query_type: str | None = None
    """Record type of a DNS query, such as ``AAAA``."""
    method: str | None = None
    path: str | None = None
    """Path of a request, without its query string."""
    status: int | None = None
    received_bytes: int | None = None
    """Bytes that the sandbox received on a connection that has closed."""
    sent_bytes: int | None = None
    duration: timedelta | None = None
    limit: str | None = None
    """Name of the limit that was reached."""
    count: int | None = None
    """Number of events left out because there were too many."""

    @classmethod
    def of(cls, shown: EventObject) -> NetworkEvent:
        """Return the value for an object of a response."""
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
