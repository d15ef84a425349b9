"""Changes below a directory of a session, as they happen.

The kernel tells of one directory at a time, so a tree is watched directory by directory, new ones included.
Between a directory's creation and its watch something may be created in it: such directories are listed once
they are watched, so nothing is missed, though it may be told twice. When the kernel's queue overflows the
watcher says so with an ``overflow`` and the client must look for itself.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import LimitReached, path_error
from sandkeep.linux import syscalls
from sandkeep.linux.syscalls import (
    IN_ATTRIB,
    IN_CLOSE_WRITE,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_IGNORED,
    IN_ISDIR,
    IN_MODIFY,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    IN_Q_OVERFLOW,
)
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Identity
from sandkeep.supervisor.tree import Fd, Path, absolute, proc_path

MOST_DIRECTORIES: Final = 8192
_GATHER_SECONDS: Final = 0.02
"""Changes come in bursts; a burst travels as one message."""
_MASK: Final = (
    IN_CREATE
    | IN_DELETE
    | IN_MODIFY
    | IN_CLOSE_WRITE
    | IN_ATTRIB
    | IN_MOVED_FROM
    | IN_MOVED_TO
    | IN_DELETE_SELF
)
_KINDS: Final = (
    (IN_CREATE | IN_MOVED_TO, "created"),
    (IN_DELETE | IN_MOVED_FROM | IN_DELETE_SELF, "removed"),
    (IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB, "modified"),
)
_EVENT: Final = struct.Struct("iIII")

Change = dict[str, Any]


class Watcher:
    """Watches one directory, or the tree below it, as a user of the sandbox."""

    def __init__(
        self, files: SessionFiles, path: Path, identity: Identity, *, cwd: Path, recursive: bool
    ) -> None:
        self._files = files
        self._identity = identity
        self._root = absolute(path, cwd)
        self._recursive = recursive
        self._directories: dict[int, bytes] = {}
        try:
            self._fd = syscalls.inotify_init1()
        except OSError as error:
            raise LimitReached(f"no more watches on this host: {error}", limit="watches") from error
        try:
            with files.acting_as(identity):
                self._add(self._root, [])
        except OSError as error:
            os.close(self._fd)
            raise path_error(error, "watch", path) from error
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def run(self, client: int, tell: Callable[[list[Change]], None]) -> None:
        """Tell of changes until the client says something or goes away."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(client, select.POLLIN | select.POLLHUP)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if client in ready:
                return
            # Let the burst arrive; select on the client alone so that its going away is noticed.
            select.select((client,), (), (), _GATHER_SECONDS)
            with self._files.acting_as(self._identity):
                changes = self._read()
            if changes:
                tell(changes)

    def _read(self) -> list[Change]:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return []
        changes: list[Change] = []
        seen: set[tuple[str, str]] = set()
        position = 0
        while position + _EVENT.size <= len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            name = data[position : position + length].rstrip(b"\0")
            position += length
            for change in self._changes(watch, mask, name):
                key = (change["kind"], change["path"])
                # One write is many notifications; one line tells it all.
                if key not in seen or change["kind"] != "modified":
                    seen.add(key)
                    changes.append(change)
        return changes

    def _changes(self, watch: int, mask: int, name: bytes) -> list[Change]:
        if mask & IN_Q_OVERFLOW:
            return [{"kind": "overflow", "path": os.fsdecode(self._root)}]
        directory = self._directories.get(watch)
        if directory is None:
            return []
        if mask & IN_IGNORED:
            del self._directories[watch]
            return []
        path = directory.rstrip(b"/") + b"/" + name if name else directory
        kind = next((word for bits, word in _KINDS if mask & bits), None)
        if kind is None or (mask & IN_DELETE_SELF and directory != self._root):
            return []
        if kind == "modified" and self._has_no_name(directory, name):
            return []
        is_directory = bool(mask & IN_ISDIR)
        found = [{"kind": kind, "path": os.fsdecode(path), "directory": is_directory}]
        if kind == "created" and is_directory and self._recursive:
            inside: list[Change] = []
            try:
                self._add(path, inside)
            except OSError:
                pass  # gone again, or not ours to look into
            found += inside
        return found

    def _has_no_name(self, directory: bytes, name: bytes) -> bool:
        """Whether this is how the kernel calls a file without a name, such as one on its way into place."""
        if name[:1] != b"#" or not name[1:].isdigit():
            return False
        try:
            with Fd(self._files.tree.open_directory(directory, os.O_PATH)) as fd:
                os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return True
        return False

    def _add(self, path: bytes, found: list[Change]) -> None:
        """Watch a directory and, in a recursive watch, those below it; ``found`` collects what is there."""
        pending = [path]
        while pending:
            at = pending.pop()
            if len(self._directories) >= MOST_DIRECTORIES:
                raise LimitReached(
                    f"a watch covers {MOST_DIRECTORIES} directories at most",
                    limit="watched directories",
                    value=MOST_DIRECTORIES,
                )
            with Fd(self._files.tree.open_directory(at, os.O_RDONLY)) as fd:
                watch = syscalls.inotify_add_watch(self._fd, proc_path(fd), _MASK)
                self._directories[watch] = at
                if not self._recursive:
                    return
                with os.scandir(fd) as entries:
                    for entry in entries:
                        inner = at.rstrip(b"/") + b"/" + os.fsencode(entry.name)
                        is_directory = entry.is_dir(follow_symlinks=False)
                        found.append(
                            {"kind": "created", "path": os.fsdecode(inner), "directory": is_directory}
                        )
                        if is_directory:
                            pending.append(inner)
