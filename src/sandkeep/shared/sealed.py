"""Small JSON files with a checksum of their content, so that damage is noticed.

The checksum comes first: ``{"check":NUMBER,`` followed by the rest of the object. Files of earlier versions
have none and are read without a check.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import Any, Final

_CHECK: Final = b'{"check":'
_DAMAGE: Final = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EBADMSG)
"""Errors of opening or reading that mean a damaged file; others are problems of the reading process."""


def seal(body: dict[str, Any]) -> bytes:
    """Return the bytes to write into the file."""
    rest = json.dumps(body, separators=(",", ":")).encode("ascii")[1:]
    return b"%b%d,%b" % (_CHECK, zlib.crc32(rest), rest)


def unseal(data: bytes) -> dict[str, Any]:
    """Return the sealed object. Raises ``ValueError`` when it is incomplete or altered."""
    if data.startswith(_CHECK):
        number, comma, rest = data[len(_CHECK) :].partition(b",")
        if not comma or number != b"%d" % zlib.crc32(rest):
            raise ValueError("the checksum is wrong")
        data = b"{" + rest
    try:
        body = json.loads(data)
    except RecursionError:
        raise ValueError("it is not a sandkeep record") from None
    if not isinstance(body, dict):
        raise ValueError("it is not a sandkeep record")
    return body


def read_sealed(path: str) -> dict[str, Any]:
    """Return the record in a file. Raises ``ValueError`` when it is cut short, altered or unreadable."""
    try:
        with open(path, "rb") as handle:
            return unseal(handle.read())
    except OSError as error:
        if error.errno in _DAMAGE:
            raise ValueError(str(error.strerror)) from error
        raise


def write_sealed(path: str, body: dict[str, Any], *, mode: int = 0o644, durable: bool = False) -> None:
    """Write a small file atomically: a reader sees the old one or the new one.

    After a loss of power both may be missing, unless it is ``durable``.
    """
    fresh = f"{path}.new"
    # Plain system calls and one write: every session does this, and a file object needs five more calls.
    left = memoryview(seal(body))
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        while left:
            left = left[os.write(fd, left) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)


__all__ = ["read_sealed", "seal", "unseal", "write_sealed"]
