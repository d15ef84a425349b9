"""How much of the machine one pull may take.

What a registry sends is checked against its manifest elsewhere; here is what even an honest manifest may not
ask for. A small download can unpack to any size, so bytes and entries are counted as they are unpacked, and
the disk is looked at again and again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sandkeep.errors import LimitReached, NoSpace
from sandkeep.host.images.streams import ByteSource

_LOOK_BYTES = 16 << 20
_LOOK_ENTRIES = 1024


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one pull and of the project it is for; what is none is not limited."""

    image_bytes: int | None = None
    """Of one image: as it is downloaded, and as it is unpacked."""
    image_entries: int | None = None
    """Files, directories and links of one image."""
    images: int | None = None
    """Of one project."""
    project_bytes: int | None = None
    """Unpacked, of all images of a project."""
    free_percent: float = 0
    """Of the disk, left for others than images."""
    seconds: float | None = None


UNLIMITED = Allowance()


class Spending:
    """What one pull has taken so far. Safe to use from several threads."""

    def __init__(self, allowance: Allowance, directory: str) -> None:
        self.allowance = allowance
        self._directory = directory
        self._lock = threading.Lock()
        self._bytes = self._entries = 0
        self._looked = (0, 0)
        self.check_disk(0)

    def check_download(self, size: int) -> None:
        """Before anything is fetched: ``size`` is what the manifest announces."""
        self._refuse_beyond("image_bytes", size, "bytes to download")
        self.check_disk(size)

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count
        self._refuse_beyond("image_bytes", self._bytes, "bytes unpacked")
        if self._bytes - self._looked[0] >= _LOOK_BYTES:
            self._look()

    def add_entries(self, count: int = 1) -> None:
        with self._lock:
            self._entries += count
        self._refuse_beyond("image_entries", self._entries, "entries")
        if self._entries - self._looked[1] >= _LOOK_ENTRIES:
            self._look()

    def counted(self, source: ByteSource) -> ByteSource:
        """The same bytes, each of them counted."""
        return _Counted(source, self.add_bytes)

    def check_disk(self, wanted: int) -> None:
        """Refuse to take so many bytes of the disk that too little of it would be left."""
        disk = os.statvfs(self._directory)
        share = self.allowance.free_percent / 100
        little = disk.f_bavail * disk.f_frsize - wanted < disk.f_blocks * disk.f_frsize * share
        few = disk.f_files > 0 and disk.f_favail < disk.f_files * share
        if little or few:
            raise NoSpace(
                f"less than {self.allowance.free_percent:g} % of the disk would be left",
                hint="delete images, snapshots or sandboxes; the operator can change min_free_percent",
                path=self._directory,
            )

    def _look(self) -> None:
        self._looked = (self._bytes, self._entries)
        self.check_disk(0)

    def _refuse_beyond(self, limit: str, value: int, what: str) -> None:
        most: int | None = getattr(self.allowance, limit)
        if most is not None and value > most:
            raise LimitReached(f"an image may have {most} {what}", limit=limit, value=most)


class _Counted:
    def __init__(self, source: ByteSource, count: Callable[[int], None]) -> None:
        self._source = source
        self._count = count

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._count(len(data))
        return data
