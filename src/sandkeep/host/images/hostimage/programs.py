"""Programs the skeleton adds: ``sudo``, ``python``, and the interpreter this package runs on.

``sudo`` is a shell script in front of a setuid copy of ``setpriv``, so it works where no sudo is installed;
the copy's mode admits only members of the ``sudo`` group.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache

from sandkeep.host.images.tree import ImageTree
from sandkeep.host.rootfs import Bind

AS = "usr/libexec/sandkeep/as"
PLATFORM = "opt/sandkeep/bin"
"""Directory that shows an interpreter from outside ``/usr``."""
_SCRIPT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sudo.sh")


@cache
def sudo_script() -> bytes:
    """Return the program ``sudo``; the file is read once."""
    with open(_SCRIPT, "rb") as source:
        return source.read()


def install_sudo(tree: ImageTree, *, setpriv: str | None, sudo_gid: int, prefix: str = "usr/") -> bool:
    """Install sudo into ``tree``, whose ``/usr`` is at ``prefix``; return false without a setpriv to copy."""
    if setpriv is None:
        return False
    where = prefix + AS.removeprefix("usr/")
    tree.directory(os.path.dirname(where))
    if tree.mode == "single":
        tree.copy(setpriv, where, 0o755)
    else:
        tree.copy(setpriv, where, 0o4750, gid=sudo_gid)
    tree.file(f"{prefix}bin/sudo", sudo_script(), 0o755)
    return True


def host_setpriv() -> str | None:
    return shutil.which("setpriv", path="/usr/bin:/usr/sbin:/usr/local/bin")


def install_python(tree: ImageTree, prefix: str = "usr/") -> None:
    """Add ``python`` where the host has only ``python3``."""
    here = any(os.path.lexists(f"/usr/{where}/python") for where in ("bin", "local/bin"))
    if not here and os.path.lexists("/usr/bin/python3"):
        tree.symlink(f"{prefix}bin/python", "python3")


def runtimes() -> tuple[str, ...]:
    """Return the versions of ``python3`` and ``node`` inside, as runtimes: ``node20``, ``python3.11``."""
    found = []
    if version := _says("node", r"v(\d+)"):
        found.append(f"node{version}")
    if platform_prefix():
        found.append(f"python{sys.version_info.major}.{sys.version_info.minor}")
    elif version := _says("python3", r"Python (\d+\.\d+)"):
        found.append(f"python{version}")
    return tuple(found)


def _says(name: str, pattern: str) -> str | None:
    """Return the version that a program prints, as found first on the PATH inside."""
    program = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.match(pattern, done.stdout)
    return said[1] if said else None


def platform_prefix() -> str | None:
    """Return the prefix of the running interpreter if it is outside ``/usr``."""
    prefix = os.path.realpath(sys.base_prefix)
    return None if prefix in ("/", "/usr") or prefix.startswith("/usr/") else prefix


def install_platform_python(root: ImageTree, prefix: str) -> Bind:
    """Show the running interpreter at its own path, and first on ``PATH``.

    At the same path, because a shared build looks for its library there. By wrappers that ``exec``, because a
    link elsewhere makes ``venv`` record the link's directory as its home.
    """
    parts = prefix.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        above = "/".join(parts[:depth])
        if not root.exists(above):
            root.directory(above)
        else:
            mode = os.stat(root.path(above)).st_mode
            os.chmod(root.path(above), (mode & 0o7777) | 0o011)
    program = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("python", "python3", os.path.basename(program)):
        text = f'#!/bin/sh\nexec {_quoted(program)} "$@"\n'
        root.file(f"{PLATFORM}/{name}", text, 0o755)
    return Bind(prefix, prefix)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
