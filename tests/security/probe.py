"""Asked from inside: runs in a sandbox, under its own Python, and prints what worked and what did not.

The argument is a JSON list of system calls, ``[[label, number, [arguments]], …]``; string arguments are
passed as pointers. Prints a JSON object of labels to errno names, ``ok`` where a probe succeeded, ``killed``
where it ended the process. Each probe runs in a child of its own and changes nothing for the next.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(number: int, arguments: list[Any]) -> None:
    converted = [
        ctypes.c_char_p(item.encode()) if isinstance(item, str) else ctypes.c_long(item) for item in arguments
    ]
    if libc.syscall(ctypes.c_long(number), *converted) < 0:
        raise OSError(ctypes.get_errno(), "syscall")


def checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "libc")


def touch(path: str) -> str:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    return path


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())


def type_into_terminal() -> None:
    fcntl.ioctl(os.openpty()[1], 0x5412, b"x")


def scratch() -> str:
    path = f"/tmp/probe-{os.getpid()}"
    os.mkdir(path)
    return path


PROBES: dict[str, Callable[[], object]] = {
    "socket inet": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "socket unix": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "socket netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "socket diag": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4),
    "socket uevent": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15),
    "socket usersock": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2),
    "socket netfilter": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "socket packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "socket xdp": lambda: socket.socket(44, socket.SOCK_RAW),
    "socket ping": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    "socket raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "socket vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "socket vsock datagram": lambda: socket.socket(40, socket.SOCK_DGRAM),
    "socket alg": lambda: socket.socket(38, socket.SOCK_SEQPACKET),
    "memfd": lambda: os.memfd_create("probe"),
    "inotify": lambda: checked(libc.inotify_init()),
    "fifo": lambda: os.mkfifo(f"{scratch()}/fifo"),
    "chroot": lambda: os.chroot(scratch()),
    "port 80": lambda: socket.create_server(("127.0.0.1", 80)),
    "mknod null": lambda: os.mknod(f"{scratch()}/n", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    "mknod disk": lambda: os.mknod(f"{scratch()}/n", stat.S_IFBLK | 0o600, os.makedev(254, 0)),
    "mknod whiteout": lambda: os.mknod(f"{scratch()}/n", stat.S_IFCHR | 0o600, os.makedev(0, 0)),
    "xattr user": lambda: os.setxattr(touch(f"{scratch()}/x"), "user.probe", b"1"),
    "xattr trusted": lambda: os.setxattr(touch(f"{scratch()}/x"), "trusted.probe", b"1"),
    "xattr security": lambda: os.setxattr(touch(f"{scratch()}/x"), "security.probe", b"1"),
    "sysctl hostname": lambda: write("/proc/sys/kernel/hostname", "probe"),
    "sysctl core_pattern": lambda: write("/proc/sys/kernel/core_pattern", "|/tmp/probe"),
    "sysctl ip_forward": lambda: write("/proc/sys/net/ipv4/ip_forward", "1"),
    "sysctl namespaces": lambda: write("/proc/sys/user/max_user_namespaces", "100"),
    "write sysfs": lambda: write("/sys/kernel/mm/transparent_hugepage/enabled", "never"),
    "open kmsg": lambda: os.open("/proc/kmsg", os.O_RDONLY),
    "hostname": lambda: socket.sethostname("probe"),
    "nice -5": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)),
    "type into terminal": type_into_terminal,
    "open host disk": lambda: os.open("/dev/vda", os.O_RDONLY),
    "open memory": lambda: os.open("/dev/mem", os.O_RDONLY),
    "ptrace init": lambda: checked(libc.ptrace(16, 1, 0, 0)),
    "init exe": lambda: os.readlink("/proc/1/exe"),
    "init root": lambda: os.readlink("/proc/1/root"),
    "init cwd": lambda: os.readlink("/proc/1/cwd"),
    "init fd": lambda: os.listdir("/proc/1/fd"),
    "init open fd": lambda: os.open("/proc/1/fd/3", os.O_RDWR),
    "init maps": lambda: os.open("/proc/1/maps", os.O_RDONLY),
    "init environ": lambda: os.open("/proc/1/environ", os.O_RDONLY),
    "init mem": lambda: os.open("/proc/1/mem", os.O_RDWR),
    "init namespaces": lambda: os.readlink("/proc/1/ns/user"),
    "init oom": lambda: write("/proc/1/oom_score_adj", "1000"),
    "init stack": lambda: os.read(os.open("/proc/1/syscall", os.O_RDONLY), 100),
    "init exe replaced": lambda: os.open("/proc/1/exe", os.O_WRONLY),
    "enter init root": lambda: os.chdir("/proc/1/root"),
    "enter init cwd": lambda: os.chdir("/proc/1/cwd"),
    "kill init": lambda: os.kill(1, signal.SIGKILL),
    "stop init": lambda: os.kill(1, signal.SIGSTOP),
    "terminate init": lambda: os.kill(1, signal.SIGTERM),
    "interrupt init": lambda: os.kill(1, signal.SIGINT),
}


def outcome(probe: Callable[[], object]) -> str:
    read, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            probe()
            answer = "ok"
        except OSError as error:
            answer = errno.errorcode.get(error.errno or 0, str(error.errno))
        os.write(out, answer.encode())
        os._exit(0)
    os.close(out)
    answer = os.read(read, 100).decode()
    os.close(read)
    _, status = os.waitpid(pid, 0)
    return answer if not os.WIFSIGNALED(status) else "killed"


if __name__ == "__main__":
    results = {name: outcome(probe) for name, probe in PROBES.items()}
    for label, number, arguments in json.loads(sys.argv[1]):
        results[label] = outcome(lambda number=number, arguments=arguments: call(number, arguments))  # type: ignore[misc]
    print(json.dumps(results))
