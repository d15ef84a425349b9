"""``/etc`` of the host image: files that are public by construction, files on a list, generated files.

A configuration file is copied when its bytes are the ones its package shipped, so nothing an administrator
wrote gets inside. Files that packages generate (alternatives, certificates, the linker cache) are listed by
name. A path in ``NEVER`` is never copied, by either rule.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess

from sandkeep.host.images.hostimage.accounts import SUDO_GROUP, AccountFiles
from sandkeep.host.images.tree import ImageTree

NEVER = (
    "etc/ssl/private",
    "etc/ssh",
    "etc/apt/auth.conf",
    "etc/apt/auth.conf.d",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/sudoers",
    "etc/sudoers.d",
    "etc/shadow",
    "etc/gshadow",
    "etc/environment",
    "etc/profile",
    "etc/sudo.conf",
)

ALLOWED = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl/certs",
    "ssl/cert.pem",
    "ssl/openssl.cnf",
    "ca-certificates",
    "ca-certificates.conf",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/tls/openssl.cnf",
    "pki/ca-trust/extracted",
    "crypto-policies",
    "localtime",
    "timezone",
    "locale.alias",
    "locale.conf",
    "locale.gen",
    "os-release",
    "debian_version",
    "redhat-release",
    "system-release",
    "arch-release",
    "SuSE-release",
    "shells",
    "services",
    "protocols",
    "rpc",
    "ethertypes",
    "networks",
    "host.conf",
    "gai.conf",
    "login.defs",
    "default/useradd",
    "default/locale",
    "bash.bashrc",
    "bashrc",
    "inputrc",
    "terminfo",
    "mime.types",
    "magic",
    "magic.mime",
    "skel",
    "perl",
    "python3",
    "rmt",
    "ucf.conf",
    "debconf.conf",
    "manpath.config",
)

_PAM_COMMON = {
    "common-auth": "auth [success=1 default=ignore] pam_unix.so nullok\nauth requisite pam_deny.so\n"
    "auth required pam_permit.so\n",
    "common-account": "account [success=1 new_authtok_reqd=done default=ignore] pam_unix.so\n"
    "account requisite pam_deny.so\naccount required pam_permit.so\n",
    "common-password": "password [success=1 default=ignore] pam_unix.so obscure yescrypt\n"
    "password requisite pam_deny.so\npassword required pam_permit.so\n",
    "common-session": "session [default=1] pam_permit.so\nsession requisite pam_deny.so\n"
    "session required pam_permit.so\nsession required pam_unix.so\n",
    "common-session-noninteractive": "session [default=1] pam_permit.so\nsession requisite pam_deny.so\n"
    "session required pam_permit.so\nsession required pam_unix.so\n",
}

_PROFILE = """\
# Login shells keep the PATH they were given: it holds the sandbox's own directories.
: "${PATH:=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
export PATH
if [ "${PS1-}" ]; then
    if [ -n "${BASH-}" ] && [ -f /etc/bash.bashrc ]; then
        . /etc/bash.bashrc
    elif [ "$(id -u)" -eq 0 ]; then
        PS1='# '
    else
        PS1='$ '
    fi
fi
if [ -d /etc/profile.d ]; then
    for i in /etc/profile.d/*.sh; do
        [ -r "$i" ] && . "$i"
    done
    unset i
fi
"""

HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
RESOLV_CONF = "nameserver 10.0.2.3\n"
HOSTNAME = "sandbox\n"


def build_etc(tree: ImageTree, accounts: AccountFiles) -> None:
    tree.directory("etc")
    for name in ALLOWED:
        _copy_allowed(tree, f"etc/{name}")
    for path in _unmodified_conffiles():
        name = path.lstrip("/")
        if name.startswith("etc/") and not _forbidden(name):
            _copy_conffile(tree, name)
    write_accounts(tree, accounts)
    _generate(tree)


def write_accounts(tree: ImageTree, accounts: AccountFiles) -> None:
    shadow = accounts.gid_of("shadow") or 0
    tree.file("etc/passwd", accounts.passwd_text())
    tree.file("etc/group", accounts.group_text())
    tree.file("etc/shadow", accounts.shadow_text(), 0o640, gid=shadow)
    tree.file("etc/gshadow", accounts.gshadow_text(), 0o640, gid=shadow)


def _generate(tree: ImageTree) -> None:
    tree.file("etc/hosts", HOSTS)
    tree.file("etc/resolv.conf", RESOLV_CONF)
    tree.file("etc/hostname", HOSTNAME)
    tree.file(
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\ngshadow: files\nhosts: files dns\n"
        "networks: files\nprotocols: files\nservices: files\nethers: files\nrpc: files\n",
    )
    tree.file("etc/profile", _PROFILE)
    for name in ("environment", "machine-id", "subuid", "subgid", "fstab", "motd"):
        tree.file(f"etc/{name}", "")
    tree.symlink("etc/mtab", "../proc/self/mounts")
    for name, text in _PAM_COMMON.items():
        tree.file(f"etc/pam.d/{name}", text)
    if not tree.exists("etc/pam.d/su"):
        tree.file(
            "etc/pam.d/su",
            "auth sufficient pam_rootok.so\nauth required pam_unix.so\naccount required pam_unix.so\n"
            "session required pam_unix.so\n",
        )
    if not tree.exists("etc/pam.d/other"):
        tree.file("etc/pam.d/other", "".join(f"{kind} required pam_unix.so\n" for kind in _PAM_KINDS))
    if not tree.exists("etc/shells"):
        tree.file("etc/shells", "/bin/sh\n/bin/bash\n")
    # A real sudo that the package manager installs later finds its rule here.
    tree.directory("etc/sudoers.d", 0o750)
    tree.file("etc/sudoers.d/sandkeep", sudo_rule(f"%{SUDO_GROUP}"), 0o440)
    for name in ("sources.list.d", "preferences.d", "apt.conf.d", "trusted.gpg.d", "auth.conf.d", "keyrings"):
        tree.directory(f"etc/apt/{name}")
    tree.file("etc/apt/sources.list", "")
    if tree.mode == "single":
        # apt would switch to a user of its own for downloads, and this session has only one id.
        tree.file("etc/apt/apt.conf.d/90sandkeep", 'APT::Sandbox::User "root";\n')


_PAM_KINDS = ("auth", "account", "password", "session")


def sudo_rule(who: str) -> str:
    """Return a passwordless rule that keeps PATH and the environment but sets the target's HOME."""
    settings = "!env_reset, always_set_home, !fqdn, !requiretty, !secure_path"
    return f"Defaults {settings}\n{who} ALL=(ALL:ALL) NOPASSWD: ALL\n"


def _forbidden(name: str) -> bool:
    return any(name == entry or name.startswith(entry + "/") for entry in NEVER)


def _copy_allowed(tree: ImageTree, name: str) -> None:
    source = f"/{name}"
    try:
        info = os.lstat(source)
        if stat.S_ISLNK(info.st_mode):
            target = os.readlink(source)
            resolved = os.path.normpath(os.path.join("/etc", target))
            if resolved.startswith("/usr/"):
                tree.symlink(name, target)
            elif os.path.isfile(source):
                tree.copy(source, name, 0o644)
        elif stat.S_ISDIR(info.st_mode):
            tree.copy_tree(source, name)
        elif stat.S_ISREG(info.st_mode) and info.st_mode & stat.S_IROTH:
            tree.copy(source, name)
    except (FileNotFoundError, PermissionError):
        return


def _copy_conffile(tree: ImageTree, name: str) -> None:
    source = f"/{name}"
    info = os.lstat(source)
    _mirror_parents(tree, name)
    if info.st_mode & stat.S_IROTH:
        tree.copy(source, name)
    else:
        gid = info.st_gid if info.st_gid < 1000 else 0
        tree.copy(source, name, stat.S_IMODE(info.st_mode), gid=gid)


def _mirror_parents(tree: ImageTree, name: str) -> None:
    above = os.path.dirname(name)
    if above and not tree.exists(above):
        _mirror_parents(tree, above)
        tree.directory(above, stat.S_IMODE(os.stat(f"/{above}").st_mode))


def _unmodified_conffiles() -> list[str]:
    """Return the host's configuration files whose bytes are their package's; empty without dpkg."""
    try:
        listing = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Conffiles}\n"], capture_output=True, check=False, text=True
        ).stdout
    except OSError:
        return []
    found = []
    for line in listing.splitlines():
        fields = line.split()  # a third field marks files the package no longer ships
        if len(fields) == 2 and _has_md5(*fields):
            found.append(fields[0])
    return found


def _has_md5(path: str, md5: str) -> bool:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as source:
            return hashlib.file_digest(source, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
    except OSError:
        return False
