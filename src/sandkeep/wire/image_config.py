"""What an image's author configured, as responses show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, UnsetType, field

from sandkeep.wire.base import Object

_NANOSECONDS = 1_000_000
"""In a millisecond: images give durations in nanoseconds."""


class HealthcheckObject(Object, kw_only=True, frozen=True):
    """How the author tells whether the program works; reported, not run."""

    test: list[str] = field(default_factory=list)
    interval_ms: int = 0
    timeout_ms: int = 0
    start_period_ms: int = 0
    retries: int = 0


class ImageConfigObject(Object, kw_only=True, frozen=True):
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    """What runs when a caller names no command; arguments of ``entrypoint`` if that is given."""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | UnsetType = UNSET
    user: str | UnsetType = UNSET
    ports: list[str] = field(default_factory=list)
    """Such as ``8080/tcp``."""
    volumes: list[str] = field(default_factory=list)
    """Paths below which the author expects data; they are ordinary directories of a sandbox."""
    stop_signal: str | UnsetType = UNSET
    healthcheck: HealthcheckObject | UnsetType = UNSET
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> ImageConfigObject:
        """Return what an OCI image's configuration says, without what has another type than it should."""
        env = dict(item.split("=", 1) for item in _texts(raw.get("Env")) if "=" in item)
        return cls(
            entrypoint=_texts(raw.get("Entrypoint")),
            command=_texts(raw.get("Cmd")),
            env=env,
            cwd=_text(raw.get("WorkingDir")),
            user=_text(raw.get("User")),
            ports=sorted(map(str, _mapping(raw.get("ExposedPorts")))),
            volumes=sorted(map(str, _mapping(raw.get("Volumes")))),
            stop_signal=_text(raw.get("StopSignal")),
            healthcheck=_healthcheck(_mapping(raw.get("Healthcheck"))),
            labels={str(key): str(value) for key, value in _mapping(raw.get("Labels")).items()},
        )


def _healthcheck(raw: Mapping[str, Any]) -> HealthcheckObject | UnsetType:
    test = _texts(raw.get("Test"))
    if not test or test == ["NONE"]:
        return UNSET
    return HealthcheckObject(
        test=test,
        interval_ms=_number(raw.get("Interval")) // _NANOSECONDS,
        timeout_ms=_number(raw.get("Timeout")) // _NANOSECONDS,
        start_period_ms=_number(raw.get("StartPeriod")) // _NANOSECONDS,
        retries=_number(raw.get("Retries")),
    )


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _text(value: Any) -> str | UnsetType:
    return value if isinstance(value, str) and value else UNSET


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
