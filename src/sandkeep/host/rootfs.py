"""The parts of a root filesystem: slots of lower directories, and a few read-only binds.

Frozen values with a JSON form, because they cross two process boundaries on the way from the image store to
the supervisor that mounts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

HOME: Final = "/home/sandbox"
WORK: Final = "/workspace"
"""The default user's home and working directory, for sandkeep's own clients."""
VENDOR_HOME: Final = "/vercel"
VENDOR_WORK: Final = "/vercel/sandbox"
"""The same for official clients of the vendor, which expect these paths."""

Flavour = Literal["trusted", "user"]
"""Which extended attributes an overlay reads: ``trusted.overlay.*`` or, rootless, ``user.overlay.*``."""


@dataclass(frozen=True, slots=True)
class Lower:
    """One read-only directory of an overlay."""

    path: str
    store: bool = True
    """Whether it is below the data directory. If not, a host directory, used through a read-only clone."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One overlay of the root filesystem; its upper is the session's ``fs/<name>``."""

    name: str
    target: str
    lowers: tuple[Lower, ...]
    """Topmost first. Empty for a drive that was never written to."""
    drive: bool = False
    """A drive: its mount point is made when missing, and a new upper belongs to the default user."""
    read_only: bool = False
    room_bytes: int | None = None
    """How much a session may write to it; ``None`` means as much as fits on the disk."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory shown inside at ``target``, read-only."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """What an image configures for processes run in it."""

    user: str = "sandbox"
    cwd: str = WORK
    env: Mapping[str, str] = field(default_factory=dict)
    own_cwd: bool = False
    """Whether ``cwd`` was chosen by the image's author."""
    home: str | None = None
    """The home that the author chose for the default user, if it is not the account's."""


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A complete root filesystem, without the session's private upper."""

    image: str
    flavour: Flavour
    slots: tuple[Slot, ...]
    binds: tuple[Bind, ...] = ()
    defaults: ImageDefaults = field(default_factory=ImageDefaults)
    host_key: str | None = None
    """Key of the host state that the lowers depend on; ``None`` when they do not depend on it."""

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
                    "room_bytes": s.room_bytes,
                }
                for s in self.slots
            ],
            "binds": [[b.source, b.target] for b in self.binds],
            "defaults": {
                "user": self.defaults.user,
                "cwd": self.defaults.cwd,
                "env": dict(self.defaults.env),
                "own_cwd": self.defaults.own_cwd,
                "home": self.defaults.home,
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
                    s.get("room_bytes"),
                )
                for s in body["slots"]
            ),
            binds=tuple(Bind(*bind[:2]) for bind in body["binds"]),
            defaults=ImageDefaults(**body["defaults"]),
            host_key=body["host_key"],
        )


class Composed(NamedTuple):
    """An image with a chain of layers on top, ready to be mounted."""

    rootfs: Rootfs
    warnings: tuple[str, ...]
    """Warnings for the sandbox's user."""
