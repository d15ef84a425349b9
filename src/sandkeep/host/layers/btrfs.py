"""Make the data directory a btrfs subvolume where possible, so that it can be snapshotted.

Everything in the data directory stays in that one subvolume, on purpose. With a subvolume for each upper, a
checkpoint would be one snapshot and nothing else, but inode numbers repeat between subvolumes while an
overlay shows all its layers under one device number: unrelated files would look like hard links of each
other, and tools that rely on inode numbers (``tar``, ``cp -a``, ``cmp``) would lose data. So a checkpoint
snapshots the whole data directory for an instant, and copies the upper out of that snapshot afterwards.
"""

from __future__ import annotations

import os

from sandkeep.linux import btrfs


def create_data_directory(path: str) -> bool:
    """Create the data directory if it is missing; return whether it is a subvolume of its own."""
    parent, name = os.path.split(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not os.path.lexists(path):
            if btrfs.is_btrfs(parent_fd):
                btrfs.create_subvolume(parent_fd, os.fsencode(name))
                os.chmod(path, 0o700)
            else:
                os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return btrfs.is_subvolume(fd)
        finally:
            os.close(fd)
    finally:
        os.close(parent_fd)
