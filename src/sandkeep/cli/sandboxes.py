"""``sandkeep ls``, ``stop`` and ``rm``."""

from __future__ import annotations

from typing import Any

import click

from sandkeep.cli import show
from sandkeep.cli.framework import App, command, finish, option, sandbox_argument, several
from sandkeep.cli.listing import paged, paging
from sandkeep.cli.output import ago, pairs, size, span
from sandkeep.cli.values import TAG
from sandkeep.types import SessionStatus, SortOrder

_SORTS = {"createdAt": "SandboxQueryByCreated", "statusUpdatedAt": "SandboxQueryByStatusUpdated"}


@command(
    "ls",
    examples=[
        ("also those that are stopped", "sandkeep ls --all"),
        ("by label", "sandkeep ls --all --tag env=staging"),
        ("names only, for a script", "sandkeep ls --all --json | jq -r '.sandboxes[].name'"),
    ],
)
@option("-a", "--all", "everything", is_flag=True, help="Also those that do not run.")
@option("--name-prefix", metavar="PREFIX", help="Only names that begin so; sorts by name.")
@option("--tag", type=TAG, help="Only those with this label.")
@option(
    "--sort-by",
    type=click.Choice(["createdAt", "name", "statusUpdatedAt"]),
    help="[default: createdAt, or name with --name-prefix]",
)
@paging
def ls(app: App, **values: Any) -> None:
    """List sandboxes: those that run, or all."""
    from sandkeep import sync

    prefix, sort = values["name_prefix"], values["sort_by"]
    if prefix and sort not in (None, "name"):
        raise click.UsageError("--name-prefix sorts by name")
    given: dict[str, Any] = {"page_size": values["limit"], "tag": values["tag"]}
    if values["sort_order"]:
        given["order"] = SortOrder(values["sort_order"])
    if not values["everything"]:
        given["status"] = SessionStatus.RUNNING
    query: sync.SandboxQuery
    if prefix or sort == "name":
        query = sync.SandboxQueryByName(prefix=prefix or "", **given)
    else:
        query = getattr(sync, _SORTS[sort or "createdAt"])(**given)
    page = app.client.query_sandboxes(query).page(values["cursor"])
    narrowed = prefix or values["tag"]
    paged(
        app,
        "sandboxes",
        page,
        headers=("NAME", "STATUS", "CREATED", "IMAGE", "VCPUS", "TIMEOUT", "EXPIRES", "TAGS"),
        row=lambda box: (
            box.name,
            box.status.value,
            ago(box.created_at),
            box.image or box.runtime or "-",
            str(box.resources.vcpus),
            span(box.execution_time_limit),
            ago(box.expires_at),
            pairs(box.tags),
        ),
        json=show.sandbox,
        empty=_none(everything=values["everything"], narrowed=bool(narrowed or values["cursor"])),
    )


def _none(*, everything: bool, narrowed: bool) -> str:
    if narrowed:
        return (
            "no such sandbox" if everything else "no such sandbox runs; --all looks at those that are stopped"
        )
    if everything:
        return "no sandboxes; 'sandkeep create --name NAME' makes one"
    return "no sandbox runs; 'sandkeep ls --all' shows those that are stopped"


@command("stop", examples=[("two at once", "sandkeep stop web api")])
@sandbox_argument(nargs=-1, required=True, help="Sandboxes to stop.")
def stop(app: App, name: tuple[str, ...]) -> None:
    """Stop sandboxes. The files of persistent ones are kept in a snapshot.

    Prints what the session used and the snapshot that was taken.
    """
    results: list[dict[str, Any]] = []
    for each in dict.fromkeys(name):
        with several(app, results, each) as result:
            with app.busy(f"Stopping {each}"):
                stopped = app.sandbox(each).stop()
            result["session"], result["snapshot"] = stopped.session, stopped.snapshot
            if not app.json:
                app.out.line(each)
                usage = stopped.session.usage
                if usage is not None:
                    app.note(
                        f"  ran {span(usage.duration)}, {span(usage.cpu)} of processor time, "
                        f"received {size(usage.ingress_bytes)}, sent {size(usage.egress_bytes)}"
                    )
                if stopped.snapshot is not None:
                    taken = stopped.snapshot
                    app.note(f"  files are kept in {taken.id}")
    finish(app, results)


@command(
    "rm",
    examples=[
        ("with its snapshots", "sandkeep rm web --delete-orphan-snapshots"),
    ],
)
@sandbox_argument(nargs=-1, required=True, help="Sandboxes to remove.")
@option(
    "--delete-orphan-snapshots",
    is_flag=True,
    help="Delete their snapshots too, except those another sandbox uses.",
)
def rm(app: App, name: tuple[str, ...], delete_orphan_snapshots: bool) -> None:
    """Remove sandboxes for good, also running ones. Their names are free afterwards.

    Their snapshots stay, and others can start from them, unless they are to be deleted too.
    """
    results: list[dict[str, Any]] = []
    for each in dict.fromkeys(name):
        with several(app, results, each) as result:
            with app.busy(f"Removing {each}"):
                app.sandbox(each).destroy(delete_snapshots=delete_orphan_snapshots)
            result["removed"] = True
            if not app.json:
                app.out.line(each)
    finish(app, results)
