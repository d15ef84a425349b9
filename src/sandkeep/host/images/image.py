"""One image as the store knows it: a frozen value, and its JSON form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sandkeep.host.rootfs import Bind, Flavour, ImageDefaults, Lower, Rootfs, Slot

Kind = Literal["host", "oci", "docker-archive", "tar", "directory"]


@dataclass(frozen=True, slots=True)
class Image:
    id: str
    """``host@<12 digits>``, or ``sha256:…`` of the configuration an image was made from."""
    kind: Kind
    flavour: Flavour
    slots: tuple[Slot, ...]
    defaults: ImageDefaults
    created_ms: int
    size: int
    """Bytes of file content the store holds for it; layers shared with other images count in each."""
    names: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    host_key: str | None = None
    warnings: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """Keys of the unpacked layers it refers to, lowest first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the image's author configured: entrypoint, command, exposed ports, labels …"""

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
            "warnings": list(self.warnings),
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
            binds=rootfs.binds,
            host_key=rootfs.host_key,
            warnings=tuple(body["warnings"]),
            layers=tuple(body["layers"]),
            config=body["config"],
        )


def relocated(image: Image, *, old: str, new: str) -> Image:
    """The same image with its store directories moved from below ``old`` to below ``new``."""

    def moved(low: Lower) -> Lower:
        inside = low.store and low.path.startswith(old + "/")
        return Lower(new + low.path[len(old) :]) if inside else low

    slots = tuple(replace(slot, lowers=tuple(moved(low) for low in slot.lowers)) for slot in image.slots)
    return replace(image, slots=slots)
