"""What an image's author configured, as the SDK returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import timedelta
from typing import TYPE_CHECKING

from sandkeep.dataclass import dataclass

if TYPE_CHECKING:
    from sandkeep.wire.image_config import HealthcheckObject, ImageConfigObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """How an image's author tells whether its program works. Sandkeep reports it and does not run it."""

    test: tuple[str, ...]
    """``CMD`` and arguments, or ``CMD-SHELL`` and a line for the shell."""
    interval: timedelta
    timeout: timedelta
    start_period: timedelta
    retries: int

    @classmethod
    def of(cls, shown: HealthcheckObject) -> Healthcheck:
        """Return the value for an object of a response."""
        return cls(
            test=tuple(shown.test),
            interval=timedelta(milliseconds=shown.interval_ms),
            timeout=timedelta(milliseconds=shown.timeout_ms),
            start_period=timedelta(milliseconds=shown.start_period_ms),
            retries=shown.retries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorConfig:
    """What an image's author configured."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """What runs when the caller names no command; arguments of ``entrypoint`` if that is given."""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    ports: tuple[str, ...] = ()
    """Ports that the program listens on, such as ``8080/tcp``."""
    volumes: tuple[str, ...] = ()
    """Paths below which the author expects data; they are ordinary directories of a sandbox."""
    stop_signal: str | None = None
    healthcheck: Healthcheck | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> tuple[str, ...]:
        """The program that the author meant to run, with its arguments; empty if there is none."""
        return (*self.entrypoint, *self.command)

    @classmethod
    def of(cls, shown: ImageConfigObject) -> AuthorConfig:
        """Return the value for an object of a response."""
        return cls(
            entrypoint=tuple(shown.entrypoint),
            command=tuple(shown.command),
            env=shown.env,
            cwd=shown.cwd or None,
            user=shown.user or None,
            ports=tuple(shown.ports),
            volumes=tuple(shown.volumes),
            stop_signal=shown.stop_signal or None,
            healthcheck=Healthcheck.of(shown.healthcheck) if shown.healthcheck else None,
            labels=shown.labels,
        )
