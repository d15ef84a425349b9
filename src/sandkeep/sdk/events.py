"""Events of a project, as the SDK returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from sandkeep.dataclass import dataclass
from sandkeep.frozen import Frozen

if TYPE_CHECKING:
    from sandkeep.wire.v1 import EventObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a sandbox or in a project, and who caused it."""

    id: str
    time: datetime
    kind: str
    """Such as ``sandbox.created``, ``process.started``, ``network.connection``."""
    actor: str | None = None
    """``token:`` and its id, or ``user:`` and a user id on the server's machine; ``None`` if the server
    itself or the sandbox caused it, such as the end of a session that reached its time limit."""
    sandbox_name: str | None = None
    """Name of the sandbox at that time; the sandbox may be deleted by now."""
    session_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """Details, depending on the kind."""

    @classmethod
    def of(cls, shown: EventObject) -> Event:
        """Return the value for an object of a response."""
        return cls(
            id=shown.id,
            time=datetime.fromtimestamp(shown.time / 1000, UTC),
            kind=shown.kind,
            actor=None if shown.actor is UNSET else shown.actor,
            sandbox_name=None if shown.sandbox_name is UNSET else shown.sandbox_name,
            session_id=None if shown.session_id is UNSET else shown.session_id,
            data=Frozen(shown.data),
        )
