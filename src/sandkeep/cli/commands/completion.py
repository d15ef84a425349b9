"""``sandkeep completion``: print the script that makes a shell complete command lines."""

from __future__ import annotations

import click

from sandkeep.cli.app import App
from sandkeep.cli.framework import argument, command

_SHELLS = ("bash", "zsh", "fish")
_HOW = {
    "bash": 'eval "$(sandkeep completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(sandkeep completion zsh)"   # in ~/.zshrc',
    "fish": "sandkeep completion fish | source   # in ~/.config/fish/config.fish",
}


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

    from sandkeep.cli.tree import COMPLETION_VARIABLE, Root

    kind = get_completion_class(shell)
    assert kind is not None
    app.out.line(f"# {_HOW[shell]}")
    app.out.line(kind(Root(), {}, "sandkeep", COMPLETION_VARIABLE).source())
