"""``sandkeep version``."""

from __future__ import annotations

from sandkeep.cli.app import App
from sandkeep.cli.framework import command
from sandkeep.version import __version__


@command("version", connection=False)
def version(app: App) -> None:
    """Print the version of this program."""
    if app.json:
        app.out.json({"version": __version__})
    else:
        app.out.line(f"sandkeep {__version__}")
