"""``sandkeep run``: run a command in a new sandbox, or in a named one that is created if needed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import interrupts, options
from sandkeep.cli.app import App
from sandkeep.cli.commands.execute import BARE, SHELL, WithCommand, perform
from sandkeep.cli.completion import sandbox_names
from sandkeep.cli.exit_status import Ended
from sandkeep.cli.framework import argument, command, option
from sandkeep.errors import NotFound

if TYPE_CHECKING:
    from sandkeep.sync import NewConfiguration, Sandbox

ENDING = "When it ends"
_LOOKS = 10
"""Counted in responses, not in seconds: a server that is stuck does not create the sandbox either."""

silent = option(
    "--silent", is_flag=True, section=options.SANDBOX, help="Do not print the name of a new sandbox."
)


class Run(WithCommand):
    """``-t`` asks for a terminal, as in ``-it``; followed by ``key=value`` it is a tag."""

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
        ("once, in a sandbox that is removed", "sandkeep run -- python3 -c 'print(1 + 1)'"),
        ("in a sandbox that is kept", "sandkeep run --name web -- npm install"),
        ("the same one again, then stop it", "sandkeep run --name web --stop -- npm test"),
        ("without network", "sandkeep run --network-policy deny-all -- make"),
        ("with a terminal", "sandkeep run -it -- bash"),
        ("what an image is meant to run", "sandkeep run --image redis:7"),
    ],
)
@argument(
    "command",
    nargs=-1,
    metavar="[--] COMMAND...",
    help="Command to run. Without it, what the image's author configured. Optional with --connect.",
)
@option(
    "--name",
    metavar="NAME",
    shell_complete=sandbox_names,
    section=options.SANDBOX,
    help="Use the sandbox of this name; create or resume it, and keep it. An existing sandbox must have the "
    "configuration that the options give. Without a name, a new sandbox is used and removed afterwards.",
)
@options.run_sandbox
@options.how_to_run
@options.interactive
@options.extend
@option(
    "--connect",
    is_flag=True,
    section=options.COMMAND,
    help="Open a shell in the sandbox first; the command runs when the shell ends.",
)
@silent
@option("--rm", "remove", is_flag=True, section=ENDING, help="Remove the sandbox, even one with a name.")
@option("--stop", is_flag=True, section=ENDING, help="Stop the sandbox and keep its files.")
def run(app: App, command: tuple[str, ...], name: str | None, **values: Any) -> None:
    """Run a command in a sandbox.

    Output is shown as it is printed, and the exit status is that of the command. Ctrl-C interrupts the
    command, a second Ctrl-C kills it.
    """
    if values["remove"] and values["stop"]:
        raise click.UsageError("--rm and --stop cannot be given together")
    if not (command or values["connect"] or values["image"]):
        raise click.UsageError("COMMAND is missing: it is optional only with --image or --connect")
    with opened(app, name, values, throw_away=name is None and not values["stop"]) as box:
        status = _shell(app, box, values) if values["connect"] else 0
        if not command and not values["connect"]:
            command = _of_image(app, box)
        if command:
            status = perform(app, box, command, {**values, "timeout": None})
    raise Ended(status)


def _of_image(app: App, box: Sandbox) -> tuple[str, ...]:
    """Return the command that the author of the sandbox's image configured."""
    for image in app.client.images.list():
        if image.id == box.image and image.config.argv:
            return image.config.argv
    raise click.UsageError(f"COMMAND is missing: the image {box.image} has no entrypoint and no command")


def _shell(app: App, box: Sandbox, values: dict[str, Any]) -> int:
    """Open a shell before the command; of the options only --no-extend-timeout applies to it."""
    return perform(app, box, SHELL, {**BARE, "no_extend_timeout": values["no_extend_timeout"]})


@contextmanager
def opened(app: App, name: str | None, values: dict[str, Any], *, throw_away: bool) -> Iterator[Sandbox]:
    """Open a sandbox by name, or a new one; at the end remove it, stop it, or leave it as it is."""
    # Variables are for the command only and are not stored with the sandbox.
    wanted = options.configuration({**values, "env": ()})
    pulling = options.pulling(values)
    with interrupts.raised(*interrupts.ENDING):
        if name is not None:
            box = _found_or_made(app, name, wanted, pulling)
        elif throw_away:
            wanted["persistent"] = False
            box = _short_lived(app, wanted, pulling)
        else:
            with app.starting("Starting a sandbox"):
                box = app.client.create_sandbox(None, **pulling, **wanted)
            if not values["silent"]:
                app.note(f"sandbox {box.name}")
        try:
            interrupts.raise_pending()
            yield box
        finally:
            if throw_away or values["remove"]:
                with app.busy(f"Removing {box.name}"):
                    _destroy(box)
            elif values["stop"]:
                with app.busy(f"Stopping {box.name}"):
                    box.stop()


def _found_or_made(app: App, name: str, wanted: NewConfiguration, pulling: options.Pulling) -> Sandbox:
    with app.starting(f"Starting {name}"):
        return app.client.get_or_create_sandbox(name, **pulling, **wanted)


def _short_lived(app: App, wanted: NewConfiguration, pulling: options.Pulling) -> Sandbox:
    """Create a sandbox under a generated name, to find it by if an interrupt comes during its creation."""
    name = f"run-{os.urandom(6).hex()}"
    try:
        with app.starting("Starting a sandbox"):
            return app.client.create_sandbox(name, **pulling, **wanted)
    except BaseException:
        if interrupts.pending():
            _forget(app, name)
        raise


def _forget(app: App, name: str) -> None:
    for _ in range(_LOOKS):
        try:
            app.sandbox(name).destroy()
            return
        except NotFound:
            time.sleep(0.1)  # the server may still be creating it


def _destroy(box: Sandbox) -> None:
    try:
        box.destroy()
    except NotFound:
        pass  # another client removed it
