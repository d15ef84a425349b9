"""Changes below a directory of a session, as they happen.

The kernel reports on one directory at a time, so a tree is watched directory by directory, new ones included.
Entries may be created in a directory before its watch exists: such directories are listed once they are
watched, so no entry is missed, though it may be reported twice. When the kernel's queue overflows the watcher
reports an ``overflow`` and the client must list the tree itself.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
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
from sandkeep.supervisor.identity import SESSION_IDS, Identity
from sandkeep.supervisor.tree import Fd, Path, absolute, proc_path

MOST_DIRECTORIES: Final = 8192
MOST_WATCHES: Final = 16
"""Watches of one session at once. Each is an inotify instance; the kernel usually allows a user 128."""
_PLACE_SECONDS: Final = 2.0
"""Seconds to wait for a free slot: a watch whose client has just disconnected is about to free one."""
_GATHER_SECONDS: Final = 0.02
"""Seconds in which changes are collected: a burst becomes one message."""
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
_places: Final = threading.BoundedSemaphore(MOST_WATCHES)
"""Slots of this supervisor, which serves one session."""


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
        if not _places.acquire(timeout=_PLACE_SECONDS):
            raise LimitReached(
                f"a session has {MOST_WATCHES} watches at most",
                limit="watches",
                value=MOST_WATCHES,
                hint="end one of them; one recursive watch covers a whole tree",
            )
        try:
            self._fd = _instance(files.tree.base)
        except BaseException:
            _places.release()
            raise
        try:
            with files.acting_as(identity):
                self._add(self._root, [])
        except OSError as error:
            self.close()
            raise path_error(error, "watch", path) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)
        _places.release()

    def run(self, client: int, tell: Callable[[list[Change]], None]) -> None:
        """Report changes until the client sends something or disconnects."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(client, select.POLLIN | select.POLLHUP)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if client in ready:
                return
            # Let the burst arrive; poll the client alone so that a disconnect is noticed.
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
                # One write causes many notifications; report it once.
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
                pass  # removed again, or not readable for this user
            found += inside
        return found

    def _has_no_name(self, directory: bytes, name: bytes) -> bool:
        """Return whether the kernel uses this name for a file without one, such as an unpublished draft."""
        if name[:1] != b"#" or not name[1:].isdigit():
            return False
        try:
            with Fd(self._files.tree.open_directory(directory, os.O_PATH)) as fd:
                os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return True
        return False

    def _add(self, path: bytes, found: list[Change]) -> None:
        """Watch a directory and, in a recursive watch, those below it; add their entries to ``found``."""
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
                try:
                    watch = syscalls.inotify_add_watch(self._fd, proc_path(fd), _MASK)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    raise LimitReached(
                        "the machine's limit of watched directories (max_user_watches) is reached",
                        limit="watched directories",
                    ) from error
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


def _instance(base: int) -> int:
    """Return an inotify instance. The kernel charges it and its watches to the user who makes it.

    Root does not make it, since the host's programs and other sessions need root's share. The last id of a
    session's range has a count of its own, and no program of the sandbox adds to it: programs of the sandbox
    are charged to the first id.
    """
    try:
        if not base:
            return syscalls.inotify_init1()  # charged to the user who runs sandkeep: the only id here
        syscalls.set_effective_uid_thread(base + SESSION_IDS - 1)
        try:
            return syscalls.inotify_init1()
        finally:
            syscalls.set_effective_uid_thread(0)
    except OSError as error:
        raise LimitReached(
            f"no more watches on this host (max_user_instances): {error.strerror}", limit="watches"
        ) from error
