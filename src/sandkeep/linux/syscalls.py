"""System calls Python does not wrap, one function each, named as in the man page.

Three layers: constants and ctypes declarations, wrappers that return a value or raise ``OSError`` naming the
call, and two small compositions (``clone3`` as fork, ``close_range`` of everything above). This module makes
no decisions. Every integer goes through ``c_long``: a bare Python int would be passed as 32 bits.

Numbers from 424 upwards are the same on every architecture; older calls go through their libc symbol.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from typing import Final

# --- constants -----------------------------------------------------------------------------------------

CLONE_NEWTIME: Final = 0x00000080
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
CLONE_PIDFD: Final = 0x00001000
CLONE_INTO_CGROUP: Final = 0x200000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MNT_DETACH: Final = 2

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000
OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x04
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
FSOPEN_CLOEXEC: Final = 1
FSMOUNT_CLOEXEC: Final = 1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_SET_FD: Final = 5
FSCONFIG_CMD_CREATE: Final = 6
MOUNT_ATTR_RDONLY: Final = 1
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4
MOUNT_ATTR_NOEXEC: Final = 8
MOUNT_ATTR_IDMAP: Final = 0x00100000

RESOLVE_NO_XDEV: Final = 1
RESOLVE_NO_MAGICLINKS: Final = 2
RESOLVE_NO_SYMLINKS: Final = 4
RESOLVE_BENEATH: Final = 8
RESOLVE_IN_ROOT: Final = 16

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_CAPBSET_READ: Final = 23
PR_CAPBSET_DROP: Final = 24
PR_SET_SECUREBITS: Final = 28
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
SECBIT_NO_SETUID_FIXUP: Final = 1 << 2

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

KERNEL_FILESYSTEMS: Final = frozenset(
    {
        0x9FA0,  # procfs
        0x62656572,  # sysfs
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x73636673,  # securityfs
        0xCAFE4A11,  # bpf
        0x6E736673,  # nsfs
        0x62656570,  # configfs
        0x42494E4D,  # binfmt_misc
        0xDE5E81E4,  # efivarfs
        0x6165676C,  # pstore
        0x65735543,  # fusectl
        0xF97CFF8C,  # selinuxfs
    }
)
"""``f_type`` of filesystems whose files control the kernel, and are not data."""

OVERLAYFS_MAGIC: Final = 0x794C7630

_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_FSOPEN: Final = 430
_SYS_FSCONFIG: Final = 431
_SYS_FSMOUNT: Final = 432
_SYS_CLONE3: Final = 435
_SYS_CLOSE_RANGE: Final = 436
_SYS_OPENAT2: Final = 437
_SYS_FACCESSAT2: Final = 439
_SYS_MOUNT_SETATTR: Final = 442
_SYS_LANDLOCK_CREATE_RULESET: Final = 444
_SYS_LANDLOCK_ADD_RULE: Final = 445
_SYS_LANDLOCK_RESTRICT_SELF: Final = 446

MACHINE: Final = platform.machine() or os.uname().machine

_BY_MACHINE: Final[dict[str, dict[str, int]]] = {
    "x86_64": {"seccomp": 317, "capget": 125, "capset": 126, "setgroups": 116, "setresuid": 117, "bpf": 321},
    "aarch64": {"seccomp": 277, "capget": 90, "capset": 91, "setgroups": 159, "setresuid": 147, "bpf": 280},
}


# --- plumbing ------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# PyDLL keeps the GIL: between clone3 returning in the child and PyOS_AfterFork_Child nothing else may run.
_libc_gil = ctypes.PyDLL(None, use_errno=True)
_libc_gil.syscall.restype = ctypes.c_long
_long = ctypes.c_long


def _fail(call: str, path: object = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", *([path] if path is not None else []))


def _encode(text: str | bytes | None) -> ctypes.c_char_p:
    return ctypes.c_char_p(os.fsencode(text) if text is not None else None)


def syscall_number(name: str) -> int:
    """Return the number of a call that differs between architectures; ``ENOSYS`` if none is known."""
    try:
        return _BY_MACHINE[MACHINE][name]
    except KeyError:
        raise OSError(errno.ENOSYS, f"{name}: no system call number known for {MACHINE}") from None


# --- mounts --------------------------------------------------------------------------------------------


def mount(
    source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    if _libc.mount(_encode(source), _encode(target), _encode(fstype), ctypes.c_ulong(flags), _encode(data)):
        raise _fail(f"mount({fstype or 'bind'})", target)


def umount2(target: str, flags: int = 0) -> None:
    if _libc.umount2(_encode(target), ctypes.c_int(flags)):
        raise _fail("umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    if _libc.pivot_root(_encode(new_root), _encode(put_old)):
        raise _fail("pivot_root", new_root)


def open_tree(
    path: str | bytes, flags: int = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC, dir_fd: int = AT_FDCWD
) -> int:
    fd: int = _libc.syscall(_long(_SYS_OPEN_TREE), _long(dir_fd), _encode(path), _long(flags))
    if fd < 0:
        raise _fail("open_tree", path)
    return fd


def move_mount(
    from_fd: int, to_path: str | bytes, to_fd: int = AT_FDCWD, flags: int = MOVE_MOUNT_F_EMPTY_PATH
) -> None:
    if _libc.syscall(
        _long(_SYS_MOVE_MOUNT), _long(from_fd), _encode(b""), _long(to_fd), _encode(to_path), _long(flags)
    ):
        raise _fail("move_mount", to_path)


def fsopen(fstype: str) -> int:
    fd: int = _libc.syscall(_long(_SYS_FSOPEN), _encode(fstype), _long(FSOPEN_CLOEXEC))
    if fd < 0:
        raise _fail("fsopen", fstype)
    return fd


def _fsconfig(fd: int, command: int, key: str | None, value: str | None, aux: int) -> None:
    if _libc.syscall(
        _long(_SYS_FSCONFIG), _long(fd), _long(command), _encode(key), _encode(value), _long(aux)
    ):
        raise _fail(f"fsconfig({key or 'create'})")


def fsconfig_flag(fd: int, key: str) -> None:
    _fsconfig(fd, FSCONFIG_SET_FLAG, key, None, 0)


def fsconfig_string(fd: int, key: str, value: str) -> None:
    _fsconfig(fd, FSCONFIG_SET_STRING, key, value, 0)


def fsconfig_fd(fd: int, key: str, value: int) -> None:
    _fsconfig(fd, FSCONFIG_SET_FD, key, None, value)


def fsconfig_create(fd: int) -> None:
    _fsconfig(fd, FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(fd: int, attributes: int = 0) -> int:
    mount_fd: int = _libc.syscall(_long(_SYS_FSMOUNT), _long(fd), _long(FSMOUNT_CLOEXEC), _long(attributes))
    if mount_fd < 0:
        raise _fail("fsmount")
    return mount_fd


def mount_setattr(
    fd: int,
    path: str = "",
    flags: int = AT_EMPTY_PATH,
    *,
    attr_set: int = 0,
    attr_clr: int = 0,
    userns_fd: int = 0,
) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", attr_set, attr_clr, 0, userns_fd), 32)
    if _libc.syscall(
        _long(_SYS_MOUNT_SETATTR), _long(fd), _encode(path), _long(flags), attributes, _long(32)
    ):
        raise _fail("mount_setattr", path or None)


# --- namespaces and processes --------------------------------------------------------------------------


def unshare(flags: int) -> None:
    if _libc.unshare(ctypes.c_int(flags)):
        raise _fail("unshare")


def setns(fd: int, nstype: int) -> None:
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)):
        raise _fail("setns")


def sethostname(name: str) -> None:
    encoded = os.fsencode(name)
    if _libc.sethostname(ctypes.c_char_p(encoded), ctypes.c_size_t(len(encoded))):
        raise _fail("sethostname", name)


def clone3(flags: int, cgroup_fd: int = -1) -> tuple[int, int]:
    """Fork into new namespaces. Return ``(pid, pidfd)`` in the parent and ``(0, -1)`` in the child.

    Only from a single-threaded process: the child is a copy of one thread, like after ``os.fork``.
    """
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_PIDFD
    if cgroup_fd >= 0:
        flags |= CLONE_INTO_CGROUP
    args = (ctypes.c_uint64 * 11)(
        flags, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, max(cgroup_fd, 0)
    )
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc_gil.syscall(_long(_SYS_CLONE3), args, _long(ctypes.sizeof(args)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, -1
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone3: {os.strerror(number)}")
    return pid, pidfd.value


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    if _libc.syscall(_long(_SYS_CLOSE_RANGE), _long(first), _long(last), _long(0)):
        raise _fail("close_range")


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    arguments = (ctypes.c_ulong(value) for value in (arg2, arg3, arg4, arg5))
    result: int = _libc.prctl(ctypes.c_int(option), *arguments)
    if result < 0:
        raise _fail(f"prctl({option})")
    return result


def prctl_set_name(name: str) -> None:
    buffer = ctypes.create_string_buffer(os.fsencode(name)[:15], 16)
    if _libc.prctl(ctypes.c_int(PR_SET_NAME), buffer, 0, 0, 0) < 0:
        raise _fail("prctl(PR_SET_NAME)")


# --- identity, per thread ------------------------------------------------------------------------------


def setfsuid(uid: int) -> int:
    """Set the calling thread's filesystem uid. The call reports no error; the caller must have permission."""
    previous: int = _libc.setfsuid(ctypes.c_uint(uid))
    return previous


def setfsgid(gid: int) -> int:
    previous: int = _libc.setfsgid(ctypes.c_uint(gid))
    return previous


def set_effective_uid_thread(uid: int) -> None:
    """Set this thread's effective uid by the raw call; libc's wrapper changes every thread of the process."""
    keep = _long(-1)
    if _libc.syscall(_long(syscall_number("setresuid")), keep, _long(uid), keep):
        raise _fail("setresuid")


def setgroups_thread(groups: list[int]) -> None:
    """Set this thread's groups by the raw call; libc's wrapper changes every thread of the process."""
    array = (ctypes.c_uint32 * max(len(groups), 1))(*groups)
    if _libc.syscall(_long(syscall_number("setgroups")), _long(len(groups)), array):
        raise _fail("setgroups")


def capget() -> tuple[int, int, int]:
    """Return effective, permitted and inheritable sets of the calling thread."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(24)
    if _libc.syscall(_long(syscall_number("capget")), header, data):
        raise _fail("capget")
    e0, p0, i0, e1, p1, i1 = struct.unpack("6I", data.raw)
    return e0 | e1 << 32, p0 | p1 << 32, i0 | i1 << 32


def capset(effective: int, permitted: int, inheritable: int = 0) -> None:
    """Set the calling thread's sets (the raw call is per thread)."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    words = []
    for shift in (0, 32):
        words += [(mask >> shift) & 0xFFFFFFFF for mask in (effective, permitted, inheritable)]
    data = ctypes.create_string_buffer(struct.pack("6I", *words), 24)
    if _libc.syscall(_long(syscall_number("capset")), header, data):
        raise _fail("capset")


# --- files ---------------------------------------------------------------------------------------------


def openat2(
    dir_fd: int,
    path: str | bytes,
    flags: int,
    mode: int = 0,
    resolve: int = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
) -> int:
    how = ctypes.create_string_buffer(struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve), 24)
    fd: int = _libc.syscall(_long(_SYS_OPENAT2), _long(dir_fd), _encode(path), how, _long(24))
    if fd < 0:
        raise _fail("openat2", path)
    return fd


def faccessat2(dir_fd: int, path: str | bytes, mode: int, flags: int = 0x200) -> None:
    """Raise unless the thread's filesystem ids may access ``path``; ``AT_EACCESS`` is the default flag."""
    if _libc.syscall(_long(_SYS_FACCESSAT2), _long(dir_fd), _encode(path), _long(mode), _long(flags)):
        raise _fail("faccessat2", path)


def renameat2(old_dir: int, old: str | bytes, new_dir: int, new: str | bytes, flags: int = 0) -> None:
    if _libc.renameat2(
        ctypes.c_int(old_dir), _encode(old), ctypes.c_int(new_dir), _encode(new), ctypes.c_uint(flags)
    ):
        raise _fail("renameat2", old)


def syncfs(fd: int) -> None:
    if _libc.syncfs(ctypes.c_int(fd)):
        raise _fail("syncfs")


def fstatfs_type(fd: int) -> int:
    """Return the ``f_type`` of the filesystem behind a descriptor (``PROC_SUPER_MAGIC`` and the like)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(ctypes.c_int(fd), buffer):
        raise _fail("fstatfs")
    kind: int = struct.unpack_from("q", buffer.raw)[0]
    return kind


def seccomp_set_filter(program: bytes) -> None:
    """Install a BPF program on this thread; needs ``no_new_privs`` or CAP_SYS_ADMIN in its namespace."""
    body = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.create_string_buffer(struct.pack("H6xQ", len(program) // 8, ctypes.addressof(body)), 16)
    if _libc.syscall(_long(syscall_number("seccomp")), _long(1), _long(0), fprog):
        raise _fail("seccomp")


def scrub_command_line(name: str, *arguments: str) -> None:
    """Overwrite argv and environ of this process as ``/proc/PID/cmdline`` and ``environ`` show them.

    ``PR_SET_MM`` would need CAP_SYS_RESOURCE, so the memory itself is cleared.
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as handle:
        fields = handle.read().rsplit(")", 1)[1].split()
    arg_start, arg_end, env_start, env_end = (int(fields[i]) for i in (45, 46, 47, 48))
    ctypes.memset(arg_start, 0, arg_end - arg_start)
    ctypes.memset(env_start, 0, env_end - env_start)
    encoded = os.fsencode("\0".join((name, *arguments)))[: max(arg_end - arg_start - 1, 0)]
    ctypes.memmove(arg_start, encoded, len(encoded))
    prctl_set_name(name.split(" ")[0])


# --- watching files --------------------------------------------------------------------------------------

IN_MODIFY: Final = 0x00000002
IN_ATTRIB: Final = 0x00000004
IN_CLOSE_WRITE: Final = 0x00000008
IN_MOVED_FROM: Final = 0x00000040
IN_MOVED_TO: Final = 0x00000080
IN_CREATE: Final = 0x00000100
IN_DELETE: Final = 0x00000200
IN_DELETE_SELF: Final = 0x00000400
IN_Q_OVERFLOW: Final = 0x00004000
IN_IGNORED: Final = 0x00008000
IN_ISDIR: Final = 0x40000000


def inotify_init1(flags: int = os.O_CLOEXEC | os.O_NONBLOCK) -> int:
    fd: int = _libc.inotify_init1(ctypes.c_int(flags))
    if fd < 0:
        raise _fail("inotify_init1")
    return fd


def inotify_add_watch(fd: int, path: str | bytes, mask: int) -> int:
    watch: int = _libc.inotify_add_watch(ctypes.c_int(fd), _encode(path), ctypes.c_uint32(mask))
    if watch < 0:
        raise _fail("inotify_add_watch", path)
    return watch


# --- landlock ------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; raise if it has none."""
    version: int = _libc.syscall(_long(_SYS_LANDLOCK_CREATE_RULESET), None, _long(0), _long(1))
    if version < 0:
        raise _fail("landlock_create_ruleset")
    return version


def landlock_create_ruleset(handled_access_fs: int) -> int:
    attributes = ctypes.create_string_buffer(struct.pack("Q", handled_access_fs), 8)
    fd: int = _libc.syscall(_long(_SYS_LANDLOCK_CREATE_RULESET), attributes, _long(8), _long(0))
    if fd < 0:
        raise _fail("landlock_create_ruleset")
    return fd


def landlock_allow_beneath(ruleset_fd: int, directory_fd: int, access: int) -> None:
    """Call ``landlock_add_rule`` for a directory and everything below it."""
    rule = ctypes.create_string_buffer(struct.pack("=Qi", access, directory_fd), 12)
    if _libc.syscall(_long(_SYS_LANDLOCK_ADD_RULE), _long(ruleset_fd), _long(1), rule, _long(0)):
        raise _fail("landlock_add_rule")


def landlock_restrict_self(ruleset_fd: int) -> None:
    """Deny this thread every access that the rule set handles and no rule allows; needs ``no_new_privs``."""
    if _libc.syscall(_long(_SYS_LANDLOCK_RESTRICT_SELF), _long(ruleset_fd), _long(0)):
        raise _fail("landlock_restrict_self")
