"""``sandkeep create``, ``fork`` and ``sh``: new sandboxes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import options, present
from sandkeep.cli.app import App
from sandkeep.cli.commands.execute import BARE, SHELL, perform
from sandkeep.cli.commands.run import ENDING, opened, silent
from sandkeep.cli.completion import sandbox_names
from sandkeep.cli.exit_status import Ended
from sandkeep.cli.framework import command, option, sandbox_argument
from sandkeep.cli.values import NumberType

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox

_SILENT = option("--silent", is_flag=True, help="Do not print the name.")
_CONNECT = option("--connect", is_flag=True, help="Open a shell in it.")
_NAME = option("--name", metavar="NAME", help="Name, unique in the project [default: a generated one]")


@command(
    "create",
    examples=[
        ("with a name", "sandkeep create --name web"),
        ("from an image, with a port", "sandkeep create --name api --image debian:12 -p 8000"),
        ("with access to one domain only", "sandkeep create --allowed-domain '*.example.com'"),
    ],
)
@_NAME
@_CONNECT
@_SILENT
@options.new_sandbox
def create(app: App, name: str | None, connect: bool, silent: bool, **values: Any) -> None:
    """Create a sandbox and start it.

    Prints its name and the URLs of its ports.
    """
    with app.starting(f"Creating {name or 'a sandbox'}"):
        box = app.client.create_sandbox(name, **options.pulling(values), **options.configuration(values))
    _made(app, box, silent=silent, connect=connect)


@command(
    "fork",
    examples=[
        ("a copy of everything", "sandkeep fork web --name web-2"),
        ("with more processors", "sandkeep fork web --name big --cpus 4"),
        ("of a running sandbox, as it is now", "sandkeep fork --live web"),
        ("ten copies, try-1 to try-10", "sandkeep fork web --name try --count 10"),
    ],
)
@sandbox_argument(help="The sandbox to start from.")
@option("--name", "new", metavar="NAME", help="Name of the new sandbox [default: a generated one]")
@option("--live", is_flag=True, help="Start from the present files of a running sandbox, by a checkpoint.")
@option(
    "--count",
    type=NumberType(1, 100),
    metavar="NUMBER",
    help="Make so many, all of them or none, called NAME-1, NAME-2 and so on.",
)
@_CONNECT
@_SILENT
@options.forked_sandbox
def fork(
    app: App,
    name: str,
    new: str | None,
    live: bool,
    count: int | None,
    connect: bool,
    silent: bool,
    **values: Any,
) -> None:
    """Create a sandbox from the files and the configuration of another.

    It starts from the current snapshot of the other sandbox: changes of a running session are included only
    with --live. An option replaces the copied value entirely.
    """
    if count is not None:
        if connect:
            raise click.UsageError("--connect opens a shell in one sandbox, not in --count")
        with app.starting(f"Forking {name}"):
            boxes = app.client.fork_sandbox(name, new, live=live, count=count, **options.changes(values))
        _note_left_out(app, name, boxes[0])
        _made_many(app, boxes, silent=silent)
        return
    with app.starting(f"Forking {name}"):
        box = app.client.fork_sandbox(name, new, live=live, **options.changes(values))
    _note_left_out(app, name, box)
    _made(app, box, silent=silent, connect=connect)


def _note_left_out(app: App, name: str, box: Sandbox) -> None:
    if box.left_out is not None:
        app.note(f"{name} is running: its changes are not in {box.name}; --live includes them")


def _made_many(app: App, boxes: Iterable[Sandbox], *, silent: bool) -> None:
    if app.json:
        app.out.json([present.sandbox(box, routes=True) for box in boxes])
    elif not silent:
        for box in boxes:
            app.out.line(box.name)


def _made(app: App, box: Sandbox, *, silent: bool, connect: bool) -> None:
    if app.json:
        app.out.json(present.sandbox(box, routes=True))
    elif not silent:
        app.out.line(box.name)
        for route in box.routes:
            app.note(f"port {route.port} is at {route.link}")
    if connect:
        raise Ended(perform(app, box, SHELL, BARE))


@command(
    "sh",
    json=False,
    examples=[
        ("for a trial, removed afterwards", "sandkeep sh --rm"),
        ("in a sandbox that is kept", "sandkeep sh --name web"),
    ],
)
@option(
    "--name",
    metavar="NAME",
    shell_complete=sandbox_names,
    section=options.SANDBOX,
    help="Use the sandbox of this name; create or resume it.",
)
@options.shell_sandbox
@options.how_to_run
@options.extend
@silent
@option("--rm", "remove", is_flag=True, section=ENDING, help="Remove the sandbox.")
@option("--stop", is_flag=True, section=ENDING, help="Stop the sandbox and keep its files.")
def sh(app: App, name: str | None, **values: Any) -> None:
    """Open a shell in a new sandbox, or in a named one that is created if needed.

    The sandbox runs on after the shell ends, until its timeout; its files are kept.
    """
    with opened(app, name, values, throw_away=False) as box:
        status = perform(app, box, SHELL, {**values, "interactive": True, "timeout": None})
        if name is None and not values["remove"] and not values["silent"]:
            app.note(
                f"'sandkeep connect {box.name}' opens another shell, 'sandkeep rm {box.name}' removes it"
            )
    raise Ended(status)
