"""Show the host's ``/usr`` below the skeleton, and hide paths that must not show.

Root: one overlay. Its lowest layer is the host's ``/usr`` itself, so the layer's ``bin`` is ``/usr/bin``; a
skeleton directory ``usr/bin`` with ``redirect=/bin`` puts it in its place, and the layer's own names are
hidden at the top by links and whiteouts. (``redirect=/`` is not valid, hence one redirect per directory.)

Rootless: redirects are not available and the host's directories belong to an unmapped id, so nothing could be
created in them. ``/usr`` is an overlay of its own; of its two lower directories the upper one mirrors every
directory, owned by the sandbox's root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from sandkeep.host.images.tree import ImageTree

USR = "/usr"
CLOSED = ("etc", "local/etc")
"""Directories of ``/usr`` where administrators keep configuration, credentials included."""


def graft(root: ImageTree) -> None:
    """Put the host's ``/usr`` under ``root``, which contains the finished skeleton."""
    root.directory("usr")
    with os.scandir(USR) as entries:
        for entry in entries:
            name = f"usr/{entry.name}"
            if entry.is_symlink():
                root.symlink(name, os.readlink(entry.path))
            elif entry.is_dir():
                info = entry.stat()
                root.directory(name, stat.S_IMODE(info.st_mode))
                if entry.name not in CLOSED:
                    root.redirect(name, f"/{entry.name}")
            top = root.path(entry.name)
            if not os.path.lexists(top):
                root.whiteout(entry.name)
            elif os.path.isdir(top) and not os.path.islink(top):
                root.opaque(entry.name)
    for name in CLOSED:
        if os.path.isdir(f"{USR}/{name}"):
            root.directory(f"usr/{name}")
            root.opaque(f"usr/{name}")


def mirror(usr: ImageTree, directories: Iterable[tuple[str, int]]) -> None:
    """Recreate the host's directories (relative name and mode, parents first), owned by the tree's root."""
    for name, mode in directories:
        path = usr.path(name)
        try:
            os.mkdir(path)
            os.chmod(path, mode | stat.S_IRWXU)
        except FileExistsError:
            continue
    for name in CLOSED:
        if os.path.isdir(f"{USR}/{name}"):
            usr.directory(name)
            usr.opaque(name)


def mask(tree: ImageTree, prefix: str, name: str) -> None:
    """Hide ``/usr/<name>``; ``prefix`` is the path of ``/usr`` in this tree."""
    parts = name.split("/")
    for depth in range(1, len(parts)):
        above = "/".join(parts[:depth])
        try:
            info = os.lstat(f"{USR}/{above}")
        except OSError:
            return
        if not stat.S_ISDIR(info.st_mode):
            return
        if not tree.exists(prefix + above):
            tree.directory(prefix + above, stat.S_IMODE(info.st_mode))
    target = tree.path(prefix + name)
    if os.path.islink(target) or os.path.isfile(target):
        os.unlink(target)
    if os.path.isdir(target):
        _remove_mirrored(target)
    if os.path.lexists(f"{USR}/{name}"):
        tree.whiteout(prefix + name)


def _remove_mirrored(path: str) -> None:
    """Remove a directory that contains only directories and whiteouts that ``mirror`` and ``mask`` made."""
    for above, directories, files in os.walk(path, topdown=False):
        for entry in files:
            os.unlink(os.path.join(above, entry))
        for entry in directories:
            os.rmdir(os.path.join(above, entry))
    os.rmdir(path)
