"""Unpacked layers and the records of images made of them.

A layer is kept once, under the digest of its plain archive, however many images use it. Whoever adds an image
holds the store's lock shared from before it first relies on a layer until the image's record is in place;
whoever removes holds it alone, so a layer nobody refers to then is really unused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandkeep.errors import ImageError, InvalidRequest, NotFound, WrongState
from sandkeep.host.images.adapt import adapt
from sandkeep.host.images.files import locked, read_json, write_json
from sandkeep.host.images.image import Image, Kind, relocated
from sandkeep.host.images.reference import parse_reference
from sandkeep.host.images.streams import Hashing, Source, decompressed
from sandkeep.host.images.tree import Mode, flavour_of
from sandkeep.host.images.unpack import unpack
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.rootfs import Lower, Slot
from sandkeep.linux import syscalls as sc

_HOST_KEPT = 7 * 24 * 3600.0
"""Seconds an unused skeleton is kept: whoever got its image last has long stored the reference by then."""


class Records:
    def __init__(self, data_dir: str, *, mode: Mode) -> None:
        self.directory = f"{data_dir}/images"
        self._data_dir = data_dir
        self._mode: Mode = mode
        for name in ("", "/host", "/build", "/layers", "/records"):
            os.makedirs(self.directory + name, mode=0o700, exist_ok=True)

    # --- building --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def building(self, what: str) -> Iterator[str]:
        """A directory to build in; removed at the end unless it was renamed away, or later if we die."""
        area = f"{self.directory}/build"
        with locked(f"{self.directory}/build.lock"):
            _remove_abandoned(area)
            work = tempfile.mkdtemp(prefix=f"{what}-", dir=area)
            fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            os.chmod(work, 0o755)
            yield work
        finally:
            try:
                remove_tree(work)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        with locked(f"{self.directory}/store.lock", shared=True):
            yield

    # --- layers ----------------------------------------------------------------------------------------

    def has_layer(self, diff_id: str) -> bool:
        return os.path.exists(f"{self._layer(diff_id)}/layer.json")

    def add_layer(self, source: Source, diff_id: str | None, *, whiteouts: bool) -> str:
        """Unpack a layer, compressed or not, and return its digest; ``diff_id`` is what that must be."""
        with self.building("layer") as work, decompressed(source) as plain:
            os.mkdir(f"{work}/fs")
            os.chmod(f"{work}/fs", 0o755)
            hashing = Hashing(plain)
            done = unpack(hashing, f"{work}/fs", mode=self._mode, whiteouts=whiteouts)
            hashing.drain()
            if diff_id is not None and hashing.digest() != diff_id:
                raise ImageError(f"a layer's content does not match its digest {diff_id}", digest=diff_id)
            found = hashing.digest()
            write_json(f"{work}/layer.json", {"digest": found, "size": done.size, "entries": done.entries})
            publish(work, self._layer(found))
        return found

    def _layer(self, digest: str) -> str:
        return f"{self.directory}/layers/{digest.removeprefix('sha256:')}"

    # --- images ----------------------------------------------------------------------------------------

    def add_image(
        self,
        digest: str,
        layers: Sequence[str],
        *,
        kind: Kind,
        name: str,
        user: str = "",
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Image:
        """Record the image ``digest`` made of ``layers`` (lowest first) under ``name``."""
        final = f"{self.directory}/records/{digest.removeprefix('sha256:')}"
        if self.read(final) is None:
            with self.building("image") as work:
                below = [f"{self._layer(layer)}/fs" for layer in reversed(layers)]
                adapted = adapt(f"{work}/top", below, mode=self._mode, user=user, env=env or {})
                size = sum(read_json(f"{self._layer(layer)}/layer.json")["size"] for layer in set(layers))
                lowers = (Lower(f"{final}/top"), *(Lower(path) for path in below))
                image = Image(
                    id=digest,
                    kind=kind,
                    flavour=flavour_of(self._mode),
                    slots=(Slot("root", "/", lowers),),
                    defaults=adapted.defaults,
                    created_ms=time.time_ns() // 1_000_000,
                    size=size + adapted.size,
                    warnings=adapted.warnings,
                    layers=tuple(layers),
                    config=config or {},
                )
                self.write(work, image)
                publish(work, final)
        return self._name(digest, name)

    def _name(self, digest: str, name: str) -> Image:
        """Give ``name`` to one image, taking it from any other."""
        with locked(f"{self.directory}/names.lock"):
            named = None
            for directory in self._records():
                image = self.read(directory)
                if image is None:
                    continue
                kept = tuple(other for other in image.names if other != name)
                names = (*kept, name) if image.id == digest else kept
                if names != image.names:
                    image = replace(image, names=names)
                    self.write(directory, image)
                if image.id == digest:
                    named = image
        if named is None:
            raise ImageError(f"the image {digest} was removed while it was added", image=digest)
        return named

    def images(self) -> list[Image]:
        directories = sorted(glob.glob(f"{glob.escape(self.directory)}/host/*")) + self._records()
        found = [image for directory in directories if (image := self.read(directory)) is not None]
        return sorted(found, key=lambda image: image.created_ms)

    def remove(self, image: Image, name: str) -> None:
        """Take ``name`` from the image, and remove it with its last name; by its id, in any case."""
        directory = self._directory(image)
        # The trees are deleted at the end of the outer block, when nobody is kept waiting.
        with self.building("removed") as work, locked(f"{self.directory}/store.lock"):
            # Whoever was adding meanwhile may have given it another name, or this one to another image.
            current = self.read(directory)
            if current is None or not _is_called(current, name):
                raise NotFound(f"no image {name}", image=name)
            image = current
            others = tuple(other for other in image.names if other not in _spellings(name))
            if others and others != image.names:
                self.write(directory, replace(image, names=others))
                return
            users = self._users(image)
            if users:
                raise WrongState(
                    f"the image {name} is in use by {', '.join(users[:3])}{' …' if len(users) > 3 else ''}",
                    hint="remove the snapshots and stop the sessions that use it first",
                    image=image.id,
                    used_by=users,
                )
            os.rename(directory, f"{work}/image")
            self._remove_unused_layers(work)

    def use_host(self, directory: str) -> Image | None:
        """Read a skeleton, and note that somebody wanted it."""
        image = self.read(directory)
        if image is not None:
            os.utime(f"{directory}/image.json")
        return image

    def remove_old_hosts(self) -> None:
        """Remove skeletons of earlier host states that nobody asked for lately and nothing refers to."""
        for image in self.images():
            if image.kind == "host" and not self._users(image):
                directory = self._directory(image)
                if time.time() - os.stat(f"{directory}/image.json").st_mtime > _HOST_KEPT:
                    with self.building("removed") as work:
                        os.rename(directory, f"{work}/image")

    def _remove_unused_layers(self, work: str) -> None:
        kept = {layer for image in self.images() for layer in image.layers}
        for name in os.listdir(f"{self.directory}/layers"):
            if f"sha256:{name}" not in kept:
                os.rename(f"{self.directory}/layers/{name}", f"{work}/{name}")

    def _users(self, image: Image) -> list[str]:
        """Layers and sessions that name the image."""
        escaped = glob.escape(self._data_dir)
        users = []
        for kind, pattern in (("layer", "layers/*/meta.json"), ("session", "sessions/*/spec.json")):
            for path in sorted(glob.glob(f"{escaped}/{pattern}")):
                try:
                    body = read_json(path)
                except (OSError, ValueError):
                    continue  # being removed, or torn: its own store deals with it
                if image.id in (body.get("image"), (body.get("rootfs") or {}).get("image")):
                    users.append(f"{kind} {os.path.basename(os.path.dirname(path))}")
        return users

    def _records(self) -> list[str]:
        return sorted(glob.glob(f"{glob.escape(self.directory)}/records/*"))

    def _directory(self, image: Image) -> str:
        if image.kind == "host":
            return f"{self.directory}/host/{image.id.removeprefix('host@')}"
        return f"{self.directory}/records/{image.id.removeprefix('sha256:')}"

    def read(self, directory: str) -> Image | None:
        try:
            image = Image.from_json(read_json(f"{directory}/image.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return relocated(image, old=".", new=self.directory)

    def write(self, directory: str, image: Image) -> None:
        """Record an image with paths relative to the store, so that a data directory can be moved."""
        write_json(f"{directory}/image.json", relocated(image, old=self.directory, new=".").to_json())


def find(images: Sequence[Image], wanted: str) -> Image:
    """The image with that id, an unambiguous beginning of it, or that name."""
    spellings = _spellings(wanted)
    for image in images:
        if wanted == image.id or (spellings.intersection(image.names) and image.kind != "host"):
            return image
    digits = wanted.removeprefix("sha256:")
    if len(digits) >= 6:
        started = [image for image in images if image.id.removeprefix("sha256:").startswith(digits)]
        if len(started) == 1:
            return started[0]
    raise NotFound(f"no image {wanted}", hint="pull or import it first", image=wanted)


def _is_called(image: Image, name: str) -> bool:
    digits = name.removeprefix("sha256:")
    return not _spellings(name).isdisjoint(image.names) or image.id.removeprefix("sha256:").startswith(digits)


def _spellings(name: str) -> set[str]:
    """A name as given and as a registry reference: ``debian`` also means ``debian:latest``."""
    spellings = {name}
    with contextlib.suppress(InvalidRequest):
        spellings.add(str(parse_reference(name)))
    return spellings


def publish(work: str, final: str) -> None:
    """Move a finished directory to its name; if another process was first, its result serves as well.

    Its content is on disk before its name is: after a power loss whatever has its name is whole.
    """
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sc.syncfs(fd)
    finally:
        os.close(fd)
    try:
        os.rename(work, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _remove_abandoned(area: str) -> None:
    for name in os.listdir(area):
        path = f"{area}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # finished, and moved away or removed, since it was listed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove_tree(path)
        finally:
            os.close(fd)
