"""Session directories as the layer store sees them: the layers they need, the uppers they left behind.

A session needs the chain of the layer its ``spec.json`` names, and the layers of its drives, from the moment
that file exists until the session is over. It is over once its supervisor has released ``lock`` and its upper
is gone, published or discarded: the directory itself stays, for its output logs, and must not keep layers
alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sandkeep.errors import LayerError
from sandkeep.host.layers.values import is_name
from sandkeep.host.reports import DriveOrigin, SessionOrigin
from sandkeep.shared.locks import is_locked
from sandkeep.shared.sealed import read_sealed, write_sealed


@dataclass(frozen=True, slots=True)
class Needs:
    """The layers that sessions need that are not over."""

    layers: dict[str, set[str]]
    """By session."""
    unknown: tuple[str, ...]
    """Sessions whose record is damaged: any layer may be theirs."""


def session_layers(sessions: str, layers: str) -> Needs:
    """Return the layers of every session that is not over and has some; ``layers`` is their directory."""
    found: dict[str, set[str]] = {}
    unknown = []
    for session in session_names(sessions):
        directory = os.path.join(sessions, session)
        if _over(directory):
            continue
        try:
            needed = _needed(read_sealed(os.path.join(directory, "spec.json")), layers)
        except FileNotFoundError:
            # Without a specification the session does not exist; with one, its supervisor holds a lock.
            if os.path.lexists(os.path.join(directory, "lock")):
                unknown.append(session)
        except (ValueError, KeyError, TypeError):
            unknown.append(session)
        else:
            if needed:
                found[session] = needed
    return Needs(found, tuple(unknown))


def _needed(spec: dict[str, Any], layers: str) -> set[str]:
    found = {spec["layer"], *spec.get("layers", ())} | _of_drives(spec, layers)
    found.discard(None)
    return found


@dataclass(frozen=True, slots=True)
class SpecOutline:
    """The part of a session's ``spec.json`` that the layer store needs while the session runs."""

    session_id: str
    generation: int
    image: str
    layer_id: str | None
    drive_layer_ids: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session_id,
            "generation": self.generation,
            "image": self.image,
            "layer": self.layer_id,
            "layers": list(self.drive_layer_ids),
        }


def restore_spec(directory: str, spec: SpecOutline) -> bool:
    """Write ``spec`` in place of a session's ``spec.json`` if that cannot be read; return whether it was."""
    path = os.path.join(directory, "spec.json")
    try:
        read_sealed(path)["layer"]
        return False
    except (FileNotFoundError, ValueError, KeyError):
        write_sealed(path, spec.to_json())
        return True


def _of_drives(spec: dict[str, Any], layers: str) -> set[str]:
    """Return the ids of the layers that a session's drives are mounted from."""
    slots = spec.get("rootfs", {}).get("slots", ())
    paths = (path for slot in slots if slot["drive"] for path, _ in slot["lowers"])
    return {layer_id for path in paths if (layer_id := layer_at(path, layers)) is not None}


def layer_at(path: str, layers: str) -> str | None:
    """Return the id of the layer that ``path`` lies in; ``None`` if it is not below ``layers``."""
    prefix = f"{layers}/"
    return path.removeprefix(prefix).partition("/")[0] if path.startswith(prefix) else None


def session_origin(directory: str, layers: str) -> SessionOrigin | None:
    """Return what a session was started with; ``None`` once its files are published or discarded.

    Raises:
        LayerError: its ``spec.json`` is missing or damaged.
    """
    if not os.path.isdir(os.path.join(directory, "fs")):
        return None
    try:
        spec = read_sealed(os.path.join(directory, "spec.json"))
        return SessionOrigin(
            spec["image"],
            spec["layer"],
            spec.get("cwd"),
            spec["deadline_ms"],
            tuple(_drive_origin(slot, layers) for slot in spec["rootfs"]["slots"] if slot["drive"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        name = os.path.basename(directory)
        raise LayerError(f"the record of session {name} is damaged: {error!r}") from error


def _drive_origin(slot: dict[str, Any], layers: str) -> DriveOrigin:
    ids = (layer_at(path, layers) for path, _ in slot["lowers"])
    top = next((layer_id for layer_id in ids if layer_id is not None), None)
    return DriveOrigin(slot["target"], slot["read_only"], top)


def lost_sessions(sessions: str) -> tuple[str, ...]:
    """Return the sessions whose supervisor is gone and whose upper still holds files."""
    return tuple(
        session
        for session in session_names(sessions)
        if os.path.lexists(os.path.join(sessions, session, "lock"))
        and not is_locked(os.path.join(sessions, session, "lock"))
        and _holds_something(os.path.join(sessions, session, "fs"))
    )


def slots_of(upper: str) -> tuple[str, ...]:
    """Return the slots in an ``fs`` directory."""
    with os.scandir(upper) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False)))


def _over(directory: str) -> bool:
    lock = os.path.join(directory, "lock")
    # Before the supervisor has created its lock the session is starting, not over.
    return (
        os.path.lexists(lock) and not is_locked(lock) and not os.path.lexists(os.path.join(directory, "fs"))
    )


def _holds_something(upper: str) -> bool:
    try:
        return any(os.listdir(os.path.join(upper, slot)) for slot in slots_of(upper))
    except (FileNotFoundError, NotADirectoryError):
        return False


def session_names(directory: str) -> list[str]:
    """Return the names of sessions that have a directory; other entries are ignored."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []
