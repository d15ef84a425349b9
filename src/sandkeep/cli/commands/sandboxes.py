"""``sandkeep ls``, ``stop`` and ``rm``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import present
from sandkeep.cli.app import App
from sandkeep.cli.batch import collecting_errors, concurrently, confirm, print_results
from sandkeep.cli.framework import by_key, command, only_one, option, sandbox_argument
from sandkeep.cli.listing import NAME_PREFIX, gathered, paged, paging, total
from sandkeep.cli.output import ago, pairs, size, span
from sandkeep.cli.values import TAG
from sandkeep.states import SessionStatus, SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import SandboxInfo, Stopped, Usage

_SORTS = {"createdAt": "SandboxQueryByCreated", "statusUpdatedAt": "SandboxQueryByStatusUpdated"}


@command(
    "ls",
    examples=[
        ("also stopped sandboxes", "sandkeep ls --all"),
        ("by tag", "sandkeep ls --all --tag env=staging --tag team=web"),
        ("names only, for a script", "sandkeep ls --all -q"),
    ],
)
@option("-a", "--all", "everything", is_flag=True, help="Also list sandboxes that do not run.")
@NAME_PREFIX
@option(
    "--tag",
    type=TAG,
    multiple=True,
    callback=by_key,
    help="Only sandboxes with this tag; repeated: with all of these.",
)
@option(
    "--sort-by",
    type=click.Choice(["createdAt", "name", "statusUpdatedAt"]),
    help="[default: createdAt, or name with --name-prefix]",
)
@paging
def ls(app: App, **values: Any) -> None:
    """List the running sandboxes, or all."""
    from sandkeep import sync

    prefix, sort = values["name_prefix"], values["sort_by"]
    if prefix and sort not in (None, "name"):
        raise click.UsageError("--name-prefix sorts by name")
    given: dict[str, Any] = {"tags": values["tag"]}
    if values["sort_order"]:
        given["order"] = SortOrder(values["sort_order"])
    if not values["everything"]:
        given["status"] = SessionStatus.RUNNING
    query: sync.SandboxQuery
    if prefix or sort == "name":
        query = sync.SandboxQueryByName(prefix=prefix or "", **given)
    else:
        query = getattr(sync, _SORTS[sort or "createdAt"])(**given)
    page = gathered(
        values,
        lambda size, cursor: app.client.query_sandboxes(replace(query, page_size=size)).page(cursor),
    )
    narrowed = prefix or values["tag"]
    paged(
        app,
        "sandboxes",
        page,
        headers=("NAME", "STATUS", "CREATED", "IMAGE", "CPUS", "MEMORY", "TIMEOUT", "EXPIRES", "TAGS"),
        row=lambda box: (
            box.name,
            box.status.value if box.damage is None else f"{box.status.value}, damaged",
            ago(box.created_at),
            box.image or box.runtime or "-",
            str(box.resources.cpus),
            f"{box.resources.memory_mb} MB",
            span(box.execution_time_limit),
            ago(box.expires_at),
            pairs(box.tags),
        ),
        json=present.sandbox,
        empty=_none(everything=values["everything"], narrowed=bool(narrowed or values["cursor"])),
    )
    total(app, values, page, _total)


def _total(boxes: Sequence[SandboxInfo]) -> str:
    """Return how many there are, and the resources of those that run."""
    running = [box for box in boxes if not box.status.is_final]
    text = f"{len(boxes)} sandboxes, {len(running)} running"
    if running:
        text += f" with {present.resources(*(box.resources for box in running))}"
    return text


def _none(*, everything: bool, narrowed: bool) -> str:
    if narrowed:
        return "no such sandbox" if everything else "no such sandbox runs; --all also looks at stopped ones"
    if everything:
        return "no sandboxes; 'sandkeep create --name NAME' creates one"
    return "no sandbox runs; 'sandkeep ls --all' also lists stopped ones"


@command("stop", examples=[("two at once", "sandkeep stop web api")])
@sandbox_argument(nargs=-1, required=True, help="Sandboxes to stop.")
def stop(app: App, name: tuple[str, ...]) -> None:
    """Stop sandboxes. The files of persistent ones are kept in a snapshot.

    Prints the resources and the usage of the session and of all sessions together, and the snapshot, its size
    and when it expires.
    """
    results: list[dict[str, Any]] = []
    for each in dict.fromkeys(name):
        with collecting_errors(results, each) as result:
            with app.busy(f"Stopping {each}"):
                box = app.sandbox(each)
                stopped = box.stop()
            result["session"], result["snapshot"] = stopped.session, stopped.snapshot
            result["total"] = box.usage
            if not app.json:
                app.out.line(each)
                for line in _summary(stopped, box.usage):
                    app.note(f"  {line}")
    print_results(app, results)


def _summary(stopped: Stopped, usage: Usage) -> Iterator[str]:
    """Describe the usage of a session and of all sessions, and the snapshot that was taken."""
    session, taken = stopped.session, stopped.snapshot
    if session.usage is not None:
        yield f"{present.usage(session.usage)}, with {present.resources(session.resources)}"
        if usage != session.usage:
            yield f"all its sessions: {present.usage(usage)}"
    if taken is not None:
        expires = f"expires {ago(taken.expires_at)}" if taken.expires_at else "never expires"
        yield f"files are kept in {taken.id}: {size(taken.size_bytes)}, {expires}"


@command(
    "rm",
    examples=[
        ("with its snapshots", "sandkeep rm web --delete-orphan-snapshots"),
        ("by tag, without confirmation", "sandkeep rm --tag env=staging --yes"),
    ],
)
@sandbox_argument(nargs=-1, required=False, help="Sandboxes to remove.")
@option("-a", "--all", "everything", is_flag=True, help="Remove all sandboxes of the project.")
@option(
    "--tag",
    type=TAG,
    multiple=True,
    callback=by_key,
    help="Remove all with this tag; repeated: all with all of these.",
)
@option(
    "--prefix",
    "--name-prefix",
    "prefix",
    metavar="PREFIX",
    multiple=True,
    callback=only_one,
    help="Remove all whose names begin with this.",
)
@option("-y", "--yes", is_flag=True, help="Do not ask before removing what --all, --tag and --prefix select.")
@option(
    "--delete-orphan-snapshots",
    is_flag=True,
    help="Delete their snapshots too, except those that other sandboxes use.",
)
def rm(app: App, name: tuple[str, ...], delete_orphan_snapshots: bool, yes: bool, **found: Any) -> None:
    """Remove sandboxes for good, even running ones. Their names can be used again afterwards.

    Their snapshots are kept until they expire, and other sandboxes can start from them, unless
    --delete-orphan-snapshots is given.
    """
    if name and any(found.values()):
        raise click.UsageError("give names, or --all, --tag or --prefix")
    names = list(dict.fromkeys(name)) or _found(app, yes=yes, **found)

    def remove(each: str) -> bool:
        box = app.sandbox(each)
        box.destroy(delete_snapshots=delete_orphan_snapshots)
        return box.current_snapshot_id is not None and not delete_orphan_snapshots

    results: list[dict[str, Any]] = []
    kept = 0
    for each, removed in zip(names, concurrently(app, "Removing", names, remove), strict=True):
        with collecting_errors(results, each) as result:
            kept += removed()
            result["removed"] = True
            if not app.json:
                app.out.line(each)
    if kept and not app.json:
        app.note(
            "  snapshots are kept until they expire: 'sandkeep snapshots ls' lists them, "
            "'sandkeep rm --delete-orphan-snapshots' deletes them too"
        )
    print_results(app, results)


def _found(app: App, *, everything: bool, tag: dict[str, str], prefix: str | None, yes: bool) -> list[str]:
    """Return the names to remove, after the user has confirmed."""
    from sandkeep.sync import SandboxQueryByName

    if not (everything or tag or prefix):
        raise click.UsageError("say what to remove: names, --all, --tag or --prefix")
    query = SandboxQueryByName(prefix=prefix or "", tags=tag, page_size=100)
    names = [box.name for box in app.client.query_sandboxes(query)]
    if not names:
        app.note("no such sandbox" if tag or prefix else "no sandboxes")
    elif not yes:
        some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        confirm(f"remove {len(names)} sandbox{'es' if len(names) > 1 else ''} for good ({some})")
    return names
