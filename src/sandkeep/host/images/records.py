"""Unpacked layers and the records of images made of them.

A layer is stored once, under the digest of its plain archive, for all images that use it. An image belongs to
the projects that fetched it, or to all projects. A project that uses a layer another project stored saves the
space, but must still prove that it can fetch the layer.

A process that adds an image claims its layers before it first relies on one, until the image's record is in
place; a process that removes images leaves claimed layers alone. A claim is a locked file, and ends when the
process that holds it does. The store's lock is held only while claims, names and records change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandkeep.errors import ImageError, InvalidRequest, LimitReached, NotFound, WrongState
from sandkeep.host.images.adapt import adapt
from sandkeep.host.images.allowance import Allowance, Spending
from sandkeep.host.images.files import locked, read_json, write_json
from sandkeep.host.images.image import Image, ImageKind, relocated
from sandkeep.host.images.reference import parse_reference
from sandkeep.host.images.streams import ByteSource, Hashing, decompressed
from sandkeep.host.images.tree import Mode, flavour_of
from sandkeep.host.images.unpack import unpack
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.rootfs import Lower, Slot
from sandkeep.linux import syscalls as sc
from sandkeep.linux.overlay import Way, choose_for_reading

_RECORDS = ("image.json", "layer.json")
"""A complete directory contains one of these."""
_HOST_KEPT = 600.0
"""Seconds an unused skeleton is kept: by then the last caller that got its image has stored its reference."""


class Records:
    def __init__(self, data_dir: str, *, mode: Mode, way: Way | None) -> None:
        self.directory = f"{data_dir}/images"
        self._data_dir = data_dir
        self._mode: Mode = mode
        for name in ("", "/host", "/build", "/layers", "/records", "/claims"):
            os.makedirs(self.directory + name, mode=0o700, exist_ok=True)
        self._way: Way = way or choose_for_reading(self.directory)

    # --- building --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def building(self, what: str) -> Iterator[str]:
        """Yield a directory to build in; removed at the end unless renamed, or later if this process dies."""
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
    def adding(self, digests: Sequence[str] | None = None) -> Iterator[None]:
        """Keep these layers and images from being removed; all, if the caller cannot name them yet."""
        with self._locked():
            fd, path = tempfile.mkstemp(dir=f"{self.directory}/claims")
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps(digests).encode())
        try:
            yield
        finally:
            os.unlink(path)
            os.close(fd)

    def _claimed(self) -> set[str] | None:
        """Return the claimed digests; ``None`` when a process has claimed everything."""
        claimed: set[str] = set()
        for path in glob.glob(f"{glob.escape(self.directory)}/claims/*"):
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as claim:
                try:
                    fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    digests = json.load(claim)
                    if digests is None:
                        return None
                    claimed.update(digests)
                else:
                    os.unlink(path)  # its holder has died
        return claimed

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(f"{self.directory}/store.lock")

    # --- layers ----------------------------------------------------------------------------------------

    def has_layer(self, diff_id: str) -> bool:
        return os.path.exists(f"{self._layer(diff_id)}/layer.json")

    def layer_size(self, digest: str) -> tuple[int, int]:
        """Return bytes and entries of a stored layer."""
        body = read_json(f"{self._layer(digest)}/layer.json")
        return body["size"], body["entries"]

    def add_layer(
        self, source: ByteSource, diff_id: str | None, *, whiteouts: bool, spending: Spending | None = None
    ) -> str:
        """Unpack a layer, compressed or not, and return its digest, which must be ``diff_id`` if given.

        A layer that is stored already is read to verify that it is the same, and left alone.
        """
        with self.building("layer") as work, decompressed(source) as plain:
            hashing = Hashing(plain if spending is None else spending.counted(plain))
            if diff_id is not None and self.has_layer(diff_id):
                hashing.drain()
                _check_content(hashing, diff_id)
                return diff_id
            os.mkdir(f"{work}/fs")
            os.chmod(f"{work}/fs", 0o755)
            done = unpack(hashing, f"{work}/fs", mode=self._mode, whiteouts=whiteouts, spending=spending)
            hashing.drain()
            if diff_id is not None:
                _check_content(hashing, diff_id)
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
        kind: ImageKind,
        name: str,
        user: str = "",
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        project: str | None = None,
        allowance: Allowance | None = None,
    ) -> Image:
        """Record the image ``digest`` made of ``layers`` (lowest first) under a name."""
        final = f"{self.directory}/records/{digest.removeprefix('sha256:')}"
        if self.read(final) is None:
            with self.building("image") as work:
                below = [f"{self._layer(layer)}/fs" for layer in reversed(layers)]
                adapted = adapt(
                    f"{work}/top",
                    below,
                    mode=self._mode,
                    way=self._way,
                    user=user,
                    env=env or {},
                    cwd=str((config or {}).get("WorkingDir") or ""),
                )
                size = sum(self.layer_size(layer)[0] for layer in set(layers))
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
        return self._name(digest, name, project, allowance or Allowance())

    def check_room(self, project: str, digest: str, size: int, allowance: Allowance) -> None:
        """Refuse one more image of that size for a project beyond its limits. Raises ``LimitReached``."""
        others = [image for image in self.images() if project in image.owners and image.id != digest]
        if allowance.images is not None and len(others) >= allowance.images:
            raise LimitReached(
                f"the project has {allowance.images} images",
                hint="delete some",
                limit="images",
                value=allowance.images,
            )
        most = allowance.project_bytes
        if most is not None and sum(image.size for image in others) + size > most:
            raise LimitReached(
                f"the project's images may have {most} bytes together",
                hint="delete some",
                limit="images_bytes",
                value=most,
            )

    def layers_of(self, project: str) -> set[str]:
        """Return the layers of the images a project may use."""
        seen = (image.seen_by(project) for image in self.images())
        return {layer for image in seen if image is not None for layer in image.layers}

    def _name(self, digest: str, name: str, project: str | None, allowance: Allowance) -> Image:
        """Give ``name`` to one image, and take it from any other image of the same project, or of all."""
        with self._locked():
            made = self.read(f"{self.directory}/records/{digest.removeprefix('sha256:')}")
            if project is not None and made is not None:
                self.check_room(project, digest, made.size, allowance)
            named = None
            for directory in self._records():
                image = self.read(directory)
                if image is None:
                    continue
                before = image.names if project is None else image.owners.get(project, ())
                kept = tuple(other for other in before if other != name)
                names = (*kept, name) if image.id == digest else kept
                if names != before:
                    image = _with_names(image, project, names)
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

    def remove(self, image: Image, name: str, project: str | None = None) -> None:
        """Remove ``name`` from the image; by its id, all names of that project (of all, if none is given).

        The image is deleted with its last name. If sessions of other projects still run on it, its files stay
        until they are swept.
        """
        directory = self._directory(image)
        # The trees are deleted at the end of the outer block, after the lock is released.
        with self.building("removed") as work, self._locked():
            # Another process may have given the image another name, or this name to another image.
            current = self.read(directory)
            if current is None or not _is_called(current, name, project):
                raise NotFound(f"no image {name}", image=name)
            before = current.names if project is None else current.owners[project]
            others = tuple(other for other in before if other not in _spellings(name))
            left = _with_names(current, project, () if others == before else others)
            if left.names or left.owners:
                self.write(directory, left)
                return
            if project is None and (users := self._users(image)):
                raise WrongState(
                    f"the image {name} is in use by {', '.join(users[:3])}{' …' if len(users) > 3 else ''}",
                    hint="remove the snapshots and stop the sessions that use it first",
                    image=image.id,
                    used_by=users,
                )
            if image.kind == "host":
                os.rename(directory, f"{work}/image")
                return
            # Sessions of other projects that use the image, or are about to, keep it; the caller cannot see
            # them.
            self.write(directory, left)
            self._sweep(work)

    def sweep(self) -> None:
        """Remove images without a name or owner, and layers that no image uses."""
        with self.building("removed") as work, self._locked():
            self._sweep(work)

    def _sweep(self, work: str) -> None:
        claimed = self._claimed()
        if claimed is None:
            return
        for directory in self._records():
            image = self.read(directory)
            if image is None or image.names or image.owners or image.id in claimed or self._users(image):
                continue
            os.rename(directory, f"{work}/{os.path.basename(directory)}-image")
        kept = claimed.union(*(image.layers for image in self.images()))
        for name in os.listdir(f"{self.directory}/layers"):
            if f"sha256:{name}" not in kept:
                os.rename(f"{self.directory}/layers/{name}", f"{work}/{name}")

    def use_host(self, directory: str) -> Image | None:
        """Read a skeleton, and record the time of its use."""
        image = self.read(directory)
        if image is not None:
            os.utime(f"{directory}/image.json")
        return image

    def remove_old_hosts(self) -> None:
        """Remove skeletons of earlier host states that were not used recently and have no reference."""
        for directory in self._old_hosts():
            image = self.read(directory)
            if image is not None and not self._users(image):
                with self.building("removed") as work:
                    os.rename(directory, f"{work}/image")

    def has_old_hosts(self) -> bool:
        return bool(self._old_hosts())

    def _old_hosts(self) -> list[str]:
        """Return skeletons not used recently. The one used last is kept for the next create."""
        used = {}
        for record in glob.glob(f"{glob.escape(self.directory)}/host/*/image.json"):
            with contextlib.suppress(FileNotFoundError):
                used[os.path.dirname(record)] = os.stat(record).st_mtime
        last = max(used.values(), default=0.0)
        return [where for where, at in used.items() if at < last and time.time() - at > _HOST_KEPT]

    def _users(self, image: Image) -> list[str]:
        """Return the layers and sessions that refer to the image."""
        escaped = glob.escape(self._data_dir)
        users = []
        for kind, pattern in (("layer", "layers/*/meta.json"), ("session", "sessions/*/spec.json")):
            for path in sorted(glob.glob(f"{escaped}/{pattern}")):
                try:
                    body = read_json(path)
                except (OSError, ValueError):
                    continue  # being removed, or incomplete: the layer store handles it
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


def find(images: Sequence[Image], wanted: str, project: str | None = None) -> Image:
    """Return the image with that id, unambiguous id prefix, or name, as far as a project may see it."""
    spellings = _spellings(wanted)
    seen = [image for each in images if (image := each.seen_by(project)) is not None]
    named = [image for image in seen if wanted == image.id or spellings.intersection(image.names)]
    # A project's own name takes precedence over a name for all projects.
    own = [image for image in named if not spellings.isdisjoint(image.owners.get(project or "", ()))]
    for image in own + named:
        if wanted == image.id or image.kind != "host":
            return image
    digits = wanted.removeprefix("sha256:")
    if len(digits) >= 6:
        started = [image for image in seen if image.id.removeprefix("sha256:").startswith(digits)]
        if len(started) == 1:
            return started[0]
    raise NotFound(f"no image {wanted}", hint="pull or import it first", image=wanted)


def _is_called(image: Image, name: str, project: str | None) -> bool:
    digits = name.removeprefix("sha256:")
    names = image.names if project is None else image.owners.get(project, ())
    by_id = image.id.removeprefix("sha256:").startswith(digits)
    return not _spellings(name).isdisjoint(names) or (by_id and (project is None or bool(names)))


def _with_names(image: Image, project: str | None, names: tuple[str, ...]) -> Image:
    if project is None:
        return replace(image, names=names)
    owners = {owner: theirs for owner, theirs in image.owners.items() if owner != project}
    return replace(image, owners={**owners, project: names} if names else owners)


def _check_content(content: Hashing, diff_id: str) -> None:
    if content.digest() != diff_id:
        raise ImageError(f"a layer's content does not match its digest {diff_id}", digest=diff_id)


def _spellings(name: str) -> set[str]:
    """Return a name as given and as a registry reference: ``debian`` also means ``debian:latest``."""
    spellings = {name}
    with contextlib.suppress(InvalidRequest):
        spellings.add(str(parse_reference(name)))
    return spellings


def publish(work: str, final: str) -> None:
    """Rename a finished directory into place; if another process was first, keep that one's result.

    The content is synced before the rename: after a power loss a directory with its name is complete.
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
        _replace_remains(work, final)


def _replace_remains(work: str, final: str) -> None:
    """Replace an incomplete directory, such as what ``rm -rf`` could not delete of an earlier image."""
    area = os.path.dirname(work)
    with locked(f"{os.path.dirname(area)}/build.lock"):  # other builders and sweepers wait
        if any(os.path.exists(f"{final}/{record}") for record in _RECORDS):
            return
        aside = tempfile.mkdtemp(prefix="remains-", dir=area)
        os.rename(final, f"{aside}/remains")
        os.rename(work, final)
    remove_tree(aside)


def _remove_abandoned(area: str) -> None:
    for name in os.listdir(area):
        path = f"{area}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # finished, and moved away or removed, since the listing
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove_tree(path)
        finally:
            os.close(fd)
