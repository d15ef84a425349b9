"""Results of a repair, as the SDK returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandkeep.dataclass import dataclass
from sandkeep.sdk.values import given

if TYPE_CHECKING:
    from sandkeep.wire.repairs import RepairShown


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A sandbox whose files are damaged."""

    sandbox: str
    snapshot_id: str
    """The snapshot it would start from."""
    layer: str
    why: str
    older_snapshot_id: str | None
    """Its newest intact snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair did, and what it could not do."""

    done: tuple[str, ...]
    """One sentence per action."""
    left: tuple[Damage, ...]

    @classmethod
    def of(cls, shown: RepairShown) -> Repaired:
        """Return the value for an object of a response."""
        return cls(
            done=tuple(shown.done),
            left=tuple(
                Damage(
                    sandbox=item.sandbox,
                    snapshot_id=item.snapshot,
                    layer=item.layer,
                    why=item.why,
                    older_snapshot_id=given(item.older),
                )
                for item in shown.left
            ),
        )
