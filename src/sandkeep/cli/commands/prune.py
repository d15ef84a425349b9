"""``sandkeep prune``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sandkeep.cli.app import App
from sandkeep.cli.batch import collecting_errors, concurrently, confirm, print_results
from sandkeep.cli.framework import by_key, command, only_one, option
from sandkeep.cli.output import ago, size
from sandkeep.cli.values import LIFETIME, TAG

if TYPE_CHECKING:
    from sandkeep.sync import SandboxInfo, Snapshot


@command(
    "prune",
    examples=[
        ("what would go", "sandkeep prune --dry-run"),
        ("stopped for a day, of one run", "sandkeep prune --older-than 1d --tag run=7 --yes"),
    ],
)
@option(
    "--older-than",
    type=LIFETIME,
    default="7d",
    show_default=True,
    help="Only sandboxes that stopped, and snapshots that were taken, longer ago than this.",
)
@option(
    "--tag",
    type=TAG,
    multiple=True,
    callback=by_key,
    help="Only sandboxes with this tag; repeated: with all of these.",
)
@option(
    "--prefix",
    "--name-prefix",
    "prefix",
    metavar="PREFIX",
    multiple=True,
    callback=only_one,
    help="Only sandboxes whose names begin with this.",
)
@option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@option("-y", "--yes", is_flag=True, help="Do not ask before removing.")
def prune(app: App, older_than: timedelta, dry_run: bool, yes: bool, **values: Any) -> None:
    """Remove stopped sandboxes with their snapshots, and snapshots of sandboxes that no longer exist.

    A sandbox that runs stays, also if it was started a moment ago, and so does a snapshot that a sandbox
    starts from. With --tag or --prefix only sandboxes are removed, with their snapshots.
    """
    before = datetime.now(UTC) - older_than
    boxes = _stopped(app, before, values["tag"], values["prefix"])
    snapshots = [] if values["tag"] or values["prefix"] else _orphaned(app, before)
    if not boxes and not snapshots:
        if app.json:
            app.out.json([])
        app.note("nothing to remove")
        return
    if dry_run:
        _show(app, boxes, snapshots)
        return
    if not yes:
        confirm(f"remove {_counted(boxes, snapshots)} for good")
    _remove(app, boxes, snapshots)


def _stopped(app: App, before: datetime, tags: dict[str, str], prefix: str | None) -> list[SandboxInfo]:
    from sandkeep.sync import SandboxQueryByName

    query = SandboxQueryByName(prefix=prefix or "", tags=tags, page_size=100)
    found = app.client.query_sandboxes(query)
    return [box for box in found if box.status.is_final and box.status_updated_at <= before]


def _orphaned(app: App, before: datetime) -> list[Snapshot]:
    from sandkeep.sync import SnapshotQuery

    found = app.client.query_snapshots(SnapshotQuery(orphaned=True, page_size=100))
    return [snapshot for snapshot in found if snapshot.created_at <= before]


def _counted(boxes: Sequence[SandboxInfo], snapshots: Sequence[Snapshot]) -> str:
    parts = []
    if boxes:
        parts.append(f"{len(boxes)} stopped sandbox{'es' if len(boxes) > 1 else ''}")
    if snapshots:
        held = size(sum(snapshot.size_bytes for snapshot in snapshots))
        parts.append(f"{len(snapshots)} snapshot{'s' if len(snapshots) > 1 else ''} of {held}")
    return " and ".join(parts)


def _show(app: App, boxes: Sequence[SandboxInfo], snapshots: Sequence[Snapshot]) -> None:
    if app.json:
        app.out.json([{"name": name, "removed": False} for name in _names(boxes, snapshots)])
        return
    if app.quiet:
        for name in _names(boxes, snapshots):
            app.out.line(name)
        return
    rows = [("sandbox", box.name, f"stopped {ago(box.status_updated_at)}") for box in boxes]
    rows += [("snapshot", each.id, f"taken {ago(each.created_at)}") for each in snapshots]
    app.out.table(("WHAT", "NAME", "SINCE"), rows)
    app.note(f"\nwould remove {_counted(boxes, snapshots)}")


def _names(boxes: Sequence[SandboxInfo], snapshots: Sequence[Snapshot]) -> list[str]:
    return [box.name for box in boxes] + [snapshot.id for snapshot in snapshots]


def _remove(app: App, boxes: Sequence[SandboxInfo], snapshots: Sequence[Snapshot]) -> None:
    sandboxes = {box.name for box in boxes}

    def remove(name: str) -> None:
        if name in sandboxes:
            app.sandbox(name).destroy(only_stopped=True)
        else:
            app.client.delete_snapshot(name)

    results: list[dict[str, Any]] = []
    names = _names(boxes, snapshots)
    for each, removed in zip(names, concurrently(app, "Removing", names, remove), strict=True):
        with collecting_errors(results, each) as result:
            removed()
            result["removed"] = True
            if not app.json:
                app.out.line(each)
    print_results(app, results)
