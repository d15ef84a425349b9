"""Images as the SDK gives them: frozen values, the same in both colours."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandkeep.wire.images import ImageObject, PullProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A read-only root filesystem that sandboxes start from. It belongs to the machine, not to a project."""

    id: str
    kind: str
    """``host``, ``oci``, ``docker-archive``, ``tar`` or ``directory``."""
    names: tuple[str, ...]
    """What ``image`` of a sandbox can say."""
    size_bytes: int
    created_at: datetime
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, shown: ImageObject) -> Image:
        return cls(
            id=shown.id,
            kind=shown.kind,
            names=tuple(shown.names),
            size_bytes=shown.size_bytes,
            created_at=datetime.fromtimestamp(shown.created_at / 1000, UTC),
            warnings=tuple(shown.warnings),
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """How far a pull has come with one of the parts of an image."""

    part: str
    done: int
    total: int

    @classmethod
    def of(cls, shown: PullProgress) -> Pulled:
        return cls(shown.what, shown.done, shown.total)
