"""The system-call filter of every process of a session, as raw BPF.

``build`` returns the program; ``syscalls.seccomp_set_filter`` installs it, once, on init before the first
process is spawned. The filter is the same for every session of a machine, so callers build it once.

It decides, in this order:

* another architecture's call (32-bit programs on a 64-bit kernel): the process is killed. The tables below
  do not describe those calls, and answering with an errno would leave a program that cannot even exit.
* a number newer than any known here: ``ENOSYS``, so that calls of future kernels stay closed and libc falls
  back as on an older kernel. The x32 variants of known calls: ``EPERM``.
* ``clone3``: ``ENOSYS``, because its flags are in memory a filter cannot read; libc falls back to ``clone``,
  which may not make namespaces.
* ``personality``, ``socket``, ``ioctl`` and ``unshare`` by argument; of sockets only the families, and of
  netlink only the protocols, that programs need. Only the low half of each argument is read: the kernel takes
  these arguments as 32-bit integers.
* the deny list: ``EPERM``.
* with ``fake_ids``, calls that change owners or identities report success and do nothing. Meant for a user
  namespace with a single id, where they could only fail and package managers would abort.
* everything else is allowed.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

from sandkeep.errors import IsolationUnavailable

NEWEST: Final = 469
"""Highest call number known (``file_setattr``). From 424 upwards all architectures share their numbers."""

_X32_BIT: Final = 0x40000000

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_SAME_NUMBERS: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "statmount": 457,
    "listmount": 458,
    "open_tree_attr": 467,
}

# A call missing from a table does not exist on that architecture.
NUMBERS: Final[dict[str, dict[str, int]]] = {
    "x86_64": _SAME_NUMBERS
    | {
        "ioctl": 16,
        "socket": 41,
        "clone": 56,
        "chown": 92,
        "fchown": 93,
        "lchown": 94,
        "syslog": 103,
        "setuid": 105,
        "setgid": 106,
        "setreuid": 113,
        "setregid": 114,
        "setgroups": 116,
        "setresuid": 117,
        "setresgid": 119,
        "setfsuid": 122,
        "setfsgid": 123,
        "uselib": 134,
        "personality": 135,
        "vhangup": 153,
        "pivot_root": 155,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "iopl": 172,
        "ioperm": 173,
        "init_module": 175,
        "delete_module": 176,
        "quotactl": 179,
        "lookup_dcookie": 212,
        "clock_settime": 227,
        "mbind": 237,
        "set_mempolicy": 238,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "migrate_pages": 256,
        "fchownat": 260,
        "unshare": 272,
        "move_pages": 279,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": _SAME_NUMBERS
    | {
        "lookup_dcookie": 18,
        "ioctl": 29,
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "fchownat": 54,
        "fchown": 55,
        "vhangup": 58,
        "quotactl": 60,
        "acct": 89,
        "personality": 92,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "reboot": 142,
        "setregid": 143,
        "setgid": 144,
        "setreuid": 145,
        "setuid": 146,
        "setresuid": 147,
        "setresgid": 149,
        "setfsuid": 151,
        "setfsgid": 152,
        "setgroups": 159,
        "settimeofday": 170,
        "socket": 198,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "clone": 220,
        "swapon": 224,
        "swapoff": 225,
        "mbind": 235,
        "set_mempolicy": 237,
        "migrate_pages": 238,
        "move_pages": 239,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}

DENIED: Final = (
    # keys, tracing and kernel code
    *("add_key", "keyctl", "request_key", "bpf", "perf_event_open", "userfaultfd", "lookup_dcookie"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    # mounts, namespaces, and handles that bypass path lookup
    *("mount", "umount2", "pivot_root", "mount_setattr", "move_mount", "open_tree", "open_tree_attr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "statmount", "listmount", "setns"),
    *("name_to_handle_at", "open_by_handle_at", "fanotify_init"),
    # other processes' memory and descriptors, and the placement of pages
    *("kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev"),
    *("mbind", "migrate_pages", "move_pages", "set_mempolicy", "set_mempolicy_home_node"),
    # the machine: clock, power, swap, quota, ports, accounting, log, consoles
    *("clock_adjtime", "clock_settime", "settimeofday", "reboot", "swapon", "swapoff"),
    *("quotactl", "quotactl_fd", "ioperm", "iopl", "acct", "syslog", "vhangup", "uselib"),
)

FAKED: Final = (
    *("chown", "fchown", "lchown", "fchownat", "setgroups", "setuid", "setgid", "setreuid", "setregid"),
    *("setresuid", "setresgid", "setfsuid", "setfsgid"),
)

CLONE_NAMESPACES: Final = 0x7E020080
"""Every ``CLONE_NEW*`` flag."""

UNSHARED: Final = 0x04000000
"""``CLONE_NEWUTS``, by which init marks the processes it spawns. Only init has the required capability."""

PERSONALITIES: Final = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, Linux with 32-bit ``uname``, the same two with ``UNAME26``, and the query."""

FAMILIES: Final = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6; of AF_NETLINK the protocols below. Others fail as if unsupported: AF_VSOCK
reaches a hypervisor past any network namespace, and rings of AF_PACKET and AF_XDP are memory that is not
charged to any control group."""

NETLINK: Final = 16
NETLINK_PROTOCOLS: Final = (0, 4, 9, 15, 16)
"""ROUTE (``getaddrinfo``, ``ip``), SOCK_DIAG (``ss``), AUDIT (``sudo``, ``sshd``), KOBJECT_UEVENT
(libudev), GENERIC. Their queues are not charged to any control group, so only protocols that programs need
are allowed."""

REFUSED_IOCTLS: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: inject input into a terminal that another process reads."""

_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_GREATER: Final = 0x25
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST_ARGUMENT: Final = 16
_SECOND_ARGUMENT: Final = 24
_THIRD_ARGUMENT: Final = 32

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000


def refusal(number: int) -> int:
    """Return the verdict "do not run the call, return this errno"; 0 reports success."""
    return _ERRNO | number


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _return(verdict: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, verdict)


def _when(test: int, value: int, body: bytes) -> bytes:
    """Run ``body`` if the test holds, else skip it."""
    return struct.pack("HBBI", test, 0, len(body) // 8, value) + body


def build(machine: str, *, fake_ids: bool = False) -> bytes:
    """Return the filter for ``machine`` (as ``uname -m`` spells it).

    Every rule ends in a verdict of its own, so no jump is longer than one rule.
    """
    try:
        numbers, architecture = NUMBERS[machine], _ARCHITECTURES[machine]
    except KeyError:
        raise IsolationUnavailable(
            f"no system-call filter for {machine}",
            part="seccomp",
            why=f"system-call numbers of {machine} are not known",
        ) from None
    eperm, enosys = refusal(errno.EPERM), refusal(errno.ENOSYS)

    newer = _return(enosys)
    if machine == "x86_64":
        # A tracer skips a call by setting its number to -1, which must not be treated as an x32 call.
        newer = (
            _when(_JUMP_AT_LEAST, 0x80000000, newer) + _when(_JUMP_ANY_BIT, _X32_BIT, _return(eperm)) + newer
        )

    clone = _load(_FIRST_ARGUMENT) + _when(_JUMP_ANY_BIT, CLONE_NAMESPACES, _return(eperm)) + _return(ALLOW)
    unshare = _load(_FIRST_ARGUMENT) + _when(_JUMP_EQUAL, UNSHARED, _return(ALLOW)) + _return(eperm)
    personality = _load(_FIRST_ARGUMENT)
    for value in PERSONALITIES:
        personality += _when(_JUMP_EQUAL, value, _return(ALLOW))
    personality += _return(eperm)
    netlink = _load(_THIRD_ARGUMENT)
    for protocol in NETLINK_PROTOCOLS:
        netlink += _when(_JUMP_EQUAL, protocol, _return(ALLOW))
    netlink += _return(refusal(errno.EPROTONOSUPPORT))
    socket = _load(_FIRST_ARGUMENT)
    for family in FAMILIES:
        socket += _when(_JUMP_EQUAL, family, _return(ALLOW))
    socket += _when(_JUMP_EQUAL, NETLINK, netlink) + _return(refusal(errno.EAFNOSUPPORT))
    ioctl = _load(_SECOND_ARGUMENT)
    for request in REFUSED_IOCTLS:
        ioctl += _when(_JUMP_EQUAL, request, _return(eperm))
    ioctl += _return(ALLOW)

    program = _load(_ARCHITECTURE) + struct.pack("HBBI", _JUMP_EQUAL, 1, 0, architecture) + _return(KILL)
    program += _load(_NUMBER) + _when(_JUMP_GREATER, NEWEST, newer)
    # Rules that check arguments come first: the kernel caches verdicts that depend on the number alone, so
    # only these are evaluated on every call.
    for name, rule in (
        *(("ioctl", ioctl), ("socket", socket), ("clone", clone), ("personality", personality)),
        ("unshare", unshare),
    ):
        program += _when(_JUMP_EQUAL, numbers[name], rule)
    program += _when(_JUMP_EQUAL, numbers["clone3"], _return(enosys))
    for name in DENIED:
        if name in numbers:
            program += _when(_JUMP_EQUAL, numbers[name], _return(eperm))
    if fake_ids:
        for name in FAKED:
            if name in numbers:
                program += _when(_JUMP_EQUAL, numbers[name], _return(refusal(0)))
    return program + _return(ALLOW)
