"""``sandkeep drives``: named filesystems that sandboxes mount."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandkeep.cli.app import App
from sandkeep.cli.batch import remove_each
from sandkeep.cli.framework import Group, argument, command, option
from sandkeep.cli.listing import NAME_PREFIX, gathered, paged, paging
from sandkeep.cli.options import region
from sandkeep.cli.output import ago, size
from sandkeep.cli.values import SIZE
from sandkeep.states import SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import Drive, DriveQuery

drives = Group(
    "drives",
    "Manage drives: named filesystems that sandboxes mount with --mount.",
    aliases={"list": "ls", "delete": "rm"},
)


@command("ls")
@NAME_PREFIX
@paging
def ls(app: App, name_prefix: str | None, **values: Any) -> None:
    """List drives."""
    from sandkeep.sync import DriveQueryByCreated, DriveQueryByName

    given: dict[str, Any] = {}
    if values["sort_order"]:
        given["order"] = SortOrder(values["sort_order"])
    query: DriveQuery
    query = DriveQueryByName(prefix=name_prefix, **given) if name_prefix else DriveQueryByCreated(**given)
    paged(
        app,
        "drives",
        gathered(
            values,
            lambda size, cursor: app.client.query_drives(replace(query, page_size=size)).page(cursor),
        ),
        headers=("NAME", "CREATED", "CHANGED", "MAX SIZE", "USED BY"),
        row=lambda drive: (
            drive.name,
            ago(drive.created_at),
            ago(drive.updated_at),
            size(drive.max_size_bytes),
            drive.sandbox or "-",
        ),
        empty="no drives; 'sandkeep drives get-or-create NAME' creates one",
    )


@command(
    "get-or-create",
    examples=[("and use it", "sandkeep run --mount cache:/cache -- ls /cache")],
)
@argument("name", metavar="NAME", help="The drive.")
@option("--max-size", type=SIZE, help="Maximum size of a new drive, such as 10G.")
@region
def get_or_create(app: App, name: str, max_size: int | None, region: str | None) -> None:
    """Create a drive, unless one of that name exists."""
    _show(app, app.client.get_or_create_drive(name, max_size_bytes=max_size))


@command("fork")
@argument("source", metavar="SOURCE", help="The drive to copy.")
@argument("name", metavar="NAME", help="The new drive.")
def fork(app: App, source: str, name: str) -> None:
    """Create a drive with the content that ended sessions left on another."""
    _show(app, app.client.fork_drive(source, name))


@command("rm")
@argument("name", nargs=-1, required=True, metavar="NAME...", help="Drives to delete.")
def rm(app: App, name: tuple[str, ...]) -> None:
    """Delete drives and everything on them."""
    remove_each(app, name, app.client.delete_drive)


def _show(app: App, drive: Drive) -> None:
    if app.json:
        app.out.json(drive)
    else:
        app.out.line(drive.name)
        app.note(f"  up to {size(drive.max_size_bytes)}, created {ago(drive.created_at)}")


for each in (ls, get_or_create, fork, rm):
    drives.add_command(each)
