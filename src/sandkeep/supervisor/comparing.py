"""A tree that a client compares with its own: list everything in it, and remove chosen entries.

Below the root of the tree no symbolic link is followed, neither while it is listed nor while something is
removed, however processes of the session rearrange it meanwhile. File systems of the kernel are left out.
"""

from __future__ import annotations

import errno
import os
import stat
from _blake2 import blake2b  # hashlib would load OpenSSL into every supervisor
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from sandkeep.errors import path_error
from sandkeep.shared.ignoring import Ignore
from sandkeep.supervisor.archive import DEPTH, too_deep
from sandkeep.supervisor.files import KINDS, SessionFiles, refuse_mounted
from sandkeep.supervisor.identity import Identity
from sandkeep.supervisor.tree import Fd, KernelFileSystem, Path, Tree, absolute, split_below

DIGEST_BYTES: Final = 32
_BATCH: Final = 1000
_TEXT: Final = 1 << 18
"""Characters of paths in one batch: at six bytes each, escaped, they fit into a frame."""
_HASHED: Final = 64 << 20
"""Bytes of content after which a batch is sent, so that the client hears something."""
_CHUNK: Final = 1 << 18


class ListedEntry(NamedTuple):
    """One entry of a tree."""

    path: str
    """Relative to the tree."""
    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: str | None = None
    """Target of a symbolic link, as stored."""
    digest: str | None = None
    """BLAKE2b of a file's content, 32 bytes in hexadecimal, if asked for and the file can be read."""
    unreadable: bool = False
    """What is below this directory is not known."""


def list_tree(
    files: SessionFiles,
    path: Path,
    identity: Identity,
    send: Callable[[list[dict[str, Any]]], object],
    *,
    cwd: Path = "/",
    ignore: Sequence[str] = (),
    checksum: bool = False,
) -> int:
    """Send every entry below a directory, in batches, a directory before its contents; return how many.

    ``ignore`` has patterns as `sandkeep.shared.ignoring` describes them. Entries that vanish meanwhile are
    left out.
    """
    patterns = Ignore(ignore)
    with files.acting_as(identity):
        try:
            top = _entered(files.tree.open_directory(absolute(path, cwd), os.O_RDONLY))
        except OSError as error:
            raise path_error(error, "list", path) from error
        with Fd(top):
            listing = _Listing(
                files.tree, os.fsdecode(absolute(path, cwd)), patterns, send, checksum=checksum
            )
            listing.walk(top)
            listing.flush()
        return listing.count


class _Listing:
    def __init__(
        self,
        tree: Tree,
        top: str,
        ignore: Ignore,
        send: Callable[[list[dict[str, Any]]], object],
        *,
        checksum: bool,
    ) -> None:
        self._tree = tree
        self._top = top
        self._ignore = ignore
        self._send = send
        self._checksum = checksum
        self._batch: list[dict[str, Any]] = []
        self._hashed = 0
        self._text = 0
        self.count = 0

    def walk(self, top: int) -> None:
        """List everything below an open directory. The caller keeps and closes the descriptor."""
        levels: list[tuple[int, str, Iterator[str]]] = [(top, "", iter(sorted(os.listdir(top))))]
        try:
            while levels:
                fd, prefix, names = levels[-1]
                last = next(names, None)
                if last is None:
                    levels.pop()
                    if levels:
                        os.close(fd)
                    continue
                path = prefix + last
                below = self._entry(fd, last, path)
                if below >= 0:
                    try:
                        if len(levels) == DEPTH:
                            raise too_deep(self._top, path)
                        found = sorted(os.listdir(below))
                    except BaseException:
                        os.close(below)
                        raise
                    levels.append((below, path + "/", iter(found)))
        finally:
            for fd, _, _ in levels[1:]:
                os.close(fd)

    def flush(self) -> None:
        if self._batch:
            self._send(self._batch)
            self._batch = []
            self._hashed = self._text = 0

    def _entry(self, parent: int, last: str, path: str) -> int:
        """List one entry; return the descriptor of a directory to enter, -1 for anything else."""
        try:
            info = os.stat(last, dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, PermissionError):
            return -1  # gone, or the directory has been closed to the user
        directory = stat.S_ISDIR(info.st_mode)
        if self._ignore(path, directory=directory):
            return -1
        if directory:
            return self._directory(parent, last, path, info)
        found = _found(path, info)
        if stat.S_ISLNK(info.st_mode):
            try:
                found = found._replace(target=os.readlink(last, dir_fd=parent))
            except OSError:
                return -1  # replaced by something else
        elif stat.S_ISREG(info.st_mode) and self._checksum:
            found = found._replace(digest=self._digest(parent, last))
        self._add(found)
        return -1

    def _directory(self, parent: int, last: str, path: str, info: os.stat_result) -> int:
        try:
            fd = _entered(os.open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._add(_found(path, info)._replace(unreadable=True))
            return -1
        try:
            self._tree.check(fd)
        except KernelFileSystem:
            os.close(fd)
            return -1
        except BaseException:
            os.close(fd)
            raise
        self._add(_found(path, info))
        return fd

    def _digest(self, parent: int, last: str) -> str | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            with Fd(os.open(last, flags, dir_fd=parent)) as fd:
                if not stat.S_ISREG(self._tree.check(fd).st_mode):
                    return None
                state = blake2b(digest_size=DIGEST_BYTES)
                while data := os.read(fd, _CHUNK):
                    state.update(data)
                    self._hashed += len(data)
                return state.hexdigest()
        except OSError:
            return None

    def _add(self, found: ListedEntry) -> None:
        self._batch.append(found._asdict())
        self.count += 1
        self._text += len(found.path) + len(found.target or "")
        if len(self._batch) == _BATCH or self._text >= _TEXT or self._hashed >= _HASHED:
            self.flush()


def _entered(fd: int) -> int:
    """Return the descriptor of a directory that the user may search, and not only read."""
    try:
        os.stat(".", dir_fd=fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _found(path: str, info: os.stat_result) -> ListedEntry:
    return ListedEntry(
        path, KINDS[stat.S_IFMT(info.st_mode)], info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime_ns
    )


def remove_entries(
    files: SessionFiles, path: Path, identity: Identity, names: Sequence[str], *, cwd: Path = "/"
) -> list[str]:
    """Remove entries of a tree in the given order; return the directories that stay.

    A directory is removed only if it is empty, so nothing goes that the caller has not named; one that is not
    stays, as does one that something is mounted on. An entry may be gone already. The error of an entry that
    cannot be removed has ``removed``, how many before it are gone.
    """
    kept: list[str] = []
    with files.acting_as(identity):
        try:
            top = files.tree.open_directory(absolute(path, cwd))
        except OSError as error:
            raise path_error(error, "remove below", path) from error
        with Fd(top):
            for done, name in enumerate(names):
                try:
                    if not _remove(files.tree, top, name):
                        kept.append(name)
                except OSError as error:
                    failure = path_error(error, "remove", os.path.join(os.fsdecode(path), name))
                    failure.details["removed"] = done - len(kept)
                    raise failure from error
    return kept


def _remove(tree: Tree, top: int, name: str) -> bool:
    directory, last = split_below(name, "names")
    try:
        with Fd(tree.open_beneath(top, directory)) as parent:
            refuse_mounted(parent, last)
            if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(last, dir_fd=parent)
            else:
                os.rmdir(last, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            return False
        raise
    return True
