"""``sandkeep drives``: named filesystems of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandkeep.cli.framework import App, Group, argument, command, finish, option, several
from sandkeep.cli.listing import paged, paging
from sandkeep.cli.options import region
from sandkeep.cli.output import ago, size
from sandkeep.cli.values import SIZE
from sandkeep.types import SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import Drive, DriveQuery

drives = Group(
    "drives",
    "Manage drives: filesystems of their own, which sandboxes mount with --mount.",
    aliases={"list": "ls", "delete": "rm"},
)


@command("ls")
@option("--name-prefix", metavar="PREFIX", help="Only names that begin so; sorts by name.")
@paging
def ls(app: App, name_prefix: str | None, **values: Any) -> None:
    """List drives."""
    from sandkeep.sync import DriveQueryByCreated, DriveQueryByName

    given: dict[str, Any] = {"page_size": values["limit"]}
    if values["sort_order"]:
        given["order"] = SortOrder(values["sort_order"])
    query: DriveQuery
    query = DriveQueryByName(prefix=name_prefix, **given) if name_prefix else DriveQueryByCreated(**given)
    paged(
        app,
        "drives",
        app.client.query_drives(query).page(values["cursor"]),
        headers=("NAME", "CREATED", "CHANGED", "MAX SIZE", "USED BY"),
        row=lambda drive: (
            drive.name,
            ago(drive.created_at),
            ago(drive.updated_at),
            size(drive.max_size_bytes),
            drive.sandbox or "-",
        ),
        empty="no drives; 'sandkeep drives get-or-create NAME' makes one",
    )


@command(
    "get-or-create",
    examples=[("and use it", "sandkeep run --mount cache:/cache -- ls /cache")],
)
@argument("name", metavar="NAME", help="The drive.")
@option("--max-size", type=SIZE, help="How large a new one may become, such as 10G.")
@region
def get_or_create(app: App, name: str, max_size: int | None, region: str | None) -> None:
    """Create a drive, if there is none of that name."""
    _show(app, app.client.get_or_create_drive(name, max_size_bytes=max_size))


@command("fork")
@argument("source", metavar="SOURCE", help="The drive to copy.")
@argument("name", metavar="NAME", help="The new drive.")
def fork(app: App, source: str, name: str) -> None:
    """Make a new drive with the content another one has now."""
    _show(app, app.client.fork_drive(source, name))


@command("rm")
@argument("name", nargs=-1, required=True, metavar="NAME...", help="Drives to delete.")
def rm(app: App, name: tuple[str, ...]) -> None:
    """Delete drives and everything on them."""
    results: list[dict[str, Any]] = []
    for each in dict.fromkeys(name):
        with several(app, results, each) as result:
            app.client.delete_drive(each)
            result["removed"] = True
            if not app.json:
                app.out.line(each)
    finish(app, results)


def _show(app: App, drive: Drive) -> None:
    if app.json:
        app.out.json(drive)
    else:
        app.out.line(drive.name)
        app.note(f"  up to {size(drive.max_size_bytes)}, made {ago(drive.created_at)}")


for each in (ls, get_or_create, fork, rm):
    drives.add_command(each)
