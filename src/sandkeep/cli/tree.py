"""The command tree: one click group for running commands, for help and for completion.

A command is imported when it is needed: when it runs, when its help is shown, or when its arguments are
completed. Options before the command are options of the group and count for every command.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from sandkeep.cli import interrupts
from sandkeep.cli.exit_status import UsageWithHint, conclude
from sandkeep.cli.framework import Group, leading_options
from sandkeep.cli.table import ALIASES, COMMANDS, hint_for_unknown, usage
from sandkeep.version import __version__

COMPLETION_VARIABLE: Final = "_SANDKEEP_COMPLETE"
"""Set by the completion script of a shell to ask for completions."""


def load(name: str) -> click.Command:
    """Import a command of the table."""
    entry = COMMANDS[name]
    module = import_module(f"sandkeep.cli.commands.{entry.module}")
    found: click.Command = getattr(module, entry.function)
    return found


class Root(Group):
    """``sandkeep`` itself."""

    def __init__(self) -> None:
        super().__init__("sandkeep", "Named Linux sandboxes that keep their files.", aliases=dict(ALIASES))
        self.invoke_without_command = True
        self.no_args_is_help = False
        self.callback = click.pass_context(_require_command)
        self.params += leading_options()
        self.params.append(
            click.Option(["-V", "--version"], is_flag=True, is_eager=True, callback=_print_version)
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.aliases.get(cmd_name, cmd_name)
        return load(name) if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":
            args = [*args[1:], "--help"]
            if len(args) == 1:
                click.echo(usage())
                ctx.exit()
        name = self.aliases.get(args[0], args[0])
        if name not in COMMANDS and not ctx.resilient_parsing:
            raise UsageWithHint(f"no command {name!r}", hint_for_unknown(name), ctx)
        return super().resolve_command(ctx, [name, *args[1:]])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return self.parse_options(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        return usage()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands from the table, which imports none of them."""
        commands = [
            CompletionItem(name, help=entry.summary)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)


def _require_command(ctx: click.Context, **_options: Any) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(usage(), err=True)
        ctx.exit(2)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"sandkeep {__version__}")
        ctx.exit()


def run(args: list[str]) -> int:
    """Run a command line and return its exit status."""
    root = Root()
    ctx: click.Context | None = None
    try:
        with interrupts.raised(signal.SIGINT):
            ctx = root.make_context("sandkeep", args)
            with ctx:
                root.invoke(ctx)
        sys.stdout.flush()
        return 0
    except BaseException as error:
        return conclude(error, ctx)


def complete() -> int:
    """Print the completions that a shell asks for when its user presses Tab."""
    from click.shell_completion import shell_complete

    instruction = os.environ[COMPLETION_VARIABLE]
    return shell_complete(Root(), {}, "sandkeep", COMPLETION_VARIABLE, instruction)
