"""What a data directory holds, counted and measured, also if it is damaged."""

from __future__ import annotations

import os
from typing import Any

from sandkeep.cli.output import size
from sandkeep.host.layers.lock import is_locked
from sandkeep.host.layers.sessions import session_names
from sandkeep.host.remover import Remover
from sandkeep.server.inspecting import count_rows


def holdings(directory: str, *, seconds: float) -> dict[str, Any]:
    """Return the counts as JSON. ``None`` is unknown: the store is missing, damaged, or locked by a server.

    ``seconds`` limits how long files are measured; ``complete`` says whether that was enough.
    """
    known = count_rows(directory)
    with Remover() as remover:
        used, complete = remover.measure(directory, seconds=seconds)
    return {
        "sandboxes": known and known.sandboxes,
        "runningSandboxes": running(directory),
        "snapshots": known and known.snapshots,
        "drives": known and known.drives,
        "images": _images(directory),
        "bytes": used,
        "complete": complete,
    }


def summary(counts: dict[str, Any]) -> str:
    """``2 sandboxes (1 running), 3 snapshots, no drives, 1 image, 1.2 GiB``."""
    if counts["sandboxes"] is None:
        kept = "sandboxes, snapshots and drives that cannot be counted"
    else:
        running = f" ({counts['runningSandboxes']} running)" if counts["runningSandboxes"] else ""
        sandboxes = plural(counts["sandboxes"], "sandbox", "es")
        snapshots, drives = plural(counts["snapshots"], "snapshot"), plural(counts["drives"], "drive")
        kept = f"{sandboxes}{running}, {snapshots}, {drives}"
    more = "" if counts["complete"] else "more than "
    return f"{kept}, {plural(counts['images'], 'image')}, {more}{size(counts['bytes'])}"


def plural(number: int, noun: str, ending: str = "s") -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else ending}"


def running(directory: str) -> int:
    """Count the running sandboxes, with or without a server."""
    sessions = os.path.join(directory, "sessions")
    return sum(is_locked(os.path.join(sessions, name, "lock")) for name in session_names(sessions))


def _images(directory: str) -> int:
    """Count the images that were pulled or imported; that of the machine is rebuilt when needed."""
    try:
        return len(os.listdir(os.path.join(directory, "images", "records")))
    except OSError:
        return 0
