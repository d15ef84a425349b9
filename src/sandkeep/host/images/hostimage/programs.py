"""Programs the skeleton adds: ``sudo``, ``python``, and the interpreter this package runs on.

``sudo`` is a shell script in front of a setuid copy of ``setpriv``, so it works where no sudo is installed;
membership of the ``sudo`` group is the mode of that copy.
"""

from __future__ import annotations

import os
import shutil
import sys

from sandkeep.host.images.tree import Tree
from sandkeep.host.rootfs import Bind

AS = "usr/libexec/sandkeep/as"
_SCRIPT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sudo.sh")


def sudo_script() -> bytes:
    with open(_SCRIPT, "rb") as source:
        return source.read()


def install_sudo(tree: Tree, *, setpriv: str | None, sudo_gid: int, prefix: str = "usr/") -> bool:
    """Put sudo into ``tree``, whose ``/usr`` is at ``prefix``. False when there is no setpriv to copy."""
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


def install_python(tree: Tree, prefix: str = "usr/") -> None:
    """A ``python`` beside the host's ``python3`` when it has only that."""
    here = any(os.path.lexists(f"/usr/{where}/python") for where in ("bin", "local/bin"))
    if not here and os.path.lexists("/usr/bin/python3"):
        tree.symlink(f"{prefix}bin/python", "python3")


def platform_prefix() -> str | None:
    """Where the running interpreter lives when that is outside ``/usr``."""
    prefix = os.path.realpath(sys.base_prefix)
    return None if prefix in ("/", "/usr") or prefix.startswith("/usr/") else prefix


def install_platform_python(root: Tree, prefix: str, *, uid: int, gid: int) -> Bind:
    """Show the running interpreter at its own path, found first on ``PATH``.

    The same path, because a shared build looks for its library there. Wrappers that ``exec``, because a link
    elsewhere makes ``venv`` record the link's directory as its home.
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
        root.file(f"vercel/bin/{name}", text, 0o755, uid=uid, gid=gid)
    return Bind(prefix, prefix)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
