"""The image store: which images exist, under which names, and how to add one.

On disk, below ``<data>/images``::

    host/<12 digits>/image.json  root/  [usr/]   generated skeletons, one per state of the host and masks
    layers/<sha256>/layer.json   fs/             unpacked layers, shared by the images that list them
    records/<sha256>/image.json  top/            images, each with the layer that adapts it
    blobs/[<project>/]<sha256>.part              downloads that can be resumed
    build/                                       work in progress

A directory appears under its final name by one rename after it is complete.
"""

from __future__ import annotations

import contextlib
import errno
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
from sandkeep.host.images.allowance import UNLIMITED, Allowance, Spending
from sandkeep.host.images.files import locked
from sandkeep.host.images.hostimage import programs
from sandkeep.host.images.image import Image, ImageKind
from sandkeep.host.images.oci import (
    Blob,
    DockerArchive,
    ImageConfig,
    Layout,
    digest_of,
    own_platform,
    parse_config,
)
from sandkeep.host.images.records import Records, find, publish
from sandkeep.host.images.reference import Reference, parse_reference
from sandkeep.host.images.registry import Progress, Registry, remove_other_parts
from sandkeep.host.images.streams import CHUNK, ByteSource, Hashing, decompressed
from sandkeep.host.images.transport import OPERATOR, Access
from sandkeep.host.images.tree import Mode, flavour_of
from sandkeep.host.layers.values import check_name
from sandkeep.host.rootfs import ImageDefaults
from sandkeep.linux.overlay import Way

T = TypeVar("T")

_HOST_ATTEMPTS = 6
_HOST_PAUSE = 0.5
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class ImageStore:
    """All images below one data directory. Several processes may use it at the same time."""

    def __init__(self, data_dir: str, *, mode: Mode, way: Way | None = None) -> None:
        """Open the store. ``way`` is how overlays are mounted, by default the newest that works."""
        self.data_dir = os.path.abspath(data_dir)
        self.mode: Mode = mode
        self._records = Records(self.data_dir, mode=mode, way=way)
        self.directory = self._records.directory
        self._proved: set[tuple[str, str]] = set()
        """Projects, each with a layer it has fetched completely, while the image is not recorded yet."""

    # --- the host image --------------------------------------------------------------------------------

    def host(self, *, masks: tuple[str, ...] = (), progress: Progress | None = None) -> Image:
        """Return the ``host`` image for the host's current state, built on first use.

        ``masks`` are paths below ``/usr`` to hide. Raises ``HostCannot`` where ``/usr`` is not merged.
        """
        hidden = hostimage.normal_masks(tuple(masks))
        final, key = self._host_now(hidden)
        if image := self._records.use_host(final):
            return image
        with locked(f"{self.directory}/host.lock"):
            for attempt in range(1, _HOST_ATTEMPTS + 1):
                # While a package manager runs, files that were just listed may disappear.
                final, key = self._host_now(hidden)
                if image := self._records.use_host(final):
                    return image
                if progress:
                    progress("host image", 0, 0)
                try:
                    image = self._build_host(final, key, hidden, last=attempt == _HOST_ATTEMPTS)
                except OSError as error:
                    if error.errno not in _VANISHED:
                        raise
                    image, why = None, error
                if image is not None:
                    break
                time.sleep(_HOST_PAUSE)
            else:
                raise ImageError(
                    f"the machine's packages change while the host image is built: {why}",
                    hint="try again when the package manager is done",
                )
            self._records.remove_old_hosts()
            if progress:
                progress("host image", image.size, image.size)
        return image

    def _host_now(self, hidden: tuple[str, ...]) -> tuple[str, str]:
        """Return where the skeleton for the host's current state belongs, and the key of that state."""
        key = hostimage.host_key()
        recipe = [hostimage.FORMAT, key, self.mode, hidden, programs.platform_prefix()]
        name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        return f"{self.directory}/host/{name}", key

    def _build_host(self, final: str, key: str, hidden: tuple[str, ...], *, last: bool) -> Image | None:
        """Build and publish; return ``None`` if the host changed, except for the ``last`` attempt."""
        with self._records.building("host") as work:
            built = hostimage.build(work, mode=self.mode, masks=hidden)
            if not last and hostimage.host_key() != key:
                return None
            image = Image(
                id=f"host@{os.path.basename(final)}",
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
                runtimes=built.runtimes,
            )
            self._records.write(work, image)
            publish(work, final)
        return image

    def collect(self) -> None:
        """Remove host images of earlier host states that nothing refers to."""
        if self._records.has_old_hosts():
            with locked(f"{self.directory}/host.lock"):
                self._records.remove_old_hosts()

    def warning_for(self, key: str | None) -> str | None:
        """Return the warning for resuming a snapshot that was made when the host's key was ``key``."""
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
        """Unpack a root filesystem archive: uncompressed, gzip or zstd."""
        with _open(path) as source:
            return self._import_stream(source, name=name, kind="tar", finished=lambda: None)

    def _import_stream(
        self, source: ByteSource, *, name: str, kind: ImageKind, finished: Callable[[], None]
    ) -> Image:
        _check_name(name)
        with self._records.adding():
            layer = self._records.add_layer(source, None, whiteouts=False)
            finished()
            return self._records.add_image(layer, [layer], kind=kind, name=name)

    def import_oci_layout(
        self, path: str, *, name: str, reference: str | None = None, platform: str | None = None
    ) -> Image:
        """Import from an OCI image layout directory; ``reference`` selects one where it holds several."""
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
        """Import an image from the output of ``docker save``; ``tag`` selects one where it holds several."""
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
        access: Access = OPERATOR,
        project: str | None = None,
        allowance: Allowance = UNLIMITED,
        progress: Progress | None = None,
    ) -> Image:
        """Fetch an image from a registry, for a project or for all projects.

        Layers that the project has already are not fetched again. Other layers are, even if they are stored:
        a registry may name the layers of another project's image, and only fetching the content proves the
        right to use it.

        ``auth`` is a user name and password; the operator's default is what ``docker login`` stored.
        ``access`` limits what the caller may connect to, ``allowance`` how much it may use. ``progress`` gets
        a layer's digest, bytes done and the total.
        """
        parsed = parse_reference(reference)
        spending = Spending(allowance, self.directory)
        with Registry(
            parsed, auth=(auth[0], auth[1]) if auth else None, access=access, seconds=allowance.seconds
        ) as registry:
            return self._pull(registry, parsed, platform, project, spending, progress)

    def _pull(
        self,
        registry: Registry,
        parsed: Reference,
        platform: str | None,
        project: str | None,
        spending: Spending,
        progress: Progress | None,
    ) -> Image:
        manifest = registry.manifest(platform or own_platform())
        config = parse_config(registry.config(manifest.config), manifest.config.digest)
        try:
            with self._records.adding([config.digest, *config.diff_ids]):
                if project is not None:
                    self._records.check_room(project, config.digest, 0, spending.allowance)
                layers = pairs(manifest.layers, config.diff_ids)
                self._fetch(registry, layers, project, spending, progress)
                made = self._add_configured(
                    config, name=str(parsed), kind="oci", project=project, allowance=spending.allowance
                )
        except BaseException:
            if project is not None:
                self._records.sweep()  # otherwise the unpacked layers would stay without an owner
            raise
        finally:
            self._proved -= {(project or "", layer) for layer in config.diff_ids}
        return made.seen_by(project) or made

    def _fetch(
        self,
        registry: Registry,
        layers: Sequence[tuple[Blob, str]],
        project: str | None,
        spending: Spending,
        progress: Progress | None,
    ) -> None:
        known = None if project is None else self._records.layers_of(project)

        def has(diff_id: str) -> bool:
            proved = known is None or diff_id in known or (project, diff_id) in self._proved
            return proved and self._records.has_layer(diff_id)

        wanted = [(blob, diff_id) for blob, diff_id in dict.fromkeys(layers) if not has(diff_id)]
        for diff_id in {diff_id for _, diff_id in layers} - {diff_id for _, diff_id in wanted}:
            size, entries = self._records.layer_size(diff_id)
            spending.add_bytes(size)
            spending.add_entries(entries)
        spending.check_download(sum(blob.size for blob, _ in wanted))
        # Separate for each project: a download that another project began proves nothing for this one.
        directory = f"{self.directory}/blobs" + (f"/{check_name(project, 'project')}" if project else "")
        if project:
            remove_other_parts(directory, [blob for blob, _ in wanted])
        with contextlib.closing(registry.layers(wanted, directory, has=has, progress=progress)) as arriving:
            for packed, diff_id in arriving:
                self._records.add_layer(packed, diff_id, whiteouts=True, spending=spending)
                self._proved.add((project or "", diff_id))

    def _add_configured(
        self,
        config: ImageConfig,
        *,
        name: str,
        kind: ImageKind,
        project: str | None = None,
        allowance: Allowance | None = None,
    ) -> Image:
        return self._records.add_image(
            config.digest,
            config.diff_ids,
            kind=kind,
            name=name,
            user=config.user,
            env=config.env,
            config=config.raw,
            project=project,
            allowance=allowance,
        )

    # --- what there is ---------------------------------------------------------------------------------

    def get(self, name: str, *, project: str | None = None) -> Image:
        """Return the image with that name or id; ``host`` is the host's current state. Raises ``NotFound``.

        A project finds images that it fetched or that are for all projects; without a project any is found by
        id.
        """
        return self.host() if name == "host" else find(self._records.images(), name, project)

    def list(self, *, project: str | None = None) -> list[Image]:
        """Return every image, or those a project may use, oldest first."""
        return [image for each in self._records.images() if (image := each.seen_by(project)) is not None]

    def remove(self, name: str, *, project: str | None = None) -> None:
        """Remove a name; with its last name, remove the image and the layers that only it used.

        The name is the project's, or one for all projects. Raises ``NotFound``, or ``WrongState`` while a
        layer or a session uses an image for all projects.
        """
        self._records.remove(self.get(name, project=project), name, project)

    def sweep(self) -> None:
        """Remove images that belong to no project and have no name."""
        self._records.sweep()


def pairs(layers: Sequence[T], diff_ids: Sequence[str]) -> list[tuple[T, str]]:
    """Return each layer with the digest of its uncompressed archive, lowest first."""
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
    """Return the archive itself when it is uncompressed, else its decompressed bytes in ``spare``."""
    if packed.read(2) != b"\x1f\x8b":
        packed.seek(0)
        if packed.read(4) != b"\x28\xb5\x2f\xfd":
            return packed
    packed.seek(0)
    with decompressed(packed) as plain:
        while data := plain.read(CHUNK):
            spare.write(data)
    return spare
