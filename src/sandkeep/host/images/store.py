"""The image store: what exists, under which names, and the ways in.

On disk, below ``<data>/images``::

    host/<12 digits>/image.json  root/  [usr/]   generated skeletons, one per state of the host and masks
    layers/<sha256>/layer.json   fs/             unpacked layers, shared by the images that list them
    records/<sha256>/image.json  top/            images, each with the layer that adapts it
    blobs/<sha256>.part                          downloads to be continued
    build/                                       work in progress

A directory appears under its final name by one rename after it is complete, so whatever is there is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

from sandkeep.errors import ImageError, InvalidRequest
from sandkeep.host.images import hostimage
from sandkeep.host.images.files import locked
from sandkeep.host.images.hostimage import programs
from sandkeep.host.images.image import Image, Kind
from sandkeep.host.images.oci import Config, DockerArchive, Layout, digest_of, own_platform, parse_config
from sandkeep.host.images.records import Records, find, publish
from sandkeep.host.images.reference import parse_reference
from sandkeep.host.images.registry import Progress, Registry
from sandkeep.host.images.streams import CHUNK, Hashing, Source, decompressed
from sandkeep.host.images.tree import Mode, flavour_of
from sandkeep.host.rootfs import ImageDefaults

T = TypeVar("T")


class ImageStore:
    """All images below one data directory. Any number of processes may use one at the same time."""

    def __init__(self, data_dir: str, *, mode: Mode) -> None:
        self.data_dir = os.path.abspath(data_dir)
        self.mode: Mode = mode
        self._records = Records(self.data_dir, mode=mode)
        self.directory = self._records.directory

    # --- the host image --------------------------------------------------------------------------------

    def host(self, *, masks: tuple[str, ...] = (), progress: Progress | None = None) -> Image:
        """The ``host`` image for the host as it is now, built the first time it is asked for.

        ``masks`` are paths below ``/usr`` to hide. Raises ``HostCannot`` where ``/usr`` is not merged.
        """
        key = hostimage.host_key()
        hidden = hostimage.normal_masks(tuple(masks))
        recipe = [hostimage.FORMAT, key, self.mode, hidden, programs.platform_prefix()]
        name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        final = f"{self.directory}/host/{name}"
        if image := self._records.use_host(final):
            return image
        with locked(f"{self.directory}/host.lock"):
            if image := self._records.use_host(final):
                return image
            if progress:
                progress("host image", 0, 0)
            with self._records.building("host") as work:
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
                self._records.write(work, image)
                publish(work, final)
            self._records.remove_old_hosts()
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

    # --- imports ---------------------------------------------------------------------------------------

    def import_directory(self, path: str, *, name: str) -> Image:
        """Copy a root filesystem directory; other filesystems mounted below it are left out."""
        if not os.path.isdir(path):
            raise InvalidRequest(f"{path} is not a directory", path=path)
        command = ["tar", "-C", path, "--one-file-system", "--numeric-owner", "--xattrs"]
        command += ["--xattrs-include=*", "--format=pax", "--sort=name", "-cf", "-", "."]
        with (
            tempfile.TemporaryFile() as complaints,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints) as tar,
        ):
            assert tar.stdout

            def finished() -> None:
                if tar.wait():
                    complaints.seek(0)
                    detail = complaints.read(2000).decode(errors="replace").strip()
                    raise ImageError(f"cannot read all of {path}: {detail}", path=path)

            try:
                return self._import_stream(tar.stdout, name=name, kind="directory", finished=finished)
            finally:
                tar.kill()

    def import_tar(self, path: str, *, name: str) -> Image:
        """Unpack a root filesystem archive: plain, gzip or zstd."""
        with _open(path) as source:
            return self._import_stream(source, name=name, kind="tar", finished=lambda: None)

    def _import_stream(self, source: Source, *, name: str, kind: Kind, finished: Callable[[], None]) -> Image:
        _check_name(name)
        with self._records.adding():
            layer = self._records.add_layer(source, None, whiteouts=False)
            finished()
            return self._records.add_image(layer, [layer], kind=kind, name=name)

    def import_oci_layout(
        self, path: str, *, name: str, reference: str | None = None, platform: str | None = None
    ) -> Image:
        """Import from an OCI image layout directory; ``reference`` names one where it holds several."""
        _check_name(name)
        layout = Layout(path)
        manifest = layout.manifest(reference, platform or own_platform())
        config = parse_config(layout.read(manifest.config), manifest.config.digest)
        with self._records.adding():
            for blob, diff_id in pairs(manifest.layers, config.diff_ids):
                if not self._records.has_layer(diff_id):
                    with layout.open(blob) as file:
                        packed = Hashing(file)
                        self._records.add_layer(packed, diff_id, whiteouts=True)
                        packed.drain()
                        if packed.digest() != blob.digest:
                            raise ImageError(f"content does not match its digest {blob.digest}")
            return self._add_configured(config, name=name, kind="oci")

    def import_docker_archive(self, path: str, *, name: str, tag: str | None = None) -> Image:
        """Import an image from what ``docker save`` writes; ``tag`` names one where it holds several."""
        _check_name(name)
        with _open(path) as packed, tempfile.TemporaryFile(dir=f"{self.directory}/build") as spare:
            file = _seekable(packed, spare)
            archive = DockerArchive(file)
            data, layers = archive.select(tag)
            config = parse_config(data, digest_of(data))
            with self._records.adding():
                for layer, diff_id in pairs(layers, config.diff_ids):
                    if not self._records.has_layer(diff_id):
                        self._records.add_layer(archive.open(layer), diff_id, whiteouts=True)
                return self._add_configured(config, name=name, kind="docker-archive")

    # --- registries ------------------------------------------------------------------------------------

    def pull(
        self,
        reference: str,
        *,
        platform: str | None = None,
        auth: tuple[str, str] | None = None,
        insecure: bool = False,
        progress: Progress | None = None,
    ) -> Image:
        """Fetch an image from a registry; layers already here are not fetched again.

        ``auth`` is a user name and password, by default what ``docker login`` stored. ``insecure`` allows
        plain HTTP and untrusted certificates. ``progress`` gets a layer's digest, bytes done and bytes total.
        """
        parsed = parse_reference(reference)
        registry = Registry(parsed, auth=(auth[0], auth[1]) if auth else None, insecure=insecure)
        manifest = registry.manifest(platform or own_platform())
        config = parse_config(registry.config(manifest.config), manifest.config.digest)
        with self._records.adding():
            wanted = [
                (blob, diff_id)
                for blob, diff_id in dict.fromkeys(pairs(manifest.layers, config.diff_ids))
                if not self._records.has_layer(diff_id)
            ]
            layers = registry.layers(
                wanted, f"{self.directory}/blobs", has=self._records.has_layer, progress=progress
            )
            with contextlib.closing(layers):
                for packed, diff_id in layers:
                    self._records.add_layer(packed, diff_id, whiteouts=True)
            return self._add_configured(config, name=str(parsed), kind="oci")

    def _add_configured(self, config: Config, *, name: str, kind: Kind) -> Image:
        return self._records.add_image(
            config.digest,
            config.diff_ids,
            kind=kind,
            name=name,
            user=config.user,
            env=config.env,
            config=config.raw,
        )

    # --- what there is ---------------------------------------------------------------------------------

    def get(self, name: str) -> Image:
        """The image with that name or id; ``host`` is the host as it is now. Raises ``NotFound``."""
        return self.host() if name == "host" else find(self._records.images(), name)

    def list(self) -> list[Image]:
        """Every image, oldest first."""
        return self._records.images()

    def remove(self, name: str) -> None:
        """Remove a name, and with its last name the image and the layers only it used.

        Raises ``NotFound``, or ``WrongState`` while a layer or a session uses the image.
        """
        self._records.remove(self.get(name), name)


def pairs(layers: Sequence[T], diff_ids: Sequence[str]) -> list[tuple[T, str]]:
    """Each layer with the digest of its plain archive, lowest first."""
    if len(layers) != len(diff_ids) or not layers:
        raise ImageError(f"the image lists {len(layers)} layers but {len(diff_ids)} digests of their content")
    return [*zip(layers, diff_ids, strict=True)]


def _check_name(name: str) -> None:
    if not name or name == "host" or name.startswith(("host@", "sha256:")) or any(c.isspace() for c in name):
        raise InvalidRequest(f"{name!r} cannot be an image's name", name=name)


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", path=path) from error


def _seekable(packed: BinaryIO, spare: BinaryIO) -> BinaryIO:
    """The archive itself when it is plain, else its plain bytes in ``spare``."""
    if packed.read(2) != b"\x1f\x8b":
        packed.seek(0)
        if packed.read(4) != b"\x28\xb5\x2f\xfd":
            return packed
    packed.seek(0)
    with decompressed(packed) as plain:
        while data := plain.read(CHUNK):
            spare.write(data)
    return spare
