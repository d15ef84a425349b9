"""Image manifests: choose one by platform, and read an OCI layout or a docker archive.

Everything named by a digest is verified against it before use; what only a manifest states (media types,
sizes) is checked where it matters. Every kind of import yields a ``Manifest``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform as _platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from sandkeep.errors import ImageError, NotFound
from sandkeep.host.images.streams import ByteSource, Limited, archive_errors
from sandkeep.shared.tarreader import TarReader

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = (OCI_INDEX, DOCKER_LIST)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
REF_NAME = "org.opencontainers.image.ref.name"

_MOST_JSON = 8 << 20
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True)
class Blob:
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an image configuration a sandbox uses."""

    digest: str
    diff_ids: tuple[str, ...]
    """Digests of the layers' plain archives, lowest first."""
    user: str
    env: Mapping[str, str]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Blob
    layers: tuple[Blob, ...]


def own_platform() -> str:
    machine = _platform.machine()
    return f"linux/{_MACHINES.get(machine, machine)}"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(digest: object) -> str:
    """Return the digest if it is sha256, which can be verified and is safe as a file name; refuse others."""
    text = str(digest)
    algorithm, _, value = text.partition(":")
    if algorithm != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ImageError(f"unsupported digest {text[:80]!r}", hint="only sha256 digests are supported")
    return text


def verified(data: bytes, digest: str) -> bytes:
    if digest_of(data) != digest:
        raise ImageError(f"content does not match its digest {digest}", digest=digest)
    return data


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ImageError(f"the {what} is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ImageError(f"the {what} is not a JSON object")
    return body


def _blob(body: object) -> Blob:
    if not isinstance(body, dict) or not isinstance(body.get("size"), int) or body["size"] < 0:
        raise ImageError("a manifest's descriptor is malformed")
    return Blob(check_digest(body.get("digest")), body["size"])


def parse_manifest(body: Mapping[str, Any]) -> Manifest:
    if body.get("schemaVersion") != 2 or "config" not in body:
        raise ImageError(
            "unsupported manifest schema", hint="only OCI and docker schema 2 manifests are supported"
        )
    layers = body.get("layers")
    if not isinstance(layers, list):
        raise ImageError("the manifest lists no layers")
    for layer in layers:
        kind = str(layer.get("mediaType", "")) if isinstance(layer, dict) else ""
        if "foreign" in kind or "nondistributable" in kind or "encrypted" in kind:
            raise ImageError(f"unsupported layer type {kind}")
    return Manifest(_blob(body["config"]), tuple(_blob(layer) for layer in layers))


def parse_config(data: bytes, digest: str) -> ImageConfig:
    body = parse_json(data, "image configuration")
    runtime = body.get("config") or {}
    rootfs = body.get("rootfs") or {}
    diff_ids = tuple(check_digest(item) for item in rootfs.get("diff_ids") or ())
    env = dict(item.split("=", 1) for item in runtime.get("Env") or () if "=" in item)
    return ImageConfig(digest, diff_ids, str(runtime.get("User") or ""), env, runtime)


def is_index(body: Mapping[str, Any]) -> bool:
    return body.get("mediaType") in INDEXES or "manifests" in body


def choose(body: Mapping[str, Any], platform: str) -> Blob:
    """Return the manifest of an index for ``platform`` (``os/arch`` or ``os/arch/variant``)."""
    wanted = platform.split("/")
    found = []
    entries: list[Any] = body.get("manifests") or []
    for entry in entries:
        here = entry.get("platform") or {}
        offered = [here.get("os"), here.get("architecture"), here.get("variant")]
        if offered[:2] == wanted[:2] and (len(wanted) < 3 or offered[2] == wanted[2]):
            return _blob(entry)
        if here.get("os") not in (None, "unknown"):
            found.append("/".join(str(part) for part in offered if part))
    if len(entries) == 1 and "platform" not in entries[0]:
        return _blob(entries[0])
    raise ImageError(
        f"no image for {platform}; there is one for: {', '.join(sorted(set(found))) or 'nothing'}",
        platform=platform,
    )


class Layout:
    """An OCI image layout: a directory of blobs named by digest."""

    def __init__(self, path: str) -> None:
        self._path = path
        if not os.path.isfile(f"{path}/oci-layout"):
            raise ImageError(f"{path} is not an OCI image layout: it has no oci-layout file", path=path)

    def manifest(self, reference: str | None, platform: str) -> Manifest:
        with open(f"{self._path}/index.json", "rb") as source:
            index = parse_json(source.read(_MOST_JSON), "layout's index")
        body = self._json(self._select(index, reference))
        if is_index(body):
            body = self._json(choose(body, platform))
        return parse_manifest(body)

    def read(self, blob: Blob) -> bytes:
        if blob.size > _MOST_JSON:
            raise ImageError(f"{blob.digest} is too large for a document")
        with self.open(blob) as source:
            data = b""
            while chunk := source.read(blob.size + 1 - len(data)):
                data += chunk
        return verified(data, blob.digest)

    @contextlib.contextmanager
    def open(self, blob: Blob) -> Iterator[ByteSource]:
        algorithm, _, value = blob.digest.partition(":")
        try:
            file = open(f"{self._path}/blobs/{algorithm}/{value}", "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise ImageError(f"the layout lacks {blob.digest}", digest=blob.digest) from error
        with file:
            yield file

    def _json(self, blob: Blob) -> dict[str, Any]:
        return parse_json(self.read(blob), "manifest")

    def _select(self, index: Mapping[str, Any], reference: str | None) -> Blob:
        entries = index.get("manifests") or []
        names = [str((entry.get("annotations") or {}).get(REF_NAME, "")) for entry in entries]
        if reference is None:
            if len(entries) == 1:
                return _blob(entries[0])
            raise ImageError(f"the layout holds {len(entries)} images: {', '.join(names)}", hint="name one")
        for entry, name in zip(entries, names, strict=True):
            if reference in (name, entry.get("digest")):
                return _blob(entry)
        raise NotFound(f"the layout has no image {reference}; it has: {', '.join(names)}")


class DockerArchive:
    """The output of ``docker save``: a plain tar with ``manifest.json`` and the layers' archives inside.

    Members are located by one pass over the headers and then read by position, so nothing is copied.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        file.seek(0)
        with archive_errors():
            for member in TarReader(file.read, gunzip=False):
                name, target = os.fsdecode(member.name), os.fsdecode(member.link)
                name = os.path.normpath(name)
                if member.kind == "file":
                    self._members[name] = (member.offset, member.size)
                elif member.kind == "symlink":
                    links[name] = os.path.normpath(os.path.join(os.path.dirname(name), target))
                elif member.kind == "hardlink":
                    links[name] = os.path.normpath(target)
        for name, target in links.items():
            if target in self._members:
                self._members[name] = self._members[target]

    def select(self, tag: str | None) -> tuple[bytes, Sequence[str]]:
        """Return the configuration and the layers' member names of the image tagged ``tag``."""
        try:
            entries = json.loads(self.read("manifest.json"))
        except ValueError as error:
            raise ImageError(f"manifest.json is not JSON: {error}") from None
        tags = [name for entry in entries for name in entry.get("RepoTags") or ()]
        if tag is None:
            if len(entries) != 1:
                raise ImageError(
                    f"the archive holds {len(entries)} images: {', '.join(tags)}", hint="name one"
                )
            chosen = entries[0]
        else:
            wanted = (tag, f"{tag}:latest", f"docker.io/library/{tag}")
            chosen = next((e for e in entries if set(wanted) & set(e.get("RepoTags") or ())), None)
            if chosen is None:
                raise NotFound(f"the archive has no image {tag}; it has: {', '.join(tags)}")
        return self.read(os.path.normpath(chosen["Config"])), [os.path.normpath(n) for n in chosen["Layers"]]

    def read(self, name: str) -> bytes:
        offset, size = self._find(name)
        if size > _MOST_JSON:
            raise ImageError(f"{name} is too large for a document")
        self._file.seek(offset)
        return self._file.read(size)

    def open(self, name: str) -> ByteSource:
        return Limited(self._file, *self._find(name))

    def _find(self, name: str) -> tuple[int, int]:
        try:
            return self._members[name]
        except KeyError:
            raise ImageError(f"the archive lacks {name}") from None
