"""``sandkeep sync``: make a local directory and one of a sandbox alike."""

from __future__ import annotations

from typing import Any

import click

from sandkeep.cli.app import App
from sandkeep.cli.commands.files import PATH, place
from sandkeep.cli.completion import sandbox_paths
from sandkeep.cli.framework import argument, command, option
from sandkeep.cli.output import clean, plain, size


@command(
    "sync",
    examples=[
        ("send what differs", "sandkeep sync . web:src --ignore .git/ --ignore '*.pyc'"),
        ("fetch it, and delete what is gone there", "sandkeep sync web:src . --delete --ignore .git/"),
        ("see what would happen", "sandkeep sync . web:src --delete --dry-run"),
    ],
)
@argument("source", metavar="SOURCE", shell_complete=sandbox_paths, help=PATH)
@argument("target", metavar="TARGET", shell_complete=sandbox_paths, help=PATH)
@option("--delete", is_flag=True, help="Remove from the target what the source does not have.")
@option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Neither copy nor remove what matches, as in .gitignore. Can be repeated.",
)
@option(
    "--ignore-from",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Read such patterns from a file; those of --ignore come after them.",
)
@option("--checksum", is_flag=True, help="Compare the content of files instead of their times.")
@option("--dry-run", is_flag=True, help="Change nothing; print what would be copied (+) and removed (-).")
def sync(
    app: App,
    source: str,
    target: str,
    delete: bool,
    ignore: tuple[str, ...],
    ignore_from: str | None,
    checksum: bool,
    dry_run: bool,
) -> None:
    """Make a directory like another one, to or from a sandbox, by copying only what differs.

    The content of SOURCE goes into TARGET, which is created if it is missing. Files differ in size, time or
    permissions. Links are copied as links, and owners are not kept. Without --delete nothing is removed that
    the source does not have.

    In a pattern, '*' and '?' stand for a part of a name and '[a-z]' for a character; '/' at the beginning or
    in the middle ties it to the top of the directory, '/' at the end means directories only, '**' any number
    of directories, and '!' takes back an earlier pattern.
    """
    if not source or not target:
        raise click.UsageError(f"{'TARGET' if source else 'SOURCE'} is empty")
    here, there = place(source), place(target)
    if (here.sandbox is None) == (there.sandbox is None):
        side = "both are on this machine" if here.sandbox is None else "both are in sandboxes"
        raise click.UsageError(f"one of the two must be NAME:PATH and the other a local path; {side}")
    with app.bar(f"Comparing {source} and {target}") as bar:
        options: dict[str, Any] = {
            "delete": delete,
            "ignore": ignore,
            "ignore_from": ignore_from,
            "checksum": checksum,
            "dry_run": dry_run,
            "progress": lambda at: bar.update(at.bytes, what=at.path),
        }
        if here.sandbox is not None:
            done = app.sandbox(here.sandbox).fs.sync_from(here.path, there.path, **options)
        else:
            assert there.sandbox is not None
            done = app.sandbox(there.sandbox).fs.sync_to(here.path, there.path, **options)
    if app.json:
        app.out.json({"target": target, "dryRun": dry_run, **plain(done)})
        return
    if dry_run:
        for sign, names in (("-", done.deleted), ("+", done.copied)):
            for name in names:
                app.out.line(f"{sign} {clean(name)}")
    for name in done.left_out:
        app.note(f"{clean(name)}: a pipe, a socket or a device, not copied")
    would = "would be " if dry_run else ""
    app.note(
        f"{target}: {len(done.copied)} {would}copied, {size(done.bytes)}, "
        f"{len(done.deleted)} {would}removed, {done.unchanged} unchanged"
    )
