"""Limit how much disk and time one pull may use.

Other modules check a registry's data against its manifest; this one limits what even a correct manifest may
ask for. A small download can unpack to any size, so bytes and entries are counted as they are unpacked, and
the free space of the disk is checked repeatedly.
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
    """Limits of one pull and of the project it is for; ``None`` means unlimited."""

    image_bytes: int | None = None
    """Size of one image, both as downloaded and as unpacked."""
    image_entries: int | None = None
    """Files, directories and links of one image."""
    images: int | None = None
    """Number of images of one project."""
    project_bytes: int | None = None
    """Unpacked size of all images of a project."""
    free_percent: float = 0
    """Part of the disk that images must leave free."""
    seconds: float | None = None


UNLIMITED = Allowance()


class Spending:
    """What one pull has used so far. Safe to use from several threads."""

    def __init__(self, allowance: Allowance, directory: str) -> None:
        self.allowance = allowance
        self._directory = directory
        self._lock = threading.Lock()
        self._bytes = self._entries = 0
        self._looked = (0, 0)
        self.check_disk(0)

    def check_download(self, size: int) -> None:
        """Refuse a download of ``size`` bytes, as announced by the manifest, before anything is fetched."""
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
        """Return a source with the same bytes that counts each of them."""
        return _Counted(source, self.add_bytes)

    def check_disk(self, wanted: int) -> None:
        """Refuse to write ``wanted`` bytes if too little of the disk would be left."""
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
