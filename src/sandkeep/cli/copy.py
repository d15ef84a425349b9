"""``sandkeep cp``: files and trees, to and from a sandbox."""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sandkeep.cli.framework import App, argument, command, option
from sandkeep.cli.output import size
from sandkeep.errors import NotDirectory, PathNotFound

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox, Transferred


class Place(NamedTuple):
    """One side of a copy; ``sandbox`` is ``None`` here on this machine."""

    sandbox: str | None
    path: str


def place(text: str) -> Place:
    """``name:path`` is in a sandbox; anything with a slash before the colon is a path here."""
    name, colon, path = text.partition(":")
    if colon and name and "/" not in name:
        return Place(name, path or ".")
    return Place(None, text)


def _places(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from sandkeep.cli.completion import places

    return places(ctx, param, incomplete)


@command(
    "cp",
    examples=[
        ("a file into a sandbox", "sandkeep cp notes.txt web:/tmp/"),
        ("a directory out of it", "sandkeep cp web:/var/log ./logs"),
        ("without what need not be there", "sandkeep cp --ignore .git --ignore '*.pyc' . web:src"),
    ],
)
@argument("source", metavar="SOURCE", shell_complete=_places, help="A path here, or NAME:PATH in a sandbox.")
@argument("target", metavar="TARGET", shell_complete=_places, help="A path here, or NAME:PATH in a sandbox.")
@option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Leave out names or paths below the directory that match. Can be repeated.",
)
def cp(app: App, source: str, target: str, ignore: tuple[str, ...]) -> None:
    """Copy a file, or a directory with everything in it, to or from a sandbox.

    Paths in a sandbox start in its working directory unless they begin with a slash. When the target is a
    directory, or ends with a slash, the copy goes into it under its own name; otherwise the target is the
    name of the copy. Directories it needs are made. Modes and links are kept, owners are not.
    """
    if not source or not target:
        raise click.UsageError(f"{'TARGET' if source else 'SOURCE'} is empty")
    here, there = place(source), place(target)
    if (here.sandbox is None) == (there.sandbox is None):
        side = "both are on this machine" if here.sandbox is None else "both are in sandboxes"
        raise click.UsageError(f"one side has to be NAME:PATH and the other a path here; {side}")
    if here.sandbox is None:
        assert there.sandbox is not None
        done, path = _upload(app, app.sandbox(there.sandbox), here.path, there.path, ignore)
        shown = f"{there.sandbox}:{path}"
    else:
        done, shown = _download(app, app.sandbox(here.sandbox), here.path, there.path, ignore)
    if app.json:
        app.out.json({"target": shown, "files": done.files, "bytes": done.bytes})
    else:
        files = f"{done.files} file{'' if done.files == 1 else 's'}"
        app.note(f"{shown}: {files}, {size(done.bytes)}")


def _upload(
    app: App, box: Sandbox, source: str, target: str, ignore: tuple[str, ...]
) -> tuple[Transferred, str]:
    total = _measure(source)
    if target.endswith("/") or _is_directory(box, target):
        target = posixpath.normpath(posixpath.join(target, os.path.basename(os.path.abspath(source))))
    with app.bar(f"Sending {source}") as bar:
        done = box.fs.upload(
            source, target, ignore=ignore, progress=lambda at: bar.update(at.bytes, total, what=at.path)
        )
    return done, target


def _download(
    app: App, box: Sandbox, source: str, target: str, ignore: tuple[str, ...]
) -> tuple[Transferred, str]:
    if target.endswith("/") or os.path.isdir(target):
        name = posixpath.basename(posixpath.normpath(source))
        # What "." and "/" are called is not for the copy to have; it is their content that is wanted.
        target = os.path.join(target, "" if name in ("", ".", "..") else name)
    found = box.fs.stat(source)
    total = found.size if found.is_file else None
    with app.bar(f"Fetching {source}") as bar:
        done = box.fs.download(
            source, target, ignore=ignore, progress=lambda at: bar.update(at.bytes, total, what=at.path)
        )
    return done, target


def _measure(path: str) -> int:
    """Bytes to send."""
    info = os.stat(path)
    if not os.path.isdir(path):
        return info.st_size
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            total += os.lstat(os.path.join(directory, name)).st_size
    return total


def _is_directory(box: Sandbox, path: str) -> bool:
    try:
        return box.fs.stat(path).is_dir
    except (PathNotFound, NotDirectory):
        return False
