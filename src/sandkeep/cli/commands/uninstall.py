"""``sandkeep uninstall``: remove the data directory and everything that runs in it."""

from __future__ import annotations

from sandkeep.cli.app import App
from sandkeep.cli.batch import confirm
from sandkeep.cli.framework import command, option
from sandkeep.paths import data_directory

_MEASURE_SECONDS = 10.0


@command(
    "uninstall",
    connection=False,
    examples=[
        ("show what it removes, and ask", "sandkeep uninstall"),
        ("the data of a server", "sandkeep uninstall --data-dir /srv/sandkeep --yes"),
    ],
)
@option("-y", "--yes", is_flag=True, help="Do not ask.")
def uninstall(app: App, yes: bool) -> None:
    """Remove all sandkeep data from this machine: all sandboxes, snapshots, drives and images.

    Stops running sandboxes and the server, and deletes the data directory, including files of subordinate
    ids, which 'rm -rf' may not be allowed to delete. Works even if the server cannot start, or if half of the
    directory is gone. Refuses a directory that contains other files. Disable a service that runs the server
    first; remove the program itself the way it was installed.
    """
    from sandkeep.cli.holdings import holdings, summary
    from sandkeep.host import datadir
    from sandkeep.host.uninstall import uninstall as remove

    directory = data_directory(app.data_dir)
    there = datadir.check(directory)
    found = holdings(directory, seconds=_MEASURE_SECONDS) if there else None
    if found is not None and not yes:
        confirm(f"delete {directory} for good: {summary(found)}")
    with app.busy(f"Removing {directory}") as doing:
        stays = remove(directory, doing=doing)
    if app.json:
        app.out.json(
            {"dataDirectory": directory, "removed": there, "empty": stays is not None, **(found or {})}
        )
        return
    if found is None:
        app.note(f"there is no sandkeep data at {directory}")
        return
    app.out.line(f"removed {directory}: {summary(found)}")
    if stays is not None:
        app.note(f"  the empty directory stays ({stays}); remove it as a user who may")
