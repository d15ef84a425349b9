"""A disk that remembers every write and every flush in their order, and disks as a power cut would leave it.

A FUSE server shows one file; a loop device makes a disk of it. A flush of the disk is an ``fsync`` of the
file, so the log knows what a disk must keep through a loss of power, which is what was written before the
last flush, and what it may lose: any part of what was written since. Run as a program this is the server.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandkeep.linux import syscalls

ROOT = Path(__file__).resolve().parents[2]
PAGE: Final = 4096

# --- the log -------------------------------------------------------------------------------------------

_ENTRY = struct.Struct("<QQ")
_FLUSH: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A write to the disk, or a flush of it (``offset`` is ``None``)."""

    offset: int | None
    size: int
    at: int
    """Where the written bytes are in the log."""


def read_log(path: Path, until: int) -> list[Entry]:
    """What had happened when the log was ``until`` bytes long."""
    entries = []
    with open(path, "rb") as log:
        at = 0
        while at + _ENTRY.size <= until:
            offset, size = _ENTRY.unpack(os.pread(log.fileno(), _ENTRY.size, at))
            at += _ENTRY.size
            entries.append(Entry(None if offset == _FLUSH else offset, size, at))
            at += size
    return entries


# --- the server ----------------------------------------------------------------------------------------

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_TRANSFER = struct.Struct("<QQI20x")
_ATTRIBUTES = struct.Struct("<QII6Q10I")
_FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _RELEASE = 2, 3, 4, 14, 15, 16, 18
_FSYNC, _FLUSH_FD, _INIT, _INTERRUPT, _BATCH_FORGET = 20, 25, 26, 36, 42
_ASYNC_READ, _BIG_WRITES, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 22
_MAX_WRITE: Final = 1 << 20


def serve(fuse: int, disk: int, log: int) -> None:
    """Answer the kernel, one request after the other, until the file is unmounted."""
    size = os.fstat(disk).st_size
    request = bytearray(_MAX_WRITE + PAGE)
    while True:
        try:
            length = os.readv(fuse, [request])
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            raise
        _, opcode, unique, *_ = _IN.unpack_from(request)
        body = memoryview(request)[_IN.size : length]
        if opcode not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            status, answer = _answer(opcode, body, disk, log, size)
            os.writev(fuse, [_OUT.pack(_OUT.size + len(answer), -status, unique), answer])


def _answer(opcode: int, body: memoryview, disk: int, log: int, size: int) -> tuple[int, bytes]:
    if opcode == _INIT:
        flags = _ASYNC_READ | _BIG_WRITES | _MAX_PAGES
        return 0, struct.pack(
            "<IIIIHHIIHHI28x", 7, 31, 1 << 17, flags, 64, 48, _MAX_WRITE, 1, _MAX_WRITE // PAGE, 0, 0
        )
    if opcode in (_GETATTR, _SETATTR):
        mode = stat.S_IFREG | 0o600
        return 0, _ATTRIBUTES.pack(
            3600, 0, 0, 1, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, PAGE, 0
        )
    if opcode == _OPEN:
        return 0, bytes(16)
    if opcode == _READ:
        _, offset, length = _TRANSFER.unpack_from(body)
        return 0, os.pread(disk, length, offset)
    if opcode == _WRITE:
        _, offset, length = _TRANSFER.unpack_from(body)
        data = body[_TRANSFER.size : _TRANSFER.size + length]
        os.writev(log, [_ENTRY.pack(offset, length), data])
        os.pwrite(disk, data, offset)
        return 0, struct.pack("<II", length, 0)
    if opcode == _FSYNC:
        os.write(log, _ENTRY.pack(_FLUSH, 0))
        return 0, b""
    if opcode in (_FLUSH_FD, _RELEASE):
        return 0, b""
    return errno.ENOSYS, b""


# --- a mounted disk ------------------------------------------------------------------------------------

MAKE: Final = {
    "ext4": ("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q"),
    "btrfs": ("mkfs.btrfs", "-q"),
}


ALONE: Final = frozenset({"xfs", "btrfs"})
"""Filesystems that cannot be mounted beside a copy of themselves."""


def make_disk(path: Path, filesystem: str, size: int) -> None:
    with open(path, "wb") as image:
        image.truncate(size)
    subprocess.run([*MAKE[filesystem], str(path)], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, place: Path, *, direct: bool = False) -> Iterator[None]:
    """The filesystem in a file, mounted; it recovers from what happened to it as after a reboot."""
    attach = ["losetup", "--find", "--show", f"--direct-io={'on' if direct else 'off'}", str(image)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        place.mkdir(exist_ok=True)
        if shutil.which("btrfs"):
            # It would take this one for an older state of the disk it saw last, and refuse it.
            subprocess.run(["btrfs", "device", "scan", "--forget"], capture_output=True)
        subprocess.run(["mount", device, str(place)], check=True, capture_output=True, text=True)
        try:
            yield
        finally:
            _unmount(place)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def _unmount(place: Path) -> None:
    """Processes that used it may take a moment to end."""
    for _ in range(200):
        try:
            syscalls.umount2(str(place), 0)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.05)
    syscalls.umount2(str(place), syscalls.MNT_DETACH)
    raise AssertionError(f"{place} is still in use")


class RecordedDisk:
    """The disk while it is used."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.base = base
        self.log = directory / "log"
        self.log.touch()
        self._disk = directory / "disk"
        self._file = directory / "recorded"
        subprocess.run(["cp", "--sparse=always", str(base), str(self._disk)], check=True)

    def position(self) -> int:
        """How long the log is: everything the disk has been told so far is before it."""
        return self.log.stat().st_size

    @contextmanager
    def mounted(self, place: Path) -> Iterator[None]:
        self._file.touch()
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={fuse},rootmode=100000,user_id=0,group_id=0"
        syscalls.mount("recorded", str(self._file), "fuse", syscalls.MS_NODEV, options)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.recorded_disk", str(fuse), str(self._disk), str(self.log)],
            cwd=ROOT,
            pass_fds=[fuse],
        )
        os.close(fuse)
        try:
            with mounted(self._file, place, direct=True):
                yield
        finally:
            syscalls.umount2(str(self._file), syscalls.MNT_DETACH)
            server.wait(30)


# --- after a power cut ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instant:
    """Power goes after so many entries of the log; ``kept`` is the share of the unflushed ones that stays."""

    entry: int
    kept: float
    seed: int


class Replay:
    """Disks as they are after a power cut, for one instant after the other, the earliest first."""

    def __init__(self, base: Path, log: Path, entries: list[Entry]) -> None:
        self._disk = os.open(base, os.O_RDWR | os.O_CLOEXEC)
        self._base = base
        self._log = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        self._entries = entries
        self._flushed = 0

    def close(self) -> None:
        os.close(self._disk)
        os.close(self._log)

    def disk(self, instant: Instant, path: Path) -> None:
        """Write the disk of the instant to ``path``."""
        flushed = self._flushed
        for number in range(self._flushed, instant.entry):
            if self._entries[number].offset is None:
                flushed = number + 1
        for entry in self._entries[self._flushed : flushed]:
            self._write(self._disk, entry)
        self._flushed = flushed
        subprocess.run(["cp", "--sparse=always", str(self._base), str(path)], check=True)
        chance = random.Random(instant.seed)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for entry in self._entries[flushed : instant.entry]:
                if chance.random() < instant.kept:
                    # A disk writes pages and not requests: of a long one it may have written a part.
                    whole = instant.kept == 1 or chance.random() < 0.8
                    self._write(fd, entry, None if whole else chance.randrange(0, entry.size + 1, PAGE))
        finally:
            os.close(fd)

    def _write(self, fd: int, entry: Entry, size: int | None = None) -> None:
        if entry.offset is not None:
            data = os.pread(self._log, entry.size if size is None else size, entry.at)
            os.pwrite(fd, data, entry.offset)


if __name__ == "__main__":
    _fuse, _disk, _log = sys.argv[1:]
    serve(int(_fuse), os.open(_disk, os.O_RDWR), os.open(_log, os.O_WRONLY | os.O_APPEND))
