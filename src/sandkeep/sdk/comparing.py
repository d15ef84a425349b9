"""What differs between a local tree and one of a sandbox, and so has to be copied or removed. Blocking."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from sandkeep.checks import expect, refuse
from sandkeep.errors import PathExists
from sandkeep.sdk.local import local_kind
from sandkeep.shared.ignoring import Ignore
from sandkeep.states import FileKind

_COPIED: Final = frozenset({FileKind.FILE, FileKind.DIRECTORY, FileKind.SYMLINK})
_TICK: Final = 100
"""Times are compared in units of so many nanoseconds: not every system keeps each of them."""
_HAS_MODES: Final = os.name != "nt"
_PERMISSIONS: Final = 0o777
_DIGEST_BYTES: Final = 32
_CHUNK: Final = 1 << 20


class SyncEntry(NamedTuple):
    """One entry of a tree."""

    kind: FileKind
    size: int
    mode: int
    mtime_ns: int
    target: str | None = None
    digest: str | None = None
    unreadable: bool = False


Entries = dict[str, SyncEntry]
"""The entries of a tree by their paths relative to it."""


class SyncPlan(NamedTuple):
    """What makes the target of a sync like its source."""

    copy: list[str]
    """Entries to create or replace, directories before what is in them."""
    remove: list[str]
    """Entries to remove before that, what is in a directory before the directory."""
    in_the_way: frozenset[str]
    """Those of them that must go because something of another kind takes their place."""
    unchanged: int
    left_out: list[str]
    bytes: int


def read_patterns(ignore: Iterable[str], ignore_from: str | os.PathLike[str] | None) -> list[str]:
    """Return the patterns of a file, then those given; check all of them."""
    if isinstance(ignore, str):
        refuse("ignore", "must be a sequence of patterns, not one text")
    patterns: list[str] = []
    if ignore_from is not None:
        with open(ignore_from, encoding="utf-8", errors="surrogateescape") as lines:
            patterns += (line.rstrip("\r\n") for line in lines)
        patterns = [line for line in patterns if line.strip() and not line.startswith("#")]
    for pattern in ignore:
        expect("ignore", pattern, str, "a sequence of patterns")
        patterns.append(pattern)
    Ignore(patterns)
    return patterns


def scan(root: str, patterns: Iterable[str]) -> Entries:
    """Return the entries of a local tree. Links are not followed.

    Raises:
        OSError: the tree, or a directory in it, cannot be read.
    """
    ignore = Ignore(patterns)
    found: Entries = {}
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(os.path.join(root, below) if below else root) as entries:
            for entry in entries:
                path = below + entry.name
                try:
                    info = entry.stat(follow_symlinks=False)
                    directory = stat.S_ISDIR(info.st_mode)
                    if ignore(path, directory=directory):
                        continue
                    target = os.readlink(entry.path) if stat.S_ISLNK(info.st_mode) else None
                except FileNotFoundError:
                    continue
                kind = local_kind(info)
                found[path] = SyncEntry(
                    kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime_ns, target
                )
                if directory:
                    waiting.append(path + "/")
    return found


def order(path: str) -> list[str]:
    """Return the key that puts a directory directly before everything in it."""
    return path.split("/")


def plan(
    source: Mapping[str, SyncEntry],
    target: Mapping[str, SyncEntry],
    same: Callable[[str, SyncEntry, SyncEntry], bool],
    *,
    delete: bool,
) -> SyncPlan:
    """Return what to do so that ``target`` has what ``source`` has.

    Raises:
        PathExists: without ``delete``, a directory that is not empty is where a file or link has to be.
    """
    copy: list[str] = []
    blocking: set[str] = set()
    left_out: list[str] = []
    unchanged = size = 0
    for path in sorted(source, key=order):
        wanted, there = source[path], target.get(path)
        if wanted.kind not in _COPIED:
            left_out.append(path)
            continue
        if there is not None and there.kind == wanted.kind and same(path, wanted, there):
            unchanged += 1
            continue
        if there is not None and there.kind != wanted.kind:
            blocking.add(path)
        copy.append(path)
        size += wanted.size if wanted.kind == FileKind.FILE else 0
    remove: list[str] = []
    for path in sorted(target, key=order, reverse=True):
        if path in blocking:
            remove.append(path)
        elif path not in source and (delete or not blocking.isdisjoint(above(path))):
            if not delete:
                way = next(each for each in above(path) if each in blocking)
                raise PathExists(
                    f"sync {way}: a directory that is not empty is where a file has to be",
                    path=way,
                    operation="sync",
                    hint="pass delete=True to remove what the source does not have",
                )
            remove.append(path)
    return SyncPlan(copy, remove, frozenset(blocking), unchanged, left_out, size)


def above(path: str) -> Iterator[str]:
    """Return the directories above a path, inside the tree."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def alike(root: str, *, checksum: bool, least: int = 0) -> Callable[[str, SyncEntry, SyncEntry], bool]:
    """Return a function that says whether two entries of one kind are the same.

    Args:
        root: the local tree, whose files are read for a digest.
        checksum: compare the content of files, and not their times.
        least: permissions that every directory of the target has.
    """

    def same(path: str, wanted: SyncEntry, there: SyncEntry) -> bool:
        if wanted.kind == FileKind.SYMLINK:
            return wanted.target == there.target
        more = least if wanted.kind == FileKind.DIRECTORY else 0
        if _HAS_MODES and ((wanted.mode | more) ^ there.mode) & _PERMISSIONS:
            return False
        if wanted.kind == FileKind.DIRECTORY:
            return True
        if wanted.size != there.size:
            return False
        if not checksum:
            return wanted.mtime_ns // _TICK == there.mtime_ns // _TICK
        known = wanted.digest or there.digest  # only the sandbox's entry has one
        return known is not None and known == _digest(os.path.join(root, path))

    return same


def _digest(path: str) -> str | None:
    import hashlib

    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        with open(path, "rb", buffering=0) as content:
            while data := content.read(_CHUNK):
                state.update(data)
    except FileNotFoundError:
        return None
    return state.hexdigest()


def remove_local(root: str, names: Iterable[str]) -> set[str]:
    """Remove entries of a local tree, in this order; return the directories that stay: not empty."""
    kept: set[str] = set()
    for name in names:
        path = os.path.join(root, name)
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            kept.add(name)
    return kept
