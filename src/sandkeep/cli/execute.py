"""``sandkeep exec`` and ``sandkeep connect``: commands and shells in sandboxes that exist."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import options
from sandkeep.cli.ending import Ended, say
from sandkeep.cli.framework import App, Argument, Command, argument, command, option, sandbox_argument
from sandkeep.cli.output import span
from sandkeep.cli.values import DURATION
from sandkeep.errors import SandkeepError
from sandkeep.types import ProcessStatus

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox

SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi")
"""The best shell the sandbox has."""
BARE = {"env": (), "workdir": None, "sudo": False, "no_extend_timeout": False, "interactive": True}
"""How a shell is run that nothing was said about."""


class WithCommand(Command):
    """Takes a command line of its own: whatever follows our own arguments belongs to that, dashes and all."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = sum(isinstance(param, Argument) and param.nargs == 1 for param in self.params)
        return super().parse_args(ctx, self._parted(args, own))

    def _parted(self, args: list[str], own: int) -> list[str]:
        """Our options, then ``--``, our arguments and the command."""
        takes_value = {
            name: not param.is_flag
            for param in [*self.params, self.get_help_option(click.Context(self))]
            if isinstance(param, click.Option)
            for name in param.opts
        }
        ours: list[str] = []
        names: list[str] = []
        rest = list(args)
        while rest:
            item = rest[0]
            if item == "--":
                del rest[0]
                break
            if not item.startswith("-") or item == "-":
                if len(names) == own:
                    break
                names.append(rest.pop(0))
                continue
            ours.append(rest.pop(0))
            if _wants_value(item, takes_value):
                if not rest:
                    return ours  # a value is missing, which is said before anything else
                ours.append(rest.pop(0))
        return [*ours, "--", *names, *rest]


def _wants_value(item: str, takes_value: dict[str, bool]) -> bool:
    """Whether the value of an option is the next word."""
    if item.startswith("--"):
        return "=" not in item and takes_value.get(item, False)
    for index, letter in enumerate(item[1:], 2):
        if takes_value.get(f"-{letter}", False):
            return index == len(item)
    return False


@command(
    "exec",
    json=False,
    cls=WithCommand,
    examples=[
        ("run the tests", "sandkeep exec web -- npm test"),
        ("as root, elsewhere", "sandkeep exec --sudo -w /tmp web ls -la"),
        ("a program that wants a terminal", "sandkeep exec -it web htop"),
        ("feed it a file", "sandkeep exec -i web -- wc -l < notes.txt"),
    ],
)
@sandbox_argument()
@argument("command", nargs=-1, required=True, metavar="[--] COMMAND...", help="What to run in it.")
@options.how_to_run
@options.interactive
@option(
    "--timeout",
    type=DURATION,
    section=options.COMMAND,
    help="Kill the command, and all it started, after so long.",
)
@options.extend
def exec_(app: App, name: str, command: tuple[str, ...], **values: Any) -> None:
    """Run a command in an existing sandbox, which is resumed when it is stopped.

    Output arrives as it is printed, and the exit status is the command's own. Ctrl-C interrupts the command,
    a second Ctrl-C kills it.
    """
    box = app.sandbox(name)
    raise Ended(perform(app, box, command, values))


@command("connect", json=False, examples=[("open a shell", "sandkeep connect web")])
@sandbox_argument()
@options.how_to_run
@options.extend
def connect(app: App, name: str, **values: Any) -> None:
    """Open a shell in an existing sandbox, which is resumed when it is stopped.

    Also called ssh. The session's timeout is kept extended while the shell is open. Leaving the shell leaves
    the sandbox running until its timeout; its files are kept.
    """
    box = app.sandbox(name)
    raise Ended(perform(app, box, SHELL, {**values, "interactive": True, "timeout": None}))


def perform(app: App, box: Sandbox, command: tuple[str, ...], values: dict[str, Any]) -> int:
    """Run a command as the options say; returns its exit status."""
    from sandkeep.cli import attach
    from sandkeep.cli.follow import follow

    env = dict(values["env"])
    wanted: timedelta | None = values.get("timeout")
    if values.get("interactive") and attach.possible():
        if wanted is not None:
            raise click.UsageError("--timeout cannot be given together with --interactive")
        status = attach.attach(
            box,
            command,
            cwd=values["workdir"],
            env=env,
            sudo=values["sudo"],
            extend=not values["no_extend_timeout"],
        )
        if status > 128:
            _explain(box, box.current_session.id, "the terminal was open", line=False)
        return status
    with app.busy(f"Starting {command[0]} in {box.name}"):
        process = box.create_process(
            command[0],
            command[1:],
            cwd=values["workdir"],
            env=env,
            sudo=values["sudo"],
            stdin=bool(values.get("interactive")),
            kill_after=wanted,
        )
    status = follow(process, stdin=bool(values.get("interactive")))
    if process.status is not ProcessStatus.EXITED:
        ended = _explain(box, process.session_id, f"{command[0]} ran")
        if process.reason and not ended:
            app.note(f"{command[0]}: {process.reason}")
    return status


def _explain(box: Sandbox, session_id: str, meanwhile: str, *, line: bool = True) -> bool:
    """Something was ended from outside: say so if that was the end of its session.

    ``line``: whether the cursor is at the beginning of one.
    """
    try:
        session = box.refresh().current_session
    except SandkeepError:
        return False
    if session.id != session_id or session.is_running:
        return False
    if not line:
        click.echo(err=True)
    say(
        f"the session of {box.name} ended while {meanwhile}; its timeout is "
        f"{span(session.execution_time_limit)}",
        f"'sandkeep config timeout {box.name} 1h' gives later ones more time",
    )
    return True
