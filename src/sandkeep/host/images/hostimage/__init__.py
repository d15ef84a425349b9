"""The ``host`` image: a generated skeleton over the host's own ``/usr``. Nothing is downloaded.

``build`` writes the skeleton into an empty directory, ``root/`` and, rootless, ``usr/``; the image store
chooses the directory and publishes it.

``etc``       ``/etc``: files that are public by construction, files on a list, generated files
``accounts``  users and groups as text files, and the rows every sandbox must have
``var``       ``/var`` and the other top-level directories
``programs``  programs that the skeleton adds: ``sudo``, ``python``, this package's interpreter
``packages``  the configuration that package managers need
``graft``     shows the host's ``/usr`` below the skeleton, and hides paths that must not show
``survey``    walks the host's ``/usr`` and warns of files that should not be shared
``state``     a key of the host's current state: a skeleton with another key is out of date
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sandkeep.errors import InvalidRequest
from sandkeep.host.images.hostimage import graft, packages, programs
from sandkeep.host.images.hostimage.accounts import SUDO_GROUP, USER, USER_ID, AccountFiles
from sandkeep.host.images.hostimage.etc import build_etc
from sandkeep.host.images.hostimage.state import MERGED, host_key, require_merged_usr
from sandkeep.host.images.hostimage.survey import survey
from sandkeep.host.images.hostimage.var import build_top, build_var, home_directories
from sandkeep.host.images.tree import ImageTree, Mode
from sandkeep.host.rootfs import HOME, VENDOR_HOME, Bind, Lower, Slot

__all__ = ["ENV", "FORMAT", "Built", "build", "host_key", "normal_masks", "slots"]

FORMAT = 4
"""Version of the skeleton's content; raise it when that changes, so that older skeletons are not reused."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = f"{HOME}/.local/bin:/{programs.PLATFORM}:{SYSTEM_PATH}"
ENV = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    "HOME": HOME,
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
}


@dataclass(frozen=True, slots=True)
class Built:
    size: int
    warnings: tuple[str, ...]
    binds: tuple[Bind, ...]
    runtimes: tuple[str, ...]


def normal_masks(masks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths below ``/usr`` to hide, relative to it, sorted."""
    found = set()
    for mask in masks:
        name = os.path.normpath("/" + mask.removeprefix("/usr/")).lstrip("/")
        if not name or name == "usr":
            raise InvalidRequest(f"cannot mask {mask!r}: not a path below /usr", mask=mask)
        found.add(name)
    return tuple(sorted(found))


def build(directory: str, *, mode: Mode, masks: tuple[str, ...]) -> Built:
    """Write the skeleton for this host into ``directory``. ``masks`` as from ``normal_masks``."""
    require_merged_usr()
    found = survey(frozenset(masks))
    root = ImageTree(f"{directory}/root", mode=mode)
    accounts = AccountFiles.of_system(_text("/etc/passwd"), _text("/etc/group"))
    accounts.add_default_user(single=mode == "single")
    user = 0 if mode == "single" else USER_ID
    group = 0 if mode == "single" else int((accounts.user(USER) or [])[3])

    build_top(root)
    build_etc(root, accounts)
    build_var(root)
    home_directories(root, uid=user, gid=group)
    no_sources = packages.write_sources(root)
    for home in (HOME, VENDOR_HOME):
        packages.write_user_config(root, home, uid=user, gid=group)
    binds: tuple[Bind, ...] = ()
    if prefix := programs.platform_prefix():
        binds = (programs.install_platform_python(root, prefix),)
    for name in (*MERGED, "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            root.symlink(name, f"usr/{os.path.basename(os.readlink(f'/{name}'))}")

    size = root.size
    if mode == "root":
        usr, below = root, "usr/"
        graft.graft(root)
    else:
        root.directory("usr")
        usr, below = ImageTree(f"{directory}/usr", mode=mode), ""
        graft.mirror(usr, found.directories)
    sudo_gid = accounts.gid_of(SUDO_GROUP) or 0
    has_sudo = programs.install_sudo(usr, setpriv=programs.host_setpriv(), sudo_gid=sudo_gid, prefix=below)
    programs.install_python(usr, prefix=below)
    for name in (*masks, *packages.external_marks()):
        graft.mask(usr, below, name)
    warnings = [*([no_sources] if no_sources else []), *found.warnings]
    if not has_sudo:
        warnings.insert(0, "no setpriv on this host (package util-linux), so sandboxes have no sudo")
    total = root.size if usr is root else size + usr.size
    return Built(total, tuple(warnings), binds, programs.runtimes())


def slots(directory: str, *, mode: Mode) -> tuple[Slot, ...]:
    host = Lower(graft.USR, store=False)
    skeleton = Lower(f"{directory}/root")
    if mode == "root":
        return (Slot("root", "/", (skeleton, host)),)
    return Slot("root", "/", (skeleton,)), Slot("usr", "/usr", (Lower(f"{directory}/usr"), host))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as source:
            return source.read()
    except OSError:
        return ""
