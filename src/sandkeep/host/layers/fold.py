"""Merge several overlay directories into one that shows the same files over the layers below them.

The inputs are not changed: directories are created anew, everything else is hard-linked. The rules are those
of the kernel's name lookup, redirects included, applied to the merged directories only:

* the topmost entry of a name wins; a directory merges with those below it down to the first
  non-directory, whiteout or opaque directory;
* a directory that was renamed continues under the name its redirect gives, relative to the same parent or
  absolute from the top of the next directory down;
* a whiteout is kept only where it still hides an entry below: in a directory that merges with nothing it
  would be listed as a ghost. Entries below are looked up through a real overlay mount.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from typing import NamedTuple

from sandkeep.host.layers.tree import open_directory
from sandkeep.host.rootfs import Flavour
from sandkeep.linux import overlay
from sandkeep.linux.overlay import Way
from sandkeep.shared.copying import (
    EntryCopier,
    apply_attributes,
    check_depth,
    link_entry,
    open_beneath,
    read_xattrs,
)

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class _Node(NamedTuple):
    """A directory of the result."""

    path: bytes
    sources: tuple[tuple[int, bytes], ...]
    """The directories merged into it: index of the input and path there, topmost first."""
    below: bytes | None
    """Its path in the overlay of the layers below, or ``None`` when it merges with nothing there."""
    opaque: bool = False
    redirect: bytes | None = None


class _Found(NamedTuple):
    """The place of a redirected directory in one input, and how the lookup continues below it."""

    path: bytes | None
    cut: bool
    redirect: bytes


def merge(
    inputs: list[str], *, below: list[str], dest: str, scratch: str, flavour: Flavour, way: Way
) -> None:
    """Merge ``inputs``, topmost first, into the new directory ``dest`` on the same file system.

    ``below`` lists the overlay directories under the inputs, ``scratch`` is a path for an empty directory,
    ``way`` is how to mount the directories below.
    """
    os.makedirs(dest, mode=0o700)
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    with ExitStack() as stack:

        def opened(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        roots = [opened(open_directory(path)) for path in inputs]
        target = opened(open_directory(dest))
        options = ["userxattr" if flavour == "user" else "redirect_dir=follow"]
        view = opened(overlay.read_only([scratch, *below], options, way)) if below else None
        _Merge(roots, target, view, flavour).run()


class _Merge:
    def __init__(self, roots: list[int], dest: int, view: int | None, flavour: Flavour) -> None:
        self._roots = roots
        self._dest = dest
        self._view = view
        self._opaque = f"{flavour}.overlay.opaque"
        self._redirect = f"{flavour}.overlay.redirect"
        self._copier = EntryCopier()
        self._copied: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        # With userxattr the kernel follows no redirects, so redirects have no effect there.
        self._follow = flavour == "trusted"

    def run(self) -> None:
        everything = tuple((index, b"") for index in range(len(self._roots)))
        pending = [_Node(b"", everything, b"" if self._view is not None else None)]
        made: list[_Node] = []
        while pending:
            node = pending.pop()
            check_depth(node.path)
            made.append(node)
            self._directory(node, pending)
        # Creating an entry changes the times of its directory, so attributes are set last, children first.
        for node in reversed(made):
            self._attributes(node)

    # --- one directory ---------------------------------------------------------------------------------

    def _directory(self, node: _Node, pending: list[_Node]) -> None:
        with ExitStack() as stack:

            def opened(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            dest = opened(open_beneath(self._dest, node.path))
            sources = [opened(open_beneath(self._roots[index], path)) for index, path in node.sources]
            listings = [_listing(fd) for fd in sources]
            below = self._open_below(node.below)
            if below is not None:
                opened(below)
            for name in {name for listing in listings for name in listing}:
                level = next(i for i, listing in enumerate(listings) if name in listing)
                mode, rdev = listings[level][name]
                if stat.S_ISDIR(mode):
                    os.mkdir(name, 0o700, dir_fd=dest)
                    pending.append(self._child(node, name, listings))
                elif not _is_whiteout(mode, rdev) or (below is not None and _exists(name, below)):
                    self._entry(node, name, level, sources[level], dest)

    def _entry(self, node: _Node, name: bytes, level: int, source: int, dest: int) -> None:
        """Hard-link a non-directory; copy it if its link count is at the maximum (mostly whiteouts)."""
        try:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=dest, follow_symlinks=False)
            return
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        key = (node.sources[level][0], status.st_ino)
        if key in self._copied and link_entry(self._dest, self._copied[key], dest, name):
            return
        if stat.S_ISREG(status.st_mode):
            fd, status = self._copier.open_file(source, name)
            try:
                self._copier.file(fd, status, dest, name)
            finally:
                os.close(fd)
        else:
            self._copier.other(source, dest, name, status)
        self._copied[key] = (node.path, name)

    def _child(self, node: _Node, name: bytes, listings: list[dict[bytes, tuple[int, int]]]) -> _Node:
        """Return the directory ``name`` in ``node``: the inputs it merges, and its path below them."""
        sources: list[tuple[int, bytes]] = []
        wanted, cut = self._merge(node, name, listings, sources)
        absolute = wanted if wanted.startswith(b"/") else None
        if absolute is not None:
            absolute, cut = self._follow_down(absolute, sources)
        path = _join(node.path, name)
        moved = absolute is not None or wanted != name
        if cut:
            below = None
        elif absolute is not None:
            below = absolute.strip(b"/")
        else:
            below = _join(node.below, wanted) if node.below is not None else None
        if moved and below is not None and not self._is_below(below):
            below = None
        # Entries below under the same name must not show through where the merge ended or was redirected.
        hides = below is None and node.below is not None and (cut or moved)
        redirect = (absolute or wanted) if moved and below is not None else None
        return _Node(path, tuple(sources), below, hides, redirect)

    def _merge(
        self,
        node: _Node,
        name: bytes,
        listings: list[dict[bytes, tuple[int, int]]],
        sources: list[tuple[int, bytes]],
    ) -> tuple[bytes, bool]:
        """Add the directories that ``name`` merges to ``sources``.

        Return the name under which the lookup continues in lower layers, absolute after an absolute redirect,
        and whether the merge ends above them.
        """
        for (index, path), listing in zip(node.sources, listings, strict=True):
            if name not in listing:
                continue
            if not stat.S_ISDIR(listing[name][0]):
                return name, True
            directory = _join(path, name)
            sources.append((index, directory))
            opaque, redirect = self._marks(index, directory)
            if opaque:
                return name, True
            name = redirect or name
            if name.startswith(b"/"):
                break
        return name, False

    def _follow_down(self, redirect: bytes, sources: list[tuple[int, bytes]]) -> tuple[bytes, bool]:
        """Look up an absolute redirect in every input under the one that has it."""
        for index in range(sources[-1][0] + 1, len(self._roots)):
            found = self._walk(index, redirect)
            redirect = found.redirect
            if found.path is not None:
                sources.append((index, found.path))
            if found.cut:
                return redirect, True
        return redirect, False

    def _walk(self, index: int, redirect: bytes) -> _Found:
        """Find the directory at ``redirect`` in one input, applying the marks of its parent directories."""
        names = redirect.strip(b"/").split(b"/")
        path, cut, onwards = b"", False, redirect
        for position, name in enumerate(names):
            path = _join(path, name)
            parent, _, last = path.rpartition(b"/")
            try:
                fd = open_beneath(self._roots[index], parent)
            except OSError as error:
                if error.errno in _NOTHING_THERE:
                    return _Found(None, cut, onwards)
                raise
            try:
                status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return _Found(None, cut, onwards)
            finally:
                os.close(fd)
            if not stat.S_ISDIR(status.st_mode):
                return _Found(None, True, onwards)
            opaque, own = self._marks(index, path)
            rest = names[position + 1 :]
            if opaque:
                cut = True
            elif own is not None and own.startswith(b"/"):
                # The redirect leaves the directory that an opaque parent closes, so that parent no longer
                # matters.
                onwards, cut = b"/".join([own, *rest]), False
            elif own is not None:
                before = onwards.split(b"/")[: -1 - len(rest)]
                onwards = b"/".join([*before, own, *rest])
        return _Found(path, cut, onwards)

    def _marks(self, index: int, path: bytes) -> tuple[bool, bytes | None]:
        fd = open_beneath(self._roots[index], path)
        try:
            opaque = _xattr(fd, self._opaque) == b"y"
            return opaque, _xattr(fd, self._redirect) if self._follow else None
        finally:
            os.close(fd)

    def _attributes(self, node: _Node) -> None:
        index, path = node.sources[0]
        source = open_beneath(self._roots[index], path)
        dest = open_beneath(self._dest, node.path)
        try:
            xattrs = read_xattrs(source)
            xattrs.pop(self._opaque, None)
            xattrs.pop(self._redirect, None)
            if node.opaque:
                xattrs[self._opaque] = b"y"
            if node.redirect is not None:
                xattrs[self._redirect] = node.redirect
            apply_attributes(dest, os.fstat(source), xattrs, stale=set())
        finally:
            os.close(source)
            os.close(dest)

    # --- what is below ---------------------------------------------------------------------------------

    def _open_below(self, path: bytes | None) -> int | None:
        if path is None or self._view is None:
            return None
        try:
            return open_beneath(self._view, path)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise

    def _is_below(self, path: bytes) -> bool:
        fd = self._open_below(path)
        if fd is None:
            return False
        os.close(fd)
        return True


def _listing(fd: int) -> dict[bytes, tuple[int, int]]:
    """Return mode and device number of every name; the number matters for whiteouts only."""
    found = {}
    with os.scandir(fd) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found[os.fsencode(entry.name)] = (status.st_mode, status.st_rdev)
    return found


def _is_whiteout(mode: int, rdev: int) -> bool:
    return stat.S_ISCHR(mode) and rdev == 0


def _exists(name: bytes, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _xattr(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, name)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
        raise


def _join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name
