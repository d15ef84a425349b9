"""Where sandkeep keeps its data: the one rule that every component uses."""

from __future__ import annotations

import os


def data_directory(given: str | None = None) -> str:
    """Return ``given``, else ``SANDKEEP_HOME``, else the directory from the XDG base directories."""
    if given:
        return os.path.abspath(given)
    if home := os.environ.get("SANDKEEP_HOME"):
        return os.path.abspath(home)
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(base, "sandkeep")
