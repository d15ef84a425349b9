"""Names of images in registries: ``name``, ``name:tag``, ``host:port/name@sha256:…``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandkeep.errors import InvalidRequest

HUB = "docker.io"
HUB_ENDPOINT = "registry-1.docker.io"
_REPOSITORY = re.compile(
    r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Reference:
    host: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def version(self) -> str:
        """The tag or digest to request from the registry: a digest takes precedence."""
        return self.digest or self.tag or "latest"

    @property
    def endpoint(self) -> str:
        return HUB_ENDPOINT if self.host == HUB else self.host

    def __str__(self) -> str:
        """Return the short form people write, always with its tag or digest."""
        name = (
            self.repository.removeprefix("library/") if self.host == HUB else f"{self.host}/{self.repository}"
        )
        tag = f":{self.tag}" if self.tag else ""
        return f"{name}{tag}@{self.digest}" if self.digest else f"{name}{tag}"


def parse_reference(text: str) -> Reference:
    """Parse a reference the way docker does. Raises ``InvalidRequest``."""
    rest, _, digest = text.partition("@")
    first, slash, after = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first.lower() != first):
        host, rest = first, after
    else:
        host = HUB
    if host in ("index.docker.io", HUB_ENDPOINT):
        host = HUB
    repository, colon, tag = rest.partition(":")
    if host == HUB and "/" not in repository:
        repository = f"library/{repository}"
    if (
        not _REPOSITORY.fullmatch(repository)
        or not _HOST.fullmatch(host)
        or (colon and not _TAG.fullmatch(tag))
        or ("@" in text and not _DIGEST.fullmatch(digest))
    ):
        raise InvalidRequest(
            f"{text!r} is not an image reference", hint="name, name:tag or host/name@sha256:…"
        )
    return Reference(host, repository, tag or (None if digest else "latest"), digest or None)
