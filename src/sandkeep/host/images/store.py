"""The image store: what exists, under which names, and the ways in.

On disk, below ``<data>/images``::

    host/<12 digits>/image.json  root/  [usr/]   generated skeletons, one per state of the host and masks
    build/                                       work in progress

A directory appears under its final name by one rename after it is complete, so whatever is there is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator

from sandkeep.host.images import hostimage
from sandkeep.host.images.files import locked, read_json, remove_tree, write_json
from sandkeep.host.images.hostimage import programs
from sandkeep.host.images.image import Image, relocated
from sandkeep.host.images.tree import Mode, flavour_of
from sandkeep.host.rootfs import ImageDefaults

Progress = Callable[[str, int, int], None]
"""Called with what is being worked on, how much is done, and the total (0 when not known)."""


class ImageStore:
    """All images below one data directory. Any number of processes may use one at the same time."""

    def __init__(self, data_dir: str, *, mode: Mode) -> None:
        self.data_dir = os.path.abspath(data_dir)
        self.mode: Mode = mode
        self.directory = f"{self.data_dir}/images"
        for name in ("", "/host", "/build"):
            os.makedirs(self.directory + name, mode=0o700, exist_ok=True)

    # --- the host image --------------------------------------------------------------------------------

    def host(self, *, masks: tuple[str, ...] = (), progress: Progress | None = None) -> Image:
        """The ``host`` image for the host as it is now, built the first time it is asked for.

        ``masks`` are paths below ``/usr`` to hide. Raises ``HostCannot`` where ``/usr`` is not merged.
        """
        key = hostimage.host_key()
        hidden = hostimage.normal_masks(masks)
        recipe = [hostimage.FORMAT, key, self.mode, hidden, programs.platform_prefix()]
        name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        final = f"{self.directory}/host/{name}"
        if image := self._read(final):
            return image
        with locked(f"{self.directory}/host.lock"):
            if image := self._read(final):
                return image
            if progress:
                progress("host image", 0, 0)
            with self._building("host") as work:
                built = hostimage.build(work, mode=self.mode, masks=hidden)
                image = Image(
                    id=f"host@{name}",
                    kind="host",
                    flavour=flavour_of(self.mode),
                    slots=hostimage.slots(final, mode=self.mode),
                    defaults=ImageDefaults(env=hostimage.ENV),
                    created_ms=time.time_ns() // 1_000_000,
                    size=built.size,
                    names=("host",),
                    binds=built.binds,
                    host_key=key,
                    warnings=built.warnings,
                )
                self._write(work, image)
                os.rename(work, final)
            if progress:
                progress("host image", image.size, image.size)
        return image

    def warning_for(self, key: str | None) -> str | None:
        """What to tell someone resuming a snapshot made when the host's key was ``key``."""
        if key is None or key == hostimage.host_key():
            return None
        return (
            "the host's packages changed since this snapshot was taken: files it never touched are the "
            "host's current ones, files it changed are as they were, and its package database is the old one"
        )

    # --- inside ----------------------------------------------------------------------------------------

    def _read(self, directory: str) -> Image | None:
        try:
            image = Image.from_json(read_json(f"{directory}/image.json"))
        except FileNotFoundError:
            return None
        return relocated(image, old=".", new=self.directory)

    def _write(self, directory: str, image: Image) -> None:
        """Record an image with paths relative to the store, so that a data directory can be moved."""
        write_json(f"{directory}/image.json", relocated(image, old=self.directory, new=".").to_json())

    @contextlib.contextmanager
    def _building(self, what: str) -> Iterator[str]:
        """A directory to build in; removed unless it was renamed away."""
        work = tempfile.mkdtemp(prefix=f"{what}-", dir=f"{self.directory}/build")
        os.chmod(work, 0o755)
        try:
            yield work
        finally:
            remove_tree(work)
