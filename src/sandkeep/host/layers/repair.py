"""Find damaged layers, and restore a layer's record.

Damaged files of a layer cannot be restored. Only the record beside them can: from its copy, or from what the
caller knows. The record of a folded layer exists nowhere else than in its copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from sandkeep.errors import LayerError
from sandkeep.host.layers.sessions import slots_of
from sandkeep.host.layers.values import Examined, Layer, meta_is_whole, read_meta, write_meta

_FIRST = "fs"
"""The directory a layer is published with; a fold writes another one."""


def examine(root: str, layers: Iterable[str]) -> Examined:
    """Examine every layer below ``root``; change nothing."""
    parents: dict[str, str | None] = {}
    damaged: dict[str, str] = {}
    names = list(layers)
    for name in names:
        directory = os.path.join(root, name)
        try:
            found = read_meta(directory, name)
        except LayerError as error:
            damaged[name] = error.message
            continue
        if found is None:
            continue  # another process has deleted it
        parents[name] = found.parent
        gone = [slot for slot in found.slots if not os.path.isdir(f"{directory}/{found.directory}/{slot}")]
        if gone or not os.path.isdir(f"{directory}/{found.directory}"):
            lost = "/".join([found.directory, *gone[:1]])
            damaged[name] = f"layer {name} is damaged: its directory {lost} is gone"
    strays = sorted(entry for entry in os.listdir(root) if not entry.startswith(".") and entry not in names)
    return Examined(parents, damaged, tuple(strays))


def restore(directory: str, layer: str) -> bool:
    """Restore a damaged ``meta.json`` from its copy; return whether it was damaged. Raises ``LayerError``."""
    found = read_meta(directory, layer)
    if found is None or meta_is_whole(directory, layer):
        return False
    write_meta(directory, found)
    return True


def rebuild(directory: str, known: Layer) -> bool:
    """Rebuild a layer's record from ``known`` if it cannot be read; return whether it was rebuilt."""
    try:
        return restore(directory, known.id)
    except LayerError:
        if not os.path.isdir(os.path.join(directory, _FIRST)):
            raise
    write_meta(directory, replace(known, directory=_FIRST, slots=slots_of(os.path.join(directory, _FIRST))))
    return True
