"""Configure package managers so that installing works as on a developer's own machine.

``apt`` gets the distribution's own public archive: sources that an administrator wrote may name private
archives, so they are not copied. ``pip`` and ``npm`` install for the user into ``~/.local``, which is on
``PATH``; with ``sudo`` they install for all users.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Mapping

from sandkeep.host.images.hostimage.graft import USR
from sandkeep.host.images.tree import ImageTree

_KEYRINGS = "/usr/share/keyrings"
_UBUNTU_ELSEWHERE = "http://ports.ubuntu.com/ubuntu-ports"
_UBUNTU_ARCHITECTURES = ("x86_64", "i686")

PIP_CONF = """\
# This machine belongs to one user, who may become root: packages need no environment of their own.
# The mark that says otherwise is not in the image, but an upgrade of Python would bring it back.
[global]
break-system-packages = true
root-user-action = ignore
"""
NPMRC = "prefix=${HOME}/.local\n"


def os_release(text: str) -> dict[str, str]:
    """Parse the variables of an ``os-release`` file."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            try:
                found[name.strip()] = " ".join(shlex.split(value))
            except ValueError:
                continue
    return found


def apt_source(release: Mapping[str, str], machine: str) -> tuple[str, str] | None:
    """Return name and text of the file that a fresh installation has; ``None`` for unknown distributions."""
    distribution, codename = release.get("ID"), release.get("VERSION_CODENAME")
    if not codename:
        return None
    if distribution == "debian":
        parts = [
            ("http://deb.debian.org/debian", f"{codename} {codename}-updates"),
            ("http://deb.debian.org/debian-security", f"{codename}-security"),
        ]
        return "debian.sources", _stanzas(parts, "main", "debian-archive-keyring.gpg")
    if distribution == "ubuntu":
        usual = machine in _UBUNTU_ARCHITECTURES
        parts = [
            (
                "http://archive.ubuntu.com/ubuntu" if usual else _UBUNTU_ELSEWHERE,
                f"{codename} {codename}-updates {codename}-backports",
            ),
            ("http://security.ubuntu.com/ubuntu" if usual else _UBUNTU_ELSEWHERE, f"{codename}-security"),
        ]
        components = "main restricted universe multiverse"
        return "ubuntu.sources", _stanzas(parts, components, "ubuntu-archive-keyring.gpg")
    return None


def _stanzas(parts: list[tuple[str, str]], components: str, keyring: str) -> str:
    signed = f"{_KEYRINGS}/{keyring}"
    # Without that file apt uses the keys in trusted.gpg.d, where the keyring's package puts them too.
    last = f"Signed-By: {signed}\n" if os.path.exists(signed) else ""
    return "\n".join(
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: {components}\n{last}"
        for uri, suites in parts
    )


def write_sources(tree: ImageTree) -> str | None:
    """Give apt the distribution's own archive; return a warning if none is known."""
    if not os.path.isdir("/etc/apt"):
        return None
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as source:
            release = os_release(source.read())
    except OSError:
        release = {}
    found = apt_source(release, os.uname().machine)
    if found is None:
        name = release.get("PRETTY_NAME") or release.get("ID") or "this distribution"
        return f"no public archive of {name} is known: apt has no sources inside until some are written"
    tree.file(f"etc/apt/sources.list.d/{found[0]}", found[1])
    return None


def write_user_config(tree: ImageTree, home: str, *, uid: int, gid: int) -> None:
    """Write the configuration that lets ``pip`` and ``npm`` install for the user."""
    tree.file("etc/pip.conf", PIP_CONF)
    tree.file(f"{home.strip('/')}/.npmrc", NPMRC, uid=uid, gid=gid)


def external_marks() -> list[str]:
    """Return the files below ``/usr`` that tell ``pip`` to refuse (PEP 668), relative to it."""
    found = glob.glob(f"{USR}/lib/python3*/EXTERNALLY-MANAGED")
    found += glob.glob(f"{USR}/local/lib/python3*/EXTERNALLY-MANAGED")
    return sorted(os.path.relpath(path, USR) for path in found)
