"""``sandkeep run``: a command in a new sandbox, or in a named one that is found or made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import options
from sandkeep.cli.ending import Ended
from sandkeep.cli.execute import WithCommand, perform
from sandkeep.cli.framework import App, argument, command, option, sandbox_names
from sandkeep.errors import NotFound

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox

ENDING = "When it ends"


class Run(WithCommand):
    """``-t`` is the terminal's, as in ``-it``; followed by ``key=value`` it is a tag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        changed = [
            "--tag" if item == "-t" and index + 1 < end and "=" in args[index + 1] else item
            for index, item in enumerate(args)
        ]
        return super().parse_args(ctx, changed)


@command(
    "run",
    json=False,
    cls=Run,
    examples=[
        ("once, leaving nothing behind", "sandkeep run -- python3 -c 'print(1 + 1)'"),
        ("in a sandbox that stays", "sandkeep run --name web -- npm install"),
        ("the same one again, then stop it", "sandkeep run --name web --stop -- npm test"),
        ("without network", "sandkeep run --network-policy deny-all -- make"),
        ("with a terminal", "sandkeep run -it -- bash"),
    ],
)
@argument("command", nargs=-1, required=True, metavar="[--] COMMAND...", help="What to run.")
@option(
    "--name",
    metavar="NAME",
    shell_complete=sandbox_names,
    section=options.SANDBOX,
    help="Use the sandbox of this name; it is created, or resumed, and stays. Without a name a sandbox is "
    "made for this command and removed after it.",
)
@options.run_sandbox
@options.how_to_run
@options.interactive
@options.extend
@option("--rm", "remove", is_flag=True, section=ENDING, help="Remove the sandbox, also a named one.")
@option("--stop", is_flag=True, section=ENDING, help="Stop the sandbox and keep its files.")
def run(app: App, command: tuple[str, ...], name: str | None, **values: Any) -> None:
    """Run a command in a sandbox.

    Output arrives as it is printed, and the exit status is the command's own. Ctrl-C interrupts the command,
    a second Ctrl-C kills it.
    """
    if values["remove"] and values["stop"]:
        raise click.UsageError("--rm and --stop cannot be given together")
    with opened(app, name, values, throw_away=name is None and not values["stop"]) as box:
        status = perform(app, box, command, {**values, "timeout": None})
    raise Ended(status)


@contextmanager
def opened(app: App, name: str | None, values: dict[str, Any], *, throw_away: bool) -> Iterator[Sandbox]:
    """A sandbox by name, or a new one; at the end it is removed, stopped, or left as it is."""
    wanted = options.configuration({**values, "env": values.get("sandbox_env", ())})
    if throw_away:
        wanted["persistent"] = False
    created: list[Sandbox] = []
    with app.busy(f"Starting {name or 'a sandbox'}"):
        if name is None:
            box = app.client.create_sandbox(None, **wanted)
        else:
            box = app.client.get_or_create_sandbox(name, on_create=created.append, **wanted)
    if name is None and not throw_away:
        app.note(f"sandbox {box.name}")
    if name is not None and wanted and not created:
        app.note(f"{name} exists and keeps its configuration; 'sandkeep config' changes it")
    try:
        yield box
    finally:
        if throw_away or values["remove"]:
            with app.busy(f"Removing {box.name}"):
                try:
                    box.destroy()
                except NotFound:
                    pass  # somebody else did
        elif values["stop"]:
            with app.busy(f"Stopping {box.name}"):
                box.stop()
