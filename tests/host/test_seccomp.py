"""The system-call filter asked from inside: a child in a user namespace installs it and tries."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandkeep.linux import seccomp, syscalls

MACHINE = syscalls.MACHINE

if MACHINE not in seccomp.NUMBERS:
    pytest.skip(f"no filter for {MACHINE}", allow_module_level=True)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: int) -> int:
    """errno of a raw call, 0 if it succeeded."""
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
    return ctypes.get_errno() if result < 0 else 0


def named(name: str, *arguments: int) -> int:
    return call(seccomp.NUMBERS[MACHINE][name], *arguments)


def outcome(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0


def inside(probe: Callable[[], Any], *, fake_ids: bool = False) -> Any:
    """What ``probe`` returns when run as root of a user namespace with every capability and the filter."""
    read, write = os.pipe()
    program = seccomp.build(MACHINE, fake_ids=fake_ids)
    uid, gid = os.geteuid(), os.getegid()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
                Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
            except OSError as error:
                answer: Any = {"skip": f"no user namespaces here: {error}"}
            else:
                syscalls.seccomp_set_filter(program)
                answer = {"value": probe()}
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        except BaseException as error:
            os.write(write, json.dumps({"failed": repr(error)}).encode())
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        reported = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not reported:
        pytest.fail(f"the child ended with status {status:#x}")
    answer = json.loads(reported)
    if "skip" in answer:
        pytest.skip(answer["skip"])
    assert "failed" not in answer, answer["failed"]
    return answer["value"]


@pytest.mark.parametrize("name", [name for name in seccomp.DENIED if name in seccomp.NUMBERS[MACHINE]])
def test_denied_calls_fail_with_eperm(name: str) -> None:
    assert inside(lambda: named(name, -1, -1, -1, -1, -1, -1)) == errno.EPERM


def test_barriers_by_argument() -> None:
    def probe() -> dict[str, int]:
        master, slave = pty.openpty()
        return {
            "clone3": named("clone3", 0, 0),
            "clone into a namespace": named("clone", syscalls.CLONE_NEWUSER | signal.SIGCHLD, 0),
            "vsock": outcome(lambda: socket.socket(40, socket.SOCK_STREAM)),
            "alg": outcome(lambda: socket.socket(38, socket.SOCK_SEQPACKET)),
            "type into a terminal": outcome(lambda: fcntl.ioctl(slave, termios.TIOCSTI, b"x")),
            "console": outcome(lambda: fcntl.ioctl(slave, 0x541C, b"\x02")),
            "no randomisation": named("personality", 0x0040000),
            "unknown call": call(1000),
            "newest + 1": call(seccomp.NEWEST + 1),
            "negative call": call(-1),
            "master": 0 if master >= 0 else 1,
        }

    assert inside(probe) == {
        "clone3": errno.ENOSYS,
        "clone into a namespace": errno.EPERM,
        "vsock": errno.EAFNOSUPPORT,
        "alg": errno.EAFNOSUPPORT,
        "type into a terminal": errno.EPERM,
        "console": errno.EPERM,
        "no randomisation": errno.EPERM,
        "unknown call": errno.ENOSYS,
        "newest + 1": errno.ENOSYS,
        "negative call": errno.ENOSYS,
        "master": 0,
    }


def test_ordinary_work_goes_on() -> None:
    """Threads, processes, sockets, terminals and the personality query all work."""

    def probe() -> dict[str, Any]:
        done = []
        thread = threading.Thread(target=lambda: done.append(1))
        thread.start()
        thread.join()
        left, right = socket.socketpair()
        left.sendall(b"x")
        _, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
        return {
            "thread": done,
            "process": subprocess.run(
                ["/bin/sh", "-c", "echo $((6 * 7))"], capture_output=True, text=True
            ).stdout,
            "socketpair": right.recv(1).decode(),
            "inet": outcome(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()),
            "personality": named("personality", 0xFFFFFFFF),
            "window": struct.unpack("HHHH", fcntl.ioctl(slave, termios.TIOCGWINSZ, bytes(8)))[:2],
        }

    assert inside(probe) == {
        "thread": [1],
        "process": "42\n",
        "socketpair": "x",
        "inet": 0,
        "personality": 0,
        "window": [10, 20],
    }


@pytest.mark.skipif(MACHINE != "x86_64", reason="x32 exists on x86-64 only")
def test_x32_calls_are_refused() -> None:
    assert inside(lambda: call(0x40000000 + 39)) == errno.EPERM


@pytest.mark.skipif(MACHINE != "x86_64", reason="32-bit calls are made with int 0x80 here")
def test_a_32_bit_call_kills_the_process() -> None:
    """getpid through the 32-bit door: ``mov eax, 20; int 0x80; ret`` in anonymous memory."""
    script = """
import ctypes, mmap, sys
from sandkeep.linux import seccomp, syscalls
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
if sys.argv[1] == "filtered":
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp_set_filter(seccomp.build(syscalls.MACHINE))
function()
"""
    free = subprocess.run([sys.executable, "-c", script, "free"])
    if free.returncode != 0:
        pytest.skip(f"this kernel runs no 32-bit calls (status {free.returncode})")
    assert subprocess.run([sys.executable, "-c", script, "filtered"]).returncode == -signal.SIGSYS


def test_faked_identity_calls_claim_success_and_change_nothing(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.touch()
    before = (target.stat().st_uid, target.stat().st_gid)

    def probe() -> list[Any]:
        os.chown(target, 33, 33)
        os.lchown(target, 33, 33)
        os.setgroups([1, 2, 3])
        os.setresgid(5, 5, 5)
        os.setresuid(5, 5, 5)
        os.setuid(7)
        return [os.getuid(), os.getgid()]

    assert inside(probe, fake_ids=True) == [0, 0]
    assert (target.stat().st_uid, target.stat().st_gid) == before
    assert inside(lambda: outcome(lambda: os.chown(target, 33, 33))) == errno.EINVAL


def test_numbers_up_to_the_newest_exist_in_a_kernel_that_has_them() -> None:
    """``file_setattr``, the newest known, is not "no such call" where the kernel is new enough."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 17):
        pytest.skip(f"kernel {os.uname().release} is older than file_setattr")
    assert call(seccomp.NEWEST, -1, 0, 0, 0, 0) != errno.ENOSYS
    assert inside(lambda: call(seccomp.NEWEST, -1, 0, 0, 0, 0)) != errno.ENOSYS
