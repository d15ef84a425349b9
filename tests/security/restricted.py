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
from dataclasses import asdict
from typing import Any

from sandkeep.cli.main import main as cli
from sandkeep.errors import IsolationUnavailable, SandkeepError
from sandkeep.host.doctor import probe
from sandkeep.host.native.mode import Mode
from sandkeep.linux import syscalls
from tests.driver_lab import Lab

_EVERYWHERE = {"fsconfig": 431, "mount_setattr": 442}
_NUMBERS = {
    "x86_64": {"seccomp": 317, "unshare": 272, "mount": 165, **_EVERYWHERE},
    "aarch64": {"seccomp": 277, "unshare": 97, "mount": 40, **_EVERYWHERE},
}
_HAS_BITS, _IS = 0x45, 0x15
"""Comparisons of an argument with a value."""


def _deny(call: str, when: tuple[int, int, int] | None = None, number: int = errno.ENOSYS) -> None:
    """Have the kernel refuse a call from here on; ``when`` is an argument's place, a comparison, a value."""
    refuse = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | number)
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = struct.pack("HBBI", 0x20, 0, 0, 0)
    called = _NUMBERS[platform.machine()][call]
    if when is None:
        program += struct.pack("HBBI", 0x15, 0, 1, called) + refuse + allow
    else:
        place, comparison, value = when
        program += struct.pack("HBBI", 0x15, 0, 3, called) + struct.pack("HBBI", 0x20, 0, 0, 16 + 8 * place)
        program += struct.pack("HBBI", comparison, 0, 1, value) + refuse + allow
    if os.geteuid() != 0:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp_set_filter(program)


def _no_layers_as_descriptors() -> None:
    """As before Linux 6.13."""
    _deny("fsconfig", (1, _IS, syscalls.FSCONFIG_SET_FD), errno.EOPNOTSUPP)


def _no_overlay() -> None:
    """As before Linux 5.19 for root, whose layers are idmapped, and before 5.11 for others."""
    _no_layers_as_descriptors()
    # Overlays are the only thing that sessions mount by a call without any flags.
    _deny("mount", (3, _IS, 0), errno.EINVAL)


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


def _no_control_groups() -> None:
    """As in a container that was given none."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    with open("/proc/self/mountinfo") as handle:
        lines = handle.readlines()
    for line in reversed(lines):
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup"):
            syscalls.umount2(left.split(" ")[4], 2)


CASES: dict[str, Callable[[], None]] = {
    "everything": lambda: None,
    "no-filters": lambda: _deny("seccomp"),
    "no-cgroup-namespace": lambda: _deny("unshare", (0, _HAS_BITS, syscalls.CLONE_NEWCGROUP)),
    "covered-proc": lambda: _cover("/proc/tty"),
    "covered-sys": lambda: _cover("/sys/kernel"),
    "no-user-namespaces": _no_namespaces,
    "user-namespaces-denied": lambda: _deny("unshare", (0, _HAS_BITS, syscalls.CLONE_NEWUSER), errno.EPERM),
    "no-layers-as-descriptors": _no_layers_as_descriptors,
    "no-overlay": _no_overlay,
    "no-control-groups": _no_control_groups,
    "no-mount-attributes": lambda: _deny("mount_setattr"),
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
            barriers = {name: barrier.to_json() for name, barrier in box.state().barriers.items()}
            answer = {"barriers": barriers, "nested": nested, "sessions": left}
    except IsolationUnavailable as error:
        left = sorted(os.listdir(f"{data_dir}/sessions"))
        answer = {"refused": error.part, "why": error.why, "hint": error.hint, "sessions": left}
    print(json.dumps(answer))


def examine(case: str, data_dir: str) -> dict[str, Any]:
    """What doctor says about such a machine."""
    CASES[case]()
    report = probe(data_dir)
    return {"can_run": report.can_run, "findings": {found.name: asdict(found) for found in report.findings}}


def command_line(case: str, *arguments: str) -> None:
    """``sandkeep`` on such a machine."""
    CASES[case]()
    sys.exit(cli(arguments))


def sdk(case: str) -> None:
    """A program with the SDK on such a machine: prints what its first call raises."""
    from sandkeep import sync as sandkeep

    CASES[case]()
    try:
        sandkeep.create_sandbox()
    except SandkeepError as error:
        print(json.dumps({"kind": type(error).__name__, "said": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
