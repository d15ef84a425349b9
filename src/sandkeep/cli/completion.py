"""``sandkeep completion``: what shells need to complete command lines, names of sandboxes included."""

from __future__ import annotations

import os

import click

from sandkeep.cli.framework import App, argument, command
from sandkeep.cli.main import COMMANDS, load
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
        return load(cmd_name) if cmd_name in COMMANDS else None


def root() -> Root:
    return Root("sandkeep", help="Named Linux sandboxes that keep their files between runs.")


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


def names_of_sandboxes(incomplete: str) -> list[str]:
    """Names that begin so, if a server runs; at most a screenful."""
    from sandkeep.errors import SandkeepError
    from sandkeep.server.embedded import ask
    from sandkeep.sync import Client, SandboxQueryByName

    try:
        if "SANDKEEP_URL" not in os.environ and ask(data_directory(), "GET", "/version") is None:
            return []
        with Client(timeout=2) as client:
            page = client.query_sandboxes(SandboxQueryByName(prefix=incomplete, page_size=50)).page()
            return [box.name for box in page.items]
    except (SandkeepError, OSError):
        return []
