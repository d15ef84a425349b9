"""What a sandbox's root and its ordinary user can and cannot do, asked from inside in every mode."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandkeep.linux.seccomp import DENIED, NEWEST, NUMBERS
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, in_modes, opened

SOURCE = Path(__file__).with_name("probe.py").read_text()
KEPT_CAPABILITIES = 0xA80425FB
SIGCHLD = 17
NAMESPACES = (
    *(("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000)),
    *(("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000), ("time", 0x80)),
)
CALLS = NUMBERS.get(platform.machine(), {})
DENIED_HERE = [name for name in DENIED if name in CALLS]


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def calls() -> list[list[Any]]:
    """System calls to try, by number, with arguments that would do something if they were let through."""
    numbers = CALLS
    known: dict[str, list[Any]] = {
        "mount": ["probe", "/tmp", "tmpfs", 0, 0],
        "umount2": ["/proc/sys", 2],
        "keyctl": [0, -3, 0],
        "add_key": ["user", "probe", "x", 1, -3],
        "userfaultfd": [1],
        "syslog": [3, 0, 0],
        "pidfd_getfd": [0, 0, 0],
        "open_tree": [-100, "/", 1],
        "fsopen": ["tmpfs", 0],
    }
    listed = [[f"call {name}", numbers[name], known.get(name, [0, 0, 0, 0, 0])] for name in DENIED_HERE]
    listed += [[f"unshare {name}", numbers["unshare"], [flag]] for name, flag in NAMESPACES]
    listed += [[f"clone {name}", numbers["clone"], [flag | SIGCHLD]] for name, flag in NAMESPACES]
    listed += [
        ["umount kcore", numbers["umount2"], ["/proc/keys", 2]],
        ["remount", numbers["mount"], ["none", "/proc/sys", "none", 0x20, 0]],
        ["clone3", numbers["clone3"], [0, 0]],
        ["personality query", numbers["personality"], [0xFFFFFFFF]],
        ["personality odd", numbers["personality"], [0x0400000]],
        ["future", NEWEST + 1, []],
        ["far future", 1000, []],
    ]
    return listed


def probe(box: Box, *, root: bool) -> dict[str, str]:
    done = box.run("python3", "-I", "-c", SOURCE, json.dumps(calls()), root=root)
    assert done.code == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def check(found: dict[str, str], expected: dict[str, str]) -> None:
    wrong = {
        name: (found[name], want) for name, want in expected.items() if found[name] not in want.split("|")
    }
    assert not wrong, f"found, expected: {wrong}"


ANYBODY = {
    **dict.fromkeys([f"call {name}" for name in DENIED_HERE], "EPERM"),
    **dict.fromkeys([f"{call} {name}" for call in ("unshare", "clone") for name, _ in NAMESPACES], "EPERM"),
    **dict.fromkeys(["umount kcore", "remount", "personality odd", "hostname", "realtime"], "EPERM"),
    **dict.fromkeys(["mknod null", "mknod disk", "mknod whiteout", "type into terminal"], "EPERM"),
    **dict.fromkeys(["xattr trusted", "xattr security", "ptrace init"], "EPERM"),
    **dict.fromkeys(["clone3", "future", "far future"], "ENOSYS"),
    **dict.fromkeys(["socket vsock", "socket vsock datagram", "socket alg"], "EAFNOSUPPORT"),
    **dict.fromkeys(["socket packet", "socket xdp"], "EAFNOSUPPORT"),
    **dict.fromkeys(["socket usersock", "socket netfilter"], "EPROTONOSUPPORT"),
    **dict.fromkeys(["socket inet", "socket unix", "socket netlink", "personality query"], "ok"),
    **dict.fromkeys(["socket diag", "socket uevent"], "ok"),
    **dict.fromkeys(["memfd", "inotify", "fifo", "xattr user"], "ok"),
    **dict.fromkeys(["sysctl hostname", "sysctl core_pattern", "sysctl ip_forward"], "EROFS|EACCES"),
    **dict.fromkeys(["sysctl namespaces"], "EROFS|EACCES"),
    **dict.fromkeys(["open host disk", "open memory"], "ENOENT"),
    **dict.fromkeys(["init exe", "init root", "init cwd", "init fd", "init open fd"], "EACCES"),
    **dict.fromkeys(["init environ", "init mem", "init namespaces", "init oom"], "EACCES"),
    **dict.fromkeys(["init exe replaced", "enter init root", "enter init cwd"], "EACCES"),
    **dict.fromkeys(["open kmsg", "nice -5", "init maps", "init stack"], "EPERM|EACCES"),
    "write sysfs": "EROFS|EACCES|ENOENT",
}
TO_INIT = ["kill init", "stop init", "terminate init", "interrupt init"]
ROOT = {
    **dict.fromkeys(["socket raw", "chroot", "port 80"], "ok"),
    # Sent, and without effect: the kernel spares init of its own namespace.
    **dict.fromkeys(TO_INIT, "ok"),
}
USER = dict.fromkeys(["socket raw", "chroot", *TO_INIT], "EPERM")


@everywhere
def test_sandbox_root_can_use_its_own_world_and_touch_no_other(lab: Lab) -> None:
    box = lab.box()
    found = probe(box, root=True)
    check(found, ANYBODY)
    check(found, ROOT)
    # After signals, ptrace and all: init is there and does its work.
    assert box.run("true").code == 0 and box.state().status == "running"


@in_modes("root", "subuid", why="a session with one id has no ordinary user")
def test_an_ordinary_user_inside_can_do_less_still(lab: Lab) -> None:
    box = lab.box()
    found = probe(box, root=False)
    check(found, ANYBODY)
    check(found, USER)
    assert box.run("true").code == 0


@everywhere
def test_capabilities_are_the_kept_ones_for_root_and_none_for_anyone_else(lab: Lab) -> None:
    box = common(lab)

    def capabilities(root: bool) -> dict[str, int]:
        lines = box.run("cat", "/proc/self/status", root=root).stdout.splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if line.startswith(("Cap", "NoNew", "Seccomp:")))
        return {name: int(value, 16) for name, value in fields.items()}

    everyone = {"CapInh": 0, "CapBnd": KEPT_CAPABILITIES, "CapAmb": 0, "NoNewPrivs": 0, "Seccomp": 2}
    kept = {"CapPrm": KEPT_CAPABILITIES, "CapEff": KEPT_CAPABILITIES}
    assert capabilities(True) == {**everyone, **kept}
    if lab.driver.mode != "single":
        assert capabilities(False) == {**everyone, "CapPrm": 0, "CapEff": 0}


@everywhere
def test_a_32_bit_call_ends_the_process(lab: Lab) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("there is no second architecture to call")
    # mov eax, 20 (getpid); int 0x80; ret
    script = (
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    )
    done = common(lab).run("python3", "-c", script)
    assert done.record.signal in (31, 11), done
    if done.record.signal == 11:
        pytest.skip("the kernel has no 32-bit calls")


@everywhere
def test_devices_are_the_harmless_ones(lab: Lab) -> None:
    box = common(lab)
    names = box.sh("ls /dev").stdout.split()
    assert sorted(names) == sorted(
        [
            *(
                "fd",
                "full",
                "mqueue",
                "null",
                "ptmx",
                "pts",
                "random",
                "shm",
                "stderr",
                "stdin",
                "stdout",
                "tty",
            ),
            "urandom",
            "zero",
        ]
    )
    assert box.sh("echo x >/dev/null && head -c 4 /dev/zero | od -An -tx1").stdout.split() == ["00"] * 4
    assert box.sh("head -c 8 /dev/urandom | wc -c").stdout.strip() == "8"
    assert "No space left" in box.sh("echo x >/dev/full").stderr
    assert box.sh("touch /dev/x || rm -f /dev/null", root=True).code != 0
    assert box.sh("touch /dev/shm/x && rm /dev/shm/x && ls /dev/pts").stdout == "ptmx\n"


@everywhere
def test_masked_files_are_empty_and_stay_masked(lab: Lab) -> None:
    box = common(lab)
    script = "cd /proc; for f in kcore keys timer_list sysrq-trigger; do test ! -s $f || echo $f; done"
    assert box.sh(script, root=True).stdout == ""
    assert (
        box.sh("ls -A /proc/acpi /proc/scsi /sys/firmware 2>/dev/null | grep -v :", root=True).stdout.split()
        == []
    )
    assert box.sh("umount /proc/sys || umount /sys/firmware || mount -t proc proc /mnt", root=True).code != 0
    assert box.sh("echo 1 >/sys/fs/cgroup/pids/cgroup.procs", root=True).code != 0
