"""What an operator decided for a data directory: ``settings.json`` has fields of the engine's settings."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from sandkeep.engine.settings import Settings
from sandkeep.errors import InvalidRequest

FILE = "settings.json"


def read_settings(data_dir: str, path: str | None = None) -> Settings:
    """The settings in ``path``, else those in the data directory, else the defaults.

    What is not mentioned keeps its default; ``images`` adds to the names known already.
    """
    chosen = path or os.path.join(data_dir, FILE)
    try:
        with open(chosen, "rb") as handle:
            found = msgspec.json.decode(handle.read(), type=dict[str, object])
    except FileNotFoundError:
        if path is not None:
            raise InvalidRequest(f"there is no {path}", field="settings") from None
        return Settings()
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{chosen}: {error}", field="settings") from None
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(found.keys() - known):
        raise InvalidRequest(
            f"{chosen}: there is no setting {', '.join(unknown)}",
            field="settings",
            hint=f"known: {', '.join(sorted(known))}",
        )
    if isinstance(images := found.get("images"), dict):
        found["images"] = {**Settings().images, **images}
    try:
        return msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{chosen}: {error}", field="settings") from None
