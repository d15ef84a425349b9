"""One small layer on top of a third party's image, with the files that a sandbox relies on.

It adds a default user who is not root and may ``sudo``, that user's working directory, ``/tmp``, names, and
``python`` where there is only ``python3``. Home and working directory are those the image's author chose, if
any. The image's own layers are never changed. Parts that the image's programs do not support (no ``setpriv``,
no shell) are left out and listed in the warnings.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandkeep.host.images.hostimage import SYSTEM_PATH
from sandkeep.host.images.hostimage.accounts import (
    SUDO_GROUP,
    USER,
    USER_ID,
    AccountFields,
    AccountFiles,
    parse,
)
from sandkeep.host.images.hostimage.etc import HOSTNAME, HOSTS, RESOLV_CONF, sudo_rule, write_accounts
from sandkeep.host.images.hostimage.programs import AS, sudo_script
from sandkeep.host.images.tree import ImageTree, Mode, flavour_of
from sandkeep.host.images.view import View
from sandkeep.host.rootfs import HOME, VENDOR_HOME, VENDOR_WORK, WORK, ImageDefaults
from sandkeep.linux.overlay import Way

_MOUNT_POINTS = ("proc", "sys", "dev", "run", "home", "mnt", "media", "opt", "srv")
_MADE_ANEW = ("proc", "sys", "dev", "run")
"""Mounted anew in every session, so the image's files below them are hidden."""
_SYSTEM = frozenset(
    (
        *("bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "root", "sbin", "tmp", "usr", "var"),
        *("usr/bin", "usr/include", "usr/lib", "usr/lib64", "usr/libexec", "usr/local", "usr/sbin"),
        *("usr/local/bin", "usr/local/lib", "usr/local/sbin", "usr/share"),
        *("var/cache", "var/lib", "var/log", "var/spool", "var/tmp"),
    )
)
"""Directories whose owner and mode stay unchanged, even if one is the working directory."""
_LONGEST_PATH = 4000


@dataclass(frozen=True, slots=True)
class Adapted:
    defaults: ImageDefaults
    size: int
    warnings: tuple[str, ...]


def adapt(
    directory: str,
    layers: Sequence[str],
    *,
    mode: Mode,
    way: Way,
    user: str,
    env: Mapping[str, str],
    cwd: str,
) -> Adapted:
    """Write the top layer for ``layers`` (topmost first) into ``directory``.

    ``way`` is how to mount them; ``user``, ``env`` and ``cwd`` come from the image's configuration.
    """
    with View(layers, flavour=flavour_of(mode), way=way) as view:
        return _Adapter(directory, view, mode).run(user, env, cwd)


class _Adapter:
    def __init__(self, directory: str, view: View, mode: Mode) -> None:
        self._view = view
        self._tree = ImageTree(directory, mode=mode)
        self._mode = mode
        self._warnings: list[str] = []

    def run(self, configured: str, env: Mapping[str, str], cwd: str) -> Adapted:
        accounts = AccountFiles(
            parse(self._view.text("etc/passwd"), 7), parse(self._view.text("etc/group"), 4)
        )
        accounts.shadow = {row[0]: row for row in parse(self._view.text("etc/shadow"), 9)}
        accounts.gshadow = {row[0]: row for row in parse(self._view.text("etc/gshadow"), 4)}
        if accounts.user_with_id(0) is None:
            accounts.passwd.insert(0, ["root", "x", "0", "0", "root", "/root", "/bin/sh"])
        accounts.add_group("root", 0)
        row = self._default_user(accounts, configured)
        self._sudo(accounts, row)
        for name in ("passwd", "group", "shadow", "gshadow"):
            self._parents(f"etc/{name}")
        write_accounts(self._tree, accounts)
        self._directories(row)
        self._names()
        self._python()
        if not self._view.is_program("bin/sh"):
            self._warnings.append("the image has no /bin/sh: only its own programs can be run")
        work = self._chosen(cwd, row, "working directory")
        home = self._chosen(env.get("HOME", ""), row, "HOME")
        defaults = ImageDefaults(
            user=row[0],
            cwd=work or WORK,
            env=_environment(row, env, home),
            own_cwd=work is not None,
            home=home,
        )
        return Adapted(defaults, self._tree.size, tuple(self._warnings))

    def _default_user(self, accounts: AccountFiles, configured: str) -> AccountFields:
        if self._mode != "single":
            name, _, group = configured.partition(":")
            row = accounts.user(name)
            if row is None and name.isascii() and name.isdigit():
                row = accounts.user_with_id(int(name))
                if row is None and 0 < int(name) <= 65535:
                    gid = int(group) if group.isascii() and group.isdigit() else int(name)
                    row = self._new_user(accounts, int(name), gid)
            if row is None or row[2] == "0":
                row = accounts.user_with_id(USER_ID)
            if row is not None:
                return row
        return self._new_user(accounts, 0 if self._mode == "single" else USER_ID, None)

    def _new_user(self, accounts: AccountFiles, uid: int, gid: int | None) -> AccountFields:
        if uid == 0:
            group = 0
        elif gid is not None:
            group = gid
            if all(row[2] != str(gid) for row in accounts.group):
                accounts.add_group(USER, gid)
        else:
            group = accounts.add_group(USER, uid)
        shell = "/bin/bash" if self._view.is_program("bin/bash") else "/bin/sh"
        row = [USER, "x", str(uid), str(group), "sandbox", HOME, shell]
        accounts.passwd.append(row)
        return row

    # --- sudo ------------------------------------------------------------------------------------------

    def _sudo(self, accounts: AccountFiles, row: AccountFields) -> None:
        gid = accounts.add_group(SUDO_GROUP, 27)
        accounts.add_member(SUDO_GROUP, row[0])
        real = self._view.stat("usr/bin/sudo")
        if real is not None and real.st_mode & stat.S_ISUID and self._mode != "single":
            self._rule(row[0])
            return
        program = next((p for p in ("usr/bin/setpriv", "bin/setpriv") if self._view.is_program(p)), None)
        if program is None or not self._view.is_program("bin/sh"):
            self._warnings.append("no sudo: the image has neither sudo nor the setpriv of util-linux")
            return
        helper = self._place(AS)
        content = self._view.read(program) or b""
        if self._mode == "single":
            self._tree.file(helper, content, 0o755)
        else:
            self._tree.file(helper, content, 0o4750, gid=gid)
        self._tree.file(self._place("usr/bin/sudo"), sudo_script(), 0o755)

    def _rule(self, user: str) -> None:
        self._tree.file(self._place("etc/sudoers.d/sandkeep"), sudo_rule(user), 0o440)
        rules = self._view.text("etc/sudoers")
        if "includedir /etc/sudoers.d" not in rules:
            self._tree.file(self._place("etc/sudoers"), f"{rules}\n@includedir /etc/sudoers.d\n", 0o440)

    # --- the rest --------------------------------------------------------------------------------------

    def _directories(self, row: AccountFields) -> None:
        uid, gid = int(row[2]), int(row[3])
        for name in (WORK, VENDOR_HOME, VENDOR_WORK, f"{VENDOR_HOME}/bin"):
            self._tree.directory(name[1:], uid=uid, gid=gid)
        if row[5] not in ("", "/") and not self._view.is_directory(row[5]):
            self._tree.directory(self._place(row[5].strip("/")), uid=uid, gid=gid)
        for name in _MOUNT_POINTS:
            if not self._view.is_directory(name):
                self._tree.directory(self._place(name))
        if not self._view.is_directory("root"):
            self._tree.directory("root", 0o700)
        for name in ("tmp", "var/tmp"):
            self._tree.directory(self._place(name), 0o1777)

    def _chosen(self, configured: str, row: AccountFields, what: str) -> str | None:
        """Return a directory the image's author chose, made if missing and owned by the default user.

        Return ``None`` if none is configured, or only ``/``, or, with a warning, if that user cannot use it.
        """
        path = posixpath.normpath("/" + configured.lstrip("/"))
        if path == "/":
            return None
        problem = self._give(path, int(row[2]), int(row[3]))
        if problem is not None:
            self._warnings.append(f"the image's {what} {path[:200]!r} is not used: {problem}")
            return None
        return path

    def _give(self, path: str, uid: int, gid: int) -> str | None:
        """Make a user the owner of the directory ``path``; return why that is impossible."""
        if not path.isprintable() or len(path.encode()) > _LONGEST_PATH:
            return "its name cannot be used"
        real = self._view.resolve(path[1:])
        if real.partition("/")[0] in _MADE_ANEW:
            return "every session has its own there"
        above = real
        while above := os.path.dirname(above):
            info = self._view.stat(above)
            if info is not None and not stat.S_ISDIR(info.st_mode):
                return f"/{above} is not a directory"
            if not _may_enter(above, info, uid):
                return f"the default user may not enter /{above}"
        found = self._view.stat(real)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            return "it is not a directory"
        if real in _SYSTEM:
            return None if _may_enter(real, found, uid) else "the default user may not enter it"
        self._parents(real)
        mode = stat.S_IMODE(found.st_mode) | stat.S_IRWXU if found is not None else 0o755
        self._tree.directory(real, mode, uid=uid, gid=gid)
        return None

    def _names(self) -> None:
        # These may be links into /run: the files must be regular ones, so the names are not resolved.
        for name, text in (("hosts", HOSTS), ("resolv.conf", RESOLV_CONF), ("hostname", HOSTNAME)):
            self._parents(f"etc/{name}")
            self._tree.file(f"etc/{name}", text)
        if not self._view.stat("etc/nsswitch.conf") and self._view.is_directory("etc"):
            self._tree.file("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
        if self._mode == "single" and self._view.is_directory("etc/apt/apt.conf.d"):
            self._tree.file(self._place("etc/apt/apt.conf.d/90sandkeep"), 'APT::Sandbox::User "root";\n')

    def _python(self) -> None:
        for directory in ("usr/local/bin", "usr/bin"):
            if self._view.is_program(f"{directory}/python3"):
                if not self._view.stat(f"{directory}/python", follow=False):
                    self._tree.symlink(self._place(f"{directory}/python"), "python3")
                return

    def _place(self, name: str) -> str:
        """Return the path to write ``name`` to, with its directory created and links resolved."""
        above, _, base = name.rpartition("/")
        where = self._view.resolve(above) if above else ""
        target = f"{where}/{base}" if where else base
        self._parents(target)
        return target

    def _parents(self, name: str) -> None:
        """Create the directories above ``name`` as in the image: the topmost layer decides the mode seen."""
        above = os.path.dirname(name)
        if not above or self._tree.exists(above):
            return
        self._parents(above)
        info = self._view.stat(above)
        if info is None or not stat.S_ISDIR(info.st_mode):
            self._tree.directory(above)
        else:
            self._tree.directory(above, stat.S_IMODE(info.st_mode), uid=info.st_uid, gid=info.st_gid)


def _may_enter(name: str, directory: os.stat_result | None, uid: int) -> bool:
    if directory is None:
        return uid == 0 or name != "root"  # root's home is created with its usual mode, which excludes others
    return uid in (0, directory.st_uid) or bool(directory.st_mode & stat.S_IXOTH)


def _environment(row: AccountFields, env: Mapping[str, str], chosen: str | None) -> dict[str, str]:
    home = chosen or row[5] or HOME
    path = env.get("PATH") or SYSTEM_PATH
    if f"{home}/.local/bin" not in path.split(":"):
        path = f"{home}/.local/bin:{path}"
    if "/usr/local/bin" not in path.split(":"):
        path += ":/usr/local/bin"
    own = {"HOME": home, "USER": row[0], "LOGNAME": row[0], "SHELL": row[6] or "/bin/sh"}
    return {"LANG": "C.UTF-8", **env, **own, "PATH": path}
