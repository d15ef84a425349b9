"""The operator's settings of a data directory: ``settings.json`` has fields of the engine's settings."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from sandkeep.engine.checks import problems
from sandkeep.engine.settings import Settings
from sandkeep.errors import InvalidRequest

FILE = "settings.json"


def read_settings(data_dir: str, path: str | None = None) -> Settings:
    """Return the settings in ``path``, else those in the data directory, else the defaults.

    A setting that is not mentioned keeps its default; ``images`` adds to the built-in names.
    """
    chosen = path or os.path.join(data_dir, FILE)
    try:
        with open(chosen, "rb") as handle:
            found = msgspec.json.decode(handle.read(), type=dict[str, object])
    except FileNotFoundError:
        if path is not None:
            raise InvalidRequest(f"the settings file {path} does not exist", field="settings") from None
        return Settings()
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{chosen}: {error}", field="settings") from None
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(found.keys() - known):
        raise InvalidRequest(
            f"{chosen}: unknown settings {', '.join(unknown)}",
            field="settings",
            hint=f"the settings are {', '.join(sorted(known))}",
        )
    if isinstance(images := found.get("images"), dict):
        found["images"] = {**Settings().images, **images}
    try:
        settings = msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{chosen}: {error}", field="settings") from None
    if wrong := problems(settings):
        raise InvalidRequest(f"{chosen}: {'; '.join(wrong)}", field=wrong[0].partition(" ")[0])
    return settings
