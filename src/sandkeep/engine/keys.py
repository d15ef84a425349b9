"""The installation's own secret, and keys derived from it for one purpose each.

It is a file in the data directory that only its owner can read, made on first use. A copy of the data
directory includes it; a copy of the database alone does not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final

from sandkeep.errors import StoreError

_DIRECTORY: Final = "keys"
_NAME: Final = "master"
_SIZE: Final = 32


def derive(data_dir: str, purpose: str) -> bytes:
    """Return the key for one purpose: the same purpose always has the same key."""
    return hmac.new(_master(data_dir), purpose.encode(), hashlib.sha256).digest()


def directory(data_dir: str) -> str:
    path = os.path.join(data_dir, _DIRECTORY)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def _master(data_dir: str) -> bytes:
    path = os.path.join(directory(data_dir), _NAME)
    try:
        with open(path, "rb") as handle:
            key = handle.read()
    except FileNotFoundError:
        write_private(path, os.urandom(_SIZE))
        return _master(data_dir)
    if len(key) != _SIZE:
        raise StoreError(f"{path} is damaged", path=path, hint="restore it: stored secrets depend on it")
    return key


def write_private(path: str, content: bytes) -> None:
    """Write a file that only the owner can read, completely or not at all; keep an existing one.

    It is synced on return, because data sealed or signed with it may outlive a loss of power.
    """
    draft = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process made it first: use that one
    finally:
        os.unlink(draft)
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Return when the names in a directory survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
