"""What a root filesystem is made of: slots of lower directories, and a few read-only binds.

Plain frozen values that survive JSON, because they cross two process boundaries on the way from the image
store to the supervisor that mounts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Flavour = Literal["trusted", "user"]
"""Which extended attributes an overlay reads: ``trusted.overlay.*`` or, rootless, ``user.overlay.*``."""


@dataclass(frozen=True, slots=True)
class Lower:
    """One read-only directory of an overlay."""

    path: str
    store: bool = True
    """Below the data directory. Otherwise a directory of the host, used through a read-only clone."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One overlay of the root filesystem; its upper is the session's ``fs/<name>``."""

    name: str
    target: str
    lowers: tuple[Lower, ...]
    """Topmost first. None for a drive nobody has written to."""
    drive: bool = False
    """Its place inside is made when missing, and a new upper belongs to the default user."""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory shown inside at ``target``."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """What an image says about running things in it."""

    user: str = "sandbox"
    cwd: str = "/vercel/sandbox"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A complete root filesystem, without the session's private upper."""

    image: str
    flavour: Flavour
    slots: tuple[Slot, ...]
    binds: tuple[Bind, ...] = ()
    defaults: ImageDefaults = field(default_factory=ImageDefaults)
    host_key: str | None = None
    """State of the host the lowers depend on; ``None`` when they depend on none of it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "image": self.image,
            "flavour": self.flavour,
            "slots": [
                {
                    "name": s.name,
                    "target": s.target,
                    "lowers": [[low.path, low.store] for low in s.lowers],
                    "drive": s.drive,
                    "read_only": s.read_only,
                }
                for s in self.slots
            ],
            "binds": [[b.source, b.target, b.read_only] for b in self.binds],
            "defaults": {
                "user": self.defaults.user,
                "cwd": self.defaults.cwd,
                "env": dict(self.defaults.env),
            },
            "host_key": self.host_key,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Rootfs:
        return cls(
            image=body["image"],
            flavour=body["flavour"],
            slots=tuple(
                Slot(
                    s["name"],
                    s["target"],
                    tuple(Lower(path, store) for path, store in s["lowers"]),
                    s.get("drive", False),
                    s.get("read_only", False),
                )
                for s in body["slots"]
            ),
            binds=tuple(Bind(*bind) for bind in body["binds"]),
            defaults=ImageDefaults(**body["defaults"]),
            host_key=body["host_key"],
        )
