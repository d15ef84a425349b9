"""The state of the host's ``/usr``, as one short key.

The key changes when packages were installed, removed or upgraded, or when ``/usr/local`` changed: then a
skeleton built earlier no longer matches the ``/usr`` below it.
"""

from __future__ import annotations

import functools
import hashlib
import os

from sandkeep.errors import HostCannot

MERGED = ("bin", "sbin", "lib")
_CONTENT = ("/etc/os-release", "/var/lib/dpkg/status")
_TIMES = (
    "/usr",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local",
    "/usr/local/bin",
    "/usr/local/lib",
    "/etc/ssl/certs",
    "/var/lib/rpm",
    "/usr/lib/sysimage/rpm",
    "/var/lib/pacman/local",
)


def require_merged_usr() -> None:
    """Refuse a host whose programs are not all in ``/usr``."""
    for name in MERGED:
        path = f"/{name}"
        if not os.path.islink(path) or os.path.realpath(path).split("/")[1:2] != ["usr"]:
            raise HostCannot(
                f"the host image needs a merged /usr, but {path} is not a link into it",
                hint="use an imported or pulled image instead",
                part="host image",
                why=f"{path} is not a symbolic link into /usr",
            )


@functools.lru_cache(maxsize=8)
def _content_digest(path: str, *_identity: int) -> bytes:
    """Return a file's SHA-256; read it again only if inode, size or time differ, as every create asks."""
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").digest()


def host_key() -> str:
    digest = hashlib.sha256()
    for path in _CONTENT:
        try:
            info = os.stat(path)
            digest.update(_content_digest(path, info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            digest.update(b"-")
    for path in _TIMES:
        try:
            digest.update(b"%d," % os.stat(path).st_mtime_ns)
        except OSError:
            digest.update(b"-,")
    return digest.hexdigest()
