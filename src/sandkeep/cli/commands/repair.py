"""``sandkeep repair``: find damage and repair it where possible."""

from __future__ import annotations

import asyncio

from sandkeep.cli.app import App
from sandkeep.cli.exit_status import FAILED, Ended
from sandkeep.cli.framework import command, option, sandbox_argument
from sandkeep.paths import data_directory


@command(
    "repair",
    examples=[
        ("all sandboxes", "sandkeep repair"),
        ("go back to the newest intact snapshot", "sandkeep repair web --use-older"),
        ("recover a data directory whose store is lost", "sandkeep repair --adopt"),
    ],
)
@sandbox_argument(required=False, help="The sandbox [default: all]")
@option("--use-older", is_flag=True, help="Roll damaged sandboxes back to their newest intact snapshot.")
@option("--drop", is_flag=True, help="Delete snapshots that cannot be read and that no sandbox starts from.")
@option(
    "--adopt",
    is_flag=True,
    help="Recover what is missing in the store of the data directory. No server may run on it.",
)
def repair(app: App, name: str | None, use_older: bool, drop: bool, adopt: bool) -> None:
    """Look for damage, repair what can be repaired, and print what is left.

    Records of sessions and layers are restored from their copies and from the store. Without --drop nothing
    is deleted, and without --use-older no sandbox goes back to older files. A damaged sandbox can always be
    removed with 'sandkeep rm'. Exit status 1 if damage is left.
    """
    if adopt:
        _adopt(app)
        return
    report = app.client.repair(name, use_older=use_older, drop=drop)
    if app.json:
        app.out.json(report)
    else:
        for line in report.done:
            app.out.line(f"repaired: {line}")
        for item in report.left:
            app.out.line(f"damaged: {item.sandbox}: {item.why}")
            if item.older_snapshot_id is not None:
                app.note(f"  '--use-older' goes back to snapshot {item.older_snapshot_id}")
            else:
                app.note(
                    "  none of its snapshots is intact; restore the layer from a backup, or 'sandkeep rm'"
                )
        if not report.done and not report.left:
            app.note("nothing is damaged")
    if report.left:
        raise Ended(FAILED)


def _adopt(app: App) -> None:
    from sandkeep.server.adopting import adopt

    found = asyncio.run(adopt(data_directory(app.data_dir)))
    if app.json:
        app.out.json([{"kind": each.kind, "name": each.name, "found": each.found} for each in found])
    elif found:
        app.out.table(("KIND", "NAME", "FOUND"), [(each.kind, each.name, each.found) for each in found])
    else:
        app.note("nothing is missing in the store")
