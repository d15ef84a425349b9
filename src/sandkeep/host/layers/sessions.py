"""What session directories mean to the layer store: which layers they need, which uppers were left behind.

A session needs the chain of the layer its ``spec.json`` names, and what its drives stand on, from the moment
that file is there until it is over. It is over once its supervisor has let go of ``lock`` and its upper is
gone, published or thrown away: the directory itself stays, for its output logs, and must not keep layers
alive.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sandkeep.errors import LayerError
from sandkeep.host.layers.lock import is_locked


def session_layers(sessions: str, layers: str) -> dict[str, set[str]]:
    """Session to layers, for every session that is not over and stands on some; ``layers`` is their place."""
    found = {}
    for session in _names(sessions):
        directory = os.path.join(sessions, session)
        try:
            with open(os.path.join(directory, "spec.json"), encoding="utf-8") as handle:
                spec = json.load(handle)
            needed = {spec["layer"]} | _of_drives(spec, layers)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise LayerError(
                f"cannot tell which layer session {session} needs: {error}", session=session
            ) from error
        needed.discard(None)
        if needed and not _over(directory):
            found[session] = needed
    return found


def _of_drives(spec: dict[str, Any], layers: str) -> set[str]:
    """The layers a session's drives are mounted from; their names are in the paths only."""
    found = set()
    for slot in spec.get("rootfs", {}).get("slots", ()):
        for path, _ in slot["lowers"] if slot["drive"] else ():
            if path.startswith(f"{layers}/"):
                found.add(path.removeprefix(f"{layers}/").partition("/")[0])
    return found


def lost_sessions(sessions: str) -> tuple[str, ...]:
    """Sessions whose supervisor is gone and whose upper still holds something."""
    return tuple(
        session
        for session in _names(sessions)
        if os.path.lexists(os.path.join(sessions, session, "lock"))
        and not is_locked(os.path.join(sessions, session, "lock"))
        and _holds_something(os.path.join(sessions, session, "fs"))
    )


def slots_of(upper: str) -> tuple[str, ...]:
    """The slots in an ``fs`` directory."""
    with os.scandir(upper) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))


def _over(directory: str) -> bool:
    lock = os.path.join(directory, "lock")
    # Before the supervisor made its lock the session is starting, not over.
    return (
        os.path.lexists(lock) and not is_locked(lock) and not os.path.lexists(os.path.join(directory, "fs"))
    )


def _holds_something(upper: str) -> bool:
    try:
        return any(os.listdir(os.path.join(upper, slot)) for slot in slots_of(upper))
    except FileNotFoundError:
        return False


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
