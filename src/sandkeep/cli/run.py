"""``sandkeep run``: a command in a new sandbox, or in a named one that is found or made."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import interrupts, options
from sandkeep.cli.ending import Ended
from sandkeep.cli.execute import BARE, SHELL, WithCommand, perform
from sandkeep.cli.framework import App, argument, command, option, sandbox_names
from sandkeep.errors import NotFound

if TYPE_CHECKING:
    from sandkeep.sync import NewConfiguration, Sandbox

ENDING = "When it ends"
_LOOKS = 10
"""Answers of the server, not seconds: while it stands still, so does what it was asked for before."""

silent = option(
    "--silent", is_flag=True, section=options.SANDBOX, help="Do not print the name of a new sandbox."
)


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
@argument(
    "command",
    nargs=-1,
    metavar="[--] COMMAND...",
    help="What to run. With --connect it may be left out.",
)
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
@option(
    "--connect",
    is_flag=True,
    section=options.COMMAND,
    help="Open a shell in the sandbox first; the command runs when it is left.",
)
@silent
@option("--rm", "remove", is_flag=True, section=ENDING, help="Remove the sandbox, also a named one.")
@option("--stop", is_flag=True, section=ENDING, help="Stop the sandbox and keep its files.")
def run(app: App, command: tuple[str, ...], name: str | None, **values: Any) -> None:
    """Run a command in a sandbox.

    Output arrives as it is printed, and the exit status is the command's own. Ctrl-C interrupts the command,
    a second Ctrl-C kills it.
    """
    if values["remove"] and values["stop"]:
        raise click.UsageError("--rm and --stop cannot be given together")
    if not command and not values["connect"]:
        raise click.UsageError("COMMAND is missing")
    with opened(app, name, values, throw_away=name is None and not values["stop"]) as box:
        status = perform(app, box, SHELL, BARE) if values["connect"] else 0
        if command:
            status = perform(app, box, command, {**values, "timeout": None})
    raise Ended(status)


@contextmanager
def opened(app: App, name: str | None, values: dict[str, Any], *, throw_away: bool) -> Iterator[Sandbox]:
    """A sandbox by name, or a new one; at the end it is removed, stopped, or left as it is."""
    # Variables are for the command, so that they are not kept with the sandbox.
    wanted = options.configuration({**values, "env": ()})
    with interrupts.raised():
        if name is not None:
            box = _found_or_made(app, name, wanted)
        elif throw_away:
            wanted["persistent"] = False
            box = _short_lived(app, wanted)
        else:
            with app.busy("Starting a sandbox"):
                box = app.client.create_sandbox(None, **wanted)
            if not values["silent"]:
                app.note(f"sandbox {box.name}")
        try:
            interrupts.look()
            yield box
        finally:
            if throw_away or values["remove"]:
                with app.busy(f"Removing {box.name}"):
                    _destroy(box)
            elif values["stop"]:
                with app.busy(f"Stopping {box.name}"):
                    box.stop()


def _found_or_made(app: App, name: str, wanted: NewConfiguration) -> Sandbox:
    created: list[Sandbox] = []
    with app.busy(f"Starting {name}"):
        box = app.client.get_or_create_sandbox(name, on_create=created.append, **wanted)
    if wanted and not created:
        app.note(f"{name} exists and keeps its configuration; 'sandkeep config' changes it")
    return box


def _short_lived(app: App, wanted: NewConfiguration) -> Sandbox:
    """A sandbox under a name of our own making, to find it by when we are interrupted while it is created."""
    name = f"run-{secrets.token_hex(6)}"
    try:
        with app.busy("Starting a sandbox"):
            return app.client.create_sandbox(name, **wanted)
    except BaseException:
        if interrupts.came():
            _forget(app, name)
        raise


def _forget(app: App, name: str) -> None:
    for _ in range(_LOOKS):
        try:
            app.sandbox(name).destroy()
            return
        except NotFound:
            time.sleep(0.1)  # what was asked for may be under way still


def _destroy(box: Sandbox) -> None:
    try:
        box.destroy()
    except NotFound:
        pass  # somebody else did
