"""``sandkeep create``, ``fork`` and ``sh``: new sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandkeep.cli import options, show
from sandkeep.cli.ending import Ended
from sandkeep.cli.execute import BARE, SHELL, perform
from sandkeep.cli.framework import App, command, option, sandbox_argument, sandbox_names
from sandkeep.cli.run import ENDING, opened, silent

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox

_SILENT = option("--silent", is_flag=True, help="Do not print the name.")
_CONNECT = option("--connect", is_flag=True, help="Open a shell in it.")
_NAME = option("--name", metavar="NAME", help="Its name, unique in the project; made up when not given.")


@command(
    "create",
    examples=[
        ("with a name", "sandkeep create --name web"),
        ("from an image, with a port", "sandkeep create --name api --image debian:12 -p 8000"),
        ("that reaches one domain only", "sandkeep create --allowed-domain '*.example.com'"),
    ],
)
@_NAME
@_CONNECT
@_SILENT
@options.new_sandbox
def create(app: App, name: str | None, connect: bool, silent: bool, **values: Any) -> None:
    """Create a sandbox and start it.

    Prints its name and where its ports are reached.
    """
    with app.busy(f"Creating {name or 'a sandbox'}"):
        box = app.client.create_sandbox(name, **options.configuration(values))
    _made(app, box, silent=silent, connect=connect)


@command(
    "fork",
    examples=[
        ("a copy of everything", "sandkeep fork web --name web-2"),
        ("with more processors", "sandkeep fork web --name big --vcpus 4"),
    ],
)
@sandbox_argument(help="The sandbox to start from.")
@option("--name", "new", metavar="NAME", help="Name of the new one; made up when not given.")
@_CONNECT
@_SILENT
@options.forked_sandbox
def fork(app: App, name: str, new: str | None, connect: bool, silent: bool, **values: Any) -> None:
    """Make a new sandbox from the files and the configuration of another.

    It starts from the snapshot the other one would start from: what a running sandbox has changed is not in
    it until it stops. 'sandkeep create --snapshot' starts from a checkpoint. Options replace what would be
    copied, entirely.
    """
    with app.busy(f"Forking {name}"):
        box = app.client.fork_sandbox(name, new, **options.changes(values))
    _made(app, box, silent=silent, connect=connect)


def _made(app: App, box: Sandbox, *, silent: bool, connect: bool) -> None:
    if app.json:
        app.out.json(show.sandbox(box, routes=True))
    elif not silent:
        app.out.line(box.name)
        for route in box.routes:
            app.note(f"port {route.port} is at {route.url}")
    if connect:
        raise Ended(perform(app, box, SHELL, BARE))


@command(
    "sh",
    json=False,
    examples=[
        ("try something out", "sandkeep sh --rm"),
        ("work somewhere for longer", "sandkeep sh --name web"),
    ],
)
@option(
    "--name",
    metavar="NAME",
    shell_complete=sandbox_names,
    section=options.SANDBOX,
    help="Use the sandbox of this name; it is created, or resumed.",
)
@options.run_sandbox
@options.how_to_run
@options.extend
@silent
@option("--rm", "remove", is_flag=True, section=ENDING, help="Remove the sandbox.")
@option("--stop", is_flag=True, section=ENDING, help="Stop the sandbox and keep its files.")
def sh(app: App, name: str | None, **values: Any) -> None:
    """Open a shell in a new sandbox, or in a named one that is found or made.

    The sandbox stays when the shell ends, until its timeout; its files are kept.
    """
    with opened(app, name, values, throw_away=False) as box:
        status = perform(app, box, SHELL, {**values, "interactive": True, "timeout": None})
        if name is None and not values["remove"] and not values["silent"]:
            app.note(f"'sandkeep connect {box.name}' goes on there, 'sandkeep rm {box.name}' removes it")
    raise Ended(status)
