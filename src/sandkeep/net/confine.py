"""Taking everything away from netd that it does not need: it reads what hostile programs send.

It keeps sockets, memory and the host's network. It loses files (its root is an empty tmpfs), sight of other
processes, its user id (under root), every capability, ways to get them back, and the system calls no session
may make either. What a kernel cannot do is reported by name; the user id and the namespaces are not optional.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable
from typing import Final

from sandkeep.errors import LimitReached, SandkeepError
from sandkeep.linux import seccomp, syscalls

_FIRST_ID: Final = 0x6FFF_0000
_IDS: Final = 4096
"""Just below the ranges sessions are given, one id per netd of the machine."""
_LOCKS: Final = "/run/sandkeep/netd"
_LANDLOCK_FS: Final = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)
"""Every right over files that versions 1 to 5 know."""
_OWN_FILES: Final = 1 << 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 14
"""Write, read, remove, make and truncate files: within its own root, which is empty."""
_MOST_FILES: Final = 1 << 19


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
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as handle:
        handle.write(text)


def take_id() -> tuple[int, int]:
    """An id no other netd of this machine has, and the descriptor that keeps it."""
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
    """In the process that stays: drop everything. Returns what this kernel could not do, and why.

    ``uid`` is the id to become, ``None`` to keep the own one (an ordinary user's).
    """
    absent: dict[str, str] = {}
    _raise_file_limit()
    _empty_root(uid)
    _drop_bounding_set()
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.capset(0, 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _attempt(absent, "landlock", _forbid_files)
    _attempt(absent, "seccomp", lambda: syscalls.seccomp_set_filter(seccomp.build(syscalls.MACHINE)))
    return absent


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


def _empty_root(uid: int | None) -> None:
    anchor = next(path for path in ("/mnt", "/tmp", "/usr") if os.path.isdir(path))
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("netd", anchor, "tmpfs", flags, "mode=0700,size=1m,nr_inodes=64")
    os.chdir(anchor)
    if uid is not None:
        os.chown(".", uid, uid)
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _drop_bounding_set() -> None:
    capability = 0
    while True:
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_READ, capability)
        except OSError:
            return
        syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        capability += 1


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
