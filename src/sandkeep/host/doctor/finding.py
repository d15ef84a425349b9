"""The values a probe returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingStatus = Literal["works", "degraded", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability of the machine."""

    name: str
    status: FindingStatus
    why: str
    fix: str = ""
    """What to do about it; empty when nothing needs doing."""
    required: bool = False
    """Whether no session can run while this is missing."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    mode: Literal["root", "rootless"]
    findings: tuple[Finding, ...]

    @property
    def can_run(self) -> bool:
        """Whether sessions can run on this machine with every isolation barrier."""
        return not any(found.required and found.status == "missing" for found in self.findings)

    def __getitem__(self, name: str) -> Finding:
        return next(found for found in self.findings if found.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "can_run": self.can_run,
            "findings": [asdict(found) for found in self.findings],
        }
