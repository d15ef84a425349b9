"""Completion of names of sandboxes. Pressing Tab starts no server: names come from one that runs already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli.app import App, common_values
from sandkeep.paths import data_directory

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PAGE = 50
_SECONDS = 2.0


def sandbox_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a sandbox of the server that the command line names."""
    return _names(common_values(ctx), incomplete)


def sandbox_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a path as ``cp`` takes it: a local file, or a sandbox and a colon."""
    from click.shell_completion import CompletionItem

    # bash uses the type of the last item: "plain" if there are sandboxes, otherwise "file".
    files = [CompletionItem(incomplete, type="file")]
    return files + [CompletionItem(f"{name}:") for name in sandbox_names(ctx, param, incomplete)]


def _names(values: dict[str, Any], incomplete: str) -> list[str]:
    from sandkeep.embedded import ask
    from sandkeep.errors import SandkeepError
    from sandkeep.sync import SandboxQueryByName

    app = App(values, seconds=_SECONDS)
    try:
        if app.url is None and ask(data_directory(), "GET", "/version") is None:
            return []
        page = app.client.query_sandboxes(SandboxQueryByName(prefix=incomplete, page_size=_PAGE)).page()
        return [box.name for box in page.items]
    except (SandkeepError, OSError):
        return []
    finally:
        app.close()
