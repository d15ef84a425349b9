"""Images, as the SDK returns them."""

from __future__ import annotations

from dataclasses import field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from sandkeep.dataclass import dataclass
from sandkeep.sdk.image_config import AuthorConfig

if TYPE_CHECKING:
    from sandkeep.wire.images import ImageObject, PullProgress

PullPolicy = Literal["missing", "always", "never"]
"""When the image of a new sandbox is fetched from its registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A read-only root filesystem for sandboxes: of the project that pulled it, or shared by all projects."""

    id: str
    kind: str
    """``host``, ``oci``, ``docker-archive``, ``tar`` or ``directory``."""
    names: tuple[str, ...]
    """Names that the ``image`` option of a sandbox accepts."""
    size_bytes: int
    created_at: datetime
    warnings: tuple[str, ...]
    shared: bool
    """Every project of the machine can use it; only the machine's local user can delete it."""
    config: AuthorConfig = field(default_factory=AuthorConfig)
    """What its author configured: command, ports, labels and more."""

    @classmethod
    def of(cls, shown: ImageObject) -> Image:
        """Return the value for an object of a response."""
        return cls(
            id=shown.id,
            kind=shown.kind,
            names=tuple(shown.names),
            size_bytes=shown.size_bytes,
            created_at=datetime.fromtimestamp(shown.created_at / 1000, UTC),
            warnings=tuple(shown.warnings),
            shared=shown.shared,
            config=AuthorConfig.of(shown.config),
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """Progress of one part of an image pull."""

    part: str
    done: int
    total: int

    @classmethod
    def of(cls, shown: PullProgress) -> Pulled:
        """Return the value for an object of a response."""
        return cls(shown.what, shown.done, shown.total)
