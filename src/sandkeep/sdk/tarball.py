"""Tar streams with text names, on top of ``shared.tarwriter``. Names that are not UTF-8 survive."""

from __future__ import annotations

from sandkeep.shared import tarwriter
from sandkeep.shared.tar import END, padding

__all__ = ["END", "file", "header", "padding", "text"]

_NAME_ERRORS = "surrogateescape"


def header(
    name: str,
    *,
    size: int = 0,
    mode: int = 0o644,
    mtime: int = 0,
    mtime_ns: int | None = None,
    directory: bool = False,
    link: str = "",
) -> bytes:
    """Return the header of one entry: a file unless it is a directory or has a link target.

    ``mtime_ns``, if given, is the time instead of the whole seconds of ``mtime``.
    """
    kind = "directory" if directory else "symlink" if link else "file"
    raw, target = name.encode("utf-8", _NAME_ERRORS), link.encode("utf-8", _NAME_ERRORS)
    return tarwriter.header(raw, kind, mode=mode, size=size, mtime=mtime, mtime_ns=mtime_ns, link=target)


def file(name: str, data: bytes, mode: int, *, mtime: int = 0) -> bytes:
    """Return a whole entry."""
    return header(name, size=len(data), mode=mode, mtime=mtime) + data + padding(len(data))


def text(name: bytes) -> str:
    """Return a name of an archive as text."""
    return name.decode("utf-8", _NAME_ERRORS)
