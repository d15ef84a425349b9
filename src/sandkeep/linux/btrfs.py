"""The three btrfs ioctls sandkeep uses: create, snapshot and destroy a subvolume.

A subvolume is recognised by its inode number: only there is it 256 on a filesystem with btrfs's magic number.
Functions return a value or raise ``OSError`` naming the call.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

from sandkeep.linux.syscalls import fstatfs_type

_MAGIC: Final = 0x9123683E
_SUBVOLUME_INODE: Final = 256
_SUBVOL_CREATE: Final = 0x5000940E
_SNAP_DESTROY: Final = 0x5000940F
_SNAP_CREATE_V2: Final = 0x50009417
_ARGUMENT_SIZE: Final = 4096
_NAME_MAX: Final = 255


def is_btrfs(fd: int) -> bool:
    return fstatfs_type(fd) == _MAGIC


def is_subvolume(fd: int) -> bool:
    return os.fstat(fd).st_ino == _SUBVOLUME_INODE and is_btrfs(fd)


def create_subvolume(dir_fd: int, name: bytes) -> None:
    """Create an empty subvolume ``name`` in the directory behind ``dir_fd``."""
    _ioctl("BTRFS_IOC_SUBVOL_CREATE", dir_fd, _SUBVOL_CREATE, 0, 8, name)


def snapshot(subvolume_fd: int, dir_fd: int, name: bytes) -> None:
    """Create a writable snapshot of a subvolume, dirty data included."""
    _ioctl("BTRFS_IOC_SNAP_CREATE_V2", dir_fd, _SNAP_CREATE_V2, subvolume_fd, 56, name)


def destroy_subvolume(dir_fd: int, name: bytes) -> None:
    """Delete a subvolume and its content; needs CAP_SYS_ADMIN on the host or the matching mount option."""
    _ioctl("BTRFS_IOC_SNAP_DESTROY", dir_fd, _SNAP_DESTROY, 0, 8, name)


def _ioctl(call: str, dir_fd: int, request: int, fd: int, name_offset: int, name: bytes) -> None:
    if len(name) > _NAME_MAX:
        raise OSError(36, f"{call}: File name too long", os.fsdecode(name))
    # fcntl.ioctl refuses immutable arguments above 1,024 bytes, hence a bytearray.
    argument = bytearray(_ARGUMENT_SIZE)
    struct.pack_into("q", argument, 0, fd)
    argument[name_offset : name_offset + len(name)] = name
    try:
        fcntl.ioctl(dir_fd, request, argument)
    except OSError as error:
        raise OSError(error.errno, f"{call}: {os.strerror(error.errno or 0)}", os.fsdecode(name)) from None
