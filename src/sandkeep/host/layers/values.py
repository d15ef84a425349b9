"""What a layer is, and its ``meta.json``.

``meta.json`` is always written beside and renamed into place, so it is there completely or not at all. It is
fsynced when it replaces one that may be durable already; a first one is made durable by ``sync``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from sandkeep.errors import InvalidRequest, LayerError
from sandkeep.host.rootfs import Flavour

META = "meta.json"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@")


@dataclass(frozen=True, slots=True)
class Retired:
    """A directory a fold has replaced. Sessions that mounted it go on using it, and what was below it."""

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


def check_name(name: str, field_name: str) -> str:
    """Names become file names: refuse what could leave the directory or look like one of our own files."""
    if not name or name.startswith(".") or len(name) > 200 or not set(name) <= _NAME_CHARACTERS:
        raise InvalidRequest(f"{name!r} is not a usable {field_name}", field=field_name)
    return name


def read_meta(directory: str, layer: str) -> Layer | None:
    """The layer at ``directory``, with depth 0; ``None`` when there is none."""
    path = os.path.join(directory, META)
    try:
        info = os.stat(path)
        return _load(path, layer, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LayerError(f"layer {layer} has an unreadable {META}: {error}", layer=layer) from error


@lru_cache(maxsize=4096)
def _load(path: str, layer: str, inode: int, modified_ns: int, changed_ns: int) -> Layer:
    """Read once per file: chains are walked all the time, and the file is always replaced as a whole.

    One replaced between the look and the reading is remembered under a look nobody will have again.
    """
    del inode, modified_ns, changed_ns
    with open(path, encoding="utf-8") as handle:
        body = json.load(handle)
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


def write_meta(directory: str, layer: Layer, *, durable: bool) -> None:
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
    final = os.path.join(directory, META)
    with open(final + ".new", "w", encoding="utf-8") as handle:
        json.dump(body, handle)
        if durable:
            handle.flush()
            os.fsync(handle.fileno())
    os.rename(final + ".new", final)
