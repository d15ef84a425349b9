"""``sandkeep secret``: values for rules of network policies and for processes. They are never shown again."""

from __future__ import annotations

import sys

import click

from sandkeep.cli.app import App
from sandkeep.cli.batch import remove_each
from sandkeep.cli.framework import Group, argument, command, option
from sandkeep.cli.output import ago

secret = Group(
    "secret",
    "Manage secrets: values for rules of network policies, as ${secret:NAME}, and for commands.",
    aliases={"list": "ls", "delete": "rm"},
)


@command(
    "set",
    examples=[
        ("from a file", "sandkeep secret set github < token.txt"),
        ("typed without being shown", "sandkeep secret set github"),
    ],
)
@argument("name", metavar="NAME", help="Name that rules and commands refer to.")
@option("--value", metavar="TEXT", help="The value; other users of this machine may see it. Better on stdin.")
def set_(app: App, name: str, value: str | None) -> None:
    """Store a value, read from standard input, and replace an earlier one.

    Running sandboxes whose rules name it use the new value at once. It is never shown again.
    """
    text = _asked() if value is None else value
    if not text:
        raise click.UsageError("no value on standard input" if value is None else "--value is empty")
    stored = app.client.secrets.set(name, text)
    if app.json:
        app.out.json(stored)
    else:
        app.out.line(stored.name)


def _asked() -> str:
    """Read standard input, without the line feed that editors and echo put at its end."""
    if sys.stdin.isatty():
        return str(click.prompt("Value", hide_input=True, err=True))
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise click.UsageError("the value on standard input is not text") from None
    return text.removesuffix("\n").removesuffix("\r")


@command("ls")
def ls(app: App) -> None:
    """List the names of secrets, without their values."""
    found = app.client.secrets.list()
    if app.json:
        app.out.json(found)
    elif found:
        rows = [(each.name, ago(each.created_at), ago(each.updated_at)) for each in found]
        app.out.table(("NAME", "CREATED", "CHANGED"), rows)
    else:
        app.note("no secrets; 'sandkeep secret set NAME' creates one")


@command("rm")
@argument("name", nargs=-1, required=True, metavar="NAME...", help="Names of secrets.")
def rm(app: App, name: tuple[str, ...]) -> None:
    """Delete secrets. Requests whose rules name them are refused from now on."""
    remove_each(app, name, app.client.secrets.delete)


for child in (set_, ls, rm):
    secret.add_command(child)
