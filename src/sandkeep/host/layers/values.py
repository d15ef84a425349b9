"""A layer as a value, and its ``meta.json``.

``meta.json`` is written under another name, fsynced and renamed into place, so it exists completely or not at
all, also after a loss of power. It carries a checksum, and a copy lies beside it, which is read when the file
itself is damaged or gone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast

from sandkeep.errors import InvalidRequest, LayerError
from sandkeep.host.rootfs import Flavour
from sandkeep.shared.sealed import read_sealed, write_sealed

META = "meta.json"
_COPY: Final = "meta.copy.json"
REPAIR_HINT: Final = "'sandkeep repair' says what can be saved, and saves it"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@")


@dataclass(frozen=True, slots=True)
class Retired:
    """A directory a fold has replaced. Sessions that mounted it keep using it and the layers below it."""

    directory: str
    parent: str | None
    retired_ms: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One immutable set of filesystem changes, on top of its parent or of an image."""

    id: str
    parent: str | None
    image: str
    flavour: Flavour
    host_key: str | None
    created_ms: int
    synced_ms: int | None
    """When it became safe against power loss; ``None`` while it is only safe against dying processes."""
    size_bytes: int | None
    depth: int
    """Layers in its chain, itself included."""
    slots: tuple[str, ...]
    directory: str = "fs"
    """Name of the directory holding the slots; a fold writes a new one."""
    retired: tuple[Retired, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of ``recover``."""

    finished: tuple[Layer, ...]
    """Layers made from publishes and checkpoints that a crash had interrupted."""
    lost: tuple[str, ...]
    """Sessions without a supervisor whose upper holds files: publish or discard them."""
    damaged: tuple[str, ...]
    """Layers that cannot be read, or whose parent is missing. They are left alone."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of ``sweep``."""

    deleted: tuple[str, ...]
    expired: tuple[str, ...]
    """Deleted layers that had been set aside."""
    set_aside: tuple[str, ...]
    """Layers found for the first time without a reference, though none was released."""
    unknown: tuple[str, ...]
    """Layers and sessions whose lower layers are unknown. While there are any, nothing is deleted."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of ``examine``."""

    parents: dict[str, str | None]
    """The parent of every layer whose record can be read."""
    damaged: dict[str, str]
    """Why a layer cannot be used; a layer below it may be missing in addition."""
    strays: tuple[str, ...]
    """Names in the directory of layers that are not names of layers."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Result of ``doubt``."""

    first: bool
    """Whether the reference was not in doubt before."""
    ended: bool
    """Whether the reference has ended."""


@dataclass(frozen=True, slots=True)
class DriveContent:
    """Where a drive's content is."""

    directories: tuple[str, ...]
    """Topmost first."""
    size_bytes: int | None
    """Its bytes on disk, if the caller asked for them."""


def check_name(name: str, field_name: str) -> str:
    """Refuse a name that, as a file name, could leave the directory or look like a file of the store."""
    if not is_name(name):
        raise InvalidRequest(f"{name!r} is not a usable {field_name}", field=field_name)
    return name


def is_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and len(name) <= 200 and set(name) <= _NAME_CHARACTERS


def damaged(layer: str, what: str) -> LayerError:
    return LayerError(f"layer {layer} {what}", layer=layer, hint=REPAIR_HINT)


def read_meta(directory: str, layer: str) -> Layer | None:
    """Return the layer at ``directory``, with depth 0; ``None`` when there is none."""
    failure = ""
    for name in (META, _COPY):
        try:
            return _look(os.path.join(directory, name), layer)
        except (FileNotFoundError, NotADirectoryError):
            failure = failure or "is missing"
        except (ValueError, KeyError, TypeError) as error:
            failure = f"is unreadable: {error}"
    if not os.path.isdir(directory):
        return None
    raise damaged(layer, f"is damaged: its {META} {failure}")


def meta_is_whole(directory: str, layer: str) -> bool:
    """Return whether ``meta.json`` itself can be read, and not only its copy."""
    try:
        _look(os.path.join(directory, META), layer)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _look(path: str, layer: str) -> Layer:
    info = os.stat(path)
    return _load(path, layer, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)


@lru_cache(maxsize=4096)
def _load(path: str, layer: str, inode: int, modified_ns: int, changed_ns: int) -> Layer:
    """Read a record, once per file: chains are walked often, and the file is always replaced as a whole.

    If the file is replaced between stat and read, the cache entry is keyed by a stat that never recurs.
    """
    del inode, modified_ns, changed_ns
    body = read_sealed(path)
    return Layer(
        id=layer,
        parent=body["parent"],
        image=body["image"],
        flavour=cast(Flavour, body["flavour"]),
        host_key=body["host_key"],
        created_ms=body["created_ms"],
        synced_ms=body["synced_ms"],
        size_bytes=body["size_bytes"],
        depth=0,
        slots=tuple(body["slots"]),
        directory=body["directory"],
        retired=tuple(Retired(*entry) for entry in body["retired"]),
    )


def write_meta(directory: str, layer: Layer) -> None:
    body: dict[str, Any] = {
        "parent": layer.parent,
        "image": layer.image,
        "flavour": layer.flavour,
        "host_key": layer.host_key,
        "created_ms": layer.created_ms,
        "synced_ms": layer.synced_ms,
        "size_bytes": layer.size_bytes,
        "slots": list(layer.slots),
        "directory": layer.directory,
        "retired": [[r.directory, r.parent, r.retired_ms] for r in layer.retired],
    }
    write_sealed(os.path.join(directory, META), body, durable=True)
    copy = os.path.join(directory, _COPY)
    try:
        write_sealed(copy, body)
    except OSError:
        # Mostly because the disk is full. An outdated copy would be worse than none.
        with suppress(OSError):
            os.unlink(copy)
