"""What happened in a project, as the SDK gives it: the same in both colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

if TYPE_CHECKING:
    from sandkeep.wire.additions import EventObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a sandbox, or in a project, and who had it done."""

    id: str
    time: datetime
    kind: str
    """Such as ``sandbox.created``, ``process.started``, ``network.connection``."""
    actor: str | None = None
    """``token:`` and its id, or ``user:`` and a number of the server's machine; ``None`` for what came by
    itself, such as the end of a session whose time was up, or from inside the sandbox."""
    sandbox_name: str | None = None
    """What the sandbox was called, which may be gone by now."""
    session_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """What there is to know about it, depending on its kind."""

    @classmethod
    def of(cls, shown: EventObject) -> Event:
        return cls(
            id=shown.id,
            time=datetime.fromtimestamp(shown.time / 1000, UTC),
            kind=shown.kind,
            actor=None if shown.actor is UNSET else shown.actor,
            sandbox_name=None if shown.sandbox_name is UNSET else shown.sandbox_name,
            session_id=None if shown.session_id is UNSET else shown.session_id,
            data=MappingProxyType(shown.data),
        )
