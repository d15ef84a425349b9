"""Machines that cannot do everything, made for real: a program that takes something away and starts a lab.

Arguments: a case below, a data directory, and barriers to do without, separated by commas. Prints as JSON
what became of a session: ``{"refused": part, …}``, or its barriers and what a nested user namespace met.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from collections.abc import Callable

from sandkeep.errors import IsolationUnavailable
from sandkeep.host.native.mode import Mode
from sandkeep.linux import syscalls
from tests.lab import Lab

_NUMBERS = {"x86_64": {"seccomp": 317, "unshare": 272}, "aarch64": {"seccomp": 277, "unshare": 97}}


def _deny(call: str, flag: int | None = None) -> None:
    """Have the kernel refuse a call (with ``flag`` in its first argument, if given) from here on."""
    number = _NUMBERS[platform.machine()][call]
    refuse = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.ENOSYS)
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = struct.pack("HBBI", 0x20, 0, 0, 0)
    if flag is None:
        program += struct.pack("HBBI", 0x15, 0, 1, number) + refuse + allow
    else:
        program += struct.pack("HBBI", 0x15, 0, 3, number) + struct.pack("HBBI", 0x20, 0, 0, 16)
        program += struct.pack("HBBI", 0x45, 0, 1, flag) + refuse + allow
    syscalls.seccomp_set_filter(program)


def _cover(path: str) -> None:
    """Hide a part of a kernel file system, as containers do."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", path, "tmpfs", 0)


def _no_namespaces() -> None:
    """An outer user namespace that allows no further one."""
    uid = os.getuid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1")):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(text)
    with open("/proc/sys/user/max_user_namespaces", "w") as handle:
        handle.write("0")


CASES: dict[str, Callable[[], None]] = {
    "everything": lambda: None,
    "no-filters": lambda: _deny("seccomp"),
    "no-cgroup-namespace": lambda: _deny("unshare", syscalls.CLONE_NEWCGROUP),
    "covered-proc": lambda: _cover("/proc/tty"),
    "covered-sys": lambda: _cover("/sys/kernel"),
    "no-user-namespaces": _no_namespaces,
}


NESTED = "import ctypes, errno\nl = ctypes.CDLL(None, use_errno=True)\n" + (
    "print(errno.errorcode[ctypes.get_errno()] if l.unshare(0x10000000) else 'ok')"
)


def main(case: str, data_dir: str, accepted: str) -> None:
    mode: Mode = "root" if os.getuid() == 0 else "single"
    ctypes.CDLL(None)  # loaded before anything is taken away
    CASES[case]()
    answer: dict[str, object]
    try:
        with Lab(data_dir, mode) as lab:
            box = lab.box(accept=frozenset(accepted.split(",")) - {""})
            nested = {
                who: box.run("python3", "-c", NESTED, root=who == "root").stdout.strip()
                for who in ("root", "user")
            }
            left = sorted(os.listdir(f"{data_dir}/sessions"))
            answer = {"barriers": box.state()["barriers"], "nested": nested, "sessions": left}
    except IsolationUnavailable as error:
        left = sorted(os.listdir(f"{data_dir}/sessions"))
        answer = {"refused": error.part, "why": error.why, "hint": error.hint, "sessions": left}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
