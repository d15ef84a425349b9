"""``sandkeep version``."""

from __future__ import annotations

import sandkeep
from sandkeep.cli.framework import App, command


@command("version", connection=False)
def version(app: App) -> None:
    """Print the version of this program."""
    if app.json:
        app.out.json({"version": sandkeep.__version__})
    else:
        app.out.line(f"sandkeep {sandkeep.__version__}")
