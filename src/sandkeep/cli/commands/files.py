"""``sandkeep cp`` and ``cat``: files and directories to and from a sandbox."""

from __future__ import annotations

import os
import posixpath
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from sandkeep.cli.app import App
from sandkeep.cli.completion import sandbox_paths
from sandkeep.cli.framework import argument, command, option
from sandkeep.cli.output import size
from sandkeep.errors import NotDirectory, PathNotFound

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox, Transferred


_CHUNK: Final = 1 << 18
_MANY_LINES: Final = 100_000
PATH: Final = "A local path, or NAME:PATH in a sandbox."


class Place(NamedTuple):
    """Source or target of a copy; ``sandbox`` is ``None`` for a local path."""

    sandbox: str | None
    path: str


def place(text: str) -> Place:
    """Parse ``name:path``, a path in a sandbox; with a slash before the colon it is a local path."""
    name, colon, path = text.partition(":")
    if colon and name and "/" not in name:
        return Place(name, path or ".")
    return Place(None, text)


@command(
    "cp",
    examples=[
        ("a file into a sandbox", "sandkeep cp notes.txt web:/tmp/"),
        ("a directory out of it", "sandkeep cp web:/var/log ./logs"),
        ("a file to standard output", "sandkeep cp web:report.txt - | less"),
        ("without some files", "sandkeep cp --ignore .git --ignore '*.pyc' . web:src"),
    ],
)
@argument("source", metavar="SOURCE", shell_complete=sandbox_paths, help=PATH)
@argument("target", metavar="TARGET", shell_complete=sandbox_paths, help=PATH)
@option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Leave out names, or paths below the directory, that match. Can be repeated.",
)
def cp(app: App, source: str, target: str, ignore: tuple[str, ...]) -> None:
    """Copy a file, or a directory with everything in it, to or from a sandbox.

    Paths in a sandbox are relative to its working directory unless they begin with a slash. If the target is
    a directory, or ends with a slash, the copy goes into it under its own name; otherwise the target is the
    name of the copy. Missing directories are created. Modes and links are kept, owners are not.

    '-' is standard input or standard output, for one file; './-' is a file of that name.
    """
    if not source or not target:
        raise click.UsageError(f"{'TARGET' if source else 'SOURCE'} is empty")
    here, there = place(source), place(target)
    if (here.sandbox is None) == (there.sandbox is None):
        side = "both are on this machine" if here.sandbox is None else "both are in sandboxes"
        raise click.UsageError(f"one of the two must be NAME:PATH and the other a local path; {side}")
    if "-" in (source, target):
        if ignore:
            raise click.UsageError("--ignore is for directories, and '-' is one file")
        _stream(app, here, there)
        return
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


@command(
    "cat",
    examples=[
        ("a file", "sandkeep cat web:report.txt"),
        ("lines 100 to 120", "sandkeep cat --lines 100-120 web:src/main.py"),
        ("the second kilobyte", "sandkeep cat --offset 1024 --length 1024 web:data.bin"),
    ],
)
@argument("source", metavar="NAME:PATH", shell_complete=sandbox_paths, help="A file in a sandbox.")
@option("--lines", metavar="FIRST-LAST", help="Only these lines, counted from 1; '20-' is the rest.")
@option("--offset", type=click.IntRange(min=0), metavar="BYTES", help="Begin at this byte.")
@option("--length", type=click.IntRange(min=0), metavar="BYTES", help="Print this many bytes at most.")
def cat(app: App, source: str, lines: str | None, offset: int | None, length: int | None) -> None:
    """Print a file of a sandbox, or a part of it.

    Only the part that is printed is sent.
    """
    where = place(source)
    if where.sandbox is None:
        raise click.UsageError(f"{source} is a local path; give NAME:PATH")
    if app.json:
        raise click.UsageError("--json and the file cannot both go to standard output")
    if lines is not None and (offset is not None or length is not None):
        raise click.UsageError("--lines is for lines, --offset and --length are for bytes: give one of them")
    box = app.sandbox(where.sandbox)
    if lines is not None:
        _print_lines(box, where.path, *_line_range(lines))
    else:
        _print_bytes(box, where.path, offset or 0, length)
    sys.stdout.buffer.flush()


def _line_range(text: str) -> tuple[int, int | None]:
    """Parse ``FIRST-LAST``, ``FIRST-`` or one line; return the first line and how many, ``None`` for all."""
    first, dash, last = text.partition("-")
    try:
        start = int(first)
        end = int(last) if last else (None if dash else start)
    except ValueError:
        start, end = 0, None
    if start < 1 or (end is not None and end < start):
        raise click.UsageError(f"--lines {text}: give FIRST-LAST, such as 10-20, or 10-")
    return start, None if end is None else end - start + 1


def _print_lines(box: Sandbox, path: str, start: int, left: int | None) -> None:
    next_start: int | None = start
    while next_start is not None and left != 0:
        limit = _MANY_LINES if left is None else min(left, _MANY_LINES)
        found = box.fs.read_lines(path, start=next_start, limit=limit, errors="surrogateescape")
        if found.cut:
            raise click.UsageError(
                f"line {found.start} is longer than 1 MiB: read it with --offset and --length"
            )
        sys.stdout.buffer.write(found.text.encode(errors="surrogateescape"))
        next_start = found.next_start
        left = None if left is None else left - found.count


def _print_bytes(box: Sandbox, path: str, offset: int, length: int | None) -> None:
    left = length
    with box.fs.open(path, "rb") as content:
        content.seek(offset)
        while left != 0:
            data = content.read(_CHUNK if left is None else min(left, _CHUNK))
            if not data:
                return
            sys.stdout.buffer.write(data)
            left = None if left is None else left - len(data)


def _stream(app: App, here: Place, there: Place) -> None:
    """Copy a file from standard input, or to standard output."""
    if here.sandbox is None:
        assert there.sandbox is not None
        box = app.sandbox(there.sandbox)
        if there.path.endswith("/") or _is_directory(box, there.path):
            raise click.UsageError(f"{there.path} is a directory: add the name of the copy")
        with box.fs.open(there.path, "wb") as copy:
            while data := os.read(sys.stdin.fileno(), _CHUNK):
                copy.write(data)
        return
    if app.json:
        raise click.UsageError("--json and the file cannot both go to standard output")
    with app.sandbox(here.sandbox).fs.open(here.path, "rb") as content:
        while data := content.read(_CHUNK):
            sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


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
        # Copy the content of "." and "/", not the directory itself.
        target = os.path.join(target, "" if name in ("", ".", "..") else name)
    found = box.fs.stat(source)
    total = found.size if found.is_file else None
    with app.bar(f"Fetching {source}") as bar:
        done = box.fs.download(
            source, target, ignore=ignore, progress=lambda at: bar.update(at.bytes, total, what=at.path)
        )
    return done, target


def _measure(path: str) -> int:
    """Return the number of bytes to send."""
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
