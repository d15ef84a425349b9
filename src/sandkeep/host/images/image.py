"""One image as the store knows it: a frozen value, and its JSON form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sandkeep.host.rootfs import Bind, Flavour, ImageDefaults, Lower, Rootfs, Slot

ImageKind = Literal["host", "oci", "docker-archive", "tar", "directory"]
ImportKind = Literal["directory", "tar", "oci-layout", "docker-archive"]
"""What an image can be imported from."""


@dataclass(frozen=True, slots=True)
class Image:
    id: str
    """``host@<12 digits>``, or ``sha256:…`` of the configuration an image was made from."""
    kind: ImageKind
    flavour: Flavour
    slots: tuple[Slot, ...]
    defaults: ImageDefaults
    created_ms: int
    size: int
    """Bytes of file content stored for it; layers shared with other images count in each."""
    names: tuple[str, ...] = ()
    """Its names for all projects; see ``seen_by``."""
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Projects that fetched it, each with its own names for it."""
    binds: tuple[Bind, ...] = ()
    host_key: str | None = None
    warnings: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    """Runtimes that the ``host`` image has, as ``node20``; unknown for other images."""
    layers: tuple[str, ...] = ()
    """Keys of its unpacked layers, lowest first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration by the image's author: entrypoint, command, exposed ports, labels …"""

    def seen_by(self, project: str | None) -> Image | None:
        """Return the image as one project sees it, its own names first; ``None`` if it may not use it.

        The operator shares an image by giving it a name that belongs to all projects.
        """
        if project is None:
            return self
        own = self.owners.get(project, ())
        if self.kind != "host" and not self.names and not own:
            return None
        names = (*own, *(name for name in self.names if name not in own))
        return replace(self, names=names, owners={project: own} if own else {})

    def rootfs(self) -> Rootfs:
        return Rootfs(
            image=self.id,
            flavour=self.flavour,
            slots=self.slots,
            binds=self.binds,
            defaults=self.defaults,
            host_key=self.host_key,
        )

    def to_json(self) -> dict[str, Any]:
        body = self.rootfs().to_json()
        del body["image"]
        return {
            "id": self.id,
            "kind": self.kind,
            "created_ms": self.created_ms,
            "size": self.size,
            "names": list(self.names),
            "owners": {project: list(names) for project, names in self.owners.items()},
            "warnings": list(self.warnings),
            "runtimes": list(self.runtimes),
            "layers": list(self.layers),
            "config": dict(self.config),
            **body,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Image:
        rootfs = Rootfs.from_json({**body, "image": body["id"]})
        return cls(
            id=body["id"],
            kind=body["kind"],
            flavour=rootfs.flavour,
            slots=rootfs.slots,
            defaults=rootfs.defaults,
            created_ms=body["created_ms"],
            size=body["size"],
            names=tuple(body["names"]),
            owners={project: tuple(names) for project, names in body.get("owners", {}).items()},
            binds=rootfs.binds,
            host_key=rootfs.host_key,
            warnings=tuple(body["warnings"]),
            runtimes=tuple(body.get("runtimes", ())),
            layers=tuple(body["layers"]),
            config=body["config"],
        )


def relocated(image: Image, *, old: str, new: str) -> Image:
    """Return the image with its store directories moved from below ``old`` to below ``new``."""

    def moved(low: Lower) -> Lower:
        inside = low.store and low.path.startswith(old + "/")
        return Lower(new + low.path[len(old) :]) if inside else low

    slots = tuple(replace(slot, lowers=tuple(moved(low) for low in slot.lowers)) for slot in image.slots)
    return replace(image, slots=slots)
