"""``sandkeep completion``: what shells need to complete command lines, names of sandboxes included."""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from sandkeep.cli.framework import App, argument, command, sandbox_names
from sandkeep.cli.main import ALIASES, COMMANDS, LEADING_FLAGS, LEADING_VALUES, load
from sandkeep.paths import data_directory

VARIABLE = "_SANDKEEP_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_HOW = {
    "bash": 'eval "$(sandkeep completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(sandkeep completion zsh)"   # in ~/.zshrc',
    "fish": "sandkeep completion fish | source   # in ~/.config/fish/config.fish",
}


class Root(click.Group):
    """All commands as one click group, each imported when it is looked at."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        return load(name) if name in COMMANDS else None


def root() -> Root:
    options: list[click.Parameter] = [click.Option([name], is_flag=True) for name in LEADING_FLAGS]
    options += [click.Option([name], callback=_noted) for name in LEADING_VALUES]
    return Root("sandkeep", params=options)


def _noted(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Options in front of the command count as they do when it is run."""
    if value is not None:
        os.environ[LEADING_VALUES[param.opts[0]]] = value


@command(
    "completion",
    connection=False,
    json=False,
    examples=[(f"for {shell}", line.partition("   #")[0]) for shell, line in _HOW.items()],
)
@argument("shell", metavar="|".join(_SHELLS), type=click.Choice(_SHELLS), help="The shell.")
def completion(app: App, shell: str) -> None:
    """Print a script that makes a shell complete sandkeep's command lines."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    app.out.line(f"# {_HOW[shell]}")
    app.out.line(kind(root(), {}, "sandkeep", VARIABLE).source())


def answer() -> int:
    """What a shell asks for while its user presses Tab."""
    from click.shell_completion import shell_complete

    return shell_complete(root(), {}, "sandkeep", VARIABLE, os.environ[VARIABLE])


def names_of_sandboxes(values: dict[str, Any], incomplete: str) -> list[str]:
    """Names that begin so, if a server runs; at most a screenful.

    ``values``: of the common options, so that the server is the one the command would ask.
    """
    from sandkeep.errors import SandkeepError
    from sandkeep.server.embedded import ask
    from sandkeep.sync import SandboxQueryByName

    app = App(values, seconds=2)
    try:
        if app.url is None and ask(data_directory(), "GET", "/version") is None:
            return []
        page = app.client.query_sandboxes(SandboxQueryByName(prefix=incomplete, page_size=50)).page()
        return [box.name for box in page.items]
    except (SandkeepError, OSError):
        return []
    finally:
        app.close()


def places(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Sandboxes, as ``cp`` wants them named, and files here."""
    # In bash the last kind counts when there is any of it, and files otherwise.
    files = [CompletionItem(incomplete, type="file")]
    return files + [CompletionItem(f"{name}:") for name in sandbox_names(ctx, param, incomplete)]
