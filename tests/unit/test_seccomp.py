"""The system-call filter, run by a small interpreter of the BPF it is written in."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.errors import IsolationUnavailable
from sandkeep.linux import seccomp

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
MACHINES = sorted(ARCHITECTURE)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}

EPERM = seccomp.refusal(errno.EPERM)
ENOSYS = seccomp.refusal(errno.ENOSYS)
EPROTONOSUPPORT = seccomp.refusal(errno.EPROTONOSUPPORT)
EAFNOSUPPORT = seccomp.refusal(errno.EAFNOSUPPORT)
FAKED = seccomp.refusal(0)


def judge(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run the filter over one call, as strictly as the kernel's own checker: no jump past the end."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *(a & (2**64 - 1) for a in padded))
    code = list(struct.iter_unpack("HBBI", program))
    accumulator, position = 0, 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("I", data, operand)
        elif operation == 0x06:
            assert isinstance(operand, int)
            return operand
        elif operation in (0x15, 0x25, 0x35, 0x45):
            taken = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[operation]
            position += if_true if taken else if_false
        else:
            raise AssertionError(f"unexpected instruction {operation:#x}")


def ask(machine: str, call: str | int, *arguments: int, fake_ids: bool = False) -> int:
    number = call if isinstance(call, int) else seccomp.NUMBERS[machine][call]
    return judge(seccomp.build(machine, fake_ids=fake_ids), ARCHITECTURE[machine], number, *arguments)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("clone3", (), ENOSYS),
        ("clone", (0x11,), seccomp.ALLOW),
        ("clone", (0x003D0F00,), seccomp.ALLOW),  # a thread, as libc makes it
        ("clone", (0x10000011,), EPERM),
        ("clone", (0x00020011,), EPERM),
        ("clone", (0x40000011,), EPERM),
        ("clone", (0x02000011,), EPERM),
        ("personality", (0,), seccomp.ALLOW),
        ("personality", (0xFFFFFFFF,), seccomp.ALLOW),
        ("personality", (2**64 - 1,), seccomp.ALLOW),
        ("personality", (0x20008,), seccomp.ALLOW),
        ("personality", (0x40000,), EPERM),  # ADDR_NO_RANDOMIZE
        ("personality", (0x400000,), EPERM),  # READ_IMPLIES_EXEC
        ("socket", (1, 1, 0), seccomp.ALLOW),
        ("socket", (2, 1, 0), seccomp.ALLOW),
        ("socket", (10, 2, 17), seccomp.ALLOW),
        ("socket", (16, 3, 0), seccomp.ALLOW),  # NETLINK_ROUTE
        ("socket", (16, 3, 4), seccomp.ALLOW),  # NETLINK_SOCK_DIAG
        ("socket", (16, 3, 2), EPROTONOSUPPORT),  # NETLINK_USERSOCK
        ("socket", (16, 3, 12), EPROTONOSUPPORT),  # NETLINK_NETFILTER
        ("socket", (16, 3, 2**32 + 2), EPROTONOSUPPORT),
        ("socket", (17, 3, 0), EAFNOSUPPORT),  # AF_PACKET
        ("socket", (44, 3, 0), EAFNOSUPPORT),  # AF_XDP
        ("socket", (40, 1, 0), EAFNOSUPPORT),
        ("socket", (38, 5, 0), EAFNOSUPPORT),
        ("socket", (2**32 + 40, 1, 0), EAFNOSUPPORT),  # the kernel ignores the upper half too
        ("ioctl", (0, 0x5401), seccomp.ALLOW),
        ("ioctl", (0, 0x5412), EPERM),
        ("ioctl", (0, 0x541C), EPERM),
        ("ioctl", (0, 2**32 + 0x5412), EPERM),
        ("ioctl", (0x5412, 0x5413), seccomp.ALLOW),
        ("unshare", (0x10000000,), EPERM),
        ("unshare", (0x04000000,), seccomp.ALLOW),
        ("unshare", (0x14000000,), EPERM),
        ("mount", (), EPERM),
        ("fchownat", (), seccomp.ALLOW),
        ("setresuid", (), seccomp.ALLOW),
    ],
)
def test_calls_judged_by_argument(machine: str, call: str, arguments: tuple[int, ...], verdict: int) -> None:
    assert ask(machine, call, *arguments) == verdict


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("fake_ids", [False, True])
def test_every_number_is_denied_exactly_when_listed(machine: str, fake_ids: bool) -> None:
    numbers = seccomp.NUMBERS[machine]
    expected = {numbers[name]: EPERM for name in seccomp.DENIED if name in numbers}
    expected[numbers["clone3"]] = ENOSYS
    expected[numbers["unshare"]] = EPERM  # unless it is for a UTS namespace alone
    expected[numbers["socket"]] = EAFNOSUPPORT  # of no family
    if fake_ids:
        expected |= {numbers[name]: FAKED for name in seccomp.FAKED if name in numbers}
    program = seccomp.build(machine, fake_ids=fake_ids)
    for number in range(seccomp.NEWEST + 1):
        verdict = judge(program, ARCHITECTURE[machine], number)
        assert verdict == expected.get(number, seccomp.ALLOW), number


@pytest.mark.parametrize("machine", MACHINES)
def test_every_rule_names_a_known_call(machine: str) -> None:
    absent = {name for name in (*seccomp.DENIED, *seccomp.FAKED) if name not in seccomp.NUMBERS[machine]}
    assert absent == (set() if machine == "x86_64" else {"chown", "lchown", "ioperm", "iopl", "uselib"})


@given(
    machine=st.sampled_from(MACHINES),
    number=st.integers(seccomp.NEWEST + 1, 2**32 - 1),
    arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6),
)
def test_unknown_numbers_are_never_allowed(machine: str, number: int, arguments: list[int]) -> None:
    x32 = machine == "x86_64" and 0x40000000 <= number < 0x80000000
    assert ask(machine, number, *arguments) == (EPERM if x32 else ENOSYS)


@given(
    machine=st.sampled_from(MACHINES),
    name=st.sampled_from(seccomp.DENIED),
    arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6),
    fake_ids=st.booleans(),
)
def test_denied_calls_are_refused_whatever_their_arguments(
    machine: str, name: str, arguments: list[int], fake_ids: bool
) -> None:
    if name in seccomp.NUMBERS[machine]:
        assert ask(machine, name, *arguments, fake_ids=fake_ids) == EPERM


@given(
    machine=st.sampled_from(MACHINES),
    architecture=st.sampled_from([I386, ARM, *ARCHITECTURE.values(), 0]),
    number=st.integers(0, 2**32 - 1),
)
def test_other_architectures_are_killed(machine: str, architecture: int, number: int) -> None:
    verdict = judge(seccomp.build(machine), architecture, number)
    assert (verdict == seccomp.KILL) == (architecture != ARCHITECTURE[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_agree_with_the_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed (linux-libc-dev)")
    header = {
        name: int(number)
        for name, number in re.findall(r"^#define __NR_(\w+)\s+(\d+)$", HEADERS[machine].read_text(), re.M)
    }
    newest_in_header = max(header.values())
    compared = 0
    for name, number in seccomp.NUMBERS[machine].items():
        if name in header:
            assert header[name] == number, name
            compared += 1
        else:
            assert number > newest_in_header, f"{name} is not in {HEADERS[machine]}"
    assert compared > 60


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(IsolationUnavailable) as caught:
        seccomp.build("riscv64")
    assert caught.value.part == "seccomp"
