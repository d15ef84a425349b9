"""The index of a tree that a checkpoint keeps between its passes, in a file without a name.

A session may have millions of files, and the supervisor's memory is not counted as the session's. So the keys
of a directory's entries are packed and written beside the copy; only the paths of directories and the offset
of each one's record are in memory. Records are only appended: each pass adds at most one per directory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from sandkeep.shared.copying import Attributes

_KEY: Final = struct.Struct("<IQqq")
_SAME_INODE: Final = 12
_HEAD: Final = struct.Struct("<?QqIqII")
_ATTRIBUTES: Final = struct.Struct("<IIIqIqI")
"""Times that programs can set are packed as seconds and nanoseconds: some file systems hold more seconds than
64 bits of nanoseconds do."""
_NAME: Final = struct.Struct("<H")
_LENGTHS: Final = struct.Struct("<HI")
_LINK: Final = struct.Struct("<HH")
_SECOND: Final = 1_000_000_000
_READ: Final = 4096
"""Bytes read at once: the records of most directories are smaller."""

Key = bytes
"""Kind, inode, size and change time of an entry, packed."""


def pack_key(kind: int, inode: int, size: int, changed_ns: int) -> Key:
    return _KEY.pack(kind, inode, size, changed_ns)


def unpack_key(key: Key) -> tuple[int, int, int, int]:
    kind, inode, size, changed_ns = _KEY.unpack(key)
    return kind, inode, size, changed_ns


def same_inode(one: Key, other: Key) -> bool:
    """Return whether kind and inode are the same."""
    return one[:_SAME_INODE] == other[:_SAME_INODE]


class Directory(NamedTuple):
    """The record of one directory."""

    key: tuple[int, int, int] | None
    """Inode, modification time and change time when its attributes were copied."""
    attributes: bytes
    entries: bytes

    def keys(self) -> dict[bytes, Key]:
        found = {}
        entries, position = self.entries, 0
        while position < len(entries):
            start = position + 2
            end = start + entries[position] + (entries[position + 1] << 8)
            position = end + _KEY.size
            found[entries[start:end]] = entries[end:position]
        return found


def pack_entry(name: bytes, key: Key) -> bytes:
    return _NAME.pack(len(name)) + name + key


def pack_attributes(status: os.stat_result, xattrs: dict[str, bytes]) -> bytes:
    times = *divmod(status.st_atime_ns, _SECOND), *divmod(status.st_mtime_ns, _SECOND)
    parts = [_ATTRIBUTES.pack(status.st_uid, status.st_gid, status.st_mode, *times)]
    for attribute, value in xattrs.items():
        name = os.fsencode(attribute)
        parts += [_LENGTHS.pack(len(name), len(value)), name, value]
    return b"".join(parts)


def unpack_attributes(data: bytes) -> tuple[Attributes, dict[str, bytes]]:
    uid, gid, mode, accessed, accessed_ns, modified, modified_ns = _ATTRIBUTES.unpack_from(data)
    times = accessed * _SECOND + accessed_ns, modified * _SECOND + modified_ns
    status = Attributes(uid, gid, mode, *times)
    xattrs = {}
    position = _ATTRIBUTES.size
    while position < len(data):
        name, value = _LENGTHS.unpack_from(data, position)
        start = position + _LENGTHS.size
        position = start + name + value
        xattrs[os.fsdecode(data[start : start + name])] = data[start + name : position]
    return status, xattrs


class Memory:
    """Directories by path, and the first names of files that have several."""

    __slots__ = ("_directories", "_end", "_fd", "_links")

    def __init__(self, beside: int) -> None:
        """``beside`` is the directory of the copy; the file has no name there."""
        name = b".remembering"
        self._fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=beside)
        self._end = 0
        self._directories: dict[bytes, int] = {}
        self._links: dict[int, int] = {}
        os.unlink(name, dir_fd=beside)

    def close(self) -> None:
        os.close(self._fd)

    def get(self, path: bytes) -> Directory | None:
        offset = self._directories.get(path)
        if offset is None:
            return None
        data = os.pread(self._fd, _READ, offset)
        has_key, inode, modified, modified_ns, changed, attributes, entries = _HEAD.unpack_from(data)
        middle, end = _HEAD.size + attributes, _HEAD.size + attributes + entries
        if len(data) < end:
            data += self._read(offset + len(data), end - len(data))
        key = (inode, modified * _SECOND + modified_ns, changed) if has_key else None
        return Directory(key, data[_HEAD.size : middle], data[middle:end])

    def put(self, path: bytes, directory: Directory) -> None:
        inode, modified, changed = directory.key or (0, 0, 0)
        times = *divmod(modified, _SECOND), changed
        sizes = len(directory.attributes), len(directory.entries)
        head = _HEAD.pack(directory.key is not None, inode, *times, *sizes)
        self._directories[path] = self._add(head + directory.attributes + directory.entries)

    def forget(self, path: bytes) -> Directory | None:
        known = self.get(path)
        self._directories.pop(path, None)
        return known

    def children_first(self) -> Iterator[tuple[bytes, Directory]]:
        for path in sorted(self._directories, key=len, reverse=True):
            known = self.get(path)
            if known is not None:
                yield path, known

    def link(self, inode: int) -> tuple[bytes, bytes, Key] | None:
        """Return directory, name and key of the first copied name of a file that has several."""
        offset = self._links.get(inode)
        if offset is None:
            return None
        directory, name = _LINK.unpack(self._read(offset, _LINK.size))
        data = self._read(offset + _LINK.size, directory + name + _KEY.size)
        return data[:directory], data[directory : directory + name], data[directory + name :]

    def put_link(self, inode: int, path: bytes, name: bytes, key: Key) -> None:
        self._links[inode] = self._add(_LINK.pack(len(path), len(name)) + path + name + key)

    def forget_links(self) -> None:
        self._links.clear()

    def _add(self, data: bytes) -> int:
        offset, left = self._end, memoryview(data)
        while left:
            done = os.pwrite(self._fd, left, self._end)
            self._end += done
            left = left[done:]
        return offset

    def _read(self, offset: int, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = os.pread(self._fd, size - len(data), offset + len(data))
            if not chunk:
                raise OSError(5, "the index of a checkpoint is cut short")
            data += chunk
        return data
