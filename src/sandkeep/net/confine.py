"""Confining a process to what it needs: it reads what hostile programs send.

Two are confined: netd, and git when it fetches a source. Both lose sight of other processes, their user id
(under root), every capability, ways to get them back, and the system calls no session may make either. They
keep sockets, memory and the host's network.

netd has no files either: its root is an empty tmpfs. git has a root with the machine's programs, read-only,
and one directory to write to.

A step that the kernel cannot do is reported by name; the user id and the namespaces are not optional.
"""

from __future__ import annotations

import fcntl
import os
import resource
import stat
from collections.abc import Callable, Sequence
from typing import Final

from sandkeep.errors import LimitReached, SandkeepError
from sandkeep.linux import capabilities, seccomp, syscalls

_FIRST_ID: Final = 0x6FFF_0000
_IDS: Final = 4096
"""Just below the ranges sessions are given, one id per netd of the machine, or git that fetches."""
_LOCKS: Final = "/run/sandkeep/netd"
_LANDLOCK_FS: Final = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)
"""Every right over files that versions 1 to 5 know."""
_OWN_FILES: Final = 1 << 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 14
"""Write, read, remove, make and truncate files: within its own root, which is empty."""
_MOST_FILES: Final = 1 << 19

SCRATCH: Final = "/scratch"
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/gnu")
"""Directories of a machine's programs, as far as they exist."""
_CONFIGURATION: Final = (
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/crypto-policies", "/etc/static"),
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime"),
)
"""What programs need to find libraries, names and certificates."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def enter_namespaces() -> None:
    """Leave the host's mounts, processes, IPC and, as an ordinary user, user namespace.

    The process namespace is that of the next child, so fork after this.
    """
    flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        syscalls.unshare(flags | syscalls.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    else:
        syscalls.unshare(flags)
    # Not private: until the root is switched, what the host unmounts would stay busy.
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


def take_id() -> tuple[int, int]:
    """Return an id that no other confined process of this machine has, and the descriptor that holds it."""
    os.makedirs(_LOCKS, mode=0o700, exist_ok=True)
    for number in range(_IDS):
        fd = os.open(f"{_LOCKS}/{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return _FIRST_ID + number, fd
    raise LimitReached("every id for a network process is in use", limit="netd", value=_IDS)


def give_up(uid: int | None) -> dict[str, str]:
    """Drop everything, in the process that stays. Return the steps this kernel cannot do, and why.

    ``uid`` is the id to become, ``None`` to keep the own one (an ordinary user's).
    """
    absent: dict[str, str] = {}
    _raise_file_limit()
    _empty_root(uid)
    _lose_rights(uid)
    _attempt(absent, "landlock", _forbid_files)
    _attempt(absent, "seccomp", _install_filter)
    return absent


def keep_programs(uid: int | None, scratch: str, *, also: Sequence[str] = (), hidden: str) -> None:
    """Confine a process that runs the machine's programs, and writes below ``SCRATCH`` only.

    That is the directory ``scratch``, which is given to ``uid``. ``also`` are directories that programs need
    besides those of the system; ``hidden`` is not shown even where it is in one of those.
    """
    if uid is not None:
        os.chown(scratch, uid, uid)
    _program_root(scratch, also, hidden)
    _lose_rights(uid)
    _attempt({}, "seccomp", _install_filter)


def _lose_rights(uid: int | None) -> None:
    capabilities.drop_bounding_set()
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.capset(0, 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _install_filter() -> None:
    syscalls.seccomp_set_filter(seccomp.build(syscalls.MACHINE))


def _attempt(absent: dict[str, str], name: str, step: Callable[[], None]) -> None:
    try:
        step()
    except (OSError, SandkeepError) as error:
        absent[name] = str(error)


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid() == 0:
        hard = max(hard, _MOST_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # the kernel's own maximum is lower; each session's limit still holds


def _program_root(scratch: str, also: Sequence[str], hidden: str) -> None:
    trees = {path: _shown(path, writable=False) for path in _shown_paths(also)}
    trees[SCRATCH] = _shown(scratch, writable=True)
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    syscalls.mount("git", _anchor(), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755,size=1m")
    os.chdir(_anchor())
    for path, tree in trees.items():
        place = path.lstrip("/")
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(place, mode=0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), mode=0o755, exist_ok=True)
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        syscalls.move_mount(tree, place)
        os.close(tree)
    for path, target in links.items():
        os.symlink(target, path.lstrip("/"))
    if os.path.isdir(hidden.lstrip("/")):
        syscalls.mount("hidden", hidden.lstrip("/"), "tmpfs", syscalls.MS_RDONLY, "mode=0000,size=4k")
    syscalls.mount_setattr(syscalls.AT_FDCWD, ".", 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)
    _switch_root()


def _shown_paths(also: Sequence[str]) -> list[str]:
    paths = [path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    paths += also
    return paths + [path for path in (*_CONFIGURATION, *_DEVICES) if os.path.exists(path)]


def _shown(path: str, *, writable: bool) -> int:
    """Return a detached mount of ``path``, to be attached elsewhere."""
    deep = 0 if writable else syscalls.AT_RECURSIVE
    tree = syscalls.open_tree(path, syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | deep)
    flags = syscalls.MOUNT_ATTR_NOSUID
    if path not in _DEVICES:
        flags |= syscalls.MOUNT_ATTR_NODEV
    flags |= syscalls.MOUNT_ATTR_NOEXEC if writable else syscalls.MOUNT_ATTR_RDONLY
    syscalls.mount_setattr(tree, "", syscalls.AT_EMPTY_PATH | deep, attr_set=flags)
    return tree


def _anchor() -> str:
    return next(path for path in ("/mnt", "/tmp", "/usr") if os.path.isdir(path))


def _empty_root(uid: int | None) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("netd", _anchor(), "tmpfs", flags, "mode=0700,size=1m,nr_inodes=64")
    os.chdir(_anchor())
    if uid is not None:
        os.chown(".", uid, uid)
    _switch_root()


def _switch_root() -> None:
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _forbid_files() -> None:
    version = syscalls.landlock_version()
    handled = _LANDLOCK_FS[min(version, len(_LANDLOCK_FS)) - 1]
    ruleset = syscalls.landlock_create_ruleset(handled)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        syscalls.landlock_allow_beneath(ruleset, root, handled & _OWN_FILES)
        syscalls.landlock_restrict_self(ruleset)
    finally:
        os.close(root)
        os.close(ruleset)
