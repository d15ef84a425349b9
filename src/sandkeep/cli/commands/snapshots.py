"""``sandkeep snapshot``, ``checkpoint``, ``rollback`` and ``snapshots``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli.app import App
from sandkeep.cli.batch import remove_each
from sandkeep.cli.completion import sandbox_names
from sandkeep.cli.framework import Group, argument, command, option, sandbox_argument
from sandkeep.cli.listing import CURSOR, PAGING, gathered, more, paged, paging, total
from sandkeep.cli.output import ago, clean, size
from sandkeep.cli.values import LIFETIME, NumberType
from sandkeep.errors import NotFound
from sandkeep.states import SnapshotStatus, SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox, Snapshot, SnapshotNode

_EXPIRATION = option(
    "--expiration",
    type=LIFETIME,
    help="How long it is kept [default: the sandbox's setting]. The current snapshot never expires.",
)
_COMMENT = option("--comment", metavar="TEXT", help="What it is for; lists show it.")
_SILENT = option("--silent", is_flag=True, help="Do not print the snapshot.")


@command("snapshot", examples=[("for a week", "sandkeep snapshot --stop web --expiration 7d")])
@sandbox_argument()
@option("--stop", is_flag=True, help="Required: taking a snapshot stops the sandbox.")
@_EXPIRATION
@_COMMENT
@_SILENT
def snapshot(
    app: App, name: str, stop: bool, expiration: timedelta | None, comment: str | None, silent: bool
) -> None:
    """Take a snapshot of the files of a sandbox, and stop it."""
    if not stop:
        raise click.UsageError(
            f"this stops {name}: confirm with --stop, or use 'sandkeep checkpoint {name}', which lets it run"
        )
    with app.busy(f"Taking a snapshot of {name}"):
        taken = app.sandbox(name).snapshot(expiration=expiration, comment=comment)
    _taken(app, taken, silent=silent)


@command(
    "checkpoint",
    examples=[
        ("before something risky", "sandkeep checkpoint web --comment 'before the upgrade'"),
        ("try it in a copy", "sandkeep create --snapshot SNAPSHOT_ID"),
        ("or go back", "sandkeep rollback web SNAPSHOT_ID"),
    ],
)
@sandbox_argument()
@_EXPIRATION
@_COMMENT
@_SILENT
def checkpoint(app: App, name: str, expiration: timedelta | None, comment: str | None, silent: bool) -> None:
    """Take a snapshot of the files of a running sandbox, which pauses for a moment and runs on."""
    with app.busy(f"Taking a checkpoint of {name}"):
        taken = app.sandbox(name).checkpoint(expiration=expiration, comment=comment)
    _taken(app, taken, silent=silent)


def _taken(app: App, taken: Snapshot, *, silent: bool) -> None:
    if app.json:
        app.out.json(taken)
    elif not silent:
        app.out.line(taken.id)
        expires = f"expires {ago(taken.expires_at)}" if taken.expires_at else "never expires"
        app.note(f"  {size(taken.size_bytes)}, {expires}")


@command("rollback", examples=[("look at the snapshots first", "sandkeep snapshots tree web")])
@sandbox_argument()
@argument("snapshot", metavar="SNAPSHOT_ID", help="Snapshot to go back to.")
def rollback(app: App, name: str, snapshot: str) -> None:
    """Let the next session of a sandbox start from an earlier snapshot.

    A running session is stopped first. Nothing is lost: its changes are in the snapshot that the stop takes.
    """
    box = go_back(app, name, snapshot)
    if app.json:
        app.out.json({"name": name, "currentSnapshotId": box.current_snapshot_id})
    else:
        app.note(f"{name} starts from {box.current_snapshot_id} next time")


def go_back(app: App, name: str, snapshot: str) -> Sandbox:
    """Stop the sandbox and set its current snapshot; if the snapshot does not exist, nothing is stopped."""
    box = app.sandbox(name)
    with app.busy(f"Rolling back {name}"):
        return box.rollback(snapshot)


snapshots = Group(
    "snapshots",
    "List, inspect and delete snapshots.",
    aliases={"list": "ls", "delete": "rm"},
)


@command("ls", examples=[("of one sandbox", "sandkeep snapshots ls --name web")])
@option("--name", metavar="NAME", shell_complete=sandbox_names, help="Only snapshots of this sandbox.")
@paging
def ls(app: App, name: str | None, **values: Any) -> None:
    """List snapshots, newest first."""
    from sandkeep.sync import SnapshotQuery

    query = SnapshotQuery(sandbox=name, order=SortOrder(values["sort_order"] or "desc"))
    page = gathered(
        values,
        lambda size, cursor: app.client.query_snapshots(replace(query, page_size=size)).page(cursor),
    )
    paged(
        app,
        "snapshots",
        page,
        headers=("ID", "STATUS", "TAKEN", "SIZE", "EXPIRES", "HOW", "SOURCE SESSION", "PARENT", "COMMENT"),
        row=_row,
        empty="no snapshots",
    )
    total(app, values, page, _total)


def _total(found: Sequence[Snapshot]) -> str:
    """Return how many there are, and their size on disk together."""
    there = [each for each in found if each.status is SnapshotStatus.CREATED]
    return f"{len(there)} snapshots, {size(sum(each.size_bytes for each in there))}"


def _row(found: Snapshot) -> tuple[str, ...]:
    return (
        found.id,
        found.status.value,
        ago(found.created_at),
        _size(found),
        ago(found.expires_at) if found.expires_at else "never",
        found.method.value if found.method else "-",
        found.session_id,
        found.parent_id or "-",
        found.comment or "-",
    )


_SNAPSHOT = argument("snapshot", metavar="SNAPSHOT_ID", help="The snapshot.")


@command("get")
@_SNAPSHOT
def get(app: App, snapshot: str) -> None:
    """Show a snapshot, or the record of a deleted one."""
    found = app.client.get_snapshot(snapshot)
    if app.json:
        app.out.json(found)
        return
    app.out.fields(
        [
            ("Id", found.id),
            ("Status", found.status.value),
            ("Taken", f"{ago(found.created_at)}, {found.method.value if found.method else 'unknown'}"),
            ("Session", found.session_id),
            ("Size", _size(found)),
            ("Expires", ago(found.expires_at) if found.expires_at else "never"),
            ("Last used", ago(found.last_used_at)),
            ("Parent", found.parent_id or "-"),
            ("Comment", found.comment or "-"),
            ("On disk", f"since {ago(found.synced_at)}" if found.synced_at else "not yet"),
        ]
    )


@command("tree")
@sandbox_argument()
@option(
    "--descendants", is_flag=True, help="Show descendants of the current snapshot instead of its ancestors."
)
@option(
    "--sort-order",
    type=click.Choice(["asc", "desc"]),
    section=PAGING,
    help="asc is the same as --descendants.",
)
@option(
    "--limit",
    type=NumberType(1, 10),
    default=10,
    metavar="NUMBER",
    show_default=True,
    section=PAGING,
    help="How many to show, up to 10.",
)
@CURSOR
def tree(app: App, name: str, limit: int, cursor: str | None, **values: Any) -> None:
    """Show the current snapshot of a sandbox and its ancestors, newest first."""
    from sandkeep.sync import Page

    box = app.sandbox(name)
    if box.current_snapshot_id is None:
        raise NotFound(
            f"{name} has no snapshot yet",
            kind="snapshot",
            hint=f"'sandkeep checkpoint {name}' takes one, and so does 'sandkeep stop {name}'",
        )
    line = box.snapshot_tree(cursor, descendants=values["descendants"] or values["sort_order"] == "asc")
    # A cursor is the last snapshot of the page before.
    shown = line[1:] if cursor else line
    page = Page(tuple(shown[:limit]), shown[limit - 1].snapshot.id if len(shown) > limit else None)
    if app.json:
        nodes = [{"snapshot": node.snapshot, "siblings": node.siblings} for node in page.items]
        app.out.json({"snapshots": nodes, "next": page.next})
        return
    for index, node in enumerate(page.items):
        if index or cursor:
            app.out.line("│")
        app.out.line(_branch(app, node, current=node.snapshot.id == box.current_snapshot_id))
    more(app, page)


def _branch(app: App, node: SnapshotNode, *, current: bool) -> str:
    mark = app.out.paint("●", "green") if current else "○"
    words = [_brief(node.snapshot)]
    if current:
        words.append("(current)")
    lines = [f"{mark} {' '.join(words)}"]
    lines += [app.out.paint(f"├─○ {_brief(other)}", "dim") for other in node.siblings]
    return "\n".join(lines)


def _brief(found: Snapshot) -> str:
    how = f", {found.method.value}" if found.method else ""
    said = f"  {clean(found.comment)}" if found.comment else ""
    return f"{found.id}  {ago(found.created_at)}{how}, {_size(found)}{said}"


def _size(found: Snapshot) -> str:
    """Return the size, or ``-`` if it was not measured yet."""
    return "-" if found.synced_at is None and not found.size_bytes else size(found.size_bytes)


@command("rm")
@argument("snapshot", nargs=-1, required=True, metavar="SNAPSHOT_ID...", help="Snapshots to delete.")
def rm(app: App, snapshot: tuple[str, ...]) -> None:
    """Delete snapshots, even the current one of a sandbox."""
    remove_each(app, snapshot, app.client.delete_snapshot)


for each in (ls, get, tree, rm):
    snapshots.add_command(each)
